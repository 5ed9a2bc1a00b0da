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
    work: Callable[[Any], Awaitable[T]],
    database_url: str | None,
    data_dir: str | None,
    *,
    is_new: bool = False,
) -> T:
    """Run `work(database)`; the gateway's errors become a sentence and an exit code.

    `is_new` makes the database if there is none.

    Raises `SettingError` for what was asked wrongly, `CommandError` for what cannot be done.
    """
    from gateway.db.engine import Database
    from gateway.errors import BadRequestError, GatewayError, SettingsError
    from gateway.settings import GatewaySettings

    async def run() -> T:
        given = {"database_url": database_url, "data_dir": data_dir}
        settings = GatewaySettings.from_environment(None, **given)
        is_there = settings.database_url or (settings.data_dir / "tpugate.sqlite").exists()
        if is_new and not is_there:
            settings.data_dir.mkdir(parents=True, exist_ok=True, mode=0o700)
        elif not is_there:
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
