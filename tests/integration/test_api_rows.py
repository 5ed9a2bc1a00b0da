"""Each row of docs/api.md holds against a gateway: what it calls taken is answered, what it calls refused is refused by name."""

from typing import Any

import httpx
import pytest

from tests.fakes.api_table import Row, rows
from tests.fakes.gateway import GatewayUnderTest, assert_error

HELLO = [{"role": "user", "content": "one two three"}]
REQUIRED: dict[str, dict[str, Any]] = {
    "POST /v1/chat/completions": {"messages": HELLO},
    "POST /v1/completions": {"prompt": "x y z"},
    "POST /v1/responses": {"input": "one two three"},
    "POST /v1/messages": {"messages": HELLO, "max_tokens": 20},
    "POST /v1/messages/count_tokens": {"messages": HELLO},
    "POST /tokenize": {"prompt": "a"},
    "POST /detokenize": {"tokens": [65]},
}
UNSUPPORTED = ("unsupported_parameter", "unsupported_value")


@pytest.fixture(scope="module")
def stored_id(steady_gateway: GatewayUnderTest) -> str:
    body = {"model": "m-small", "input": "one"}
    return str(steady_gateway.client.post("/v1/responses", json=body).json()["id"])


@pytest.mark.parametrize("row", rows(), ids=lambda row: f"{row.route}:{row.name}")
def test_a_row(steady_gateway: GatewayUnderTest, stored_id: str, row: Row):
    for fields in row.taken:
        answer = ask(steady_gateway, row.route, stored_id, fields)
        assert answer.status_code == 200, (fields, answer.text)
        assert 'data: {"error"' not in answer.text
    for number, fields in enumerate(row.refused):
        answer = ask(steady_gateway, row.route, stored_id, fields)
        if row.route.startswith("POST /v1/messages"):
            assert (answer.status_code, answer.json()["type"]) == (400, "error"), fields
            assert row.name in answer.json()["error"]["message"], answer.text
            continue
        error = assert_error(answer, 400, type="invalid_request_error")
        named = (error["param"] or "").split("[")[0].split(".")[0]
        assert named == row.name or named in fields, (fields, error)
        if row.verdict == "refused" and number == 0:
            assert error["code"] in UNSUPPORTED, error


@pytest.mark.parametrize("route", REQUIRED)
def test_null_is_not_given(steady_gateway: GatewayUnderTest, route: str):
    fields = {row.name for row in rows() if row.route == route} - {"model", *REQUIRED[route]}
    answer = ask(steady_gateway, route, "", dict.fromkeys(fields))
    assert answer.status_code == 200, answer.text
    assert answer.headers["content-type"].startswith("application/json")


def ask(
    gateway: GatewayUnderTest, route: str, stored_id: str, fields: dict[str, Any]
) -> httpx.Response:
    method, path = route.split(" ")
    if method == "GET":
        query = {name: str(value).lower() for name, value in fields.items()}
        return gateway.client.get(path.replace("{id}", stored_id), params=query)
    body = {"model": "m-small", **REQUIRED[route], **fields}
    return gateway.client.post(path, json=body)
