"""The completion endpoints: check, render, queue, answer."""

import asyncio
import math
import time
from collections.abc import AsyncGenerator
from dataclasses import dataclass

from litestar.connection import Request
from litestar.datastructures import State
from litestar.exceptions import InternalServerException
from litestar.types import ASGIApp

from gateway.directory import ServedModel, unknown_model
from gateway.dispatch import Dispatcher
from gateway.domain.accounting.live import LiveCosts
from gateway.domain.accounting.tags import tag_of
from gateway.domain.accounts.services import Principal
from gateway.domain.openai.answers import collect
from gateway.domain.openai.bodies import aside, check_body
from gateway.domain.openai.chunks import stream
from gateway.domain.openai.events import Batch, events
from gateway.domain.openai.grammars import asked_grammar
from gateway.domain.openai.plan import Plan
from gateway.domain.openai.prompts import Prompt, chat_prompt, completion_prompts
from gateway.domain.openai.reading import Reading, check_calls, reading_of
from gateway.domain.openai.schemas import (
    MAX_CHOICES,
    ChatCompletionRequest,
    CompletionRequest,
    GenerationBody,
    ModelInfo,
)
from gateway.domain.openai.tools.example import example_call
from gateway.domain.openai.tools.offer import tool_offer
from gateway.domain.openai.validation import parse
from gateway.domain.system.services import Metrics, ModelMetrics
from gateway.errors import (
    BadRequestError,
    BodyTimeoutError,
    ClientGoneError,
    EncodedBodyError,
    GatewayError,
)
from gateway.jobs import Job
from gateway.request_ids import own_id, wire_id
from gateway.settings import GatewaySettings
from gateway.sse import EventStream
from workers.protocol import GenerateRequest

HttpRequest = Request[None, Principal, State]


async def read_body(request: HttpRequest, settings: GatewaySettings) -> bytes:
    """Raises `BodyTimeoutError`, `EncodedBodyError`, `ClientGoneError`, and `BadRequestError` as `check_body`."""
    if request.headers.get("content-encoding", "identity") != "identity":
        raise EncodedBodyError(
            "Send the body without a content-encoding.", param="content-encoding"
        )
    try:
        async with asyncio.timeout(settings.body_timeout_s):
            body = await request.body()
    except TimeoutError as error:
        raise BodyTimeoutError("The body did not arrive in time.") from error
    except InternalServerException as error:
        # The framework's word for it.
        raise ClientGoneError("The client left before its body had arrived.") from error
    await check_body(body)
    return body


@dataclass(frozen=True)
class ChatJob:
    """A chat in flight, for a surface that words the answer itself."""

    job: Job
    plan: Plan
    metrics: ModelMetrics
    streaming: bool

    def events(self, silence_s: float) -> AsyncGenerator[Batch, None]:
        """See `events`."""
        return events(self.job, self.plan, self.metrics, silence_s, streaming=self.streaming)


