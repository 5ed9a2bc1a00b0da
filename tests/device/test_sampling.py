"""Protects how tokens are chosen, as the device compiles it: draws against sorted probabilities, penalties
and log-probabilities against the same written down plainly, what a row is told of its own answer."""

import math
from collections import Counter
from collections.abc import Callable

import pytest
import torch
from scipy import stats
from torch import Tensor

from torchtpu.compiler import Program
from torchtpu.ops import sampling
from workers.engine import sampler

ROWS, VOCAB = 16, 512
NEUTRAL = {"temperature": 1.0, "top_p": 1.0, "repetition": 1.0}


def params(rows: list[dict[str, float]]) -> Tensor:
    """Packed parameters; what a row does not name is off."""
    packed = torch.zeros(len(rows), sampling.NUM_PARAMS, dtype=torch.int32)
    for packed_row, row in zip(packed, rows, strict=True):
        floats = [{**NEUTRAL, **row}.get(name, 0.0) for name in sampling.FLOATS]
        packed_row[: len(floats)] = torch.tensor(floats).view(torch.int32)
        packed_row[len(floats) :] = torch.tensor([row.get(n, 0) for n in sampling.INTEGERS])
    return packed


@pytest.fixture(scope="module")
def logits() -> Tensor:
    return torch.randn(ROWS, VOCAB, generator=torch.Generator().manual_seed(1)) * 3


@pytest.fixture(scope="module")
def draw(compiled: Callable[..., Program], logits: Tensor) -> Callable[..., list[int]]:
    """`draw(logits, rows)`: tokens that the device draws; greedy tokens are its own."""

    def step(logits: Tensor, packed: Tensor) -> tuple[Tensor, ...]:
        greedy = sampling.argmax(logits)
        return greedy, sampling.sample(logits, greedy, packed)

    program = compiled(step, [logits, params([{}] * ROWS)])
    return lambda logits, rows: program([logits, params(rows)])[1].tolist()


@pytest.fixture(scope="module")
def allowed(compiled: Callable[..., Program], logits: Tensor) -> Callable[..., Tensor]:
    """`allowed(logits, rows)`: [N, V] bool, the tokens that each row may draw."""

    def step(scaled: Tensor, top_k: Tensor, top_p: Tensor, min_p: Tensor) -> tuple[Tensor, ...]:
        return (sampling._allowed(scaled, top_k, top_p, min_p),)

    def split(rows: list[dict[str, float]]) -> list[Tensor]:
        return [
            torch.tensor([row.get("top_k", 0) for row in rows], dtype=torch.int32),
            torch.tensor([row.get("top_p", 1.0) for row in rows]),
            torch.tensor([row.get("min_p", 0.0) for row in rows]),
        ]

    program = compiled(step, [logits, *split([{}] * ROWS)])
    return lambda logits, rows: program([logits, *split(rows)])[0]


def allowed_by_sorting(row: Tensor, top_k: int = 0, top_p: float = 1.0, min_p: float = 0.0) -> set:
    """top-k, then top-p of what is left, then min-p, the way everybody explains them."""
    order = row.argsort(descending=True)[: top_k or None]
    probabilities = row[order].double().softmax(0)
    before = probabilities.cumsum(0) - probabilities
    keep = (before < top_p) & (probabilities >= min_p * probabilities[0])
    keep[0] = True
    return set(order[keep].tolist())


def test_greedy_is_the_first_of_the_largest(compiled: Callable[..., Program], logits: Tensor):
    tied = logits.clone()
    tied[:, 7] = tied[:, 400] = 50.0
    program = compiled(lambda values: (sampling.argmax(values),), [logits])
    assert program([logits])[0].tolist() == logits.argmax(-1).tolist()
    assert program([tied])[0].tolist() == [7] * ROWS


def test_temperature_zero_is_greedy_beside_rows_that_draw(
    draw: Callable[..., list[int]], logits: Tensor
):
    rows = [{"temperature": 0.0 if i % 2 else 5.0, "seed": i} for i in range(ROWS)]
    tokens, greedy = draw(logits, rows), logits.argmax(-1).tolist()
    assert tokens[1::2] == greedy[1::2]
    assert tokens[::2] != greedy[::2]


