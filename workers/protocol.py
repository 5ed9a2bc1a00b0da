"""The wire between gateway and workers: typed records, stream names, encode and decode.

Both sides import this module and it imports neither. Records are msgpack arrays (msgspec); a field is
only ever appended with a default, so that a gateway and a worker of neighbouring versions understand
each other during a rolling update.

    gateway ── GenerateRequest ──> requests stream of the model ──(consumer group)──> one worker
    gateway <── StepDeltas ─────── reply stream of that gateway <──(one append a step)── worker
    gateway ── AbortRequest ─────> aborts stream of the model ──(every worker reads it)──> owner acts
    worker  ── WorkerStatus ─────> key with a time to live ──(gateways poll)──> readiness, metrics
    gateway ── (gateway key) ────> key with a time to live ──(workers look)──> requests nobody waits for
    worker  ── ModelCard ────────> key of the model ──(gateways cache by digest)──> tokenizer, template
"""

from enum import StrEnum
from typing import Literal, TypeVar, cast

import msgspec

PROTOCOL_VERSION = 1
REQUEST_GROUP = "workers"
WAITING_CONSUMER = "waiting"
"""The group's consumer of entries that no worker has: seen and left for their turn, or given back."""
HEARTBEAT_INTERVAL_S = 1.0
HEARTBEAT_TTL_S = 5.0
"""A worker whose status key is gone for this long is dead: its requests are claimed by others."""
PAYLOAD_FIELD = b"p"
"""The one field of every stream entry; it holds one encoded record."""
GATEWAY_TTL_S = 5
"""A gateway whose key is gone for some seconds more is dead: workers abort its requests."""
WORKERS_SET = "tpugate:workers"
"""Ids of all workers that ever announced themselves; readers drop ids whose status key is gone."""
MODELS_SET = "tpugate:models"
"""Ids of all models that have a card."""


def requests_stream(model: str) -> str:
    return f"tpugate:requests:{model}"


def aborts_stream(model: str) -> str:
    return f"tpugate:aborts:{model}"


def replies_stream(gateway_id: str) -> str:
    return f"tpugate:replies:{gateway_id}"


def worker_key(worker_id: str) -> str:
    return f"tpugate:worker:{worker_id}"


def card_key(model: str) -> str:
    return f"tpugate:model:{model}"


def gateway_key(gateway_id: str) -> str:
    return f"tpugate:gateway:{gateway_id}"


class FinishReason(StrEnum):
    """Why a choice ended, inside the system; the gateway maps it to OpenAI's words."""

    STOP = "stop"
    LENGTH = "length"
    ABORT = "abort"
    ERROR = "error"


class WorkerState(StrEnum):
    STARTING = "starting"
    """The process lives; weights are being fetched or read."""
    WARMING = "warming"
    """Buckets are being compiled; `progress` moves from 0 to 1."""
    READY = "ready"
    DRAINING = "draining"
    """Finishes what it has, claims nothing more."""


class Grammar(msgspec.Struct, array_like=True, frozen=True):
    """What an answer's text must match, from its first token to its end token."""

    kind: Literal["json_schema", "regex", "lark"]
    """`lark` is llguidance's dialect of it."""
    text: str
    param: str = ""
    """The field of the request's body that it comes from."""


class SamplingParams(msgspec.Struct, array_like=True, frozen=True, kw_only=True):
    """How tokens are chosen and when to stop. Ranges are the gateway's to check."""

    max_tokens: int
    """Upper bound of generated tokens of each choice, >= 1."""
    temperature: float = 1.0
    """0 is greedy."""
    top_p: float = 1.0
    top_k: int = 0
    """0 is off."""
    min_p: float = 0.0
    seed: int | None = None
    stop: tuple[str, ...] = ()
    stop_token_ids: tuple[int, ...] = ()
    ignore_eos: bool = False
    min_tokens: int = 0
    skip_special_tokens: bool = True
    repetition_penalty: float = 1.0
    """Divides (above 0) or multiplies logits of tokens of the prompt and the answer; 1 is off."""
    frequency_penalty: float = 0.0
    """Subtracted from a token's logit for each time the answer has it."""
    presence_penalty: float = 0.0
    """Subtracted from the logits of the tokens that the answer has."""
    logit_bias: tuple[tuple[int, float], ...] = ()
    """(token id, what is added to its logit)."""
    logprobs: int | None = None
    """Alternatives reported beside each generated token, 0 to 20; None reports nothing."""
    prompt_logprobs: int | None = None
    """The same for the tokens of the prompt."""
    grammar: Grammar | None = None
    """Tokens that it does not allow cannot be drawn."""