class CompletionService:
    """Stateless but for its parts; one per application."""

    def __init__(
        self,
        settings: GatewaySettings,
        dispatcher: Dispatcher,
        metrics: Metrics,
        costs: LiveCosts,
    ) -> None:
        self._settings = settings
        self._dispatcher = dispatcher
        self._metrics = metrics
        self._costs = costs

    async def chat(self, request: HttpRequest) -> ASGIApp:
        """Answer /v1/chat/completions; everything a client can get wrong is raised before anything is queued."""
        started_s = time.monotonic()
        content = await read_body(request, self._settings)
        body = await aside(len(content), parse, ChatCompletionRequest, content)
        plan, prompt = await self._prepare_chat(request, body, started_s)
        return await self._answer(request, body, plan, [prompt])

    async def start_chat(
        self,
        request: HttpRequest,
        body: ChatCompletionRequest,
        started_s: float,
        *,
        streaming: bool,
    ) -> ChatJob:
        """Queue a chat for a surface that words the answer itself; the caller leaves the job's context."""
        plan, prompt = await self._prepare_chat(request, body, started_s)
        job = await self._submit(request, body, plan, [prompt], streaming=streaming)
        return ChatJob(job, plan, self._metrics.of(plan.model), streaming)

    async def _prepare_chat(
        self, request: HttpRequest, body: ChatCompletionRequest, started_s: float
    ) -> tuple[Plan, Prompt]:
        served = self._dispatcher.lookup(body.model)
        _check_num_choices(served, body)
        inline_bytes = self._settings.inline_text_bytes
        offer = tool_offer(body)
        grammar = await asked_grammar(served, body)
        if offer is not None:
            await check_calls(served, body, offer, grammar)
        tools = offer.template_tools if offer is not None else ()
        said = None
        if offer is not None and offer.is_required and served.card.engine == "scripted":
            said = example_call(served.format, offer)
        prompt = await chat_prompt(served, body, request.headers, inline_bytes, tools, said)
        reading = reading_of(served, body, offer, grammar, prompt)
        prompt = prompt.bound_to(grammar) if reading is None else reading.shaped(prompt)
        return self._plan(own_id(request.scope), served, body, [prompt], started_s, reading), prompt

    async def complete(self, request: HttpRequest) -> ASGIApp:
        """Answer /v1/completions, one or many prompts."""
        started_s = time.monotonic()
        content = await read_body(request, self._settings)
        body = await aside(len(content), parse, CompletionRequest, content)
        served = self._dispatcher.lookup(body.model)
        _check_num_choices(served, body)
        inline_bytes = self._settings.inline_text_bytes
        grammar = await asked_grammar(served, body)
        prompts = await completion_prompts(served, body, request.headers, inline_bytes)
        prompts = [prompt.bound_to(grammar) for prompt in prompts]
        most = self._settings.most_of_a_key
        if len(prompts) > most:
            raise BadRequestError(
                f"Invalid 'prompt': at most {most} prompts can be queued.", param="prompt"
            )
        plan = self._plan(own_id(request.scope), served, body, prompts, started_s)
        return await self._answer(request, body, plan, prompts)

    def _plan(
        self,
        own: str,
        served: ServedModel,
        body: GenerationBody,
        prompts: list[Prompt],
        started_s: float,
        reading: Reading | None = None,
    ) -> Plan:
        chat = isinstance(body, ChatCompletionRequest)
        digest = served.card.digest
        offer = None if reading is None else reading.offer
        return Plan(
            id=("chatcmpl-" if chat else "cmpl-") + own,
            created_s=int(time.time()),
            model=served.card.model,
            fingerprint=f"fp_{digest[:10]}" if digest else None,
            chat=chat,
            num_choices=body.num_choices,
            num_candidates=body.num_candidates,
            include_usage=body.wants_usage,
            started_s=started_s,
            tokenizer=served.tokenizer,
            num_logprobs=body.num_logprobs,
            num_prompt_logprobs=body.prompt_logprobs,
            skips_special=body.skip_special_tokens is not False,
            cost_of=self._costs.of,
            echoes=tuple(prompt.echo for prompt in prompts if prompt.echo is not None),
            scores_only=body.echoes and body.max_tokens == 0,
            parser=None if reading is None else reading.parser,
            boundary="" if reading is None else reading.boundary,
            requires_call=offer is not None and offer.is_required,
        )

    def models(self) -> list[ModelInfo]:
        """All models that have a card or a worker."""
        return [self._info(model) for model in self._dispatcher.directory.known_models()]

    def model(self, model_id: str) -> ModelInfo:
        """Raises `UnknownModelError`."""
        if model_id not in self._dispatcher.directory.known_models():
            raise unknown_model(model_id)
        return self._info(model_id)

    def _info(self, model: str) -> ModelInfo:
        served = self._dispatcher.directory.models.get(model)
        if served is None:
            return ModelInfo(id=model, created=0, owned_by="tpugate")
        card = served.card
        return ModelInfo(
            id=model,
            created=card.created_s,
            owned_by=card.owned_by,
            max_model_len=card.context_len,
        )

    async def _answer(
        self, request: HttpRequest, body: GenerationBody, plan: Plan, prompts: list[Prompt]
    ) -> ASGIApp:
        metrics = self._metrics.of(plan.model)
        job = await self._submit(request, body, plan, prompts, streaming=bool(body.stream))
        if body.stream:
            blocks = stream(job, plan, metrics, self._settings.ping_interval_s)
            return EventStream(job, blocks)
        with job:
            job.watch(request.receive)
            return await collect(job, plan, metrics)

    async def _submit(
        self,
        request: HttpRequest,
        body: GenerationBody,
        plan: Plan,
        prompts: list[Prompt],
        *,
        streaming: bool,
    ) -> Job:
        requests = self._requests(request, body, plan, prompts, whole=not streaming)
        try:
            return await self._dispatcher.submit(
                requests, streaming=streaming, timeout_s=self._timeout_s(body)
            )
        except GatewayError as error:
            self._metrics.of(plan.model).failed(error.code or "unknown")
            raise

    def _timeout_s(self, body: GenerationBody) -> float:
        """The client's, if that is less than the server's."""
        return min(body.timeout or math.inf, self._settings.request_timeout_s)

    def _requests(
        self,
        request: HttpRequest,
        body: GenerationBody,
        plan: Plan,
        prompts: list[Prompt],
        *,
        whole: bool,
    ) -> list[GenerateRequest]:
        """One for each prompt. Raises `BadRequestError`."""
        own, tag = own_id(request.scope), tag_of(request.headers)
        key_id = str(request.auth.key_id)
        now_s = time.time()
        return [
            GenerateRequest(
                request_id=wire_id(own, number),
                model=plan.model,
                reply_to=self._dispatcher.reply_to,
                prompt_token_ids=prompt.token_ids,
                sampling=prompt.sampling,
                n=plan.num_candidates,
                created_s=now_s,
                deadline_s=now_s + self._timeout_s(body),
                priority=body.priority or 0,
                script=prompt.script,
                gateway_id=self._dispatcher.gateway_id,
                # A key is the smallest tenant there is: keys share no cached prefixes.
                cache_salt=key_id,
                fair_key=key_id,
                whole=whole,
                boundary=plan.boundary,
                tag=tag,
            )
            for number, prompt in enumerate(prompts)
        ]


def _check_num_choices(served: ServedModel, body: GenerationBody) -> None:
    most = min(served.card.max_choices or MAX_CHOICES, MAX_CHOICES)
    if body.num_candidates > most:
        name = "n" if body.num_choices > most else "best_of"
        raise BadRequestError(
            f"Invalid '{name}': this model gives at most {most} choices at a time.",
            param=name,
            code="invalid_value",
        )
