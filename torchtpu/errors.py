"""Errors of the device layer.

TorchTpuError                   everything below; its text is one sentence for a user
├── SettingError                an environment variable of ours has a value that makes no sense
├── AheadOfTimeError            the compiler of a TPU that is not here fails, or refuses a program
└── DeviceError                 the chosen device cannot be used
    ├── EnvironmentConflictError    torch_tpu was imported before its environment was prepared
    ├── DeviceMissingError          no such device here, or the package that drives it is not installed
    ├── NoCompilerError             no C compiler to build the PJRT shim with
    ├── ShimBuildError              the C compiler refused the PJRT shim
    ├── NoPluginError               no PJRT CPU plugin found
    ├── PluginRejectedError         the PJRT CPU plugin cannot be loaded or speaks another API
    └── SelfTestError               the device computes, but not what it should
"""


class TorchTpuError(Exception):
    """Base of all errors of this package."""


class SettingError(TorchTpuError):
    """An environment variable holds a value that cannot be used."""


class AheadOfTimeError(TorchTpuError):
    """A program cannot be compiled for a TPU that is not here."""


class DeviceError(TorchTpuError):
    """The chosen device cannot be used."""


class EnvironmentConflictError(DeviceError):
    """TorchTPU has already read an environment other than the one needed."""


class DeviceMissingError(DeviceError):
    """There is no such device, or the package that drives it is not installed."""


class NoCompilerError(DeviceError):
    """No C compiler was found."""


class ShimBuildError(DeviceError):
    """The C compiler failed on the PJRT shim."""


class NoPluginError(DeviceError):
    """No PJRT CPU plugin was found."""


class PluginRejectedError(DeviceError):
    """The PJRT CPU plugin does not load or does not fit."""


class SelfTestError(DeviceError):
    """The device failed its self-test."""
