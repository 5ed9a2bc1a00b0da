"""From a worker's configuration to an engine that is ready: device, weights, programs."""

import hashlib
import logging
import time
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Literal

from models.errors import (
    ChatTemplateError,
    ModelCorruptError,
    ModelError,
    ModelNotFoundError,
    ModelReferenceError,
    UnsupportedModelError,
)
from models.library import LocalModel, resolve
from models.loader import (
    LoadOptions,
    ModelInfo,
    TokenizerInfo,
    load_model,
    read_info,
    read_tokenizer,
)
from models.settings import ModelSettings
from torchtpu.bringup import bring_up
from torchtpu.buckets import BucketLadder, default_ladder
from torchtpu.device import Device
from torchtpu.environment import read_settings
from torchtpu.errors import (
    EnvironmentConflictError,
    NoCompilerError,
    NoPluginError,
    SettingError,
    ShimBuildError,
    TorchTpuError,
)
from workers.config import WorkerConfig
from workers.engine.interface import LoadedEngine, Progress
from workers.errors import HopelessLoadError, LoadError
from workers.protocol import ModelCard

if TYPE_CHECKING:
    import torch
    from transformers import PreTrainedModel

    from torchtpu.compiler import StepCompiler
    from torchtpu.ops.attention import CacheShape, Kernel
    from workers.engine.cache_plan import CachePlan, GroupNeeds
    from workers.engine.engine import EngineParts
    from workers.engine.memory_plan import MemoryPlan
    from workers.engine.model_runner import ModelRunner
    from workers.engine.step_log import StepSink

log = logging.getLogger(__name__)

DEFAULT_ROWS = 32
DEFAULT_CONTEXT_LEN = 2048
DEFAULT_BLOCK_LEN = 16
HOPELESS = (
    ModelReferenceError,
    ModelNotFoundError,
    ModelCorruptError,
    UnsupportedModelError,
    ChatTemplateError,
    SettingError,
    NoCompilerError,
    ShimBuildError,
    NoPluginError,
    EnvironmentConflictError,
    ValueError,
)
"""Only a person can put these right. Networks, disks and devices may get better by themselves."""
DEFAULT_MEMORY_SHARE = 0.9


@dataclass(frozen=True)
class EngineConfig:
    """An engine's settings, all decided or left to the model and the device (None)."""

    model: str
    served_name: str
    device: Literal["tpu", "cpu", "cuda"] = "tpu"
    dtype: Literal["auto", "bfloat16", "float16", "float32"] = "auto"
    max_rows: int = DEFAULT_ROWS
    max_step_tokens: int | None = None
    memory_share: float = DEFAULT_MEMORY_SHARE
    num_blocks: int | None = None
    block_len: int = DEFAULT_BLOCK_LEN
    context_len: int | None = None
    compile_cache_dir: Path | None = None
    ladder: BucketLadder | None = None
    """Instead of the default one for `max_rows` and `context_len`."""

    @classmethod
    def from_worker(cls, config: WorkerConfig) -> "EngineConfig":
        programs = config.compile_cache_dir or read_settings().cache_dir / "programs"
        return cls(
            model=config.model,
            served_name=config.served_name,
            device=config.device,
            dtype=config.dtype,
            max_rows=config.max_rows or DEFAULT_ROWS,
            max_step_tokens=config.max_step_tokens,
            memory_share=config.memory_share or DEFAULT_MEMORY_SHARE,
            num_blocks=config.num_blocks,
            block_len=config.block_len or DEFAULT_BLOCK_LEN,
            context_len=config.context_len,
            compile_cache_dir=programs,
        )


def build_engine(
    config: EngineConfig, progress: Progress, sink: "StepSink | None" = None
) -> LoadedEngine:
    """Bring the device up, load the weights, compile every bucket; `sink` gets a record of each step.

    Progress: fetching the model 0 to 0.1, weights to 0.2, programs to 1. Raises `LoadError`, or
    `HopelessLoadError` if another try would end the same.
    """
    try:
        progress("starting the device", 0.0)
        device = bring_up(config.device)
        local = resolve(config.model, ModelSettings.from_environment(), _scaled(progress, 0, 0.1))
        return EngineBuilder(config, device, local, progress).build(sink)
    except HOPELESS as error:
        raise HopelessLoadError(str(error)) from error
    except (ModelError, TorchTpuError) as error:
        raise LoadError(str(error)) from error
    except OSError as error:
        raise LoadError(f"a file cannot be read or written: {error}") from error


