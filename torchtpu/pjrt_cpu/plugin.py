"""Finds XLA's CPU plugin and says whether the shim can drive it.

A plugin is accepted for what it does, never for its name: the shim checks the API it speaks, and the
self-test of `bring_up` runs programs on it.
"""

import ctypes
import importlib.util
from dataclasses import dataclass
from pathlib import Path

from torchtpu.environment import DeviceSettings
from torchtpu.errors import NoPluginError, PluginRejectedError

# Import package -> (distribution to install, file in it), in the order they are tried.
KNOWN_PACKAGES = {
    "lammps_jax_pjrt_cpu": ("lammps-jax-pjrt-cpu", "pjrt_c_api_cpu_plugin.so"),
}


@dataclass(frozen=True, slots=True)
class LoadedShim:
    """A shim that holds an accepted plugin, and the API version of that plugin."""

    path: Path
    plugin: Path
    api_version: str


def find_plugin(settings: DeviceSettings) -> Path:
    """The plugin named by the setting, else that of the first known package installed.

    Raises NoPluginError.
    """
    chosen = settings.pjrt_cpu_plugin
    if chosen is not None:
        if not chosen.is_file():
            raise NoPluginError(f"TPUGATE_PJRT_CPU_PLUGIN names {chosen}, which is not a file.")
        return chosen.resolve()
    for package, (_, file) in KNOWN_PACKAGES.items():
        spec = importlib.util.find_spec(package)
        for folder in (spec.submodule_search_locations or []) if spec else []:
            if (Path(folder) / file).is_file():
                return Path(folder) / file
    names = " or ".join(distribution for distribution, _ in KNOWN_PACKAGES.values())
    raise NoPluginError(
        "No PJRT CPU plugin is installed, and the tpu device needs one where there is no TPU: "
        f"`pip install {names}`, or name one with TPUGATE_PJRT_CPU_PLUGIN."
    )


def load_shim(shim: Path, plugin: Path) -> LoadedShim:
    """Load the shim into this process, with the plugin its environment names, and ask for its verdict.

    TorchTPU later gets the same library; it does not survive a refusal, so ask here first. Call
    after `environment.apply`. Raises PluginRejectedError with the shim's reason.
    """
    try:
        library = ctypes.CDLL(str(shim))
    except OSError as error:
        raise PluginRejectedError(f"The PJRT shim does not load: {error}.") from error
    library.tpugate_pjrt_error.restype = ctypes.c_char_p
    reason = library.tpugate_pjrt_error()
    if reason:
        raise PluginRejectedError(f"The PJRT CPU plugin was refused: {reason.decode()}.")
    minor = int(library.tpugate_pjrt_minor())
    return LoadedShim(path=shim, plugin=plugin, api_version=f"0.{minor}")
