"""OpenAI's routes. Bodies are parsed by the service, so that errors are OpenAI's and not a framework's."""

from litestar import Controller, HttpMethod, get, post
from litestar.types import ASGIApp

from gateway.domain.accounting.tags import PARAMETER as TAG
from gateway.domain.accounts.guards import KeyedRoute, requires_key
from gateway.domain.openai.answer_schemas import ChatCompletion, Completion
from gateway.domain.openai.replays import answered_once
from gateway.domain.openai.schemas import (
    ChatCompletionRequest,
    CompletionRequest,
    ModelInfo,
    ModelList,
)
from gateway.domain.openai.services import CompletionService, HttpRequest
from gateway.domain.openai.tokenization import (
    DetokenizeRequest,
    DetokenizeResponse,
    TokenizationService,
    TokenizeRequest,
    TokenizeResponse,
)
from gateway.openapi.operations import (
    BODY_ERRORS,
    GENERATION_ERRORS,
    READ_ERRORS,
    Errors,
    operation,
)

_MODEL_ERRORS = Errors(READ_ERRORS.statuses | {404})
_MODEL = "smollm2-135m-instruct"
_MESSAGES = [{"role": "user", "content": "What is the capital of France?"}]


class OpenAIController(Controller):
    path = "/v1"
    tags = ["openai"]
    guards = [requires_key]

    @KeyedRoute(
        "/chat/completions",
        http_method=HttpMethod.POST,
        status_code=200,
        operation_class=operation(
            ChatCompletionRequest,
            ChatCompletion,
            generates=True,
            parameters=[TAG],
            errors=GENERATION_ERRORS,
            example={"model": _MODEL, "messages": _MESSAGES, "temperature": 0, "max_tokens": 32},
        ),
        summary="Answer a conversation; JSON, or server-sent events with stream: true",
    )
    async def create_chat_completion(
        self, request: HttpRequest, completions: CompletionService
    ) -> ASGIApp:
        return await answered_once(request, completions.chat)

    @KeyedRoute(
        "/completions",
        http_method=HttpMethod.POST,
        status_code=200,
        operation_class=operation(
            CompletionRequest,
            Completion,
            generates=True,
            parameters=[TAG],
            errors=GENERATION_ERRORS,
            example={"model": _MODEL, "prompt": "Once upon a time", "max_tokens": 32},
        ),
        summary="Continue one or more texts",
    )
    async def create_completion(
        self, request: HttpRequest, completions: CompletionService
    ) -> ASGIApp:
        return await answered_once(request, completions.complete)

    @get(
        "/models",
        summary="All models",
        operation_class=operation(None, ModelList, errors=READ_ERRORS),
    )
    async def list_models(self, completions: CompletionService) -> ModelList:
        return ModelList(data=completions.models())

    @get(
        "/models/{model_id:path}",
        summary="One model",
        operation_class=operation(None, ModelInfo, errors=_MODEL_ERRORS),
    )
    async def get_model(self, model_id: str, completions: CompletionService) -> ModelInfo:
        return completions.model(model_id.lstrip("/"))


class TokenController(Controller):
    """At vLLM's paths, which have no version."""

    tags = ["tokens"]
    guards = [requires_key]

    @post(
        "/tokenize",
        status_code=200,
        operation_class=operation(
            TokenizeRequest,
            TokenizeResponse,
            errors=BODY_ERRORS,
            example={"model": _MODEL, "messages": _MESSAGES, "return_token_strs": True},
        ),
        summary="Token ids of a text or of a chat",
    )
    async def tokenize(
        self, request: HttpRequest, tokenization: TokenizationService
    ) -> TokenizeResponse:
        return await tokenization.tokenize(request)

    @post(
        "/detokenize",
        status_code=200,
        operation_class=operation(
            DetokenizeRequest,
            DetokenizeResponse,
            errors=BODY_ERRORS,
            example={"model": _MODEL, "tokens": [19, 198, 30]},
        ),
        summary="The text of token ids",
    )
    async def detokenize(
        self, request: HttpRequest, tokenization: TokenizationService
    ) -> DetokenizeResponse:
        return await tokenization.detokenize(request)