@pytest.mark.parametrize(
    "limits",
    [
        {"top_k": 1},
        {"top_k": 40},
        {"top_k": VOCAB + 5},
        {"top_p": 0.0},
        {"top_p": 0.5},
        {"top_p": 0.95},
        {"min_p": 0.05},
        {"min_p": 1.0},
        {"top_k": 30, "top_p": 0.8},
        {"top_k": 20, "top_p": 0.9, "min_p": 0.1},
        {},
    ],
    ids=str,
)
def test_the_tokens_let_through_are_those_of_a_sort(
    allowed: Callable[..., Tensor], logits: Tensor, limits: dict[str, float]
):
    mask = allowed(logits, [limits] * ROWS)
    for row, let_through in zip(logits, mask, strict=True):
        assert set(let_through.nonzero()[:, 0].tolist()) == allowed_by_sorting(row, **limits)


def test_each_row_has_limits_of_its_own(allowed: Callable[..., Tensor], logits: Tensor):
    limits = [{"top_k": 1 + i} if i % 2 else {"top_p": i / ROWS} for i in range(ROWS)]
    for row, let_through, own in zip(logits, allowed(logits, limits), limits, strict=True):
        assert set(let_through.nonzero()[:, 0].tolist()) == allowed_by_sorting(row, **own)


def test_negative_zero_and_huge_logits_keep_their_order(
    allowed: Callable[..., Tensor], logits: Tensor
):
    edge = torch.full_like(logits, -1e30)
    edge[:, :4] = torch.tensor([3e38, 1.0, -0.0, -3e38])
    for count in (1, 2, 3):
        mask = allowed(edge, [{"top_k": count}] * ROWS)
        assert mask[0].nonzero()[:, 0].tolist() == list(range(count))


def test_noise_is_the_same_on_the_cpu(compiled: Callable[..., Program]):
    seeds = torch.tensor([0, 1, -1, 2**31 - 1, 12345, 12345], dtype=torch.int32)
    positions = torch.tensor([0, 5, 70000, 1, 1, 2], dtype=torch.int32)
    program = compiled(lambda s, p: (sampling.gumbel(s, p, VOCAB),), [seeds, positions])
    (noise,) = program([seeds, positions])
    torch.testing.assert_close(noise, sampling.gumbel(seeds, positions, VOCAB), rtol=0, atol=2e-5)
    assert torch.isfinite(noise).all()
    assert len({tuple(row) for row in noise.tolist()}) == len(seeds)


def test_noise_is_standard_gumbel_noise():
    seeds = torch.arange(200, dtype=torch.int32)
    noise = sampling.gumbel(seeds, torch.full_like(seeds, 9), VOCAB).flatten()
    assert stats.kstest(noise.numpy(), "gumbel_r").pvalue > 1e-3


def test_draws_follow_the_probabilities(draw: Callable[..., list[int]]):
    """Chi-square over 16 000 draws of eight tokens, at a temperature."""
    row = torch.full((VOCAB,), -1e9)
    row[:8] = torch.tensor([2.0, 1.5, 1.0, 0.5, 0.0, -0.5, -1.0, -2.0])
    counts = torch.zeros(8)
    for position in range(1000):
        rows = [{"temperature": 1.6, "seed": i * 7919, "position": position} for i in range(ROWS)]
        counts += torch.bincount(torch.tensor(draw(row.expand(ROWS, -1), rows)), minlength=8)
    expected = (row[:8].double() / 1.6).softmax(0) * counts.sum()
    assert stats.chisquare(counts.double().numpy(), expected.numpy()).pvalue > 1e-3


def test_leaving_out_limits_that_nobody_has_changes_no_draw(
    compiled: Callable[..., Program], draw: Callable[..., list[int]], logits: Tensor
):
    rows = [{"temperature": i / 4, "seed": i, "position": 3} for i in range(ROWS)]
    greedy = sampling.argmax(logits)
    inputs = [logits, greedy, params(rows)]
    plain = compiled(lambda *step: (sampling.sample(*step, truncates=False),), inputs)
    assert plain(inputs)[0].tolist() == draw(logits, rows)


