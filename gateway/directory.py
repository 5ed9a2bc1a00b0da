"""Which workers live, which models they serve, how long the queues are: Redis, read every half second.

A model's card is fetched when its set of ready workers changes and parsed once per digest: a large
tokenizer takes a second to build, which happens in a thread.
"""

import asyncio
import logging
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, cast

import msgspec
from redis.asyncio import Redis
from redis.exceptions import RedisError, ResponseError

from gateway.errors import UnavailableError, UnknownModelError
from models.chat_format import ChatFormat, chat_format
from models.chat_templates import ChatTemplate
from models.errors import ModelError
from models.tokenizer import TextTokenizer
from workers.protocol import (
    GATEWAY_TTL_S,
    MODELS_SET,
    REQUEST_GROUP,
    WAITING_CONSUMER,
    WORKERS_SET,
    ModelCard,
    WorkerState,
    WorkerStatus,
    card_key,
    decode,
    gateway_key,
    requests_stream,
    worker_key,
)

logger = logging.getLogger(__name__)


@dataclass(frozen=True)
class ServedModel:
    """A card with its tokenizer and template ready for use."""

    card: ModelCard
    tokenizer: TextTokenizer
    template: ChatTemplate | None
    """None where the model has no chat template, or one that cannot be compiled."""
    format: ChatFormat = ChatFormat()
    """How it writes calls and reasoning."""


@dataclass(frozen=True)
class QueueDepth:
    num_requests: int = 0
    """Queued or running."""
    num_claimed: int = 0
    """Taken by a worker, so running or about to."""


