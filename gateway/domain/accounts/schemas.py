"""Bodies of the key administration."""

from datetime import datetime
from uuid import UUID

from pydantic import BaseModel, ConfigDict, Field, field_validator
from pydantic_core import PydanticCustomError

from gateway.db.models import Role
from gateway.domain.accounts.services import ADMIN_NAME


class CreateKey(BaseModel):
    model_config = ConfigDict(extra="ignore")

    name: str = Field(min_length=1, max_length=100)
    role: Role = Role.MEMBER

    @field_validator("name")
    @classmethod
    def _usable(cls, value: str) -> str:
        if "\0" in value:
            raise PydanticCustomError("invalid_value", "A name cannot hold the character NUL.")
        if value == ADMIN_NAME:
            raise PydanticCustomError("invalid_value", "This name is the first admin key's own.")
        return value


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
