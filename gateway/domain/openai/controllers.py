"""OpenAI's routes. Bodies are parsed by the service, so that errors are OpenAI's and not a framework's."""

from dataclasses import dataclass, field
from typing import Any

from litestar import Controller, get, post
from litestar.openapi.spec import OpenAPIMediaType, Operation, Reference, RequestBody
from litestar.types import ASGIApp

from gateway.domain.accounts.guards import requires_key
from gateway.domain.openai.schemas import ModelInfo, ModelList
from gateway.domain.openai.services import CompletionService, HttpRequest


def _body_of(name: str) -> RequestBody:
    schema = Reference(ref=f"#/components/schemas/{name}")
    return RequestBody(content={"application/json": OpenAPIMediaType(schema=schema)}, required=True)


@dataclass
class _ChatOperation(Operation):
    request_body: Any = field(default_factory=lambda: _body_of("ChatCompletionRequest"))


@dataclass
class _CompletionOperation(Operation):
    request_body: Any = field(default_factory=lambda: _body_of("CompletionRequest"))


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
