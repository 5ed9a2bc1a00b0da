"""The device side of the engine: weights, KV cache, compiled programs; one dispatch a step.

Only what every model needs lives here. A model is an unmodified Hugging Face causal language model
whose attention is ours; weights are inputs of the program, and the KV cache and the newest token of
each row are inputs that it updates in place (donated) and returns. After a failed dispatch the donated
tensors are gone: `reset_cache` makes new ones, and the engine rebuilds its sequences from their tokens.
"""

from collections.abc import Callable
from concurrent.futures import Future
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensorMode

from torchtpu.buckets import Bucket, BucketLadder
from torchtpu.compiler import CompileCounters, Program, StepCompiler
from torchtpu.device import Device
from torchtpu.memory import return_freed_memory
from torchtpu.ops import attention, native_linear, sampling
from torchtpu.ops.attention import CacheShape, Kernel
from workers.engine.cache_plan import CachePlan
from workers.engine.input_batch import BatchLayout
from workers.engine.logprobs import StepLogprobs
from workers.engine.outputs import StepPlan, StepResults
from workers.engine.sampler import Sampler, SamplerConfig
from workers.engine.step_weights import StepWeights, plain_weights, tpu_weights
from workers.errors import HopelessLoadError

if TYPE_CHECKING:
    from transformers import PreTrainedModel

WarmUpProgress = Callable[[int, int, str], None]
"""`progress(done, total, bucket name)`."""
Allowed = Callable[[], NDArray[np.int32]]
"""Gives a bit for each token that each sample may draw, [num_samples, ⌈vocab / 32⌉]."""


@dataclass(frozen=True)
class RunnerConfig:
    ladder: BucketLadder
    cache: CachePlan
    vocab_size: int
    """Width of the logits."""
    kernel: Kernel | None = None
    """Attention of its own, where the device has one."""
    native_linear: bool = False
    """Whether linear layers are `torchtpu.ops.native_linear`."""


@dataclass(frozen=True)
class StepHandle:
    """A dispatched step; its results are on the device until collected."""

    plan: StepPlan
    tokens: Tensor
    """[num_samples] int32"""
    logprobs: Tensor | None = None
    """As `torchtpu.ops.sampling.logprobs` packs them."""

    def collect(self) -> StepResults:
        """Wait for the step and read its results."""
        tokens = self.tokens.cpu().tolist()
        if self.logprobs is None:
            return StepResults(tokens)
        return StepResults(tokens, StepLogprobs(self.logprobs.cpu().contiguous().numpy()))


