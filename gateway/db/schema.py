"""The database's schema: made or brought up to date by Alembic's migrations, when a gateway starts.

Several gateways may start at once: on PostgreSQL one waits for the other's advisory lock, on SQLite for the
write lock. Alembic is loaded only if there is something to do.
"""

from importlib.resources import as_file, files

from sqlalchemy import Connection, inspect, text

HEAD = "0002"
"""The newest revision in `gateway/db/migrations/versions`."""
_BEFORE_ALEMBIC = "0001"
"""What a database has that has keys and no revision: it was made before there were any."""
_LOCK = 0x7467617465
"""Of PostgreSQL's advisory locks, ours."""


def is_current(connection: Connection) -> bool:
    """Whether the schema is the one that this gateway knows, or a newer one."""
    tables = inspect(connection)
    if not tables.has_table("alembic_version"):
        return False
    version = connection.scalar(text("SELECT version_num FROM alembic_version"))
    return version is not None and version >= HEAD


def upgrade(connection: Connection) -> None:
    """Bring the schema to `HEAD`; the connection's transaction is to be committed by the caller."""
    from alembic import command
    from alembic.config import Config

    _lock(connection)
    if is_current(connection):
        return
    with as_file(files("gateway.db") / "migrations") as folder:
        config = Config()
        config.set_main_option("script_location", str(folder).replace("%", "%%"))
        config.attributes["connection"] = connection
        tables = inspect(connection)
        if tables.has_table("api_keys") and not tables.has_table("alembic_version"):
            command.stamp(config, _BEFORE_ALEMBIC)
        command.upgrade(config, "head")


def _lock(connection: Connection) -> None:
    """Until the transaction ends."""
    if connection.dialect.name == "postgresql":
        connection.execute(text("SELECT pg_advisory_xact_lock(:key)"), {"key": _LOCK})
    else:
        # The driver begins a transaction with the first change of a row, and tables are none.
        connection.exec_driver_sql("BEGIN IMMEDIATE")
