"""An engine whose output anybody can compute by hand: it emits the request's script, a token a step.

The service, the gateway and a client's own tests run against it as against a model: the same batching,
limits, stop strings, held-back characters and aborts, only without weights. Three tokens stand for faults:

    FAIL  the request ends with an error        HANG  the request rests until it is aborted
    EXIT  the process dies at once, as if it had been killed

Log-probabilities are invented: a token's own is -0.5, and the likeliest tokens are itself and the ids that
follow it in the vocabulary, each 1.5 less. A piece of a script passes for the token of its first byte.
"""

import hashlib
import os
import time
import zlib
from collections import deque
from collections.abc import Iterable
from dataclasses import dataclass
from functools import cache

import msgspec
from tokenizers import AddedToken, Tokenizer
from tokenizers.decoders import ByteLevel as ByteLevelDecoder
from tokenizers.models import BPE
from tokenizers.pre_tokenizers import ByteLevel

from workers.engine.interface import EXPIRED, EngineStats, LoadedEngine, Progress
from workers.engine.output_processor import BytesDetokenizer, ChoiceOutput, Emission
from workers.engine.step_log import EngineLoad, StepLog, StepMember, StepSink, StepWork
from workers.errors import RequestError
from workers.protocol import (
    FinishReason,
    GenerateRequest,
    ModelCard,
    OutputDelta,
    TokenLogprobs,
    Usage,
)

FAIL = b"\x00FAIL"
HANG = b"\x00HANG"
EXIT = b"\x00EXIT"
FAULTS = frozenset((FAIL, HANG, EXIT))
EXIT_CODE = 70
FAILURE = "The script asked for a failure."
CONTEXT_LEN = 8192
CAPACITY = 256
SPECIAL_TOKENS = ("<|im_start|>", "<|im_end|>")
CHAT_TEMPLATE = (
    "{% for message in messages %}<|im_start|>{{ message['role'] }}\n"
    "{{ message['content'] or '' }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n"
    "{% if enable_thinking is defined and not enable_thinking %}<think>\n\n</think>\n\n{% endif %}"
    "{% endif %}"
)
"""That of a model that reasons and knows no tools: it is told of them in words."""


@dataclass
class _Choice:
    index: int
    output: ChoiceOutput
    is_held: bool = False
    has_begun: bool = False
    """Whether a delta of it was sent."""


class _Run:
    """A request, waiting or running."""

    def __init__(self, request: GenerateRequest, context_len: int, arrived_s: float) -> None:
        self.arrived_s = self.started_s = arrived_s
        self.request = request
        self.script = request.script or ()
        self.seq = 0
        room = min(request.sampling.max_tokens, context_len - len(request.prompt_token_ids))
        # A script's tokens are numbered by place, so ids of the vocabulary mean nothing here.
        sampling = msgspec.structs.replace(request.sampling, stop_token_ids=())
        self.choices = [
            _Choice(i, ChoiceOutput(sampling, BytesDetokenizer(self.script), frozenset(), room))
            for i in range(request.n)
        ]
        self.num_tokens = 0

    @property
    def is_held(self) -> bool:
        return all(choice.is_held for choice in self.choices)

    def members(self) -> Iterable[StepMember]:
        """What the next `advance` does, as a model would do it: first all of the prompt."""
        prompt_len = len(self.request.prompt_token_ids)
        for choice in self.choices:
            if choice.is_held:
                continue
            at = choice.output.num_tokens
            yield StepMember(
                request_id=self.request.request_id,
                choice=choice.index,
                phase="decode" if at else "prefill",
                num_tokens=1 if at else prompt_len,
                context_len=prompt_len + at - 1 if at else 0,
                is_kept=at < len(self.script) and self.script[at] not in FAULTS,
                arrived_s=self.arrived_s,
            )

    def advance(self) -> list[OutputDelta]:
        """One token for each unfinished choice."""
        deltas = []
        for choice in tuple(self.choices):
            if choice.is_held:
                continue
            delta = self._advance(choice)
            if delta is not None:
                deltas.append(delta)
        return deltas

    def end(self, reason: FinishReason, error: str | None = None) -> list[OutputDelta]:
        """The same end for every unfinished choice."""
        return [
            self._delta(choice, Emission("", reason), 0, error) for choice in tuple(self.choices)
        ]

    def _advance(self, choice: _Choice) -> OutputDelta | None:
        output = choice.output
        at = output.num_tokens
        if at >= len(self.script):
            return self._delta(choice, output.finish(), 0)
        if self.script[at] in FAULTS:
            return self._fault(choice, self.script[at])
        emission = output.push(at)
        self.num_tokens += 1
        if emission.finish_reason is None and at + 1 == len(self.script):
            rest = output.finish()
            emission = Emission(emission.text + rest.text, rest.finish_reason)
        return self._delta(choice, emission, 1)

    def _fault(self, choice: _Choice, fault: bytes) -> OutputDelta | None:
        if fault == EXIT:
            os._exit(EXIT_CODE)
        if fault == HANG:
            choice.is_held = True
            return None
        return self._delta(choice, Emission("", FinishReason.ERROR), 0, FAILURE)

    def _logprobs(self, choice: _Choice, num_tokens: int) -> tuple[TokenLogprobs, ...] | None:
        """Those of the newest `num_tokens` tokens, if they were asked for."""
        num_top, end = self.request.sampling.logprobs, choice.output.num_tokens
        if num_top is None:
            return None
        pieces = self.script[end - num_tokens : end]
        return tuple(invented_logprobs(_token_of(piece), num_top) for piece in pieces)

    def _prompt_logprobs(self, choice: _Choice) -> tuple[TokenLogprobs | None, ...] | None:
        num_top = self.request.sampling.prompt_logprobs
        if num_top is None or choice.index or choice.has_begun:
            return None
        tokens = self.request.prompt_token_ids[1:]
        return None, *(invented_logprobs(token, num_top) for token in tokens)

    def _delta(
        self, choice: _Choice, emission: Emission, num_tokens: int, error: str | None = None
    ) -> OutputDelta:
        seq = self.seq
        self.seq += 1
        usage = None
        if emission.finish_reason is not None:
            self.choices.remove(choice)
            if not self.choices:
                usage = Usage(
                    prompt_tokens=len(self.request.prompt_token_ids),
                    completion_tokens=self.num_tokens,
                    decode_s=time.monotonic() - self.started_s,
                )
        prompt_logprobs, choice.has_begun = self._prompt_logprobs(choice), True
        return OutputDelta(
            request_id=self.request.request_id,
            seq=seq,
            choice=choice.index,
            text=emission.text,
            num_tokens=num_tokens,
            finish_reason=emission.finish_reason,
            stop_reason=emission.stop_reason,
            error=error,
            usage=usage,
            logprobs=self._logprobs(choice, num_tokens),
            prompt_logprobs=prompt_logprobs,
        )


