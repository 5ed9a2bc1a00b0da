"""Probes answer whatever asks for them, and nobody can fill the log with warnings by asking oddly."""

import pytest

from tests.fakes.gateway import GatewayUnderTest


@pytest.mark.parametrize("path", ["/health", "/ready", "/metrics"])
def test_head_is_get_without_a_body(shared_gateway: GatewayUnderTest, path: str):
    response = shared_gateway.client.head(path)
    whole = shared_gateway.client.get(path)
    assert (response.status_code, response.content) == (whole.status_code, b"")
    assert response.headers["content-type"] == whole.headers["content-type"]


def test_the_type_of_the_metrics(shared_gateway: GatewayUnderTest):
    content_type = shared_gateway.client.get("/metrics").headers["content-type"]
    assert content_type == "text/plain; version=0.0.4; charset=utf-8"


def test_an_upgrade_that_is_not_done(shared_gateway: GatewayUnderTest):
    headers = {
        "connection": "Upgrade",
        "upgrade": "websocket",
        "sec-websocket-version": "13",
        "sec-websocket-key": "dGhlIHNhbXBsZSBub25jZQ==",
    }
    response = shared_gateway.client.get("/health", headers=headers)
    assert response.status_code == 200
    assert "WARNING" not in shared_gateway.output


def test_the_schema_is_whole(shared_gateway: GatewayUnderTest):
    paths = shared_gateway.client.get("/schema/openapi.json").json()["paths"]
    assert {"get", "head"} <= paths["/health"].keys()