def test_draws_stay_within_the_limits(draw: Callable[..., list[int]], logits: Tensor):
    limits = {"top_k": 5, "top_p": 0.9}
    for position in range(40):
        rows = [{**limits, "temperature": 1.0, "seed": 3, "position": position}] * ROWS
        for row, token in zip(logits, draw(logits, rows), strict=True):
            assert token in allowed_by_sorting(row, **limits)


def test_a_seed_and_a_position_decide_whatever_row_it_is(
    draw: Callable[..., list[int]], logits: Tensor
):
    wanted, tokens = {"temperature": 1.3, "seed": 42, "position": 17}, set()
    for place in range(ROWS):
        rows = [{"temperature": 0.5 + i, "seed": i, "position": place} for i in range(ROWS)]
        shuffled = logits.roll(place, 0)
        rows[place], shuffled[place] = wanted, logits[0]
        tokens.add(draw(shuffled, rows)[place])
    assert len(tokens) == 1


def test_another_position_or_seed_draws_another_series(
    draw: Callable[..., list[int]], logits: Tensor
):
    same = logits[:1].expand(ROWS, -1)

    def series(**fields: float) -> list[int]:
        rows = [{"temperature": 3.0, "seed": 1, "position": i, **fields} for i in range(ROWS)]
        return draw(same, rows)

    assert series() == series()
    assert series() != series(seed=2)
    assert len(set(series())) > ROWS // 2


def penalised_plainly(
    row: Tensor,
    text: tuple[list[int], list[int]],
    bias: dict[int, float],
    repetition: float = 1.0,
    frequency: float = 0.0,
    presence: float = 0.0,
) -> Tensor:
    """One row of logits after a prompt and an answer, token by token."""
    (prompt, answer), values = text, row.tolist()
    for token, value in bias.items():
        values[token] += value
    for token in {*prompt, *answer}:
        value = values[token]
        values[token] = value / repetition if value > 0 else value * repetition
    for token, count in Counter(answer).items():
        values[token] -= frequency * count + presence
    return torch.tensor(values)


def facts_of(prompt: list[int], answer: list[int], ends: tuple[int, ...] = ()) -> Tensor:
    facts = torch.zeros(VOCAB, dtype=torch.int32)
    for token, count in Counter(answer).items():
        facts[token] = count * sampling.ONE_MORE
    facts[list(set(prompt))] |= sampling.IN_PROMPT
    facts[list(ends)] |= sampling.IS_END
    return facts


@pytest.fixture(scope="module")
def penalise(compiled: Callable[..., Program], logits: Tensor) -> Callable[..., Tensor]:
    def step(logits: Tensor, facts: Tensor, bias: Tensor, packed: Tensor) -> tuple[Tensor, ...]:
        return (sampling.penalise(logits, facts, bias, packed),)

    facts = torch.zeros(ROWS, VOCAB, dtype=torch.int32)
    program = compiled(step, [logits, facts, torch.zeros(ROWS, VOCAB), params([{}] * ROWS)])
    return lambda *inputs: program(list(inputs))[0]


@pytest.fixture(scope="module")
def texts() -> list[tuple[list[int], list[int]]]:
    """For each row a prompt and an answer of few tokens, so that many come often."""
    generator = torch.Generator().manual_seed(3)

    def text(length: int) -> list[int]:
        return torch.randint(40, (length,), generator=generator).tolist()

    return [(text(1 + 3 * i), text(5 * i)) for i in range(ROWS)]


PENALTIES = [
    {"repetition": 1.3},
    {"repetition": 0.6},
    {"frequency": 0.7},
    {"frequency": -2.0},
    {"presence": 1.9},
    {"presence": -1.1},
    {"repetition": 1.2, "frequency": 0.3, "presence": -0.4},
]


