"""The database engine: SQLite in the data folder, or what `database_url` names."""

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

from advanced_alchemy.base import UUIDAuditBase
from sqlalchemy.exc import SQLAlchemyError
from sqlalchemy.ext.asyncio import AsyncSession, async_sessionmaker, create_async_engine

from gateway.errors import StartupError
from gateway.settings import GatewaySettings


class Database:
    """Owns the engine; one per application."""

    def __init__(self, settings: GatewaySettings) -> None:
        self._path = settings.data_dir / "tpugate.sqlite"
        url = settings.database_url or f"sqlite+aiosqlite:///{self._path}"
        try:
            self._engine = create_async_engine(url)
        except (SQLAlchemyError, ImportError) as error:
            raise StartupError(f"TPUGATE_DATABASE_URL cannot be used: {error}") from error
        self._sessions = async_sessionmaker(self._engine, expire_on_commit=False)

    async def create_tables(self) -> None:
        """Make what is missing. Raises `StartupError` if the database cannot be opened or written."""
        try:
            async with self._engine.begin() as connection:
                await connection.run_sync(UUIDAuditBase.metadata.create_all)
        except (SQLAlchemyError, OSError) as error:
            reason = str(getattr(error, "orig", error)).splitlines()[0]
            raise StartupError(f"the database {self._path} cannot be opened: {reason}") from error

    @asynccontextmanager
    async def session(self) -> AsyncIterator[AsyncSession]:
        """A session that commits at the end and rolls back on an error."""
        async with self._sessions.begin() as session:
            yield session

    async def close(self) -> None:
        await self._engine.dispose()
