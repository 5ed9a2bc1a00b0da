"""Protects the two operations of our own, as the device compiles them: attention over paged blocks
against attention written down plainly, and draws of tokens against sorted probabilities."""

from collections.abc import Callable, Sequence
from types import SimpleNamespace

import pytest
import torch
from scipy import stats
from torch import Tensor

from torchtpu.compiler import Program, ProgramCompiler
from torchtpu.device import Device
from torchtpu.ops import attention, native_attention, sampling
from torchtpu.ops.attention import Kernel

# Attention: a flat row of 3 decode rows, one of them padding, 2 segments of up to 4 tokens, 2 of padding.
BLOCK_LEN = 4
NUM_BLOCKS = 16
CONTEXT = 16
HEADS, KV_HEADS, DIM, VALUE_DIM = 4, 2, 8, 6
ROW_POSITIONS = [6, 12, 0]
ROW_BLOCKS = [[3, 7, 0, 0], [9, 2, 5, 11], [0, 0, 0, 0]]
SEGMENT_STARTS = [0, 8]
SEGMENT_LENS = [3, 4]
SEGMENT_BLOCKS = [[4, 0, 0, 0], [6, 1, 8, 0]]
SEGMENT_LEN = 4
NUM_TOKENS = len(ROW_POSITIONS) + sum(SEGMENT_LENS) + 2

# Sampling.
ROWS, VOCAB = 16, 512


@pytest.fixture(scope="module")
def compiled(tpu_device: Device) -> Callable[..., Program]:
    """`compiled(function, inputs, donated)`: the program; inputs and outputs are on the host."""
    compiler = ProgramCompiler(tpu_device, {}, cache_dir=None)

    def build(
        function: Callable[..., tuple[Tensor, ...]],
        inputs: list[Tensor],
        donated: tuple[int, ...] = (),
    ) -> Program:
        def place(tensors: list[Tensor]) -> list[Tensor]:
            return [tensor.to(tpu_device.torch_device) for tensor in tensors]

        program = compiler.start(function.__name__, function, place(inputs), donated).result()
        return lambda tensors: tuple(out.cpu() for out in program(place(tensors)))

    return build