@pytest.mark.parametrize("penalties", PENALTIES, ids=str)
@pytest.mark.parametrize("is_biased", [True, False])
def test_penalties_are_those_written_down_plainly(
    penalise: Callable[..., Tensor],
    logits: Tensor,
    texts: list[tuple[list[int], list[int]]],
    penalties: dict[str, float],
    is_biased: bool,
):
    bias = {3: -100.0, 17: 2.5, 400: 100.0}
    dense = torch.zeros(VOCAB)
    for token, value in bias.items():
        dense[token] = value
    packed = params([{**penalties, "switches": sampling.BIASED * is_biased}] * ROWS)
    facts = torch.stack([facts_of(*text) for text in texts])
    values = penalise(logits, facts, dense.expand(ROWS, -1).contiguous(), packed)
    for row, text, got in zip(logits, texts, values, strict=True):
        expected = penalised_plainly(row, text, bias if is_biased else {}, **penalties)
        torch.testing.assert_close(got, expected, rtol=1e-6, atol=1e-5)


def test_end_tokens_have_no_chance_where_they_may_not_come(
    penalise: Callable[..., Tensor], logits: Tensor
):
    ends = (0, 77, VOCAB - 1)
    facts = facts_of([1, 2, 77], [5], ends).expand(ROWS, -1).contiguous()
    packed = params([{"switches": sampling.ENDLESS * (i % 2)} for i in range(ROWS)])
    values = penalise(logits, facts, torch.zeros(ROWS, VOCAB), packed)
    assert torch.equal(values[::2], logits[::2])
    expected = logits.clone()
    expected[:, ends] = -math.inf
    assert torch.equal(values[1::2], expected[1::2])


def test_a_row_without_penalties_passes_whatever_its_place_remembers(
    penalise: Callable[..., Tensor], logits: Tensor
):
    generator = torch.Generator().manual_seed(4)
    facts = torch.randint(2**31 - 1, (ROWS, VOCAB), generator=generator, dtype=torch.int32)
    bias = torch.randn(ROWS, VOCAB, generator=generator) * 100
    assert torch.equal(penalise(logits, facts, bias, params([{}] * ROWS)), logits)


@pytest.fixture(scope="module")
def choose(compiled: Callable[..., Program], logits: Tensor) -> Program:
    """The whole penalised program: logits, params, bias, newest, facts."""
    state = torch.zeros(ROWS + 1, VOCAB)
    newest = torch.zeros(ROWS + 1, dtype=torch.int32)
    inputs = [logits, params([{}] * ROWS), state, newest, state.to(torch.int32)]
    return compiled(sampler.draw_penalised, inputs, (3, 4))


def test_a_row_among_penalised_ones_draws_what_it_draws_without_them(
    choose: Program, draw: Callable[..., list[int]], logits: Tensor
):
    rows = [
        {"temperature": i / 4, "seed": i, "position": 3, "top_k": i % 3 * 9, "row": i}
        for i in range(ROWS)
    ]
    state = torch.zeros(ROWS + 1, VOCAB)
    newest = torch.zeros(ROWS + 1, dtype=torch.int32)
    tokens = choose([logits, params(rows), state, newest, state.to(torch.int32)])[0]
    assert tokens.tolist() == draw(logits, rows)


def test_the_device_counts_what_it_draws(choose: Program, logits: Tensor):
    """Twenty greedy steps over rows in another order than their places; two places are padding."""
    rows = [(i * 5 + 2) % (ROWS - 2) for i in range(ROWS - 2)] + [ROWS, ROWS]
    packed = params([{"temperature": 0.0, "frequency": 0.9, "row": row} for row in rows])
    facts = torch.zeros(ROWS + 1, VOCAB, dtype=torch.int32)
    newest = torch.zeros(ROWS + 1, dtype=torch.int32)
    bias = torch.zeros(ROWS + 1, VOCAB)
    answers: list[list[int]] = [[] for _ in range(ROWS)]
    for _ in range(20):
        tokens, newest, facts = choose([logits, packed, bias, newest, facts])
        for place, token in enumerate(tokens[:-2].tolist()):
            expected = penalised_plainly(logits[place], ([], answers[place]), {}, frequency=0.9)
            assert token == expected.argmax()
            answers[place].append(token)
            assert newest[rows[place]] == token
    for place, answer in enumerate(answers[:-2]):
        assert torch.equal(facts[rows[place]], facts_of([], answer))
        assert max(Counter(answer).values()) > 1


