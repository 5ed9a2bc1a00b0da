"""API keys: made, looked up, revoked. Only a keyed hash is kept."""

import asyncio
import hashlib
import os
import secrets
import time
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path
from uuid import UUID

from sqlalchemy import select
from sqlalchemy.exc import IntegrityError

from gateway.db.engine import Database
from gateway.db.models import ApiKey, Role
from gateway.errors import NotFoundError, StartupError, UnauthorizedError
from gateway.settings import GatewaySettings

KEY_PREFIX = "tpg-"
ADMIN_NAME = "admin (first start)"
"""Kept for the key that the start of a gateway makes or sets."""
_MAX_CACHED = 10_000
REVOKED = "The admin's API key is revoked; TPUGATE_ADMIN_KEY can set another one."


@dataclass(frozen=True)
class Principal:
    """Who asks."""

    key_id: UUID
    name: str
    role: Role


@dataclass(frozen=True)
class _Cached:
    principal: Principal | None
    until_s: float


class AccountService:
    """Lookups are cached for `key_cache_s`, wrong keys too, so that guesses do not reach the database."""

    def __init__(self, settings: GatewaySettings, database: Database) -> None:
        self._settings = settings
        self._database = database
        self._secret = b""
        self._cache: dict[bytes, _Cached] = {}
        self._lookups: dict[bytes, asyncio.Task[_Cached]] = {}

    async def prepare(self) -> str | None:
        """Make secret, tables and the admin's key where they are missing. Raises `StartupError`.

        Returns a line for whoever starts the gateway: a new key, which is shown this once, or what is wrong.
        """
        folder = self._settings.data_dir
        try:
            folder.mkdir(parents=True, exist_ok=True)
            self._secret = _private_file(folder / "secret.key", secrets.token_hex(32)).encode()
            admin_key = self._settings.admin_key or _read_if_there(folder / "admin.key")
        except OSError as error:
            raise StartupError(
                f"the data folder {folder} cannot be used: {error.strerror}"
            ) from error
        await self._database.create_tables()
        path = folder / "admin.key"
        if admin_key:
            is_valid = await self._register_admin(admin_key)
            return None if is_valid else REVOKED
        # The file decides between gateways that start at the same time.
        made = new_key()
        key = _private_file(path, made)
        await self._register_admin(key)
        return (
            f"The admin's API key, shown this once: {key} (kept in {path})" if key == made else None
        )

    async def authenticate(self, authorization: str | None) -> Principal:
        """Who sent this header. Raises `UnauthorizedError`."""
        scheme, _, key = (authorization or "").partition(" ")
        key = key.strip()
        if scheme.lower() != "bearer" or not key:
            raise UnauthorizedError(
                "You didn't provide an API key. Send it in an Authorization header: "
                "Authorization: Bearer YOUR_KEY."
            )
        digest = self._hash(key)
        cached = self._cache.get(digest)
        if cached is None or cached.until_s < time.monotonic():
            cached = await self._look_up_once(digest)
        if cached.principal is None:
            hint = f"ending in '{key[-4:]}' " if len(key) >= 12 and key.isascii() else ""
            raise UnauthorizedError(
                f"The API key {hint}is not valid.".replace("  ", " "), code="invalid_api_key"
            )
        return cached.principal

    async def create_key(self, name: str, role: Role) -> tuple[ApiKey, str]:
        """The row and the key, which cannot be read again."""
        key = new_key()
        async with self._database.session() as session:
            row = ApiKey(name=name, role=role, key_hash=self._hash(key), last4=key[-4:])
            session.add(row)
        self._cache.clear()
        return row, key

    async def list_keys(self) -> list[ApiKey]:
        """All keys, the oldest first; revoked ones too."""
        async with self._database.session() as session:
            rows = await session.scalars(select(ApiKey).order_by(ApiKey.created_at))
            return list(rows)

    async def revoke_key(self, key_id: UUID) -> None:
        """Other gateways notice within `key_cache_s`. Raises `NotFoundError`."""
        async with self._database.session() as session:
            row = await session.get(ApiKey, key_id)
            if row is None:
                raise NotFoundError("There is no such API key.", param="key_id")
            row.revoked_at = row.revoked_at or datetime.now(UTC)
        self._cache.clear()

    def _hash(self, key: str) -> bytes:
        return hashlib.blake2b(key.encode(), key=self._secret[:64], digest_size=32).digest()

    async def _look_up_once(self, digest: bytes) -> _Cached:
        """All requests of a key that come while it is looked up wait for the same query."""
        lookup = self._lookups.get(digest)
        if lookup is None:
            lookup = self._lookups[digest] = asyncio.create_task(self._look_up(digest))
            lookup.add_done_callback(lambda _: self._lookups.pop(digest))
        return await asyncio.shield(lookup)

    async def _look_up(self, digest: bytes) -> _Cached:
        async with self._database.session() as session:
            row = await session.scalar(select(ApiKey).where(ApiKey.key_hash == digest))
        principal = None
        if row is not None and row.revoked_at is None:
            principal = Principal(key_id=row.id, name=row.name, role=Role(row.role))
        if len(self._cache) >= _MAX_CACHED:
            self._cache.clear()
        cached = _Cached(principal, time.monotonic() + self._settings.key_cache_s)
        self._cache[digest] = cached
        return cached

    async def _register_admin(self, key: str) -> bool:
        """Let `key` be the admin's, instead of the one before it; False if it has been revoked."""
        digest = self._hash(key)
        try:
            async with self._database.session() as session:
                row = await session.scalar(select(ApiKey).where(ApiKey.key_hash == digest))
                if row is not None:
                    return row.revoked_at is None
                row = await session.scalar(
                    select(ApiKey)
                    .where(ApiKey.name == ADMIN_NAME, ApiKey.revoked_at.is_(None))
                    .order_by(ApiKey.created_at)
                    .limit(1)
                )
                if row is None:
                    row = ApiKey(name=ADMIN_NAME, role=Role.ADMIN, key_hash=digest)
                    session.add(row)
                row.key_hash, row.last4 = digest, key[-4:]
        except IntegrityError:
            # Another gateway has just done the same.
            return True
        return True


def new_key() -> str:
    return KEY_PREFIX + secrets.token_urlsafe(32)


def _private_file(path: Path, content: str) -> str:
    """The file's text; made with `content`, readable by its owner only, if it is missing."""
    try:
        descriptor = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600)
    except FileExistsError:
        return path.read_text().strip()
    with os.fdopen(descriptor, "w") as file:
        file.write(content)
    return content


def _read_if_there(path: Path) -> str:
    return path.read_text().strip() if path.exists() else ""
