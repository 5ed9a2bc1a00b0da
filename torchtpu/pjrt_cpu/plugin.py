"""Finds XLA's CPU plugin and says whether the shim can drive it.

A plugin is accepted for what it does, never for its name: the shim checks the API it speaks, and a
child process tries the whole self-test on it before this process loads it, because a plugin of
another XLA may well abort. The child's good verdict is kept beside the shim, so it runs once.
"""

import contextlib
import ctypes
import hashlib
import importlib.metadata
import importlib.util
import signal
import subprocess
import sys
from dataclasses import dataclass, replace
from pathlib import Path

from torchtpu.environment import DeviceSettings, child_environment
from torchtpu.errors import NoPluginError, PluginRejectedError

# Import package -> (distribution to install, file in it), in the order they are tried.
KNOWN_PACKAGES = {
    "lammps_jax_pjrt_cpu": ("lammps-jax-pjrt-cpu", "pjrt_c_api_cpu_plugin.so"),
}
_TRIAL_TIMEOUT_S = 300


def find_plugins(settings: DeviceSettings) -> list[Path]:
    """The plugin named by the setting alone, else those of the known packages installed.

    Raises NoPluginError when there is none.
    """
    chosen = settings.pjrt_cpu_plugin
    if chosen is not None:
        if not chosen.is_file():
            raise NoPluginError(f"TPUGATE_PJRT_CPU_PLUGIN names {chosen}, which is not a file.")
        return [chosen.resolve()]
    found = []
    for package, (_, file) in KNOWN_PACKAGES.items():
        spec = importlib.util.find_spec(package)
        folders = (spec.submodule_search_locations or []) if spec else []
        found += [path for folder in folders if (path := Path(folder) / file).is_file()]
    if found:
        return found
    names = " or ".join(distribution for distribution, _ in KNOWN_PACKAGES.values())
    raise NoPluginError(
        "No PJRT CPU plugin is installed, and the tpu device needs one where there is no TPU: "
        f"`pip install {names}`, or name one with TPUGATE_PJRT_CPU_PLUGIN."
    )


def choose_plugin(settings: DeviceSettings, shim: Path) -> Path:
    """The first plugin that passes its trial. Raises NoPluginError or PluginRejectedError."""
    refusal: PluginRejectedError | None = None
    for plugin in find_plugins(settings):
        try:
            if settings.try_plugin_first:
                _try_once(replace(settings, pjrt_cpu_plugin=plugin), plugin, shim)
        except PluginRejectedError as error:
            refusal = error
        else:
            return plugin
    assert refusal is not None  # find_plugins returns at least one
    raise refusal


def _try_once(settings: DeviceSettings, plugin: Path, shim: Path) -> None:
    facts = plugin.stat()
    about_plugin = (str(plugin), facts.st_size, facts.st_mtime_ns)
    about_caller = (sys.version, _version("torch"), _version("torch-tpu"), settings.xla_flags)
    identity = repr((about_plugin, about_caller))
    key = hashlib.sha256(identity.encode()).hexdigest()[:16]
    verdict = shim.with_name(f"{shim.stem}-{key}.accepted")
    if verdict.exists():
        return
    _try(settings, plugin)
    with contextlib.suppress(OSError):  # then the next start tries again
        verdict.write_text(identity, encoding="utf-8")


def _version(distribution: str) -> str:
    try:
        return importlib.metadata.version(distribution)
    except importlib.metadata.PackageNotFoundError:
        return ""


def _try(settings: DeviceSettings, plugin: Path) -> None:
    """Bring the device up in a child process. Raises PluginRejectedError with what went wrong."""
    try:
        done = subprocess.run(
            [sys.executable, "-m", "torchtpu.trial"],
            env=child_environment(settings),
            capture_output=True,
            text=True,
            check=False,
            timeout=_TRIAL_TIMEOUT_S,
        )
    except subprocess.TimeoutExpired as error:
        raise PluginRejectedError(f"The PJRT CPU plugin {plugin} hangs in its trial.") from error
    if done.returncode == 0:
        return
    if done.returncode < 0:
        name = signal.Signals(-done.returncode).name
        reason = f"The PJRT CPU plugin {plugin} crashes in its trial ({name})."
    else:
        words = (done.stdout.strip() or done.stderr.strip() or "no reason given").splitlines()[-1]
        reason = f"The PJRT CPU plugin {plugin} does not pass its trial: {words}"
    raise PluginRejectedError(reason)


@dataclass(frozen=True)
class LoadedShim:
    pjrt_version: str
    has_attention: bool
    """Whether the custom call of `torchtpu.ops.native_attention` can be made."""
    has_linear: bool
    """Whether that of `torchtpu.ops.native_linear` can be."""


def load_shim(shim: Path) -> LoadedShim:
    """Load the shim into this process, with the plugin its environment names, for its verdict.

    Call after `environment.apply` and before TorchTPU gets the same library: it does not survive a
    refusal. Raises PluginRejectedError.
    """
    try:
        library = ctypes.CDLL(str(shim))
    except OSError as error:
        raise PluginRejectedError(f"The PJRT shim does not load: {error}.") from error
    library.tpugate_pjrt_error.restype = ctypes.c_char_p
    reason = library.tpugate_pjrt_error()
    if reason:
        raise PluginRejectedError(f"The PJRT CPU plugin was refused: {reason.decode()}.")
    return LoadedShim(
        pjrt_version=f"0.{int(library.tpugate_pjrt_minor())}",
        has_attention=bool(library.tpugate_pjrt_has_attention()),
        has_linear=bool(library.tpugate_pjrt_has_linear()),
    )
