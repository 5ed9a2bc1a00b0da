"""What is HTTP and no request of the API: other methods, other paths, long ones, browsers.

Every answer has the error shape of its surface and a request id, and none is a framework's page.
"""

from typing import Any

import httpx
import pytest

from tests.fakes.gateway import GatewayUnderTest, assert_error, chat_body
from tests.integration.conftest import StartGateway

POSTS = [
    "/v1/chat/completions",
    "/v1/completions",
    "/v1/responses",
    "/v1/messages",
    "/v1/messages/count_tokens",
    "/tokenize",
    "/detokenize",
]
GETS = ["/v1/models", "/v1/models/m-small", "/v1/responses/resp_1/input_items"]


def assert_refused(answer: httpx.Response, status: int) -> None:
    """The error object of the surface that the path belongs to."""
    if not answer.url.path.startswith("/v1/messages"):
        assert_error(answer, status, type="invalid_request_error")
        return
    assert answer.status_code == status
    body = answer.json()
    assert (set(body), body["type"]) == ({"type", "error", "request_id"}, "error")
    assert body["error"]["message"]


@pytest.mark.parametrize("method", ["GET", "PUT", "PATCH", "DELETE"])
@pytest.mark.parametrize("path", POSTS)
def test_another_method(steady_gateway: GatewayUnderTest, path: str, method: str):
    answer = steady_gateway.client.request(method, path, json={})
    assert_refused(answer, 405)
    assert "POST" in answer.headers["allow"]


@pytest.mark.parametrize("method", ["POST", "PUT", "DELETE"])
@pytest.mark.parametrize("path", GETS)
def test_another_method_of_what_is_read(steady_gateway: GatewayUnderTest, path: str, method: str):
    answer = steady_gateway.client.request(method, path)
    assert_refused(answer, 405)
    assert "GET" in answer.headers["allow"]


@pytest.mark.parametrize("path", [*POSTS, *GETS])
def test_head_has_no_body(steady_gateway: GatewayUnderTest, path: str):
    answer = steady_gateway.client.head(path)
    assert answer.status_code in (200, 405)
    assert answer.content == b""


@pytest.mark.parametrize(
    "path",
    [
        "/v1",
        "/v1/",
        "/v1/embeddings",
        "/v1/chat",
        "/v1/chat/completions/x",
        "/chat/completions",
        "/v1/messages/batches",
        "/v1/../admin",
        "/V1/chat/completions",
        "/v1/chat/completions%00",
        "/v1/chat/completions%2f..",
        "/favicon.ico",
    ],
)
@pytest.mark.parametrize("method", ["GET", "POST"])
def test_an_unknown_path(steady_gateway: GatewayUnderTest, path: str, method: str):
    url = httpx.URL(steady_gateway.url).copy_with(raw_path=path.encode())
    answer = steady_gateway.client.request(method, url)
    assert_refused(answer, 404)
    assert answer.headers["x-request-id"].startswith("req_")


@pytest.mark.parametrize("path", POSTS)
def test_a_slash_at_the_end(steady_gateway: GatewayUnderTest, path: str):
    """Or two where one belongs, as of a base URL with one: a redirect would lose many a client's body or key."""
    for spelled in (path + "/", path.replace("/", "//")):
        url = httpx.URL(steady_gateway.url).copy_with(raw_path=spelled.encode())
        answer = steady_gateway.client.post(url, json={"model": "m-small"})
        assert answer.status_code == 400
        assert answer.json()["error"]["message"]


def test_a_slash_at_the_end_of_what_is_read(steady_gateway: GatewayUnderTest):
    assert steady_gateway.client.get("/v1/models/").status_code == 200


def test_names_of_models_in_paths(steady_gateway: GatewayUnderTest):
    assert steady_gateway.client.get("/v1/models/m%2Dsmall").json()["id"] == "m-small"
    for name in ("a/b", "a%2Fb", "m-small%00", "%F0%9F%A6%80", "..%2F..", "x" * 5000):
        answer = steady_gateway.client.get(f"/v1/models/{name}")
        assert_error(answer, 404, code="model_not_found")
        assert len(answer.content) < 1000


@pytest.mark.parametrize("length", [8_000, 50_000])
def test_a_long_path(steady_gateway: GatewayUnderTest, length: int):
    answer = steady_gateway.client.get("/v1/" + "a" * length)
    assert_error(answer, 404)
    assert len(answer.content) < 1000
    query = steady_gateway.client.post("/v1/chat/completions?q=" + "a" * length, json=chat_body())
    assert query.status_code == 200


def test_a_long_header(steady_gateway: GatewayUnderTest):
    for name in ("x-other", "authorization", "x-request-id", "idempotency-key"):
        headers = {name: "Bearer " + "a" * 50_000}
        answer = steady_gateway.client.post("/v1/chat/completions", json={}, headers=headers)
        assert_error(answer, 401 if name == "authorization" else 400)
        assert len(answer.content) < 1000


BROWSER = {
    "origin": "https://chat.example",
    "access-control-request-method": "POST",
    "access-control-request-headers": "authorization,content-type,x-stainless-lang",
}


@pytest.mark.parametrize("path", [*POSTS, *GETS])
def test_a_browser_may_ask_without_a_key(steady_gateway: GatewayUnderTest, path: str):
    # sgl-project/sglang#333; dphnAI/sonar#434: a preflight cannot have a key
    answer = httpx.options(steady_gateway.url + path, headers=BROWSER)
    assert answer.status_code == 204
    assert answer.headers["access-control-allow-origin"] == "*"
    allowed = answer.headers["access-control-allow-methods"]
    assert ("POST" if path in POSTS else "GET") in allowed
    # A star is no word for 'authorization'.
    assert "authorization" in answer.headers["access-control-allow-headers"].lower()
    assert "x-stainless-lang" in answer.headers["access-control-allow-headers"].lower()
    assert int(answer.headers["access-control-max-age"]) > 0


@pytest.mark.parametrize("body", [chat_body(), chat_body(stream=True), chat_body(n=0)])
def test_a_browser_may_read_answers_and_errors(steady_gateway: GatewayUnderTest, body: Any):
    headers = {"origin": BROWSER["origin"]}
    answer = steady_gateway.client.post("/v1/chat/completions", json=body, headers=headers)
    assert answer.headers["access-control-allow-origin"] == "*"
    assert "x-request-id" in answer.headers["access-control-expose-headers"]
    assert "access-control-allow-credentials" not in answer.headers


@pytest.mark.parametrize("path", ["/metrics", "/admin/api/keys", "/health"])
def test_a_browser_reads_nothing_else(steady_gateway: GatewayUnderTest, path: str):
    answer = steady_gateway.client.get(path, headers={"origin": BROWSER["origin"]})
    assert "access-control-allow-origin" not in answer.headers


def test_browsers_can_be_kept_out(start_gateway: StartGateway):
    gateway = start_gateway(cors_origin="none")
    answer = gateway.client.get("/v1/models", headers={"origin": BROWSER["origin"]})
    assert "access-control-allow-origin" not in answer.headers
    preflight = httpx.options(gateway.url + POSTS[0], headers=BROWSER)
    assert "access-control-allow-headers" not in preflight.headers
