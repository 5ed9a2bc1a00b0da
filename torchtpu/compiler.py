"""From a Python function over tensors to a compiled program whose cache inputs are donated.

`torch.compile(backend="tpu")` never donates a mutated input, so a KV cache would be copied whole at
every step. These roads lead to a program; the first that works on this machine is taken:

    DONATED   make_fx -> torch_tpu's StaticCompiler with donated_inputs: no copy, no guards, and the
              executable pickles, so that a second start compiles nothing
    PUBLIC    torch.compile(backend="tpu") around an identity `torch.tpu.pallas.jax_op` that donates:
              public API only, no copy either, but guards at each call and nothing kept on disk
    COMPILED  torch.compile(backend="tpu") alone: copies every donated input at every step
    EAGER     the function itself, for the plain devices `cpu` and `cuda`, which update in place

All of `torch_tpu._internal` that we use is behind this module and `torchtpu.ahead_of_time.capture`.
"""

import contextlib
import hashlib
import json
import logging
import os
import pickle
import tempfile
import threading
import time
import warnings
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from enum import StrEnum
from functools import cache
from pathlib import Path
from typing import Any, Protocol, cast

import torch
from torch import Tensor

from torchtpu.device import Device
from torchtpu.environment import processor_flags

log = logging.getLogger(__name__)

UNUSED_S = 30 * 86400.0
"""A kept program that no start has read for this long is removed."""

StepFunction = Callable[..., tuple[Tensor, ...]]
"""Updates its donated inputs in place and returns them last, in their order."""
Program = Callable[[list[Tensor]], tuple[Tensor, ...]]
"""Takes the inputs in order, gives the outputs. A donated input is unusable after the call."""


class Road(StrEnum):
    DONATED = "donated"
    PUBLIC = "jax_op"
    COMPILED = "torch.compile"
    EAGER = "eager"


@dataclass
class CompileCounters:
    """What this process compiled and read back; after warm-up neither moves."""

    num_compiled: int = 0
    num_loaded: int = 0


class StepCompiler(Protocol):
    """What an engine asks for its programs: `ProgramCompiler`, or who only wants to see them."""

    counters: CompileCounters

    def start(
        self,
        name: str,
        function: StepFunction,
        inputs: Sequence[Tensor],
        donated: Sequence[int],
        *,
        has_model: bool = True,
    ) -> "Future[Program]": ...

    def total_compilations(self) -> int: ...


