"""Protects the TPU's form of attention and of the weights, computed here with plain operations: the same
answers as the matmul form, for decode rows and prompt runs, windows, soft caps and sinks."""

from types import SimpleNamespace

import pytest
import torch
from torch import Tensor
from transformers import LlamaConfig, LlamaForCausalLM

from torchtpu.compiler import ProgramCompiler
from torchtpu.device import Device
from torchtpu.ops import attention, packed_attention
from torchtpu.ops.attention import CacheShape, Kernel, StepTensors
from workers.engine.step_weights import plain_weights, tpu_weights

BLOCK_LEN, NUM_BLOCKS, CONTEXT = 8, 32, 64
HEADS, KV_HEADS, DIM, VALUE_DIM = 6, 3, 24, 16
TABLES = [[5, 1, 9, 2, 0, 0, 0, 0], [3, 0, 0, 0, 0, 0, 0, 0], [0] * 8]
TABLES += [[7, 8, 4, 6, 0, 0, 0, 0], [11, 10, 0, 0, 0, 0, 0, 0]]
ROWS = [(0, 29), (1, 3), (2, 0)]  # table, position; the last one is padding
RUN = [(3, p) for p in range(20, 29)] + [(4, p) for p in range(5)] + [(0, 0)] * 2


@pytest.mark.parametrize(
    ("options", "has_sinks"),
    [({}, False), ({"sliding_window": 10}, False), ({"softcap": 3.0}, False), ({}, True)],
)
def test_the_packed_form_agrees_with_matmuls(
    tpu_device: Device, options: dict[str, float], has_sinks: bool
) -> None:
    generator = torch.Generator().manual_seed(1)
    num_tokens = len(ROWS) + len(RUN)
    query = torch.randn(1, HEADS, num_tokens, DIM, generator=generator)
    key = torch.randn(1, KV_HEADS, num_tokens, DIM, generator=generator)
    value = torch.randn(1, KV_HEADS, num_tokens, VALUE_DIM, generator=generator)
    sinks = torch.randn(HEADS, generator=generator)
    num_slots = NUM_BLOCKS * BLOCK_LEN
    keys = torch.randn(KV_HEADS, num_slots, DIM, generator=generator)
    values = torch.randn(KV_HEADS, num_slots, VALUE_DIM, generator=generator)
    fields = dict(options) | ({"s_aux": sinks} if has_sinks else {})

    by_head = [keys.flatten(0, 1).clone()], [values.flatten(0, 1).clone()]
    expected = attend(by_head, None, query, key, value, fields)

    kernel = packed_attention.kernel(interpret=True)
    layer = CacheShape((KV_HEADS, DIM), (KV_HEADS, VALUE_DIM))
    (shape,) = kernel.cache_shapes([layer], num_slots)
    assert shape == (num_slots, 128)
    packed = torch.zeros(shape)
    rows = torch.cat([keys.transpose(0, 1).flatten(1), values.transpose(0, 1).flatten(1)], 1)
    packed[:, : rows.shape[1]] = rows

    def step(q: Tensor, k: Tensor, v: Tensor, s: Tensor, cache: Tensor) -> tuple[Tensor, ...]:
        given = dict(options) | ({"s_aux": s} if has_sinks else {})
        return attend(([cache], []), kernel, q, k, v, given), cache

    compiler = ProgramCompiler(tpu_device, {}, cache_dir=None)
    inputs = [t.to(tpu_device.torch_device) for t in (query, key, value, sinks, packed)]
    answers, cache = compiler.start("packed", step, inputs, [4]).result()(inputs)
    real = [i for i in range(num_tokens) if i != 2 and i < num_tokens - 2]
    torch.testing.assert_close(answers.cpu()[0, real], expected[0, real], atol=1e-5, rtol=1e-5)

    # What was written is what the other form wrote, token by token.
    written = torch.cat(
        [
            by_head[0][0].view(KV_HEADS, num_slots, DIM).transpose(0, 1).flatten(1),
            by_head[1][0].view(KV_HEADS, num_slots, VALUE_DIM).transpose(0, 1).flatten(1),
        ],
        1,
    )
    assert torch.equal(cache.cpu()[BLOCK_LEN:, : written.shape[1]], written[BLOCK_LEN:])


def attend(
    caches: tuple[list[Tensor], list[Tensor]],
    kernel: Kernel | None,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    options: dict[str, object],
) -> Tensor:
    device = query.device
    tokens = ROWS + RUN
    slots = [TABLES[t][p // BLOCK_LEN] * BLOCK_LEN + p % BLOCK_LEN for t, p in tokens]
    places = [*range(9), *range(9, 14), 0, 0]
    grid = [list(range(9)), [*range(9, 14), *[13] * 4]]

    def index(numbers: list) -> Tensor:
        return torch.tensor(numbers, device=device)

    step = StepTensors(
        keys=caches[0],
        values=caches[1],
        slots=index(slots),
        positions=index([p for _, p in tokens]),
        tables=index(TABLES),
        token_tables=index([t for t, _ in tokens]),
        num_rows=len(ROWS),
        grid_tokens=index(grid),
        grid_places=index(places),
        block_len=BLOCK_LEN,
        kernel=kernel,
    )
    with attention.bound_step(step):
        layer = SimpleNamespace(layer_idx=0)
        return attention.paged_attention(layer, query, key, value, None, **options)[0]


@pytest.mark.parametrize("is_tied", [True, False])
def test_padded_tables_give_the_same_logits_and_are_held_once(is_tied: bool) -> None:
    config = LlamaConfig(
        hidden_size=24, intermediate_size=32, num_hidden_layers=1, num_attention_heads=2,
        num_key_value_heads=1, vocab_size=40, tie_word_embeddings=is_tied,
    )  # fmt: skip
    model = LlamaForCausalLM(config).eval().requires_grad_(False)
    tokens = torch.arange(5)[None]
    expected = model(tokens).logits
    plain = plain_weights(model)
    padded = tpu_weights(model)
    assert padded.names == plain.names
    wide = [n for n, t in zip(padded.names, padded.tensors, strict=True) if t.shape[-1] == 128]
    assert wide == ["model.embed_tokens.weight"]
    assert model.model.embed_tokens.weight.is_meta
    assert model.lm_head.weight.is_meta == is_tied
    given = padded.by_name(padded.tensors)
    again = torch.func.functional_call(model, given, (tokens,), tie_weights=True).logits
    assert torch.equal(again, expected)
