"""The database engine: SQLite in the data folder, or what `database_url` names."""

import logging
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

from sqlalchemy import event, make_url
from sqlalchemy.engine.interfaces import DBAPIConnection
from sqlalchemy.exc import DBAPIError, IntegrityError, SQLAlchemyError
from sqlalchemy.ext.asyncio import AsyncSession, async_sessionmaker, create_async_engine
from sqlalchemy.pool import ConnectionPoolEntry

from gateway.db.schema import is_current, upgrade
from gateway.errors import StartupError, UnavailableError
from gateway.settings import GatewaySettings

logger = logging.getLogger(__name__)


class Database:
    """Owns the engine; one per application."""

    def __init__(self, settings: GatewaySettings) -> None:
        url = settings.database_url or f"sqlite+aiosqlite:///{settings.data_dir / 'tpugate.sqlite'}"
        try:
            self._name = _shown(url)
            self._engine = create_async_engine(url, hide_parameters=True)
            if self._engine.dialect.name == "sqlite":
                event.listen(self._engine.sync_engine, "connect", _tune_sqlite)
        except (SQLAlchemyError, ImportError) as error:
            raise StartupError(f"TPUGATE_DATABASE_URL cannot be used: {error}") from error
        self._sessions = async_sessionmaker(self._engine, expire_on_commit=False)

    async def create_tables(self) -> None:
        """Bring the schema up to date. Raises `StartupError` if the database cannot be opened or written."""
        try:
            async with self._engine.connect() as connection:
                if await connection.run_sync(is_current):
                    return
            async with self._engine.begin() as connection:
                await connection.run_sync(upgrade)
        except (SQLAlchemyError, OSError) as error:
            raise StartupError(
                f"the database {self._name} cannot be opened: {_reason(error)}"
            ) from error

    @asynccontextmanager
    async def session(self) -> AsyncIterator[AsyncSession]:
        """A session that commits at the end and rolls back on an error.

        Raises `UnavailableError` if the database is away or cannot be written.
        """
        try:
            async with self._sessions.begin() as session:
                yield session
        except IntegrityError:
            raise
        except (DBAPIError, OSError) as error:
            logger.warning("the database %s cannot be used: %s", self._name, _reason(error))
            raise UnavailableError(
                "The database cannot be used at the moment; the server's log says why."
            ) from error

    async def close(self) -> None:
        await self._engine.dispose()


def _tune_sqlite(connection: DBAPIConnection, _: ConnectionPoolEntry) -> None:
    """Readers and the one writer do not wait for each other, and another process's write is waited for."""
    cursor = connection.cursor()
    cursor.execute("PRAGMA busy_timeout = 10000")
    cursor.execute("PRAGMA journal_mode = WAL")
    cursor.execute("PRAGMA synchronous = NORMAL")
    cursor.close()


def _reason(error: Exception) -> str:
    """The driver's first line, without the statement."""
    return (str(getattr(error, "orig", error)).splitlines() or [type(error).__name__])[0]


def _shown(url: str) -> str:
    """A file's path, or host, port and name: nothing secret."""
    parsed = make_url(url)
    if parsed.host is None:
        return parsed.database or "in memory"
    port = f":{parsed.port}" if parsed.port else ""
    return f"{parsed.host}{port}/{parsed.database or ''}"