class ModelRunner:
    """Runs step plans. `warm_up` compiles every bucket; afterwards nothing compiles."""

    def __init__(
        self,
        device: Device,
        model: "PreTrainedModel",
        cache_shapes: list[CacheShape],
        compiler: StepCompiler,
        config: RunnerConfig,
    ) -> None:
        self._device = device.torch_device
        self._synchronize = device.synchronize
        self._model = model
        self._cache_shapes = cache_shapes
        self._compiler = compiler
        self._config = config
        self._weights = (tpu_weights if device.platform == "tpu" else plain_weights)(model)
        self._programs: dict[Bucket, Program] = {}
        choice = SamplerConfig(config.ladder.max_rows, config.vocab_size, model.dtype)
        self._sampler = Sampler(device, compiler, choice)
        self._cache: list[Tensor] = []
        self._newest = torch.empty(0)
        self.reset_cache()

    @property
    def max_rows(self) -> int:
        return self._config.ladder.max_rows

    @property
    def num_programs(self) -> int:
        return len(self._programs)

    @property
    def num_caches(self) -> int:
        """Tensors of the KV cache."""
        return len(self._cache)

    def kv_bytes(self, context: int) -> int:
        """Keys and values that one token sees, all layers, after `context` tokens."""
        return sum(
            shape.bytes_per_token(self._model.dtype) * min(context, shape.window or context)
            for shape in self._cache_shapes
        )

    @property
    def counters(self) -> CompileCounters:
        """Programs compiled by this process, and programs read back from the cache."""
        return self._compiler.counters

    def num_compilations(self) -> int:
        """All compilations of this process, as the backend counts them."""
        return self._compiler.total_compilations()

    def reset_cache(self) -> None:
        """Fresh, empty device state. Made on the host: a transfer compiles nothing."""
        dtype = self._model.dtype
        self._cache = []  # the old one goes before the new one comes
        for shape in self._tensor_shapes():
            self._cache.append(torch.zeros(shape, dtype=dtype).to(self._device))
            # A transfer runs in the background and holds its source: one at a time.
            self._synchronize()
        # One more row than runs at once: the trash row.
        newest = torch.zeros(self._config.ladder.max_rows + 1, dtype=torch.int32)
        self._newest = newest.to(self._device)
        self._sampler.reset()

    def _tensor_shapes(self) -> list[tuple[int, int]]:
        """Of the caches of all layers: keys, then values, or both in one."""
        plan, kernel = self._config.cache, self._config.kernel
        shapes_of = kernel.cache_shapes if kernel else attention.head_by_head
        layers = [
            shapes_of([shape], plan.num_blocks[group] * plan.block_len)
            for shape, group in zip(self._cache_shapes, plan.layer_groups, strict=True)
        ]
        return [shape for kind in zip(*layers, strict=True) for shape in kind]

    def layout(self, bucket: Bucket) -> BatchLayout:
        plan = self._config.cache
        max_rows = self._config.ladder.max_rows
        return BatchLayout(bucket, plan.block_len, max_rows, len(plan.groups))

    def warm_up(self, progress: WarmUpProgress) -> None:
        """Compile (or read back) every program, then run each once: a first run is a slow one."""
        buckets = self._config.ladder.buckets
        largest = {bucket.num_samples: bucket for bucket in buckets}
        self._sampler.start(sorted(largest), self._newest)
        steps = {bucket: self.start_step(bucket) for bucket in buckets}
        self._sampler.finish()
        for index, bucket in enumerate(buckets):
            progress(index, len(buckets), bucket.name)
            self._programs[bucket] = steps[bucket].result()
        # The largest first: what it needs is met now or never, and its memory serves the others.
        for bucket in reversed(buckets):
            plan = StepPlan(bucket, [], [])
            greedy, logits = self._run(plan)
            if largest[bucket.num_samples] is bucket:
                self._newest = self._sampler.probe(plan, logits, greedy, self._newest)
        return_freed_memory()
        progress(len(buckets), len(buckets), "")

    def start_step(self, bucket: Bucket) -> "Future[Program]":
        """Ask the compiler for a bucket's program: packed inputs, newest, caches, weights."""
        layout = self.layout(bucket)
        groups, kernel = self._config.cache.layer_groups, self._config.kernel
        step = make_step(self._model, self._weights, groups, layout, kernel)
        if self._config.native_linear:
            step = native_linear.replacing(step)
        donated = list(range(1, 2 + len(self._cache)))
        inputs = self._inputs(StepPlan(bucket, [], []))
        return self._compiler.start(f"step-{bucket.name}", step, inputs, donated)

    def dispatch(self, plan: StepPlan, allowed: Allowed | None = None) -> StepHandle:
        """Start a step; returns at once. An exception means that the cache is lost.

        `allowed` is asked while the device runs the model: it may wait for the step before.
        """
        greedy, logits = self._run(plan)
        masks = None if allowed is None else allowed()
        tokens, self._newest = self._sampler.draw(plan, logits, greedy, self._newest, masks)
        return StepHandle(plan, tokens, self._sampler.report(plan, logits, tokens))

    def _inputs(self, plan: StepPlan) -> list[Tensor]:
        packed = torch.from_numpy(self.layout(plan.bucket).pack(plan)).to(self._device)
        return [packed, self._newest, *self._cache, *self._weights.tensors]

    def _run(self, plan: StepPlan) -> tuple[Tensor, Tensor]:
        """Greedy tokens and logits."""
        program = self._programs[plan.bucket]
        greedy, logits, self._newest, *self._cache = program(self._inputs(plan))
        return greedy, logits


def make_step(
    model: "PreTrainedModel",
    model_weights: StepWeights,
    layer_groups: list[int],
    layout: BatchLayout,
    kernel: Kernel | None = None,
) -> Callable[..., tuple[Tensor, ...]]:
    """The step function of one bucket, to be traced and compiled.

    Inputs: packed [size] int32; newest [max_rows + 1] int32; the caches, in the shapes of the kernel or
    head by head; the weights. Outputs: greedy tokens [num_samples] int32, logits
    [num_samples, vocab], newest, caches.
    """

    def step(packed: Tensor, newest: Tensor, *rest: Tensor) -> tuple[Tensor, ...]:
        num_caches = len(rest) - len(model_weights.names)
        caches, weights = rest[:num_caches], rest[num_caches:]
        inputs = _unpack(packed, layout)
        tokens = torch.cat([newest[inputs["newest_rows"]], inputs["prompt_tokens"]])
        tensors = _step_tensors(inputs, layout, len(layer_groups), caches, kernel)
        with attention.bound_step(*tensors, groups=layer_groups):
            output = torch.func.functional_call(
                model,
                model_weights.by_name(weights),
                (),
                {
                    "input_ids": tokens[None].long(),
                    "position_ids": inputs["positions"][None],
                    "attention_mask": None,
                    "use_cache": False,
                    "logits_to_keep": inputs["sample_tokens"],
                },
                tie_weights=True,
            )
        logits = output.logits[0]
        greedy = sampling.argmax(logits)
        newest[inputs["sample_rows"]] = greedy
        return greedy, logits, newest, *tensors[0].keys, *tensors[0].values

    return step


