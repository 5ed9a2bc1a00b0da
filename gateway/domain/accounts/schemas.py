"""Bodies of the key administration."""

from datetime import datetime
from uuid import UUID

from pydantic import BaseModel, ConfigDict, Field

from gateway.db.models import Role


class CreateKey(BaseModel):
    model_config = ConfigDict(extra="ignore")

    name: str = Field(min_length=1, max_length=100)
    role: Role = Role.MEMBER


class KeyInfo(BaseModel):
    """A key as people may see it."""

    model_config = ConfigDict(from_attributes=True)

    id: UUID
    name: str
    role: Role
    last4: str
    created_at: datetime
    revoked_at: datetime | None = None


class CreatedKey(KeyInfo):
    key: str
    """Shown this once."""


class KeyList(BaseModel):
    data: list[KeyInfo]