class GenerateRequest(msgspec.Struct, array_like=True, frozen=True, kw_only=True):
    """One HTTP request's generation work: one prompt, `n` choices."""

    request_id: str
    """Unique, made by the gateway; never a client's header."""
    model: str
    reply_to: str
    """Name of the stream that takes the deltas."""
    prompt_token_ids: list[int]
    sampling: SamplingParams
    n: int = 1
    created_s: float = 0.0
    """Unix time at the gateway, seconds."""
    deadline_s: float = 0.0
    """Unix time after which the request must not be started; 0 is none."""
    priority: int = 0
    script: tuple[bytes, ...] | None = None
    """What the scripted engine emits, one token each; None for a real engine."""
    version: int = PROTOCOL_VERSION
    gateway_id: str = ""
    """Whose `gateway_key` tells that somebody waits for the answer; "" is unknown: then it is always given."""
    cache_salt: str = ""
    """Cached prefixes are shared between requests of equal salt only: one for each organisation."""
    fair_key: str = ""
    """Whose request it is (an API key's id): waiting requests of different keys take turns."""
    whole: bool = False
    """The answer is read at its end: deltas between a choice's first and last may be put together."""
    boundary: str = ""
    """Where this text is in deltas that are put together, or might have come, they tell what they are made of."""
    tag: str = ""
    """The client's own word for what it is spent on: a line of the cost report."""


class AbortRequest(msgspec.Struct, array_like=True, frozen=True):
    """The client left, or the gateway gave up: free the slot at the next step."""

    request_id: str


class Usage(msgspec.Struct, array_like=True, frozen=True, kw_only=True):
    """Token counts of a whole request, all choices together."""

    prompt_tokens: int
    completion_tokens: int
    cached_tokens: int = 0
    """Prompt tokens that needed no prefill."""
    prefill_s: float = 0.0
    """From the dispatch of the request's first step to its first token, seconds."""
    decode_s: float = 0.0
    """From there to its end."""
    reasoning_tokens: int = 0
    """Of the completion tokens. Filled in by the gateway: what is reasoning shows in the text."""
    prefill_chip_ns: int = 0
    """Nano-chip-seconds of the steps that were spent on it, by `workers.attribution`."""
    decode_chip_ns: int = 0
    sku: str = ""
    """What a price of its chips is asked for; "" if nobody metered."""
    region: str = ""
    """Where they are, for the same purpose."""


class TokenLogprobs(msgspec.Struct, array_like=True, frozen=True):
    """Natural logarithms of the model's own probabilities, before temperature, penalties and bias."""

    token_id: int
    logprob: float
    top: tuple[tuple[int, float], ...] = ()
    """(token id, logprob) of the likeliest tokens, the likeliest first."""


class OutputDelta(msgspec.Struct, array_like=True, frozen=True, kw_only=True):
    """What one step adds to one choice. Exactly one delta of a choice has `finish_reason`.

    `text` never ends within a character nor holds a part of a stop string that may still complete.
    """

    request_id: str
    seq: int
    """0, 1, 2 … per request (all choices together); a repeat or a gap is visible."""
    choice: int = 0
    text: str = ""
    num_tokens: int = 0
    """Tokens generated by this delta (several, when text was held back; 0 for a flush)."""
    finish_reason: FinishReason | None = None
    stop_reason: str | int | None = None
    """The stop string or stop token id that ended the choice."""
    error: str | None = None
    """With FinishReason.ERROR: one sentence for the client, no path, no class name."""
    usage: Usage | None = None
    """On the last delta of the last choice: the request is over."""
    logprobs: tuple[TokenLogprobs, ...] | None = None
    """One for each of the `num_tokens` tokens, if the request asked for them."""
    prompt_logprobs: tuple[TokenLogprobs | None, ...] | None = None
    """On the first delta of choice 0, if asked for: one for each prompt token, None for the first."""
    param: str | None = None
    """With `error`: the field of the body that is at fault; None if the engine is."""
    pieces: tuple[tuple[int, int], ...] = ()
    """Of deltas that were put together around the request's `boundary`: (characters, tokens) of each."""