class ProgramCompiler:
    """Compiles step programs for one device and keeps them on disk.

    `identity` names all that shapes a program besides the function's name and inputs, such as the source
    of the step: it is part of every cache key, as are the versions of libraries. `model` is what more
    shapes the programs that contain the model.
    """

    def __init__(
        self,
        device: Device,
        identity: Mapping[str, object],
        cache_dir: Path | None,
        road: Road | None = None,
        model: Mapping[str, object] | None = None,
    ) -> None:
        self._device = device
        self._identity = {**identity, **_machine_identity(device)}
        self._model = model
        self._cache_dir = cache_dir
        self.road = probe(device) if road is None else road
        self.counters = CompileCounters()
        self._threads = ThreadPoolExecutor(2, thread_name_prefix="compile")
        # Tracing patches torch for the whole process while it lasts.
        self._tracing = threading.Lock()
        self._storing = threading.Lock()
        self._has_swept = False

    def start(
        self,
        name: str,
        function: StepFunction,
        inputs: Sequence[Tensor],
        donated: Sequence[int],
        *,
        has_model: bool = True,
    ) -> "Future[Program]":
        """The program of `function` for inputs of these shapes, dtypes and strides.

        `donated` are the indices of inputs that the function updates in place and returns. Programs
        come in the order asked for, two at a time: XLA compiles one while the next is traced. A kept
        program without the model (`has_model`) serves all models.
        """
        if self.road is not Road.DONATED:
            self.counters.num_compiled += self.road is not Road.EAGER
            return _done(_on_road(self.road, function, donated))
        key = self._key(name, inputs, donated, self._model if has_model else None)
        return self._threads.submit(self._make, key, function, list(inputs), list(donated))

    def _make(
        self, key: str, function: StepFunction, inputs: list[Tensor], donated: list[int]
    ) -> Program:
        executable = self._load(key)
        if executable is not None:
            self.counters.num_loaded += 1
            return cast(Program, executable)
        with self._tracing:
            graph = trace(function, inputs)
        executable = _static_compile(graph, inputs, donated)
        self.counters.num_compiled += 1
        self._store(key, executable)
        return cast(Program, executable)

    def total_compilations(self) -> int:
        """Compilations the backend itself counted in this process, eager operations included."""
        if not self._device.is_xla:
            return self.counters.num_compiled
        return backend_compilations()

    def _key(
        self,
        name: str,
        inputs: Sequence[Tensor],
        donated: Sequence[int],
        model: Mapping[str, object] | None,
    ) -> str:
        shapes = [(list(t.shape), str(t.dtype), list(t.stride())) for t in inputs]
        facts = [name, self._identity, model, shapes, list(donated)]
        return hashlib.sha256(json.dumps(facts, sort_keys=True, default=str).encode()).hexdigest()

    def _path(self, key: str) -> Path | None:
        return None if self._cache_dir is None else self._cache_dir / f"{key}.program"

    def _load(self, key: str) -> object | None:
        """The kept executable, or None; a damaged file is removed and compiled anew."""
        path = self._path(key)
        content = None if path is None else _read(path)
        if path is None or content is None:
            return None
        digest, payload = content[:32], content[32:]
        if hashlib.sha256(payload).digest() == digest:
            try:
                return cast(object, pickle.loads(payload))  # our own file, mode 0600
            except (RuntimeError, pickle.UnpicklingError, AttributeError, ImportError) as error:
                log.warning(
                    "a kept program does not fit this TorchTPU and is compiled anew: %s", error
                )
        with contextlib.suppress(OSError):
            path.unlink()
        return None

    def _store(self, key: str, executable: object) -> None:
        """Keep a program for the next start. A disk that refuses costs only that: one warning."""
        with self._storing:
            path = self._path(key)
            if path is None:
                return
            payload = pickle.dumps(executable)
            try:
                path.parent.mkdir(parents=True, exist_ok=True, mode=0o700)
                if not self._has_swept:
                    self._has_swept = True
                    _sweep(path.parent)
                _write(path, hashlib.sha256(payload).digest() + payload)
            except OSError as error:
                self._cache_dir = None
                log.warning(
                    "Compiled programs cannot be kept in %s (%s): the next start compiles again.",
                    path.parent,
                    error.strerror or error,
                )


def _read(path: Path) -> bytes | None:
    """The file, its modification time set to now: that says when it was last of use."""
    try:
        content = path.read_bytes()
    except OSError:
        return None
    with contextlib.suppress(OSError):
        os.utime(path)
    return content


def _write(path: Path, content: bytes) -> None:
    """By a rename, so that nobody reads half of it. Raises OSError and leaves nothing behind."""
    handle, name = tempfile.mkstemp(dir=path.parent, suffix=".staging")
    staging = Path(name)
    try:
        with os.fdopen(handle, "wb") as file:
            file.write(content)
        staging.rename(path)
    finally:
        staging.unlink(missing_ok=True)


def _sweep(folder: Path) -> None:
    """Remove programs, and what interrupted starts left of them, that nobody has used for long."""
    oldest_s = time.time() - UNUSED_S
    for path in (*folder.glob("*.program"), *folder.glob("*.staging")):
        with contextlib.suppress(OSError):  # another process sweeps too
            if path.stat().st_mtime < oldest_s:
                path.unlink()


def probe(device: Device) -> Road:
    """The best road that this device and this TorchTPU take, found by compiling a tiny program."""
    if not device.is_xla:
        return Road.EAGER
    for road in (Road.DONATED, Road.PUBLIC):
        try:
            if _works(road, device):
                return road
        except (ImportError, AttributeError, TypeError, ValueError, RuntimeError) as error:
            log.warning("the road %r is not open in this TorchTPU: %s", road.value, error)
    log.warning("no road with donation is open: every step will copy the whole KV cache")
    return Road.COMPILED


