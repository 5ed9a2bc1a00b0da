"""OpenAI's routes. Bodies are parsed by the service, so that errors are OpenAI's and not a framework's."""

from dataclasses import dataclass
from typing import Any

from litestar import Controller, get, post
from litestar.openapi.spec import OpenAPIMediaType, Operation, RequestBody
from litestar.types import ASGIApp
from pydantic import BaseModel

from gateway.domain.accounts.guards import requires_key
from gateway.domain.openai.schemas import (
    ChatCompletionRequest,
    CompletionRequest,
    ModelInfo,
    ModelList,
)
from gateway.domain.openai.services import CompletionService, HttpRequest


def _body_of(kind: type[BaseModel]) -> RequestBody:
    """The schema with its definitions in place: the framework's registry takes no foreign ones."""
    schema = kind.model_json_schema()
    inlined = _inline(schema, schema.pop("$defs", {}))
    return RequestBody(
        content={"application/json": OpenAPIMediaType(schema=inlined)}, required=True
    )


def _inline(node: Any, definitions: dict[str, Any]) -> Any:  # noqa: ANN401
    if isinstance(node, list):
        return [_inline(item, definitions) for item in node]
    if not isinstance(node, dict):
        return node
    if "$ref" in node:
        return _inline(definitions[node["$ref"].rsplit("/", 1)[1]], definitions)
    return {name: _inline(item, definitions) for name, item in node.items()}


@dataclass
class _ChatOperation(Operation):
    def __post_init__(self) -> None:
        self.request_body = _body_of(ChatCompletionRequest)


@dataclass
class _CompletionOperation(Operation):
    def __post_init__(self) -> None:
        self.request_body = _body_of(CompletionRequest)


class OpenAIController(Controller):
    path = "/v1"
    tags = ["openai"]
    guards = [requires_key]

    @post(
        "/chat/completions",
        status_code=200,
        operation_class=_ChatOperation,
        summary="Answer a conversation; JSON, or server-sent events with stream: true",
    )
    async def create_chat_completion(
        self, request: HttpRequest, completions: CompletionService
    ) -> ASGIApp:
        return await completions.chat(request)

    @post(
        "/completions",
        status_code=200,
        operation_class=_CompletionOperation,
        summary="Continue one or more texts",
    )
    async def create_completion(
        self, request: HttpRequest, completions: CompletionService
    ) -> ASGIApp:
        return await completions.complete(request)

    @get("/models", summary="All models")
    async def list_models(self, completions: CompletionService) -> ModelList:
        return ModelList(data=completions.models())

    @get("/models/{model_id:path}", summary="One model")
    async def get_model(self, model_id: str, completions: CompletionService) -> ModelInfo:
        return completions.model(model_id.lstrip("/"))
