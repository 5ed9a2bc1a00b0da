"""Chooses a step's tokens from its logits, and reports log-probabilities; all of it on the device.

The step program itself gives greedy tokens; a program from here runs only if a row wants something else:

    logits ─┬─ greedy ──────────────────────────┬─> tokens ──> logprobs, if a row reports them
            ├─ PLAIN      temperature, seed ────┤
            ├─ TRUNCATED  and top-k, top-p … ───┤
            └─ PENALISED  and facts, bias ──────┘     facts: how often a row's answer has each token

If a grammar binds a row, another program goes before them: it gives logits in which only allowed tokens are
left, and the greedy tokens of those. Log-probabilities are of the logits as they were.

The facts live on the device because the host learns of a token one step late: a row that penalises
anything gets them from its known tokens when it starts, then the program counts what it draws. They are
donated, so a failed step loses them; `reset` makes new ones, and all rows start again.
"""

from collections.abc import Callable, Iterable
from concurrent.futures import Future
from dataclasses import dataclass

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from torchtpu.compiler import Program, StepCompiler
from torchtpu.device import Device
from torchtpu.ops import sampling
from workers.engine.outputs import Draw, StepPlan
from workers.engine.sampling_batch import pack_allowed, pack_params, pack_row, pack_targets

_SET_ROW = "set-row"
_RESTRICT = "restrict"
_LOGPROBS = "logprobs"


@dataclass(frozen=True)
class SamplerConfig:
    max_rows: int
    vocab_size: int
    """Width of the logits."""
    dtype: torch.dtype
    """Of the logits."""


class Sampler:
    """`reset`, `start` and `finish` come first; afterwards nothing compiles."""

    def __init__(self, device: Device, compiler: StepCompiler, config: SamplerConfig) -> None:
        self._device = device.torch_device
        self._compiler = compiler
        self._config = config
        self._pending: dict[tuple[str, int], Future[Program]] = {}
        self._programs: dict[tuple[str, int], Program] = {}
        self._facts = self._bias = torch.empty(0)

    def reset(self) -> None:
        """Fresh state. Made on the host: a transfer compiles nothing."""
        self._facts = self._bias = torch.empty(0)  # the old one goes before the new one comes
        # One more row than runs at once: padding counts its tokens there.
        shape = self._config.max_rows + 1, self._config.vocab_size
        self._facts = torch.zeros(shape, dtype=torch.int32).to(self._device)
        self._bias = torch.zeros(shape).to(self._device)

    def start(self, sizes: Iterable[int], newest: Tensor) -> None:
        """Compile the programs for these numbers of logits rows, or read them back."""
        row = self._upload(np.zeros(1 + 2 * self._config.vocab_size, np.int32))
        self._start(_SET_ROW, 0, set_row, [row, self._facts, self._bias], [1, 2])
        for size in sizes:
            self._start_size(size, newest)

    def finish(self) -> None:
        """Wait for all that was started."""
        self._programs = {key: future.result() for key, future in self._pending.items()}
        self._pending.clear()

    def probe(self, plan: StepPlan, logits: Tensor, greedy: Tensor, newest: Tensor) -> Tensor:
        """Run each program for the plan's number of logits rows; gives `newest`, which was donated."""
        allowed = np.full(
            (plan.bucket.num_samples, num_words(self._config.vocab_size)), -1, np.int32
        )
        tokens, newest = self.draw(plan, logits, greedy, newest, allowed)
        for draw in (Draw.PLAIN, Draw.TRUNCATED, Draw.PENALISED):
            tokens, newest = self._draw(draw, plan, logits, greedy, newest)
        self._report(plan, logits, tokens).cpu()
        return newest

    def draw(
        self,
        plan: StepPlan,
        logits: Tensor,
        greedy: Tensor,
        newest: Tensor,
        allowed: NDArray[np.int32] | None = None,
    ) -> tuple[Tensor, Tensor]:
        """Tokens [num_samples] int32, and `newest` with them: it is donated.

        `allowed` [num_samples, words] int32 has a bit for each token that may be drawn; without it all may.
        """
        if allowed is not None:
            packed = self._upload(pack_allowed(plan, self._config.max_rows, allowed))
            program = self._programs[_RESTRICT, plan.bucket.num_samples]
            logits, greedy, newest = program([packed, logits, newest])
        if plan.draw is Draw.GREEDY:
            return greedy, newest
        return self._draw(plan.draw, plan, logits, greedy, newest)

    def report(self, plan: StepPlan, logits: Tensor, tokens: Tensor) -> Tensor | None:
        """Log-probabilities as `torchtpu.ops.sampling.logprobs` packs them, if a row wants any."""
        return self._report(plan, logits, tokens) if plan.reports else None

    def _start_size(self, size: int, newest: Tensor) -> None:
        logits = torch.zeros(size, self._config.vocab_size, dtype=self._config.dtype)
        logits = logits.to(self._device)
        params = self._upload(np.zeros((size, sampling.NUM_PARAMS), np.int32))
        # Two of them: a tensor that is given twice is traced as one input.
        tokens, targets = (self._upload(np.zeros(size, np.int32)) for _ in range(2))
        for draw in (Draw.PLAIN, Draw.TRUNCATED):
            inputs = [logits, tokens, params, newest]
            self._start(draw.name, size, make_draw(draw), inputs, [3])
        packed = self._upload(np.zeros(size * (1 + num_words(self._config.vocab_size)), np.int32))
        self._start(_RESTRICT, size, restrict, [packed, logits, newest], [2])
        inputs = [logits, params, self._bias, newest, self._facts]
        self._start(Draw.PENALISED.name, size, draw_penalised, inputs, [3, 4])
        self._start(_LOGPROBS, size, report, [logits, tokens, targets], [])

    def _start(
        self,
        kind: str,
        size: int,
        function: Callable[..., tuple[Tensor, ...]],
        inputs: list[Tensor],
        donated: list[int],
    ) -> None:
        name = f"sample-{kind.lower()}-{size}"
        self._pending[kind, size] = self._compiler.start(
            name, function, inputs, donated, has_model=False
        )

    def _draw(
        self, draw: Draw, plan: StepPlan, logits: Tensor, greedy: Tensor, newest: Tensor
    ) -> tuple[Tensor, Tensor]:
        program = self._programs[draw.name, plan.bucket.num_samples]
        params = self._upload(pack_params(plan, self._config.max_rows))
        if draw is not Draw.PENALISED:
            tokens, newest = program([logits, greedy, params, newest])
            return tokens, newest
        self._set_rows(plan)
        tokens, newest, self._facts = program([logits, params, self._bias, newest, self._facts])
        return tokens, newest

    def _set_rows(self, plan: StepPlan) -> None:
        """What penalised rows that start in this step have said so far."""
        for sample in plan.samples:
            if sample.is_start and sample.draw is Draw.PENALISED:
                row = self._upload(pack_row(sample.sequence, self._config.vocab_size))
                program = self._programs[_SET_ROW, 0]
                self._facts, self._bias = program([row, self._facts, self._bias])

    def _report(self, plan: StepPlan, logits: Tensor, tokens: Tensor) -> Tensor:
        targets = self._upload(pack_targets(plan))
        (packed,) = self._programs[_LOGPROBS, plan.bucket.num_samples]([logits, tokens, targets])
        return packed

    def _upload(self, array: NDArray[np.int32]) -> Tensor:
        return torch.from_numpy(array).to(self._device)