class ScriptedEngine:
    """First come, first served; each running choice takes one of `capacity` rows."""

    def __init__(
        self,
        capacity: int = CAPACITY,
        context_len: int = CONTEXT_LEN,
        step_delay_s: float = 0.0,
        sink: StepSink | None = None,
    ) -> None:
        self._capacity = capacity
        self._context_len = context_len
        self._step_delay_s = step_delay_s
        self._log = StepLog(sink)
        self._waiting: deque[_Run] = deque()
        self._running: dict[str, _Run] = {}
        self._num_rows = 0
        self._steps = 0
        self._prompt_tokens = 0
        self._generation_tokens = 0

    @property
    def capacity(self) -> int:
        return self._capacity

    @property
    def context_len(self) -> int:
        return self._context_len

    def add(self, request: GenerateRequest) -> None:
        if request.script is None:
            raise RequestError("The scripted engine was given no script.")
        if not 1 <= request.n <= self._capacity:
            raise RequestError(f"This model runs at most {self._capacity} choices of a request.")
        if len(request.prompt_token_ids) >= self._context_len:
            raise RequestError(
                f"The prompt has {len(request.prompt_token_ids)} tokens; "
                f"the context of this model is {self._context_len}."
            )
        if not self._waiting and not self._running:
            self._log.resident()
        self._waiting.append(_Run(request, self._context_len, self._log.now()))

    def abort(self, request_id: str) -> list[OutputDelta]:
        run = self._running.get(request_id)
        if run is not None:
            deltas = self._note_ends(run.end(FinishReason.ABORT))
            self._leave(request_id, len(deltas))
            return deltas
        for run in self._waiting:
            if run.request.request_id == request_id:
                self._waiting.remove(run)
                return self._note_ends(run.end(FinishReason.ABORT))
        return []

    def has_work(self) -> bool:
        return self._can_start() or any(not run.is_held for run in self._running.values())

    def step(self) -> list[OutputDelta]:
        self._log.begin()
        deltas = self._expire()
        while self._can_start():
            self._start(self._waiting.popleft())
        self._log.scheduled(self._describe)
        self._log.launched()
        if self._step_delay_s:
            time.sleep(self._step_delay_s)
        self._log.collected()
        for run in tuple(self._running.values()):
            num_ended = 0
            for delta in run.advance():
                self._generation_tokens += delta.num_tokens
                deltas.append(delta)
                if delta.finish_reason is not None:
                    num_ended += 1
                    self._log.ended(delta.request_id, delta.choice, delta.finish_reason)
            if num_ended:
                self._leave(run.request.request_id, num_ended)
        self._steps += 1
        self._log.emitted(self._load)
        return deltas

    def _expire(self) -> list[OutputDelta]:
        now_s = time.time()
        late = [run for run in self._waiting if 0 < run.request.deadline_s < now_s]
        deltas: list[OutputDelta] = []
        for run in late:
            self._waiting.remove(run)
            deltas += self._note_ends(run.end(FinishReason.ERROR, EXPIRED))
        return deltas

    def fail_all(self, error: str) -> list[OutputDelta]:
        runs = [*self._running.values(), *self._waiting]
        self._waiting.clear()
        self._running.clear()
        self._num_rows = 0
        ends = [delta for run in runs for delta in run.end(FinishReason.ERROR, error)]
        return self._note_ends(ends)

    def stats(self) -> EngineStats:
        return EngineStats(
            num_running=len(self._running),
            num_waiting=len(self._waiting),
            kv_usage=self._num_rows / self._capacity,
            steps=self._steps,
            prompt_tokens=self._prompt_tokens,
            generation_tokens=self._generation_tokens,
            host_seconds=self._log.host_s,
            device_seconds=self._log.device_s,
        )

    def _can_start(self) -> bool:
        if not self._waiting:
            return False
        return self._num_rows + self._waiting[0].request.n <= self._capacity

    def _start(self, run: _Run) -> None:
        request, run.started_s = run.request, self._log.now()
        self._running[request.request_id] = run
        self._num_rows += request.n
        self._prompt_tokens += request.n * len(request.prompt_token_ids)

    def _note_ends(self, deltas: list[OutputDelta]) -> list[OutputDelta]:
        for delta in deltas:
            if delta.finish_reason is not None:
                self._log.ended(delta.request_id, delta.choice, delta.finish_reason)
        return deltas

    def _describe(self) -> StepWork:
        members = tuple(member for run in self._running.values() for member in run.members())
        return StepWork(
            bucket="script", rows=self._capacity, num_padded=0, draw="greedy", members=members
        )

    def _load(self) -> EngineLoad:
        return EngineLoad(
            num_running=len(self._running),
            num_waiting=len(self._waiting),
            kv_usage=self._num_rows / self._capacity,
        )

    def _leave(self, request_id: str, num_choices: int) -> None:
        self._num_rows -= num_choices
        if not self._running[request_id].choices:
            del self._running[request_id]


