"""How a command fails: one sentence on stderr and an exit code, never a traceback.

click.ClickException
└── CommandError     exit code 1: it could not be done
    └── SettingError exit code 2: a setting is wrong, trying again will not help
"""

import click

from workers.config import sentence


class CommandError(click.ClickException):
    exit_code = 1

    def __init__(self, message: str) -> None:
        super().__init__(sentence(message))


class SettingError(CommandError):
    exit_code = 2