class EngineBuilder:
    """The steps of `build_engine` that share the device and the model's folder."""

    def __init__(
        self, config: EngineConfig, device: Device, local: LocalModel, progress: Progress
    ) -> None:
        self._config, self._device, self._local, self._progress = config, device, local, progress
        self._info: ModelInfo = read_info(local.path)
        context_len = min(config.context_len or DEFAULT_CONTEXT_LEN, self._info.context_len)
        # The kernels compute in bfloat16 and float32.
        has_kernel = device.has_native_attention or device.platform == "tpu"
        self._has_kernel = has_kernel and config.dtype != "float16"
        self._ladder = config.ladder or default_ladder(
            config.max_rows, context_len, has_kernel=self._has_kernel
        )
        self._context_len = min(context_len, self._ladder.max_context)
        for context in (*self._ladder.contexts, *self._ladder.mixed_contexts):
            if context % config.block_len:
                raise HopelessLoadError(
                    f"blocks of {config.block_len} tokens do not divide a context of {context}: "
                    "choose a --block-len that does, such as 16"
                )

    def build(self, sink: "StepSink | None") -> LoadedEngine:
        from tokenizers import Tokenizer

        from models.grammars import model_vocabulary
        from workers.engine.engine import EngineParts, ModelEngine
        from workers.engine.grammars import Grammars
        from workers.engine.scheduler import Scheduler, SchedulerConfig

        tokens = read_tokenizer(self._local.path)
        tokenizer_json, ends = tokens.tokenizer_json.decode(), self._info.eos_token_ids
        vocabulary = partial(model_vocabulary, tokenizer_json, self._info.vocab_size, ends)
        grammars = Grammars(vocabulary, self._info.vocab_size)
        limits = SchedulerConfig(self._ladder, max_step_tokens=self._config.max_step_tokens)
        runner, plan = self._runner()
        cache = plan.new_cache()
        self._progress("warming up", 0.2)
        runner.warm_up(self._warm_up_progress)
        if grammars.why_not is not None:
            log.warning("Structured output is refused: %s.", grammars.why_not)
        parts = EngineParts(
            runner=runner,
            scheduler=Scheduler(limits, cache),
            cache=cache,
            tokenizer=Tokenizer.from_str(tokenizer_json),
            context_len=self._context_len,
            eos_token_ids=ends,
            vocab_size=self._info.vocab_size,
            grammars=grammars if grammars.why_not is None else None,
            step_sink=sink,
        )
        counters = runner.counters
        log.info(
            "%d programs compiled, %d read from the cache",
            counters.num_compiled,
            counters.num_loaded,
        )
        return LoadedEngine(ModelEngine(parts), self._card(tokens, parts))

    def _runner(self) -> "tuple[ModelRunner, CachePlan]":
        from torchtpu.ops import attention
        from workers.engine.model_runner import ModelRunner, RunnerConfig, discover_cache_shapes

        attention.register()
        model = self._load(attention.ATTENTION_NAME)
        shapes = discover_cache_shapes(model)
        plan = self._cache_plan(model, shapes)
        compiler = self._compiler(self._identity(model, plan))
        config = RunnerConfig(
            self._ladder,
            plan,
            self._info.vocab_size,
            self._kernel(),
            native_linear=self._device.has_native_linear,
        )
        return ModelRunner(self._device, model, shapes, compiler, config), plan

    def _kernel(self) -> "Kernel | None":
        from torchtpu.ops import native_attention, packed_attention

        if not self._has_kernel:
            return None
        if self._device.platform == "tpu":
            return packed_attention.kernel()
        return native_attention.kernel()

    def _compiler(self, identity: dict[str, object]) -> "StepCompiler":
        from torchtpu.compiler import ProgramCompiler

        source = {"source": _source_digest()}
        return ProgramCompiler(self._device, source, self._config.compile_cache_dir, model=identity)

    def _load_options(self, attention_name: str) -> LoadOptions:
        return LoadOptions(
            attention_name, experts_implementation="batched_mm", context_len=self._context_len
        )

    def _load(self, attention_name: str) -> "PreTrainedModel":
        return load_model(
            self._local.path,
            self._dtype(),
            self._device.torch_device,
            self._load_options(attention_name),
            _scaled(self._progress, 0.1, 0.2),
        )

    def _dtype(self) -> "torch.dtype":
        import torch

        name = self._config.dtype
        # bf16 halves the bytes of a step, and a decode step's time is the bytes it reads.
        chosen: torch.dtype = getattr(torch, "bfloat16" if name == "auto" else name)
        return chosen

    def _cache_plan(self, model: "PreTrainedModel", shapes: "list[CacheShape]") -> "CachePlan":
        """Room for every row's whole context if memory allows it, and for one at least."""
        from workers.engine.cache_plan import CachePlan, group_layers, max_chunk

        block_len = self._config.block_len
        groups = group_layers(shapes, self._ladder, block_len)
        layer_bytes = [shape.bytes_per_token(model.dtype) for shape in shapes]
        sizes = self._pool_sizes(model, groups, layer_bytes)
        return CachePlan(block_len, max_chunk(self._ladder), groups, sizes)

    def _pool_sizes(
        self, model: "PreTrainedModel", groups: "tuple[GroupNeeds, ...]", layer_bytes: list[int]
    ) -> tuple[int, ...]:
        """`layer_bytes` are what each layer keeps of a token."""
        from workers.engine.cache_plan import given_sizes, pool_sizes
        from workers.engine.memory_plan import GIB

        block_len, given = self._config.block_len, self._config.num_blocks
        if given is not None:
            if given < -(-self._context_len // block_len):
                raise HopelessLoadError(
                    f"{given} blocks of {block_len} tokens do not hold one request of "
                    f"{self._context_len} tokens: raise --num-blocks or lower --context-len"
                )
            return given_sizes(groups, given)
        plan = self._memory_plan(model, 0 if self._has_kernel else max(layer_bytes))
        block_bytes = [block_len * sum(layer_bytes[i] for i in group.layers) for group in groups]
        sizes = pool_sizes(groups, block_bytes, plan.cache, self._ladder.max_rows)
        if sizes is None:
            least = sum(g.least * size for g, size in zip(groups, block_bytes, strict=True))
            raise LoadError(
                f"the KV cache of one request of {self._context_len} tokens takes "
                f"{least / GIB:.1f} GiB and does not fit: {plan}: lower --context-len "
                "or --max-rows, or raise --memory-share"
            )
        return sizes

    def _memory_plan(self, model: "PreTrainedModel", kv_bytes: int) -> "MemoryPlan":
        from workers.engine.memory_plan import MemoryPlan, programs_bytes, weights_bytes

        plan = MemoryPlan(
            self._device.memory_bytes,
            self._config.memory_share,
            weights_bytes(model),
            programs_bytes(model, self._ladder, kv_bytes, self._info.vocab_size),
        )
        log.info("Memory: %s.", plan)
        return plan

    def _identity(self, model: "PreTrainedModel", plan: "CachePlan") -> dict[str, object]:
        config = model.config.to_dict()
        config.pop("_name_or_path", None)  # it may lie elsewhere the next time
        return {
            "model": config,
            "dtype": str(model.dtype),
            "block_len": self._config.block_len,
            "num_blocks": plan.num_blocks,
            "windows": [group.window for group in plan.groups],
            "max_rows": self._ladder.max_rows,
            "native_attention": self._has_kernel,
            "native_linear": self._device.has_native_linear,
        }

    def _warm_up_progress(self, done: int, total: int, name: str) -> None:
        # Not "compiling": most starts only read programs back.
        what = f"warming up: program {done + 1} of {total}" if name else "ready"
        self._progress(what, 0.2 + 0.8 * done / total)

    def _card(self, tokens: TokenizerInfo, parts: "EngineParts") -> ModelCard:
        template = tokens.chat_template or ""
        return ModelCard(
            model=self._config.served_name,
            created_s=int(time.time()),
            context_len=self._context_len,
            vocab_size=self._info.vocab_size,
            tokenizer_json=tokens.compressed_json(),
            chat_template=tokens.chat_template,
            special_tokens=tokens.special_tokens,
            add_bos=tokens.add_bos,
            digest=hashlib.sha256(tokens.tokenizer_json + template.encode()).hexdigest(),
            max_choices=self._ladder.max_rows,
            takes_grammars=parts.grammars is not None,
        )


def _source_digest() -> str:
    """Of the code that programs are traced from: a kept program of other code is not used."""
    from torchtpu import ops
    from workers.engine import input_batch, model_runner, sampler, step_weights

    modules = (input_batch, model_runner, sampler, step_weights)
    files = [Path(module.__file__ or "") for module in modules]
    files += sorted(Path(ops.__file__ or "").parent.glob("*.py"))
    return hashlib.sha256(b"".join(file.read_bytes() for file in files)).hexdigest()


def _scaled(progress: Progress, start: float, end: float) -> Progress:
    """A part's progress as a share of the whole."""
    return lambda what, share: progress(what, start + (end - start) * share)
