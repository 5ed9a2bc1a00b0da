"""Every request that docs/http-api.md shows is answered, and its answer has what the request asks for."""

import json
import re
from pathlib import Path
from typing import Any

import pytest

from tests.fakes.gateway import GatewayUnderTest, events

DOCUMENT = (Path(__file__).resolve().parents[2] / "docs" / "http-api.md").read_text()
EXAMPLES: list[tuple[str, dict[str, Any]]] = [
    (path, json.loads(body))
    for path, body in re.findall(r"`POST (/v1/\S+)`:\n\n```json\n(.*?)```", DOCUMENT, re.DOTALL)
]
NAMES = [",".join(sorted(body.keys() - {"model", "messages", "prompt"})) for _, body in EXAMPLES]


def test_each_kind_of_parameter_has_an_example():
    assert len(EXAMPLES) == DOCUMENT.count("```json")
    shown = {name for _, body in EXAMPLES for name in body}
    assert shown >= {
        "frequency_penalty",
        "presence_penalty",
        "repetition_penalty",
        "logit_bias",
        "min_p",
        "top_k",
        "seed",
        "n",
        "min_tokens",
        "stop_token_ids",
        "logprobs",
        "top_logprobs",
        "echo",
    }


@pytest.mark.parametrize(("path", "body"), EXAMPLES, ids=NAMES)
def test_a_documented_request(shared_gateway: GatewayUnderTest, path: str, body: dict[str, Any]):
    body = {**body, "model": "m-small"}
    whole = shared_gateway.client.post(path, json=body)
    assert whole.status_code == 200, whole.text
    choices = whole.json()["choices"]
    assert len(choices) == body.get("n", 1)
    streamed = shared_gateway.client.post(path, json={**body, "stream": True})
    assert streamed.status_code == 200, streamed.text
    chunks = events(streamed.text)
    assert chunks[-1] == "[DONE]"
    told = [choice["logprobs"] for chunk in chunks[:-1] for choice in chunk["choices"]]
    for choice in choices:
        assert choice["finish_reason"] in ("stop", "length")
        assert bool(choice["logprobs"]) == ("logprobs" in body) == any(told)
    if body.get("top_logprobs"):
        content = choices[0]["logprobs"]["content"]
        assert len(content) == whole.json()["usage"]["completion_tokens"]
        assert {len(token["top_logprobs"]) for token in content} == {body["top_logprobs"]}
    if body.get("echo"):
        assert choices[0]["text"] == body["prompt"]
        assert "".join(choices[0]["logprobs"]["tokens"]) == body["prompt"]
        assert whole.json()["usage"]["completion_tokens"] == body["max_tokens"]
