"""How a command fails: one sentence on stderr and an exit code, never a traceback.

click.ClickException
└── CommandError     exit code 1: it could not be done
    └── SettingError exit code 2: a setting is wrong, trying again will not help
"""

import click


class CommandError(click.ClickException):
    exit_code = 1


class SettingError(CommandError):
    exit_code = 2
