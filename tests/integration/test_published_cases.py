"""The collection of requests that broke other servers (tests/data/chat_api.json): each is sent as it stands there.

What the right answer looks like in detail is checked by the test that has the case's id in its name; here every
request of the collection gets an answer of the right kind, whole and streamed, and no case is without a test.
"""

import json
import re
from pathlib import Path
from typing import Any

import pytest

from tests.fakes.gateway import GatewayUnderTest, assert_error, events

TESTS = Path(__file__).resolve().parents[1]
CASES = json.loads((TESTS / "data" / "chat_api.json").read_text())
LATER = {"X08": "keys have no budgets"}


def _requests() -> list[Any]:
    found = []
    for case in CASES:
        request = case["request"]
        given = [v for v in request.get("variants", ()) if isinstance(v, dict)]
        bodies = [(v["name"], v["body"]) for v in given]
        if "body" in request:
            bodies.append(("", request["body"]))
        for name, body in bodies:
            found.append(pytest.param(request, body, id=f"{case['id']}-{name}".rstrip("-")))
    return found


@pytest.mark.parametrize("case", CASES, ids=lambda case: case["id"])
def test_every_case_has_tests_of_its_own(case: dict[str, Any]):
    short = case["id"].split("-")[0]
    named = re.compile(rf"def test_{short.lower()}_")
    files = [path for path in TESTS.rglob("test_*.py") if named.search(path.read_text())]
    assert bool(files) != (short in LATER), files


@pytest.mark.parametrize(("request_", "body"), _requests())
def test_a_request_of_the_collection(
    steady_gateway: GatewayUnderTest, request_: dict[str, Any], body: dict[str, Any]
):
    headers = _script(request_) or _call(body)
    path = request_["path"]
    for stream in (False, True):
        asked = {**body, "stream": stream}
        if not stream:
            asked.pop("stream_options", None)
        answer = steady_gateway.client.post(path, json=asked, headers=headers)
        assert answer.status_code in (200, 400, 404), answer.text
        if answer.status_code != 200:
            error = assert_error(answer, answer.status_code, type="invalid_request_error")
            assert error["param"], error
            assert len(answer.content) < 4096
        elif stream:
            assert events(answer.text)[-1] == "[DONE]"
            assert "\ufffd" not in answer.text


def _call(body: dict[str, Any]) -> dict[str, str]:
    """What a model says that has to call a tool: here nothing but its script can make it."""
    choice = body.get("tool_choice")
    if choice != "required" and not (isinstance(choice, dict) and "function" in choice):
        return {}
    name = choice["function"]["name"] if isinstance(choice, dict) else "lookup_tide"
    argument = {"lookup_tide": "harbour", "lookup_moon": "day"}.get(name, "x")
    call = json.dumps({"name": name, "arguments": {argument: "x"}})
    return {"x-model-script": json.dumps(["<tool_call>", call, "</tool_call>"])}


def _script(request: dict[str, Any]) -> dict[str, str]:
    if "model_script" in request:
        return {"x-model-script": json.dumps(request["model_script"])}
    if "model_script_hex" in request:
        script = [item.replace(" ", "") for item in request["model_script_hex"]]
        return {"x-model-script-hex": json.dumps(script)}
    return {}
