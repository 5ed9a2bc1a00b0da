"""The OpenAPI document as a page that needs nothing from elsewhere: no script, no font, no CDN."""

import json
from html import escape
from typing import Any

from litestar import Request
from litestar.openapi.plugins import OpenAPIRenderPlugin

_STYLE = (
    "body{font:15px/1.5 system-ui,sans-serif;max-width:60em;margin:2em auto;padding:0 1em}"
    "code,pre{font-size:13px;background:#f4f4f4}pre{padding:.6em;overflow:auto}"
    "summary{cursor:pointer;padding:.2em 0}td{padding:.1em .8em .1em 0;vertical-align:top}"
)


class PlainPage(OpenAPIRenderPlugin):
    """All operations with fields, example and answers, each folded."""

    def __init__(self) -> None:
        super().__init__(path="/")

    def render(self, request: Request[Any, Any, Any], openapi_schema: dict[str, Any]) -> bytes:
        parts = [
            '<!doctype html><html lang="en"><meta charset="utf-8">',
            f"<title>{escape(openapi_schema['info']['title'])}</title><style>{_STYLE}</style>",
            f"<h1>{escape(openapi_schema['info']['title'])}</h1>",
            '<p>For programs: <a href="/schema/openapi.json">openapi.json</a>, ',
            '<a href="/schema/openapi.yaml">openapi.yaml</a></p>',
        ]
        for path, item in sorted(openapi_schema["paths"].items()):
            for method in ("get", "post", "delete"):
                if method in item:
                    parts.append(_operation(method, path, item[method]))
        return "".join(parts).encode()


def _operation(method: str, path: str, fields: dict[str, Any]) -> str:
    title = f"<code>{method.upper()} {escape(path)}</code> {escape(fields.get('summary', ''))}"
    media = fields.get("requestBody", {}).get("content", {}).get("application/json", {})
    rows = "".join(
        f"<tr><td><code>{escape(name)}</code></td><td>{escape(_kind(schema))}</td>"
        f"<td>{escape(schema.get('description', ''))}</td></tr>"
        for name, schema in media.get("schema", {}).get("properties", {}).items()
    )
    examples = "".join(
        f"<pre>{escape(json.dumps(example['value'], indent=2))}</pre>"
        for example in media.get("examples", {}).values()
    )
    answers = "".join(
        f"<tr><td>{escape(status)}</td><td>{escape(answer.get('description', ''))}</td></tr>"
        for status, answer in sorted(fields.get("responses", {}).items())
    )
    return (
        f"<details><summary>{title}</summary>{examples}"
        f"<table>{rows}</table><table>{answers}</table></details>"
    )


def _kind(schema: dict[str, Any]) -> str:
    """`integer 1 to 128` of a field that may be null too."""
    kinds = [kind for kind in schema.get("anyOf", [schema]) if kind.get("type") != "null"]
    words = []
    for kind in kinds:
        word = str(kind.get("type", "any"))
        low, high = kind.get("minimum"), kind.get("maximum")
        if low is not None and high is not None and abs(high) < 2**31:
            word += f" {low} to {high}"
        words.append(word)
    return " or ".join(dict.fromkeys(words))