def test_a_row_is_replaced_and_the_others_stay(compiled: Callable[..., Program]):
    generator = torch.Generator().manual_seed(5)
    facts = torch.randint(99, (ROWS + 1, VOCAB), generator=generator, dtype=torch.int32)
    bias = torch.randn(ROWS + 1, VOCAB, generator=generator)
    new_facts, new_bias = facts[0] + 1, bias[0] - 1
    row = torch.cat([torch.tensor([4], dtype=torch.int32), new_facts, new_bias.view(torch.int32)])
    program = compiled(sampler.set_row, [row, facts, bias], (1, 2))
    after_facts, after_bias = program([row, facts.clone(), bias.clone()])
    facts[4], bias[4] = new_facts, new_bias
    assert torch.equal(after_facts, facts)
    assert torch.equal(after_bias, bias)


def test_penalised_draws_follow_the_penalised_probabilities(choose: Program):
    """Chi-square over 16 000 draws of eight tokens with every penalty, a bias and a temperature."""
    row = torch.full((VOCAB,), -1e9)
    row[:8] = torch.tensor([2.0, 1.5, 1.0, 0.5, 0.0, -0.5, -1.0, -2.0])
    prompt, answer, bias = [0, 5], [1, 1, 2, 5], {4: 1.5, 6: -1.0}
    dense = torch.zeros(ROWS + 1, VOCAB)
    for token, value in bias.items():
        dense[:, token] = value
    penalties = {"repetition": 1.4, "frequency": 0.2, "presence": 0.3}
    facts = facts_of(prompt, answer, ends=(3,)).expand(ROWS + 1, -1).contiguous()
    newest = torch.zeros(ROWS + 1, dtype=torch.int32)
    counts = torch.zeros(8)
    for position in range(1000):
        rows = [
            {
                **penalties,
                "temperature": 1.6,
                "seed": i * 7919,
                "position": position,
                "switches": sampling.BIASED | sampling.ENDLESS,
                "row": i,
            }
            for i in range(ROWS)
        ]
        inputs = [row.expand(ROWS, -1).contiguous(), params(rows), dense, newest, facts]
        counts += torch.bincount(choose(inputs)[0], minlength=8)
    values = penalised_plainly(row, (prompt, answer), bias, **penalties)
    values[3] = -math.inf
    expected = (values[:8].double() / 1.6).softmax(0) * counts.sum()
    assert counts[3] == 0
    drawn = [i for i in range(8) if i != 3]
    result = stats.chisquare(counts[drawn].double().numpy(), expected[drawn].numpy())
    assert result.pvalue > 1e-3


@pytest.mark.parametrize("vocab_size", [VOCAB, 7])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_logprobs_are_those_of_log_softmax(
    compiled: Callable[..., Program], logits: Tensor, vocab_size: int, dtype: torch.dtype
):
    values = logits[:, :vocab_size].contiguous().to(dtype)
    drawn = torch.arange(ROWS, dtype=torch.int32) % vocab_size
    targets = torch.where(drawn % 3 == 0, (drawn + 2) % vocab_size, -1).to(torch.int32)
    inputs = [values, drawn, targets]
    (packed,) = compiled(sampler.report, inputs)(inputs)
    expected = values.double().log_softmax(-1)
    num_top = min(sampling.NUM_TOP, vocab_size)
    top = expected.topk(num_top).values
    got = packed[:, : 1 + num_top].contiguous().view(torch.float32).double()
    ids = packed[:, 1 + num_top :].long()
    tokens = torch.where(targets < 0, drawn, targets).long()
    torch.testing.assert_close(
        got[:, 0], expected.gather(1, tokens[:, None])[:, 0], rtol=0, atol=1e-4
    )
    torch.testing.assert_close(got[:, 1:], top, rtol=0, atol=1e-4)
    torch.testing.assert_close(expected.gather(1, ids), top, rtol=0, atol=1e-9)
    assert all(len(set(row)) == num_top for row in ids.tolist())
