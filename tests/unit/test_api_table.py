"""docs/api.md is whole and up to date: every parameter that is read or published has a row, and each row a test."""

import ast
from functools import cache
from pathlib import Path
from typing import Any

import pytest
from anthropic.types.message_count_tokens_params import MessageCountTokensParams
from anthropic.types.message_create_params import MessageCreateParamsStreaming
from openai.types.chat.completion_create_params import (
    CompletionCreateParamsStreaming as ChatParams,
)
from openai.types.completion_create_params import CompletionCreateParamsStreaming as PlainParams
from openai.types.responses.input_item_list_params import InputItemListParams
from openai.types.responses.response_create_params import ResponseCreateParamsStreaming
from openai.types.responses.response_retrieve_params import ResponseRetrieveParamsStreaming

from gateway.domain.messages.schemas import CountTokensRequest, MessagesRequest
from gateway.domain.openai.schemas import ChatCompletionRequest, CompletionRequest
from gateway.domain.openai.tokenization import DetokenizeRequest, TokenizeRequest
from gateway.domain.responses.schemas import ResponsesRequest
from tests.fakes.api_table import Row, rows

TESTS = Path(__file__).resolve().parents[1]
HEADERS = {"user_profile_id", "workspace_id"}
"""Anthropic's client lists two headers among the parameters."""
SOMETIMES = {"mcp_servers", "container", "temperature", "top_p", "top_k"}
"""Parameters of Anthropic's beta routes, and of older models."""
READ: dict[str, Any] = {
    "POST /v1/chat/completions": ChatCompletionRequest,
    "POST /v1/completions": CompletionRequest,
    "POST /v1/responses": ResponsesRequest,
    "POST /v1/messages": MessagesRequest,
    "POST /v1/messages/count_tokens": CountTokensRequest,
    "POST /tokenize": TokenizeRequest,
    "POST /detokenize": DetokenizeRequest,
}
PUBLISHED: dict[str, Any] = {
    "POST /v1/chat/completions": ChatParams,
    "POST /v1/completions": PlainParams,
    "POST /v1/responses": ResponseCreateParamsStreaming,
    "GET /v1/responses/{id}": ResponseRetrieveParamsStreaming,
    "GET /v1/responses/{id}/input_items": InputItemListParams,
    "POST /v1/messages": MessageCreateParamsStreaming,
    "POST /v1/messages/count_tokens": MessageCountTokensParams,
}
"""As the vendors' own clients know them."""


def names(route: str) -> set[str]:
    return {row.name for row in rows() if row.route == route}


@pytest.mark.parametrize("route", READ)
def test_every_field_that_is_read_has_a_row(route: str):
    assert set(READ[route].model_fields) - names(route) == set()


@pytest.mark.parametrize("route", PUBLISHED)
def test_every_published_parameter_has_a_row(route: str):
    published = set(PUBLISHED[route].__annotations__) - HEADERS
    assert published - names(route) == set()
    unmarked = {row.name for row in rows() if row.route == route and not row.is_extension}
    assert unmarked - published - SOMETIMES == set()


@pytest.mark.parametrize("row", rows(), ids=lambda row: f"{row.route}:{row.name}")
def test_a_row_is_well_formed(row: Row):
    assert row.verdict in ("supported", "ignored", "refused")
    assert row.taken or row.refused
    assert row.refused or row.verdict != "refused"
    assert row.taken or row.verdict != "ignored"
    assert row.tests
    for test in row.tests:
        path, _, name = test.partition("::")
        assert not name or name in _functions(TESTS / path), test
        assert (TESTS / path).exists(), test


@cache
def _functions(path: Path) -> set[str]:
    tree = ast.parse(path.read_text())
    kinds = ast.FunctionDef | ast.AsyncFunctionDef
    return {node.name for node in ast.walk(tree) if isinstance(node, kinds)}