def _works(road: Road, device: Device) -> bool:
    """Whether a program of this road computes, and updates what it was given."""

    def add(one: Tensor, cache: Tensor) -> tuple[Tensor, ...]:
        cache[:1] = cache[:1] + one[:1]
        return (one + 1, cache)

    inputs = [torch.ones(8).to(device.torch_device) for _ in range(2)]
    if road is Road.DONATED:
        program = cast(Program, _static_compile(trace(add, inputs), inputs, [1]))
    else:
        program = _on_road(road, add, [1])
    two, cache = program(inputs)
    return two.cpu().tolist() == [2.0] * 8 and cache.cpu().tolist() == [2.0] + [1.0] * 7


def backend_compilations() -> int:
    """Programs that XLA compiled in this process, as TorchTPU counts them."""
    tpu: Any = getattr(torch, "tpu", None)
    return int(tpu._get_cache_misses()) if tpu is not None else 0


def trace(function: StepFunction, inputs: Sequence[Tensor]) -> torch.fx.GraphModule:
    """The function as a graph of operations, which nothing has computed."""
    from torch.fx.experimental.proxy_tensor import make_fx

    with torch.no_grad():
        return make_fx(function, tracing_mode="fake")(*inputs)


def _static_compile(
    graph: torch.fx.GraphModule, inputs: list[Tensor], donated: list[int]
) -> object:
    from torch_tpu._internal.compile import compiler

    with torch.no_grad():
        return compiler.StaticCompiler()(graph, inputs, donated_inputs=donated)


def _done(program: Program) -> "Future[Program]":
    future: Future[Program] = Future()
    future.set_result(program)
    return future


def _on_road(road: Road, function: StepFunction, donated: Sequence[int]) -> Program:
    """The program of a road that compiles when it is first called, or not at all."""
    if road is Road.EAGER:
        run: StepFunction = function
    elif road is Road.PUBLIC:
        run = _donating(function, donated)
    else:
        run = torch.compile(function, backend="tpu", dynamic=False)

    def program(inputs: list[Tensor]) -> tuple[Tensor, ...]:
        with torch.no_grad():
            return run(*inputs)

    return program


def _donating(function: StepFunction, donated: Sequence[int]) -> StepFunction:
    """`function` under torch.compile, its donated inputs given away through an identity operation.

    The compiled graph updates what the identity returned and copies the result back to the input: XLA
    sees that both are one buffer, so the copy costs nothing.
    """
    identity = _identity_op()

    def body(*inputs: Tensor) -> tuple[Tensor, ...]:
        given = [identity(t) if i in donated else t for i, t in enumerate(inputs)]
        outputs = function(*given)
        num_kept = len(outputs) - len(donated)
        for index, result in zip(donated, outputs[num_kept:], strict=True):
            inputs[index].copy_(result)
        return outputs[:num_kept]

    compiled = torch.compile(body, backend="tpu", dynamic=False)

    def run(*inputs: Tensor) -> tuple[Tensor, ...]:
        return (*compiled(*inputs), *(inputs[index] for index in donated))

    return run


@cache
def _identity_op() -> Callable[[Tensor], Tensor]:
    import jax

    def give(value: jax.Array) -> jax.Array:
        return value

    tpu: Any = torch.tpu  # type: ignore[attr-defined]
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", UserWarning)  # it says that it is experimental
        return cast(
            Callable[[Tensor], Tensor],
            tpu.pallas.jax_op("tpugate::give", give, donate_argnums=(0,)),
        )


def _machine_identity(device: Device) -> dict[str, object]:
    """XLA:CPU makes code for the processor it runs on, so that belongs to the key there."""
    identity: dict[str, object] = {"platform": device.platform, "versions": dict(device.versions)}
    if device.platform == "xla-cpu":
        identity["processor"] = processor_flags()
        identity["threads"] = torch.get_num_threads()
    return identity
