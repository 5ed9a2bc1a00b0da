"""The one place of this package that reads and writes the process environment. Never imports torch.

TorchTPU reads its environment once, while it is imported; so does XLA when its first client is made.
`apply` therefore runs first, and refuses when it is too late to make a difference.

| variable                   | meaning                                                                   |
|----------------------------|---------------------------------------------------------------------------|
| TPUGATE_CACHE_DIR          | root of models, programs and the shim; default ~/.cache/tpugate           |
| TPUGATE_PJRT_CPU_PLUGIN    | the PJRT CPU plugin to use where there is no TPU                          |
| TPUGATE_TPU_PLATFORM       | what "tpu" means: auto (default), libtpu, xla-cpu                         |
| TPUGATE_XLA_FLAGS          | flags for XLA, before those in XLA_FLAGS                                  |
"""

import os
import re
import sys
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Literal, cast, get_args

from torchtpu.errors import EnvironmentConflictError, SettingError

TpuPlatform = Literal["auto", "libtpu", "xla-cpu"]

_GOOGLE_PCI_VENDOR = "0x1ae0"
# The vendor alone says nothing: Google's virtual network card has it too.
_TPU_PCI_DEVICES = {
    "0x005e": "v4",
    "0x0062": "v5p",
    "0x0063": "v5e",
    "0x006f": "v6e",
    "0x0076": "v7x",
}
_TCMALLOC_NAMES = ("libtcmalloc_minimal.so.4", "libtcmalloc.so.4")
_LIBRARY_DIRS = ("/usr/lib/x86_64-linux-gnu", "/usr/lib64", "/usr/lib", "/usr/local/lib")

# Only a default: a user who wants XLA's log sets it. 2 leaves errors.
_DEFAULTS = {"TF_CPP_MIN_LOG_LEVEL": "2"}


# What `xla_cpu_variables` may have put into this process's environment.
_OURS_OF_XLA_CPU = frozenset({"TPU_LIBRARY_PATH", "TPUGATE_PJRT_PLUGIN", "XLA_FLAGS", "PJRT_NPROC"})


@dataclass(frozen=True, slots=True)
class DeviceSettings:
    """What the user chose about devices; see the table above."""

    cache_dir: Path
    pjrt_cpu_plugin: Path | None
    tpu_platform: TpuPlatform
    xla_flags: str
    # Try an unknown plugin in a child process first, because a bad one can crash.
    try_plugin_first: bool = True


def read_settings() -> DeviceSettings:
    """Read our variables. Raises SettingError on a value that makes no sense."""
    platform = os.environ.get("TPUGATE_TPU_PLATFORM", "auto")
    if platform not in get_args(TpuPlatform):
        raise SettingError(
            f"TPUGATE_TPU_PLATFORM is {platform!r}: use {', '.join(get_args(TpuPlatform))}."
        )
    plugin = os.environ.get("TPUGATE_PJRT_CPU_PLUGIN")
    flags = (os.environ.get("TPUGATE_XLA_FLAGS", ""), os.environ.get("XLA_FLAGS", ""))
    return DeviceSettings(
        cache_dir=cache_dir(),
        pjrt_cpu_plugin=Path(plugin) if plugin else None,
        tpu_platform=cast(TpuPlatform, platform),
        xla_flags=" ".join(dict.fromkeys(" ".join(flags).split())),
    )


def child_environment(settings: DeviceSettings) -> dict[str, str]:
    """The environment of a child process in which `read_settings` returns `settings`."""
    variables = dict(os.environ)
    variables["TPUGATE_CACHE_DIR"] = str(settings.cache_dir)
    variables["TPUGATE_TPU_PLATFORM"] = settings.tpu_platform
    variables["TPUGATE_XLA_FLAGS"] = settings.xla_flags
    if settings.pjrt_cpu_plugin is not None:
        variables["TPUGATE_PJRT_CPU_PLUGIN"] = str(settings.pjrt_cpu_plugin)
    return variables


def cache_dir(environ: Mapping[str, str] | None = None) -> Path:
    """The root of all that can be made or fetched again: models, programs, the shim.

    Raises SettingError where there is neither a setting nor a home directory.
    """
    env = os.environ if environ is None else environ
    if chosen := env.get("TPUGATE_CACHE_DIR"):
        return Path(chosen).expanduser().absolute()
    if base := env.get("XDG_CACHE_HOME"):
        return Path(base) / "tpugate"
    try:
        return Path.home() / ".cache" / "tpugate"
    except RuntimeError as error:
        raise SettingError(
            "There is no home directory to keep caches in; set TPUGATE_CACHE_DIR."
        ) from error


def plain_variables() -> dict[str, str]:
    """The environment of plain torch, which would load TorchTPU by itself where it is installed.

    Also that of TorchTPU on a TPU: the package libtpu names its own library.
    """
    return {"TORCH_DEVICE_BACKEND_AUTOLOAD": "0"}


def xla_cpu_variables(
    shim: Path, plugin: Path, *, threads: int | None, xla_flags: str = ""
) -> dict[str, str]:
    """The environment of TorchTPU on XLA:CPU. `threads` counts XLA's own; None leaves it to XLA."""
    variables = {
        **plain_variables(),
        "TPU_LIBRARY_PATH": str(shim),
        "TPUGATE_PJRT_PLUGIN": str(plugin),
        # No metadata server of a cloud machine to wait for.
        "TPU_SKIP_MDS_QUERY": "1",
    }
    if xla_flags:
        variables["XLA_FLAGS"] = xla_flags
    if threads is not None:
        variables["PJRT_NPROC"] = str(threads)
    return variables


