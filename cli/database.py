"""What commands on the ledger share: the gateway's database, opened as a gateway with the same settings would."""

import asyncio
from collections.abc import Awaitable, Callable
from typing import Any, TypeVar

import click

from cli.errors import CommandError, SettingError

F = TypeVar("F", bound=Callable[..., Any])
T = TypeVar("T")

_OPTIONS = (
    click.option(
        "--database-url", metavar="URL", help="SQLAlchemy URL (default: SQLite in --data-dir)."
    ),
    click.option(
        "--data-dir", metavar="DIR", help="Where state is kept (default: ~/.local/share/tpugate)."
    ),
    click.option("--json", "as_json", is_flag=True, help="Print JSON."),
)


def database_options(command: F) -> F:
    for option in reversed(_OPTIONS):
        command = option(command)
    return command


def with_database(
    work: Callable[[Any], Awaitable[T]], database_url: str | None, data_dir: str | None
) -> T:
    """Run `work(database)`; the gateway's errors become a sentence and an exit code.

    Raises `SettingError` for what was asked wrongly, `CommandError` for what cannot be done.
    """
    from gateway.db.engine import Database
    from gateway.errors import BadRequestError, GatewayError, SettingsError
    from gateway.settings import GatewaySettings

    async def run() -> T:
        given = {"database_url": database_url, "data_dir": data_dir}
        settings = GatewaySettings.from_environment(None, **given)
        if settings.database_url is None and not (settings.data_dir / "tpugate.sqlite").exists():
            raise CommandError(f"There is no ledger in {settings.data_dir}: give --data-dir.")
        database = Database(settings)
        try:
            await database.create_tables()
            return await work(database)
        finally:
            await database.close()

    try:
        return asyncio.run(run())
    except (SettingsError, BadRequestError) as error:
        raise SettingError(str(error)) from error
    except GatewayError as error:
        raise CommandError(str(error)) from error
