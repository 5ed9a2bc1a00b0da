"""Protects what sampling programs are told: parameters bit by bit, what a starting row has said, which
logits foretell a scored prompt token; and that a step draws no harder than its rows ask."""

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.unit.test_input_batch import BUCKET, TRASH_ROW, sequence, unpack
from torchtpu.buckets import Bucket, PrefillShape
from torchtpu.ops.sampling import BIASED, ENDLESS, FLOATS, IN_PROMPT, IS_END, NUM_PARAMS, ONE_MORE
from workers.engine.outputs import DecodeRow, Draw, PrefillSegment, StepPlan
from workers.engine.sampling_batch import DRAWN, pack_params, pack_row, pack_targets


@settings(deadline=None)
@given(
    fields=st.fixed_dictionaries(
        {
            "temperature": st.floats(0, 2, width=32),
            "top_p": st.floats(0, 1, width=32),
            "min_p": st.floats(0, 1, width=32),
            "repetition_penalty": st.floats(0.125, 2, width=32),
            "frequency_penalty": st.floats(-2, 2, width=32),
            "presence_penalty": st.floats(-2, 2, width=32),
            "top_k": st.integers(0, 2**31 - 1),
        }
    ),
    seed=st.integers(0, 2**32 - 1),
)
def test_sampling_parameters_travel_bit_by_bit(fields: dict[str, float], seed: int):
    row, ending, unfinished = (sequence(i, [1, 2, 3], seed, **fields) for i in range(3))
    plan = StepPlan(
        BUCKET,
        [DecodeRow(row, 0, position=3)],
        [
            PrefillSegment(ending, 0, start=0, length=3, samples=True),
            PrefillSegment(unfinished, 0, start=0, length=2, samples=False),
        ],
    )
    floats_of = {name.removesuffix("_penalty"): fields[name] for name in fields if name != "top_k"}
    packed = pack_params(plan, TRASH_ROW)
    assert packed.shape == (BUCKET.num_samples, NUM_PARAMS)
    floats, bits = packed[:, :6].copy().view(np.float32), packed.view(np.uint32)
    # A token is drawn by its own position: 4 after the row's input at 3, 3 after a prompt of 3.
    for index, line, position in ((0, 0, 4), (BUCKET.rows, 1, 3)):
        assert dict(zip(FLOATS, floats[index].tolist(), strict=True)) == floats_of
        assert bits[index, 6:].tolist() == [fields["top_k"], seed, position, line, 0]
    for index in {*range(BUCKET.num_samples)} - {0, BUCKET.rows}:
        assert floats[index].tolist() == [0, 0, 0, 1, 0, 0]
        assert bits[index, 6:].tolist() == [0, 0, 0, TRASH_ROW, 0]


@pytest.mark.parametrize(
    ("sampling", "samples", "draw"),
    [
        ({"temperature": 0.0, "top_k": 5}, True, Draw.GREEDY),
        ({"temperature": 0.5}, True, Draw.PLAIN),
        ({"temperature": 0.5}, False, Draw.GREEDY),
        ({"temperature": 0.5, "top_k": 5}, True, Draw.TRUNCATED),
        ({"temperature": 0.5, "top_p": 0.9}, True, Draw.TRUNCATED),
        ({"temperature": 0.5, "min_p": 0.1}, True, Draw.TRUNCATED),
        ({"temperature": 0.0, "repetition_penalty": 1.1}, True, Draw.PENALISED),
        ({"temperature": 0.0, "frequency_penalty": -1.0}, True, Draw.PENALISED),
        ({"temperature": 0.5, "presence_penalty": 1.0}, True, Draw.PENALISED),
        ({"temperature": 0.5, "logit_bias": ((3, 1.0),)}, True, Draw.PENALISED),
        ({"temperature": 0.5, "logit_bias": ((3, 1.0),)}, False, Draw.GREEDY),
        ({"temperature": 0.0, "min_tokens": 1, "stop_token_ids": (4,)}, True, Draw.PENALISED),
        ({"temperature": 0.0, "min_tokens": 1}, True, Draw.GREEDY),
        ({"temperature": 0.0, "logprobs": 3}, True, Draw.GREEDY),
    ],
)
def test_a_step_draws_no_harder_than_its_rows_ask(
    sampling: dict[str, float], samples: bool, draw: Draw
):
    segment = PrefillSegment(sequence(0, [1, 2], **sampling), 0, start=0, length=2, samples=samples)
    assert StepPlan(BUCKET, [], [segment]).draw is draw


def test_end_tokens_are_shut_out_until_the_answer_is_long_enough():
    early = sequence(0, [1, 2, 3], min_tokens=2, stop_token_ids=(4,), logit_bias=((5, 1.0),))
    switches = [
        pack_params(StepPlan(BUCKET, [DecodeRow(early, 0, position)], []), TRASH_ROW)[0, -1]
        for position in (2, 3, 4)
    ]
    assert switches == [BIASED | ENDLESS, BIASED | ENDLESS, BIASED]


def test_a_starting_row_knows_its_prompt_and_what_it_has_said():
    fields = {"logit_bias": ((2, 1.5), (7, -3.0), (2, 1.0)), "stop_token_ids": (1, 6)}
    restarted = sequence(4, [1, 1, 2], **fields)
    restarted.token_ids = [1, 1, 2, 3, 2, 3]
    packed = pack_row(restarted, 8)
    facts = {1: IN_PROMPT | IS_END, 2: IN_PROMPT | ONE_MORE, 3: 2 * ONE_MORE, 6: IS_END}
    assert packed[0] == 4
    assert packed[1:9].tolist() == [facts.get(token, 0) for token in range(8)]
    assert packed[9:].view(np.float32).tolist() == [0, 0, 2.5, 0, 0, 0, 0, -3.0]


def test_scored_tokens_get_the_logits_of_the_tokens_before_them():
    bucket = Bucket(rows=3, context=16, prefill=PrefillShape(9, 3, 4))
    middle, ending = sequence(6, [11, 12, 13, 14, 15, 16]), sequence(7, [21, 22, 23])
    plan = StepPlan(
        bucket,
        [DecodeRow(sequence(5, [7] * 9), 0, position=8)],
        [
            PrefillSegment(middle, 0, start=1, length=3, samples=False, scores=True),
            PrefillSegment(sequence(8, [1, 2]), 0, start=0, length=2, samples=True),
            PrefillSegment(ending, 0, start=0, length=3, samples=True, scores=True),
        ],
    )
    fields = unpack(bucket, plan)
    flat = [0, 0, 0, 12, 13, 14, 1, 2, 21, 22, 23]
    # Rows 1 and 2 are free, and all places behind the three segments' own.
    assert [flat[i] for i in fields["sample_tokens"][1:8]] == [12, 13, 14, 2, 23, 21, 22]
    assert pack_targets(plan).tolist() == [DRAWN, 13, 14, 15, DRAWN, DRAWN, 22, 23] + [DRAWN] * 3
    assert fields["sample_rows"] == [5] + [TRASH_ROW] * 3 + [8, 7] + [TRASH_ROW] * 5