class StepDeltas(msgspec.Struct, array_like=True, frozen=True, kw_only=True):
    """All deltas of one step for one gateway: one stream append."""

    worker_id: str
    deltas: list[OutputDelta]


class WorkerStatus(msgspec.Struct, array_like=True, frozen=True, kw_only=True):
    """A heartbeat; the key expires after HEARTBEAT_TTL_S."""

    worker_id: str
    model: str
    state: WorkerState
    progress: float = 0.0
    """0 … 1 while STARTING or WARMING."""
    detail: str = ""
    num_running: int = 0
    num_waiting: int = 0
    """Claimed by this worker but not yet running."""
    kv_usage: float = 0.0
    """Share of KV blocks in use, 0 … 1."""
    num_compiles_after_warmup: int = 0
    """An alarm: stays 0."""
    num_ready_buckets: int = 0
    steps: int = 0
    """Engine steps so far; a READY worker with work whose count stands still is stuck."""
    padding_ratio: float = 0.0
    prompt_tokens: int = 0
    generation_tokens: int = 0
    engine: Literal["model", "scripted"] = "model"
    host_seconds: float = 0.0
    """Host work of all steps so far; waiting for the device is not."""
    device_seconds: float = 0.0
    """Time that steps had the device."""
    num_prefix_queries: int = 0
    """Prompt tokens looked up in the prefix cache so far."""
    num_prefix_hits: int = 0
    num_preemptions: int = 0
    block_len: int = 0
    """Tokens of a KV block; 0 without blocks."""
    num_blocks: int = 0
    num_computed: int = 0
    """Tokens that steps computed for requests so far."""
    num_padded: int = 0
    """Tokens that they computed for nobody."""


class ModelCard(msgspec.Struct, array_like=True, frozen=True, kw_only=True):
    """All a gateway must know of a model; written by its workers, so that a gateway needs no model files."""

    model: str
    created_s: int
    context_len: int
    """Tokens of prompt and answer together."""
    vocab_size: int
    tokenizer_json: bytes
    """zlib-compressed `tokenizer.json` of the `tokenizers` library."""
    chat_template: str | None = None
    special_tokens: dict[str, str] = {}
    """Variables of the template: bos_token, eos_token, …"""
    add_bos: bool = False
    """Whether a plain (not templated) prompt gets the BOS token in front, as the tokenizer's own post-processor does."""
    engine: Literal["model", "scripted"] = "model"
    owned_by: str = "tpugate"
    digest: str = ""
    """sha256 of tokenizer and template: a gateway reloads when it changes."""
    max_choices: int = 128
    """The most choices (`n`) that a worker can run for one request; 0 is 128 too."""
    takes_grammars: bool = False
    """Whether `SamplingParams.grammar` binds its answers."""
    tool_parser: str = "auto"
    """How it writes calls of tools (`models.chat_format`); auto: as its template shows them."""
    reasoning_parser: str = "auto"
    """The marks around its reasoning, by their name; none: it does not reason."""


Record = GenerateRequest | AbortRequest | StepDeltas | WorkerStatus | ModelCard
R = TypeVar("R", GenerateRequest, AbortRequest, StepDeltas, WorkerStatus, ModelCard)
_encoder = msgspec.msgpack.Encoder()
_decoders = {kind: msgspec.msgpack.Decoder(kind) for kind in Record.__args__}


def encode(record: Record) -> bytes:
    """One record as msgpack bytes."""
    return _encoder.encode(record)


def decode(kind: type[R], payload: bytes) -> R:
    """The record of `kind` in `payload`; raises `msgspec.DecodeError` or `ValidationError` if it is none."""
    return cast(R, _decoders[kind].decode(payload))
