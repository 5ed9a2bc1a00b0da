"""Protects attention over paged blocks, as the device compiles it, against attention written down plainly."""

from collections.abc import Callable, Sequence
from types import SimpleNamespace

import pytest
import torch
from torch import Tensor

from torchtpu.compiler import Program
from torchtpu.device import Device
from torchtpu.ops import attention, native_attention
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


@pytest.mark.parametrize(
    ("dtype", "tolerance"), [(torch.float32, 1e-5), (torch.bfloat16, 1e-2)], ids=str
)
@pytest.mark.parametrize(
    ("heads", "kv_heads", "dim", "value_dim", "window"),
    [
        (9, 3, 64, 64, 0),
        (4, 4, 16, 128, 20),
        (10, 2, 80, 80, 0),
        (8, 1, 256, 40, 33),
        (2, 1, 7, 5, 0),
    ],
)
def test_the_kernel_takes_heads_of_any_size_and_number(  # noqa: PLR0913 -- fixtures and sizes
    compiled: Callable[..., Program],
    heads: int,
    kv_heads: int,
    dim: int,
    value_dim: int,
    window: int,
    dtype: torch.dtype,
    tolerance: float,
):
    """Tokens of one sequence in blocks of 16, far apart and in a row, then one of another sequence and its padding."""
    generator = torch.Generator().manual_seed(3)
    tables = [[5, 2, 7, 1, 6, 3], [4, 0, 0, 0, 0, 0]]
    order = torch.tensor([[table[p // 16] * 16 + p % 16 for p in range(96)] for table in tables])
    positions = torch.tensor([0, 15, 16, 50, *range(60, 96), 9, 0, 0])
    token_tables = torch.tensor([0] * 40 + [1] * 3)
    slots = order[token_tables, positions]
    slots[41:] = 0
    num_slots, num_tokens = 8 * 16, len(positions)
    shapes = [
        (num_tokens, heads, dim),
        (num_tokens, kv_heads, dim),
        (num_tokens, kv_heads, value_dim),
        (kv_heads * num_slots, dim),
        (kv_heads * num_slots, value_dim),
    ]
    tensors = [torch.randn(shape, generator=generator).to(dtype) for shape in shapes]
    where = [slots, positions, torch.tensor(tables), token_tables]
    numbers = [torch.full((heads,), -torch.inf), torch.tensor([16.0, dim**-0.5, 0.0, window])]
    inputs = [*tensors, *(index.int() for index in where), *numbers]
    out, *caches = compiled(kernel_alone, inputs, donated=(3, 4))(inputs)
    keys, values = (c.float().view(kv_heads, num_slots, -1).transpose(0, 1) for c in caches)
    assert torch.equal(keys[slots[:41]], tensors[1][:41].float())
    for index, position in enumerate(positions.tolist()):
        places = order[token_tables[index], : position + 1]
        seen = [c[places].repeat_interleave(heads // kv_heads, 1) for c in (keys, values)]
        scores = torch.einsum("hd,khd->hk", tensors[0][index].float(), seen[0]) * dim**-0.5
        if window:
            scores[:, : max(0, position + 1 - window)] = -torch.inf
        expected = torch.einsum("hk,khd->hd", scores.softmax(-1), seen[1])
        torch.testing.assert_close(out[index].float(), expected, rtol=tolerance, atol=tolerance)


def test_the_kernel_refuses_a_position_without_a_block(compiled: Callable[..., Program]):
    tensors = [torch.zeros(size) for size in [(1, 1, 4), (1, 1, 4), (1, 1, 4), (32, 4), (32, 4)]]
    slots, position, table, token_table = torch.tensor([[0], [16], [1], [0]], dtype=torch.int32)
    numbers = [torch.zeros(1), torch.tensor([16.0, 1.0, 0.0, 0.0])]
    inputs = [*tensors, slots, position, table[None], token_table, *numbers]
    program = compiled(kernel_alone, inputs, donated=(3, 4))
    with pytest.raises(RuntimeError, match="a position has no block"):
        program(inputs)


def kernel_alone(*inputs: Tensor) -> tuple[Tensor, ...]:
    return native_attention.operation()(*inputs)