def invented_logprobs(token: int, num_top: int) -> TokenLogprobs:
    """What the scripted engine reports of a token."""
    vocab_size = _tokenizer().get_vocab_size()
    top = tuple(((token + i) % vocab_size, -0.5 - 1.5 * i) for i in range(num_top))
    return TokenLogprobs(token, -0.5, top)


def _token_of(piece: bytes) -> int:
    ids = _tokenizer().encode(piece.decode(errors="ignore")).ids
    return ids[0] if ids else 0


@cache
def _tokenizer() -> Tokenizer:
    return scripted_tokenizer()


def scripted_tokenizer() -> Tokenizer:
    """One token a byte, so that a prompt's length is plain to see; and ChatML's two marks."""
    vocab = {character: i for i, character in enumerate(sorted(ByteLevel.alphabet()))}
    tokenizer = Tokenizer(BPE(vocab=vocab, merges=[]))
    tokenizer.pre_tokenizer = ByteLevel(add_prefix_space=False, use_regex=False)
    tokenizer.decoder = ByteLevelDecoder()
    tokenizer.add_special_tokens([AddedToken(mark, special=True) for mark in SPECIAL_TOKENS])
    return tokenizer


def scripted_card(
    model: str, context_len: int = CONTEXT_LEN, max_choices: int = CAPACITY
) -> ModelCard:
    """What gateways read of a model that the scripted engine plays."""
    tokenizer = scripted_tokenizer()
    tokenizer_json = tokenizer.to_str().encode()
    return ModelCard(
        model=model,
        created_s=int(time.time()),
        context_len=context_len,
        vocab_size=tokenizer.get_vocab_size(),
        tokenizer_json=zlib.compress(tokenizer_json),
        chat_template=CHAT_TEMPLATE,
        special_tokens={"eos_token": SPECIAL_TOKENS[1]},
        engine="scripted",
        takes_grammars=True,  # its script is taken to match
        digest=hashlib.sha256(tokenizer_json + CHAT_TEMPLATE.encode()).hexdigest(),
        max_choices=max_choices,
    )


def build_scripted(model: str, engine: ScriptedEngine, progress: Progress) -> LoadedEngine:
    """The scripted counterpart of loading a model."""
    progress("script ready", 1.0)
    card = scripted_card(model, engine.context_len, engine.capacity)
    return LoadedEngine(engine=engine, card=card)