def slots_of(blocks: list[int], positions: list[int]) -> list[int]:
    return [blocks[p // BLOCK_LEN] * BLOCK_LEN + p % BLOCK_LEN for p in positions]


def token_places() -> list[tuple[list[int], int] | None]:
    """Blocks and position of every token of the flat row; None is padding."""
    places: list[tuple[list[int], int] | None] = list(zip(ROW_BLOCKS, ROW_POSITIONS, strict=True))
    places[2] = None
    for start, length, blocks in zip(SEGMENT_STARTS, SEGMENT_LENS, SEGMENT_BLOCKS, strict=True):
        places += [(blocks, start + i) for i in range(length)]
    return places + [None] * (NUM_TOKENS - len(places))


def flat_slots() -> list[int]:
    return [slots_of(p[0], [p[1]])[0] if p else 0 for p in token_places()]


@pytest.fixture(params=["matmul", "native"])
def kernel(request: pytest.FixtureRequest, tpu_device: Device) -> Kernel | None:
    """Both forms of attention answer to the same tests."""
    if request.param == "matmul":
        return None
    assert tpu_device.has_native_attention
    return native_attention.kernel()


def paged(kernel: Kernel | None, **options: object) -> Callable[..., tuple[Tensor, ...]]:
    """The operation as a step function: query, key, value, sinks, key cache, value cache."""

    def attend(query: Tensor, key: Tensor, value: Tensor, sinks: Tensor, *caches: Tensor):
        fields = {k: v for k, v in options.items() if k != "sinks"}
        if options.get("sinks"):
            fields["s_aux"] = sinks
        tensors = step_tensors(caches[:1], caches[1:], kernel)
        with attention.bound_step(tensors):
            layer = SimpleNamespace(layer_idx=0)
            out, _ = attention.paged_attention(layer, query, key, value, None, **fields)
        return out, *tensors.keys, *tensors.values

    return attend


def paged_twice(kernel: Kernel | None) -> Callable[..., tuple[Tensor, ...]]:
    """Two layers of one step; how many key heads each has is seen in its cache."""

    def attend(query: Tensor, key: Tensor, value: Tensor, sinks: Tensor, *caches: Tensor):
        outs = []
        tensors = step_tensors(caches[:2], caches[2:], kernel)
        with attention.bound_step(tensors):
            for index in range(2):
                kv_heads = caches[index].shape[0] // (NUM_BLOCKS * BLOCK_LEN)
                layer = SimpleNamespace(layer_idx=index)
                pair = key[:, :kv_heads], value[:, :kv_heads]
                outs.append(attention.paged_attention(layer, query, *pair, None)[0])
        return *outs, *tensors.keys, *tensors.values

    return attend


def split_twice(results: tuple[Tensor, ...]) -> tuple[list[Tensor], list[list[Tensor]]]:
    """Outputs of the two layers, and their key and value caches."""
    outs, keys, values = results[:2], results[2:4], results[4:]
    return list(outs), [list(pair) for pair in zip(keys, values, strict=True)]


def step_tensors(
    keys: Sequence[Tensor], values: Sequence[Tensor], kernel: Kernel | None
) -> attention.StepTensors:
    device = keys[0].device
    num_rows, num_prompt = len(ROW_POSITIONS), NUM_TOKENS - len(ROW_POSITIONS)
    positions = torch.tensor([place[1] if place else 0 for place in token_places()], device=device)
    firsts = torch.tensor([0, SEGMENT_LENS[0]], device=device)
    grid = (firsts[:, None] + torch.arange(SEGMENT_LEN, device=device)).clamp(max=num_prompt - 1)
    places = [p * SEGMENT_LEN + i for p, n in enumerate(SEGMENT_LENS) for i in range(n)]
    tables = [num_rows + place // SEGMENT_LEN for place in places]
    places += [0] * (num_prompt - len(places))
    tables += [0] * (num_prompt - len(tables))
    return attention.StepTensors(
        keys=list(keys),
        values=list(values),
        slots=torch.tensor(flat_slots(), device=device),
        positions=positions,
        tables=torch.tensor(ROW_BLOCKS + SEGMENT_BLOCKS, device=device),
        token_tables=torch.tensor([*range(num_rows), *tables], device=device),
        num_rows=num_rows,
        grid_tokens=grid,
        grid_places=torch.tensor(places, device=device),
        block_len=BLOCK_LEN,
        kernel=kernel,
    )


def attended(
    query: Tensor, keys: Tensor, values: Tensor, position: int, options: dict[str, object]
) -> Tensor:
    """One token's attention, head by head. query [heads, dim], keys and values [position + 1, kv_heads, dim]."""
    window, softcap, sinks = (options.get(k) for k in ("sliding_window", "softcap", "s_aux"))
    first = 0 if window is None else max(0, position + 1 - window)
    outputs = []
    for head in range(HEADS):
        kv_head = head // (HEADS // keys.shape[1])
        scores = keys[first:, kv_head] @ query[head] * options.get("scaling", DIM**-0.5)
        if softcap is not None:
            scores = softcap * torch.tanh(scores / softcap)
        if sinks is not None:
            scores = torch.cat([scores, sinks[head, None]])
        weights = scores.softmax(0)[: position + 1 - first]
        outputs.append(weights @ values[first:, kv_head])
    return torch.stack(outputs)


@pytest.fixture
def tensors() -> list[Tensor]:
    """Query, key, value, sinks and both caches, filled with what earlier steps may have left."""
    generator = torch.Generator().manual_seed(0)
    length, num_slots = len(token_places()), NUM_BLOCKS * BLOCK_LEN
    shapes = [
        (1, HEADS, length, DIM),
        (1, KV_HEADS, length, DIM),
        (1, KV_HEADS, length, VALUE_DIM),
        (HEADS,),
        (KV_HEADS * num_slots, DIM),
        (KV_HEADS * num_slots, VALUE_DIM),
    ]
    return [torch.randn(shape, generator=generator) for shape in shapes]


@pytest.mark.parametrize(
    "options",
    [
        {},
        {"scaling": 0.5},
        {"sliding_window": 3},
        {"softcap": 2.0},
        {"sinks": True},
        {"sliding_window": 5, "softcap": 1.5, "sinks": True, "scaling": 1.0},
    ],
    ids=str,
)
def test_paged_attention_is_attention_over_the_tokens_of_the_blocks(
    compiled: Callable[..., Program],
    tensors: list[Tensor],
    kernel: Kernel | None,
    options: dict[str, object],
):
    function = paged(kernel, **options)
    out, *caches = compiled(function, tensors, donated=(4, 5))([t.clone() for t in tensors])
    plain = {**options, "s_aux": tensors[3]} if options.get("sinks") else options
    check_attention(tensors[0], out, caches, KV_HEADS, plain)


def test_layers_may_have_other_numbers_of_key_heads(
    compiled: Callable[..., Program], tensors: list[Tensor], kernel: Kernel | None
):
    query, key, value, sinks, *caches = tensors
    narrow = [tensor[: tensor.shape[0] // KV_HEADS] for tensor in caches]
    for first, second in ((caches, narrow), (narrow, caches)):
        inputs = [query, key, value, sinks, first[0], second[0], first[1], second[1]]
        program = compiled(paged_twice(kernel), inputs, donated=(4, 5, 6, 7))
        outs, after = split_twice(program([tensor.clone() for tensor in inputs]))
        for out, pair in zip(outs, after, strict=True):
            kv_heads = pair[0].shape[0] // (NUM_BLOCKS * BLOCK_LEN)
            check_attention(query, out, pair, kv_heads, {})


def check_attention(
    query: Tensor, out: Tensor, caches: list[Tensor], kv_heads: int, options: dict[str, object]
) -> None:
    """`caches` as the step left them."""
    by_slot = [c.view(kv_heads, NUM_BLOCKS * BLOCK_LEN, -1).transpose(0, 1) for c in caches]
    for index, place in enumerate(token_places()):
        if place is None:
            assert torch.isfinite(out[0, index]).all()
            continue
        blocks, position = place
        slots = slots_of(blocks, list(range(position + 1)))
        keys, values = (by[slots] for by in by_slot)
        expected = attended(query[0, :, index], keys, values, position, options)
        torch.testing.assert_close(out[0, index], expected, rtol=1e-5, atol=1e-5)


def test_a_step_writes_its_own_slots_and_the_trash_only(
    compiled: Callable[..., Program], tensors: list[Tensor], kernel: Kernel | None
):
    _, *caches = compiled(paged(kernel), tensors, donated=(4, 5))([t.clone() for t in tensors])
    for before, after, new in zip(tensors[4:], caches, tensors[1:3], strict=True):
        expected = before.view(KV_HEADS, NUM_BLOCKS * BLOCK_LEN, -1).clone()
        for index, slot in enumerate(flat_slots()):
            if slot:
                expected[:, slot] = new[0, :, index]
        after = after.view_as(expected)
        assert torch.equal(after[:, BLOCK_LEN:], expected[:, BLOCK_LEN:])


def params(rows: list[dict[str, float]]) -> Tensor:
    packed = torch.zeros(len(rows), sampling.NUM_PARAMS, dtype=torch.int32)
    for packed_row, row in zip(packed, rows, strict=True):
        floats = [row.get("temperature", 1.0), row.get("top_p", 1.0), row.get("min_p", 0.0)]
        packed_row[:3] = torch.tensor(floats).view(torch.int32)
        for column, name in enumerate(("top_k", "seed", "position"), start=3):
            packed_row[column] = row.get(name, 0)
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
