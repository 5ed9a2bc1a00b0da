"""Tables of the gateway."""

from datetime import datetime
from enum import StrEnum

from advanced_alchemy.base import UUIDAuditBase
from sqlalchemy import LargeBinary, String
from sqlalchemy.orm import Mapped, mapped_column


class Role(StrEnum):
    ADMIN = "admin"
    MEMBER = "member"


class ApiKey(UUIDAuditBase):
    """One key; the key itself is not kept."""

    __tablename__ = "api_keys"

    name: Mapped[str] = mapped_column(String(100))
    role: Mapped[str] = mapped_column(String(16))
    key_hash: Mapped[bytes] = mapped_column(LargeBinary(32), unique=True, index=True)
    """BLAKE2b of the key, keyed with the secret of the data folder."""
    last4: Mapped[str] = mapped_column(String(4))
    """For people to recognise it by."""
    revoked_at: Mapped[datetime | None] = mapped_column(default=None)