def tpu_compiler_environment(printed: Path) -> dict[str, str]:
    """The environment of a process that compiles with libtpu where there is no TPU.

    The compiler writes the programs that it made to the folder `printed`, as text: reading them back
    through JAX fails where its XLA is older than libtpu's.
    """
    flags = {
        "xla_jf_dump_to": str(printed),
        "xla_jf_dump_hlo_text": "true",
        "xla_jf_dump_llo_text": "false",
        "xla_jf_dump_category_filter": "basic",
    }
    variables = {k: v for k, v in os.environ.items() if k not in _OURS_OF_XLA_CPU}
    return variables | {
        "JAX_PLATFORMS": "cpu",
        "LIBTPU_INIT_ARGS": " ".join(f"--{name}={value}" for name, value in flags.items()),
        # No metadata server of a cloud machine to wait for, no neighbours.
        "TPU_SKIP_MDS_QUERY": "1",
        "TPU_WORKER_HOSTNAMES": "localhost",
        # Two compilers at once would abort on a lock file.
        "ALLOW_MULTIPLE_LIBTPU_LOAD": "1",
        "TF_CPP_MIN_LOG_LEVEL": "3",
    }


def apply(variables: Mapping[str, str]) -> None:
    """Write `variables` to the process environment.

    Raises EnvironmentConflictError when torch_tpu is already imported and read something else.
    Plain torch does no harm: it reads none of these unless it loads torch_tpu by itself.
    """
    if "torch_tpu" in sys.modules:
        different = sorted(k for k, v in variables.items() if os.environ.get(k) != v)
        if different:
            raise EnvironmentConflictError(
                "torch_tpu was imported before the device was brought up, with other values of "
                f"{', '.join(different)}: call bring_up first, or set "
                "TORCH_DEVICE_BACKEND_AUTOLOAD=0 so that torch does not import it."
            )
    os.environ.update(variables)
    for name, value in _DEFAULTS.items():
        os.environ.setdefault(name, value)


def num_tpu_chips(devices: Path = Path("/dev"), pci: Path = Path("/sys/bus/pci/devices")) -> int:
    """TPU chips this process can open: /dev/accel0, … or PCI devices given out through VFIO."""
    accelerators = [p for p in devices.glob("accel*") if re.fullmatch(r"accel\d+", p.name)]
    return len(accelerators) or sum(_is_open_tpu(entry, devices) for entry in pci.glob("*"))


def granted_chips(
    devices: Path = Path("/dev"), pci: Path = Path("/sys/bus/pci/devices")
) -> tuple[str, int] | None:
    """Generation and number of the TPU chips that this process can open; None without any.

    A chip is what is billed: one of v7x is two devices to torch.
    """
    num_chips = (
        0 if os.environ.get("TPUGATE_TPU_PLATFORM") == "xla-cpu" else num_tpu_chips(devices, pci)
    )
    if not num_chips:
        return None
    generations = {name for entry in pci.glob("*") if (name := _tpu_generation(entry))}
    return (generations.pop() if len(generations) == 1 else "tpu"), num_chips


def _is_open_tpu(entry: Path, devices: Path) -> bool:
    try:
        group = (entry / "iommu_group").readlink().name
    except OSError:
        return False
    return _tpu_generation(entry) is not None and (devices / "vfio" / group).exists()


def _tpu_generation(entry: Path) -> str | None:
    try:
        vendor = (entry / "vendor").read_text(encoding="ascii").strip()
        device = (entry / "device").read_text(encoding="ascii").strip()
    except (OSError, UnicodeDecodeError):
        return None
    return _TPU_PCI_DEVICES.get(device) if vendor == _GOOGLE_PCI_VENDOR else None


def num_cpu_cores(control_group: Path = Path("/sys/fs/cgroup")) -> int:
    """Cores this process may use: its CPU affinity, and the quota of its control group if lower."""
    cores = len(os.sched_getaffinity(0))
    try:
        quota, period = (control_group / "cpu.max").read_text(encoding="ascii").split()
        return max(1, min(cores, round(int(quota) / int(period))))
    except (OSError, ValueError, ZeroDivisionError):
        return cores


def find_tcmalloc() -> Path | None:
    """The tcmalloc library TorchTPU would like to be preloaded, None where it is not installed."""
    return next(
        (
            path
            for directory in _LIBRARY_DIRS
            for name in _TCMALLOC_NAMES
            if (path := Path(directory) / name).exists()
        ),
        None,
    )


def is_tcmalloc_loaded(maps: Path = Path("/proc/self/maps")) -> bool:
    """Whether this process runs on tcmalloc."""
    try:
        return "libtcmalloc" in maps.read_text(encoding="utf-8")
    except OSError:
        return False


def worker_preload() -> dict[str, str]:
    """Variables to start a worker process with so that tcmalloc is its allocator; may be empty.

    Only the parent can do this: the loader reads LD_PRELOAD before the program starts.
    """
    library = find_tcmalloc()
    if library is None:
        return {}
    others = [p for p in os.environ.get("LD_PRELOAD", "").split(":") if p and p != str(library)]
    return {"LD_PRELOAD": ":".join([str(library), *others])}


def find_on_path(names: tuple[str, ...]) -> Path | None:
    """The first of the executables `names` that PATH leads to."""
    import shutil

    return next((Path(found) for name in names if (found := shutil.which(name))), None)


def processor_flags() -> str:
    """What this processor can do, in the words of /proc/cpuinfo: code made for it runs where it is equal."""
    cpuinfo = Path("/proc/cpuinfo")
    if not cpuinfo.exists():
        return "unknown"
    lines = cpuinfo.read_text().splitlines()
    return next((line for line in lines if line.startswith(("flags", "Features"))), "unknown")