class Directory:
    """The latest poll. `connected` is False from the first failed poll to the next good one."""

    def __init__(
        self,
        redis: Redis,
        *,
        poll_interval_s: float,
        retry_after_s: int,
        gateway_id: str,
        on_poll: Callable[[frozenset[str]], None],
    ) -> None:
        """`on_poll` gets the ids of all living workers after each good poll; each tells workers of this gateway."""
        self._gateway_key = gateway_key(gateway_id)
        self._redis = redis
        self._poll_interval_s = poll_interval_s
        self._retry_after_s = retry_after_s
        self._on_poll = on_poll
        self._card_readers: dict[str, frozenset[str]] = {}
        self.connected = False
        self.statuses: dict[str, WorkerStatus] = {}
        self.models: dict[str, ServedModel] = {}
        self.depths: dict[str, QueueDepth] = {}
        self.deserted_s: dict[str, float] = {}
        """Seconds for which polls have found no worker at all of a model; counts only while Redis answers."""
        self._known: frozenset[str] = frozenset()
        self._ready: dict[str, frozenset[str]] = {}

    def known_models(self) -> list[str]:
        """Ids of all models that have a card or a worker, sorted."""
        return sorted(self._known)

    def is_ready(self, model: str | None = None) -> bool:
        """Whether a READY worker serves `model` (any model for None)."""
        if model is None:
            return any(name in self.models for name in self._ready)
        return model in self._ready and model in self.models

    def lookup(self, model: str) -> ServedModel:
        """The model, if it can take a request now. Raises `UnavailableError` or `UnknownModelError`."""
        if model not in self._known:
            raise unknown_model(model)
        if not self.is_ready(model):
            raise UnavailableError(
                f"No worker of the model '{model}' is ready. Try again shortly.",
                code="model_not_ready",
                retry_after_s=self._retry_after_s,
            )
        return self.models[model]

    async def run(self) -> None:
        """Poll until cancelled."""
        while True:
            await self.refresh()
            await asyncio.sleep(self._poll_interval_s)

    async def refresh(self) -> None:
        """One poll; a Redis failure is logged once and shows in `connected`."""
        try:
            await self._poll()
        except (RedisError, OSError) as error:
            if self.connected:
                logger.warning("the worker directory cannot be read: %s", error)
            self.connected = False
            return
        self.connected = True
        self._on_poll(frozenset(self.statuses))

    async def _poll(self) -> None:
        async with self._redis.pipeline(transaction=False) as pipe:
            pipe.smembers(WORKERS_SET)
            pipe.smembers(MODELS_SET)
            pipe.set(self._gateway_key, b"", ex=GATEWAY_TTL_S)
            worker_ids, model_ids, _ = await pipe.execute()
        await self._read_statuses(sorted(item.decode() for item in worker_ids))
        named = {item.decode() for item in model_ids}
        self._known = frozenset(named | {status.model for status in self.statuses.values()})
        self._ready = self._ready_workers()
        staffed = {status.model for status in self.statuses.values()}
        self.deserted_s = {
            model: self.deserted_s.get(model, 0.0) + self._poll_interval_s
            for model in self._known - staffed
        }
        await self._read_depths(sorted(self._known))
        for model in named:
            await self._refresh_card(model)
        for gone in self._card_readers.keys() - named:
            del self._card_readers[gone]
            self.models.pop(gone, None)

    async def _read_statuses(self, worker_ids: list[str]) -> None:
        payloads = (
            await self._redis.mget([worker_key(item) for item in worker_ids]) if worker_ids else []
        )
        statuses: dict[str, WorkerStatus] = {}
        gone: list[str] = []
        for worker_id, payload in zip(worker_ids, payloads, strict=True):
            if payload is None:
                gone.append(worker_id)
                continue
            try:
                statuses[worker_id] = decode(WorkerStatus, cast(bytes, payload))
            except (msgspec.DecodeError, msgspec.ValidationError):
                logger.warning("the status of worker %s cannot be read", worker_id)
        self.statuses = statuses
        if gone:
            # A living worker adds itself again with its next heartbeat.
            await cast(Any, self._redis.srem(WORKERS_SET, *gone))

    def _ready_workers(self) -> dict[str, frozenset[str]]:
        ready: dict[str, set[str]] = {}
        for status in self.statuses.values():
            if status.state is WorkerState.READY:
                ready.setdefault(status.model, set()).add(status.worker_id)
        return {model: frozenset(ids) for model, ids in ready.items()}

    async def _read_depths(self, models: list[str]) -> None:
        async with self._redis.pipeline(transaction=False) as pipe:
            for model in models:
                pipe.xlen(requests_stream(model))
                pipe.xpending(requests_stream(model), REQUEST_GROUP)
            replies = await pipe.execute(raise_on_error=False) if models else []
        depths: dict[str, QueueDepth] = {}
        for index, model in enumerate(models):
            length, pending = replies[2 * index], replies[2 * index + 1]
            # The group does not exist before the first worker starts.
            claimed = 0 if isinstance(pending, ResponseError) else _num_claimed(pending)
            depths[model] = QueueDepth(num_requests=int(length), num_claimed=claimed)
        self.depths = depths

    async def _refresh_card(self, model: str) -> None:
        readers = self._ready.get(model, frozenset())
        if self._card_readers.get(model) == readers:
            return
        payload = await self._redis.get(card_key(model))
        if payload is None:
            return
        self._card_readers[model] = readers
        try:
            self.models[model] = await self._serve(decode(ModelCard, cast(bytes, payload)))
        except (msgspec.DecodeError, msgspec.ValidationError, ModelError) as error:
            logger.warning("the card of model %s cannot be used: %s", model, error)

    async def _serve(self, card: ModelCard) -> ServedModel:
        old = self.models.get(card.model)
        if old is not None and card.digest and old.card.digest == card.digest:
            return ServedModel(
                card, old.tokenizer, old.template, _format(card, old.template, old.tokenizer)
            )
        return await asyncio.to_thread(_build, card)


def _num_claimed(pending: dict[str, Any]) -> int:
    """Of a summary of XPENDING: what workers have, without what is set aside for its turn."""
    waiting = sum(
        int(consumer["pending"])
        for consumer in pending["consumers"]
        if consumer["name"] == WAITING_CONSUMER.encode()
    )
    return int(pending["pending"]) - waiting


def unknown_model(model: str) -> UnknownModelError:
    """The 404 for a name that no worker serves; the name is cut, as it is the client's."""
    shown = model if len(model) <= 100 else model[:100] + "…"
    return UnknownModelError(
        f"The model '{shown}' does not exist or you do not have access to it.", param="model"
    )


def _build(card: ModelCard) -> ServedModel:
    tokenizer = TextTokenizer(card.tokenizer_json, bos_token=card.special_tokens.get("bos_token"))
    template: ChatTemplate | None = None
    if card.chat_template is not None:
        try:
            template = ChatTemplate(card.chat_template, card.special_tokens)
        except ModelError as error:
            logger.warning("model %s: %s", card.model, error)
    return ServedModel(card, tokenizer, template, _format(card, template, tokenizer))


def _format(card: ModelCard, template: ChatTemplate | None, tokenizer: TextTokenizer) -> ChatFormat:
    return chat_format(template, tokenizer, card.tool_parser, card.reasoning_parser)
