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
    for path, body in re.findall(r"`POST (/\S+)`:\n\n```json\n(.*?)```", DOCUMENT, re.DOTALL)
]
COMPLETIONS = [example for example in EXAMPLES if example[0].endswith("completions")]
OTHERS = [example for example in EXAMPLES if example not in COMPLETIONS]


def names(examples: list[tuple[str, dict[str, Any]]]) -> list[str]:
    said = {"model", "messages", "prompt", "input"}
    return [f"{path}:{','.join(sorted(body.keys() - said))}" for path, body in examples]


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
        "tools",
        "tool_choice",
        "parallel_tool_calls",
    }


def test_each_route_that_takes_a_body_has_an_example(steady_gateway: GatewayUnderTest):
    paths = steady_gateway.client.get("/schema/openapi.json").json()["paths"]
    takes = {path for path, item in paths.items() if "requestBody" in item.get("post", {})}
    assert {path for path, _ in EXAMPLES} == {path for path in takes if "/admin/" not in path}
    for path in takes:
        media = paths[path]["post"]["requestBody"]["content"]["application/json"]
        assert media["examples"], path


@pytest.mark.parametrize(("path", "body"), COMPLETIONS, ids=names(COMPLETIONS))
def test_a_documented_request(steady_gateway: GatewayUnderTest, path: str, body: dict[str, Any]):
    body = {**body, "model": "m-small"}
    whole = steady_gateway.client.post(path, json=body)
    assert whole.status_code == 200, whole.text
    choices = whole.json()["choices"]
    assert len(choices) == body.get("n", 1)
    streamed = steady_gateway.client.post(path, json={**body, "stream": True})
    assert streamed.status_code == 200, streamed.text
    chunks = events(streamed.text)
    assert chunks[-1] == "[DONE]"
    told = [choice["logprobs"] for chunk in chunks[:-1] for choice in chunk["choices"]]
    for choice in choices:
        assert choice["finish_reason"] in ("stop", "length", "tool_calls")
        assert ("tool_calls" in choice.get("message", {})) == ("tools" in body)
        assert bool(choice["logprobs"]) == ("logprobs" in body) == any(told)
    if body.get("top_logprobs"):
        content = choices[0]["logprobs"]["content"]
        assert len(content) == whole.json()["usage"]["completion_tokens"]
        assert {len(token["top_logprobs"]) for token in content} == {body["top_logprobs"]}
    if body.get("echo"):
        assert choices[0]["text"] == body["prompt"]
        assert "".join(choices[0]["logprobs"]["tokens"]) == body["prompt"]
        assert whole.json()["usage"]["completion_tokens"] == body["max_tokens"]


def text_of(path: str, answer: dict[str, Any]) -> str:
    if path == "/v1/responses":
        assert answer["status"] == "completed"
        return str(answer["output"][0]["content"][0]["text"])
    if path == "/v1/messages":
        assert answer["stop_reason"] == "end_turn"
        return str(answer["content"][0]["text"])
    if path == "/tokenize":
        assert answer["count"] == len(answer["tokens"])
    return str(answer.get("input_tokens") or answer.get("prompt") or answer["tokens"])


@pytest.mark.parametrize(("path", "body"), OTHERS, ids=names(OTHERS))
def test_a_documented_request_of_another_surface(
    steady_gateway: GatewayUnderTest, path: str, body: dict[str, Any]
):
    body = {**body, "model": "m-small"}
    whole = steady_gateway.client.post(path, json=body)
    assert whole.status_code == 200, whole.text
    assert text_of(path, whole.json())
    if path in ("/v1/responses", "/v1/messages"):
        streamed = steady_gateway.client.post(path, json={**body, "stream": True})
        assert streamed.status_code == 200, streamed.text
        told = [json.loads(line[6:]) for line in streamed.text.splitlines() if line[:6] == "data: "]
        assert told[-1]["type"] in ("response.completed", "message_stop")
