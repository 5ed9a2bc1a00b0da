"""Administration of API keys."""

from uuid import UUID

from litestar import Controller, delete, get, post

from gateway.domain.accounts.guards import requires_admin
from gateway.domain.accounts.schemas import CreatedKey, CreateKey, KeyInfo, KeyList
from gateway.domain.accounts.services import AccountService
from gateway.openapi.operations import ADMIN_ERRORS, operation


class KeyController(Controller):
    path = "/admin/api/keys"
    tags = ["admin"]
    guards = [requires_admin]

    @get(
        summary="All keys, without the keys themselves",
        operation_class=operation(errors=ADMIN_ERRORS),
    )
    async def list_keys(self, accounts: AccountService) -> KeyList:
        return KeyList(data=[KeyInfo.model_validate(row) for row in await accounts.list_keys()])

    @post(
        summary="Make a key; the answer is the only place that shows it",
        operation_class=operation(
            CreateKey, errors=ADMIN_ERRORS, example={"name": "laptop", "role": "member"}
        ),
    )
    async def create_key(self, data: CreateKey, accounts: AccountService) -> CreatedKey:
        row, key = await accounts.create_key(data.name, data.role)
        return CreatedKey(**KeyInfo.model_validate(row).model_dump(), key=key)

    @delete(
        "/{key_id:uuid}", summary="Revoke a key", operation_class=operation(errors=ADMIN_ERRORS)
    )
    async def revoke_key(self, key_id: UUID, accounts: AccountService) -> None:
        await accounts.revoke_key(key_id)
