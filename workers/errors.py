"""Errors of a worker process.

WorkerError
├── ConfigError     a setting is missing or wrong: the process does not start
├── LoadError       the model or the device cannot be brought up: the process ends, exit code 1
│   └── HopelessLoadError   … and trying again will not help: exit code 2
└── RequestError    one request cannot run; the others go on
"""


class WorkerError(Exception):
    """Base of all; the message is one sentence that a user can act on."""


class ConfigError(WorkerError):
    pass


class LoadError(WorkerError):
    pass


class HopelessLoadError(LoadError):
    pass


class RequestError(WorkerError):
    def __init__(self, sentence: str, param: str | None = None) -> None:
        """`param` is the field of the client's body that is at fault, if one is."""
        super().__init__(sentence)
        self.param = param