def _unpack(packed: Tensor, layout: BatchLayout) -> dict[str, Tensor]:
    """The fields as int64 tensors, which is what indexing wants."""
    wide = packed.long()
    return {
        name: wide[start:end].view(layout.shapes[name])
        for name, (start, end) in layout.offsets.items()
    }


def _step_tensors(
    inputs: dict[str, Tensor],
    layout: BatchLayout,
    num_layers: int,
    caches: tuple[Tensor, ...],
    kernel: Kernel | None,
) -> list[attention.StepTensors]:
    """For each group of layers; the lists of the caches are the same ones."""
    prefill, firsts = layout.bucket.prefill, inputs["segment_firsts"]
    ahead = torch.arange(prefill.segment_len, device=firsts.device)
    first = attention.StepTensors(
        keys=list(caches[:num_layers]),
        values=list(caches[num_layers:]),
        slots=inputs["slots"][0],
        positions=inputs["positions"],
        tables=inputs["tables"][0],
        token_tables=inputs["token_tables"],
        num_rows=layout.bucket.rows,
        grid_tokens=(firsts[:, None] + ahead).clamp(max=max(prefill.tokens - 1, 0)),
        grid_places=inputs["grid_places"],
        block_len=layout.block_len,
        kernel=kernel,
    )
    others = [
        replace(first, slots=inputs["slots"][group], tables=inputs["tables"][group], shared={})
        for group in range(1, layout.num_groups)
    ]
    return [first, *others]


def discover_cache_shapes(model: "PreTrainedModel") -> list[CacheShape]:
    """The cache of every layer, seen by running the model once without computing anything.

    Raises `HopelessLoadError` for a model with a layer that is more, or other, than attention.
    """
    num_layers = _count_layers(model)
    shapes: dict[int, CacheShape] = {}

    def record(
        module: torch.nn.Module,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        *_: object,
        sliding_window: int | None = None,
        **__: object,
    ) -> tuple[Tensor, None]:
        index = module.layer_idx
        assert isinstance(index, int)
        kv = [(tensor.shape[1], tensor.shape[3]) for tensor in (key, value)]
        shapes[index] = CacheShape(kv[0], kv[1], sliding_window)
        out = value.new_empty(1, query.shape[2], query.shape[1], value.shape[3])
        return out, None

    with attention.replaced(record), torch.no_grad(), FakeTensorMode(allow_non_fake_inputs=True):
        tokens = torch.zeros(1, 2, dtype=torch.long, device=model.device)
        positions = torch.arange(2, device=model.device)[None]
        model(input_ids=tokens, position_ids=positions, attention_mask=None, use_cache=False)
    if others := [index for index in range(num_layers) if index not in shapes]:
        raise HopelessLoadError(
            f"{type(model).__name__} cannot be served: {len(others)} of its {num_layers} layers, "
            f"such as layer {others[0]}, have no attention that another could take the place of"
        )
    return [shapes[index] for index in range(num_layers)]


def _count_layers(model: "PreTrainedModel") -> int:
    """By the cache that transformers would give the model, which must be of keys and values alone.

    A recurrent layer's state has no place in blocks, and would be wrong in silence where attention
    stands beside it.
    """
    from transformers import cache_utils

    layers = cache_utils.DynamicCache(config=model.config).layers
    served = cache_utils.DynamicLayer, cache_utils.DynamicSlidingWindowLayer, cache_utils.DummyLayer
    if others := [index for index, layer in enumerate(layers) if type(layer) not in served]:
        raise HopelessLoadError(
            f"{type(model).__name__} cannot be served: {len(others)} of its {len(layers)} layers, "
            f"such as layer {others[0]}, keep something other than keys and values of attention"
        )
    return len(layers)
