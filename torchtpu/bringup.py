"""`bring_up(kind)`: from a bare process to a device that has proved it computes.

    device = bring_up("tpu")          # before anything imports torch_tpu
    x = torch.ones(2, device=device.torch_device)

The order matters and is the same every time: find what drives the device, prepare the environment,
import torch, load TorchTPU, run the self-test. Nothing here imports torch until `bring_up` is called.
"""

from __future__ import annotations

import contextlib
import importlib.metadata
import io
import platform
import threading
import types
import warnings
from collections.abc import Iterator

from torchtpu import environment
from torchtpu.device import Device, DeviceKind, Platform
from torchtpu.environment import DeviceSettings
from torchtpu.errors import DeviceMissingError
from torchtpu.memory import available_memory_bytes, keep_freed_memory
from torchtpu.pjrt_cpu.build import build_shim
from torchtpu.pjrt_cpu.plugin import LoadedShim, choose_plugin, load_shim
from torchtpu.selftest import run_self_test

VERSIONED_PACKAGES = ("torch", "torch-tpu", "libtpu", "jax", "transformers")
_INSTALL = "install the extra `worker` of tpugate"

_ready: dict[DeviceKind, Device] = {}
_lock = threading.Lock()


def bring_up(
    kind: DeviceKind, *, threads: int | None = None, settings: DeviceSettings | None = None
) -> Device:
    """Make `kind` usable in this process and test it. A second call returns the same device.

    "tpu" is a TPU if there is one, else XLA:CPU behind our PJRT shim; "cpu" and "cuda" are plain
    PyTorch. `threads` is the number of threads that compute on a CPU (None: all cores); only the
    first call's counts. `settings` default to the environment's.
    Raises DeviceError with one sentence for the user, SettingError for a bad variable.
    """
    with _lock:
        if kind not in _ready:
            settings = settings or environment.read_settings()
            if kind == "tpu":
                device = _bring_up_tpu(threads, settings)
            else:
                device = _bring_up_plain(kind, threads)
            with _quiet():
                run_self_test(device)
            _ready[kind] = device
        return _ready[kind]


def package_versions() -> dict[str, str]:
    """Versions of the installed packages that matter to a device, and of Python."""
    versions = {"python": platform.python_version()}
    for name in VERSIONED_PACKAGES:
        with contextlib.suppress(importlib.metadata.PackageNotFoundError):
            versions[name] = importlib.metadata.version(name)
    return versions


def _bring_up_plain(kind: DeviceKind, threads: int | None) -> Device:
    environment.apply(environment.plain_variables())
    torch = _import_torch()
    if threads is not None:
        torch.set_num_threads(threads)
    name: Platform
    if kind == "cuda":
        if not torch.cuda.is_available():
            reason = (
                "torch sees no GPU" if torch.version.cuda else "this torch is built without CUDA"
            )
            raise DeviceMissingError(f"Device cuda cannot be used: {reason}.")
        name, num_chips = "cuda", torch.cuda.device_count()
        memory = int(torch.cuda.get_device_properties(0).total_memory)
    else:
        name, num_chips, memory = "cpu", 1, available_memory_bytes()
    return Device(
        kind=kind,
        platform=name,
        torch_device=torch.device(kind),
        num_chips=num_chips,
        memory_bytes=memory,
        versions=types.MappingProxyType(package_versions()),
    )


def _bring_up_tpu(threads: int | None, settings: DeviceSettings) -> Device:
    num_chips = environment.num_tpu_chips() if settings.tpu_platform != "xla-cpu" else 0
    if settings.tpu_platform == "libtpu" and num_chips == 0:
        raise DeviceMissingError("TPUGATE_TPU_PLATFORM is libtpu, but this machine has no TPU.")
    versions = package_versions()
    has_attention = has_linear = False
    if num_chips:
        environment.apply(environment.plain_variables())
    else:
        shim = _prepare_xla_cpu(threads, settings)
        versions["pjrt-cpu-api"] = shim.pjrt_version
        has_attention, has_linear = shim.has_attention, shim.has_linear
    torch = _load_torch_tpu(num_chips or 1)
    memory = (_chip_memory_bytes() if num_chips else 0) or available_memory_bytes()
    return Device(
        kind="tpu",
        platform="tpu" if num_chips else "xla-cpu",
        torch_device=torch.device("tpu", 0),
        num_chips=num_chips or 1,
        memory_bytes=memory,
        versions=types.MappingProxyType(versions),
        has_native_attention=has_attention,
        has_native_linear=has_linear,
    )


def _prepare_xla_cpu(threads: int | None, settings: DeviceSettings) -> LoadedShim:
    """Make TorchTPU find XLA:CPU when it is imported."""
    shim = build_shim(settings.cache_dir)
    plugin = choose_plugin(settings, shim)
    environment.apply(
        environment.xla_cpu_variables(
            shim,
            plugin,
            threads=threads or environment.num_cpu_cores(),
            xla_flags=settings.xla_flags,
        )
    )
    if not environment.is_tcmalloc_loaded():
        keep_freed_memory()
    return load_shim(shim)


def _import_torch() -> types.ModuleType:
    try:
        with _quiet():
            import torch
    except ImportError as error:
        raise DeviceMissingError(f"PyTorch cannot be imported ({error}): {_INSTALL}.") from error
    return torch


@contextlib.contextmanager
def _quiet() -> Iterator[None]:
    """Without what torch and TorchTPU say on stderr while they start, which no user can act on.

    That is a banner, deprecations within torch, and advice to preload tcmalloc; `doctor` gives that.
    """
    with warnings.catch_warnings(), contextlib.redirect_stderr(io.StringIO()):
        warnings.simplefilter("ignore")
        yield


def _load_torch_tpu(num_chips: int) -> types.ModuleType:
    torch = _import_torch()
    try:
        with _quiet():
            from torch_tpu import _loader
            from torch_tpu._internal.utils import hardware

            # It counts PCI devices, and does nothing where it finds none.
            if hardware.get_tpu_device_count() == 0:
                hardware.get_tpu_device_count = lambda: num_chips
            _loader.load()
    except ImportError as error:
        raise DeviceMissingError(f"TorchTPU cannot be imported ({error}): {_INSTALL}.") from error
    return torch


def _chip_memory_bytes() -> int:
    from torch_tpu._internal.utils import hardware

    return hardware.get_hbm_bytes_per_device() or 0
