"""What the sampling programs get to know of a step's rows, as packed arrays. No device."""

import numpy as np
from numpy.typing import NDArray

from torchtpu.ops import sampling
from workers.engine.outputs import Sample, StepPlan
from workers.engine.request import Sequence

DRAWN = -1
"""A target that stands for the token which the step draws."""
_NUM_FLOATS = len(sampling.FLOATS)
_REPETITION = sampling.FLOATS.index("repetition")
_ROW = _NUM_FLOATS + sampling.INTEGERS.index("row")


def pack_params(plan: StepPlan, trash_row: int) -> NDArray[np.int32]:
    """[num_samples, NUM_PARAMS] int32: `sampling.FLOATS` as float bits, then `sampling.INTEGERS`.

    Padding is greedy and penalises nothing.
    """
    packed = np.zeros((plan.bucket.num_samples, sampling.NUM_PARAMS), np.int32)
    floats = packed.view(np.float32)
    floats[:, _REPETITION] = 1.0
    packed[:, _ROW] = trash_row
    if plan.samples:
        places = [sample.place for sample in plan.samples]
        floats[places, :_NUM_FLOATS] = [_floats(sample) for sample in plan.samples]
        packed[places, _NUM_FLOATS:] = [_integers(sample, trash_row) for sample in plan.samples]
    return packed


def pack_allowed(plan: StepPlan, trash_row: int, allowed: NDArray[np.int32]) -> NDArray[np.int32]:
    """[num_samples · (1 + words)] int32: the row of each sample, then `allowed` [num_samples, words]."""
    rows = np.full(plan.bucket.num_samples, trash_row, np.int32)
    for sample in plan.samples:
        rows[sample.place] = _row(sample.sequence, trash_row)
    return np.concatenate([rows, allowed.reshape(-1)])


def pack_targets(plan: StepPlan) -> NDArray[np.int32]:
    """[num_samples] int32: the token whose log-probability each row of logits is to give."""
    targets = np.full(plan.bucket.num_samples, DRAWN, np.int32)
    for token in plan.scored:
        targets[token.place] = token.sequence.token_ids[token.position]
    return targets


def pack_row(sequence: Sequence, vocab_size: int) -> NDArray[np.int32]:
    """[1 + 2 · vocab] int32: a starting sequence's row, its facts, its bias as float bits."""
    request, tokens = sequence.request, np.asarray(sequence.token_ids)
    packed = np.zeros(1 + 2 * vocab_size, np.int32)
    packed[0] = sequence.row
    facts, bias = packed[1 : 1 + vocab_size], packed[1 + vocab_size :].view(np.float32)
    prompt_len = len(request.prompt_token_ids)
    facts[:] = np.bincount(tokens[prompt_len:], minlength=vocab_size) * sampling.ONE_MORE
    facts[tokens[:prompt_len]] |= sampling.IN_PROMPT
    ends = [token for token in sequence.output.end_token_ids if token < vocab_size]
    facts[ends] |= sampling.IS_END
    for token, value in request.sampling.logit_bias:
        bias[token] += value
    return packed


def _floats(sample: Sample) -> tuple[float, ...]:
    of = sample.sequence.request.sampling
    return (
        of.temperature,
        of.top_p,
        of.min_p,
        of.repetition_penalty,
        of.frequency_penalty,
        of.presence_penalty,
    )


def _row(sequence: Sequence, trash_row: int) -> int:
    """The sequence's row; one that ended while the step was on its way has none."""
    return sequence.row if sequence.row >= 0 else trash_row


def _integers(sample: Sample, trash_row: int) -> tuple[int, ...]:
    sequence = sample.sequence
    of = sequence.request.sampling
    switches = sampling.BIASED * bool(of.logit_bias) | sampling.ENDLESS * sample.is_endless
    # The seed's 32 bits as a signed number.
    seed = sequence.seed - ((sequence.seed >> 31) << 32)
    return of.top_k, seed, sample.position, _row(sequence, trash_row), switches