def state_bytes(max_rows: int, vocab_size: int) -> int:
    """Device memory of facts and bias."""
    return (max_rows + 1) * vocab_size * (torch.int32.itemsize + torch.float32.itemsize)


def num_words(vocab_size: int) -> int:
    """Of 32 bits, one for each token."""
    return -(-vocab_size // 32)


def restrict(packed: Tensor, logits: Tensor, newest: Tensor) -> tuple[Tensor, ...]:
    """Logits [N, V] that leave only what `sampling_batch.pack_allowed` allows, their greedy tokens, newest."""
    num_samples = logits.shape[0]
    logits = sampling.restrict(logits, packed[num_samples:].view(num_samples, -1))
    tokens = sampling.argmax(logits)
    newest[packed[:num_samples].long()] = tokens
    return logits, tokens, newest


def make_draw(draw: Draw) -> Callable[..., tuple[Tensor, ...]]:
    """logits [N, V], greedy tokens [N], parameters, newest [max_rows + 1] to tokens and newest."""

    def step(logits: Tensor, greedy: Tensor, params: Tensor, newest: Tensor) -> tuple[Tensor, ...]:
        tokens = sampling.sample(logits, greedy, params, truncates=draw is Draw.TRUNCATED)
        newest[sampling.Params.unpack(params).row.long()] = tokens
        return tokens, newest

    return step


def draw_penalised(
    logits: Tensor, params: Tensor, bias: Tensor, newest: Tensor, facts: Tensor
) -> tuple[Tensor, ...]:
    """The same with everything: `bias` and `facts` [max_rows + 1, V]; gives facts too."""
    rows = sampling.Params.unpack(params).row.long()
    values = sampling.penalise(logits, facts[rows], bias[rows], params)
    tokens = sampling.sample(values, sampling.argmax(values), params)
    newest[rows] = tokens
    added = torch.full_like(tokens, sampling.ONE_MORE)
    facts.index_put_((rows, tokens.long()), added, accumulate=True)
    return tokens, newest, facts


def set_row(row: Tensor, facts: Tensor, bias: Tensor) -> tuple[Tensor, ...]:
    """Replace one row of `facts` and `bias` by a packed one, see `sampling_batch.pack_row`."""
    vocab_size = facts.shape[1]
    index = row[:1].long()
    facts[index] = row[None, 1 : 1 + vocab_size]
    bias[index] = row[None, 1 + vocab_size :].contiguous().view(torch.float32)
    return facts, bias


def report(logits: Tensor, tokens: Tensor, targets: Tensor) -> tuple[Tensor, ...]:
    """Log-probabilities of the targets [N], or of the drawn tokens [N] where a target is `DRAWN`."""
    return (sampling.logprobs(logits, torch.where(targets < 0, tokens, targets)),)
