"""`tpugate gateway`: one gateway process."""

import click

from cli.errors import CommandError, SettingError


@click.command(epilog="Every setting can also be given as TPUGATE_ and its name in capitals.")
@click.option("--host", help="Address to listen on (default: 127.0.0.1).")
@click.option("--port", type=int, help="Port to listen on (default: 8000).")
@click.option("--redis-url", metavar="URL", help="redis://, rediss:// or unix://.")
@click.option(
    "--database-url", metavar="URL", help="SQLAlchemy URL (default: SQLite in --data-dir)."
)
@click.option("--data-dir", metavar="DIR", help="Where state is kept.")
@click.option("--queue-limit", type=int, metavar="N", help="Requests of a model before 429.")
def gateway(**flags: str | int | None) -> None:
    """Run one gateway process: OpenAI's HTTP API in front of the workers."""
    from gateway.asgi import run
    from gateway.errors import GatewayError, SettingsError
    from gateway.settings import GatewaySettings

    try:
        run(GatewaySettings.from_environment(None, **flags))
    except SettingsError as error:
        raise SettingError(str(error)) from error
    except GatewayError as error:
        raise CommandError(str(error)) from error
