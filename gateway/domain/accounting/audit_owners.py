"""The part of the audit that asks the raw log whose each line of the ledger is, and how the request ended."""

from collections import defaultdict

from sqlalchemy import select
from sqlalchemy.ext.asyncio import AsyncSession

from gateway.domain.accounting.findings import Check
from gateway.domain.accounting.tables import Charge, OpenCharge
from workers.chip_time import AnyEntry, Released, Step

RUNNING, FAULT = "running", "fault"
Owner = tuple[str, str]
"""Key and tag."""
Told = tuple[str, str, str]
"""Key, tag and status of a line."""


class Owners:
    """Of one group, along its entries; told anew for each hour."""

    def __init__(self, group_id: str, *, is_whole: bool) -> None:
        """`is_whole`: the log is there from the group's first entry on. If not, who came before is not known."""
        self._group_id, self._is_whole = group_id, is_whole
        self._open: dict[str, Owner | None] = {}
        self._seen: dict[str, set[Owner | None]] = defaultdict(set)
        """Who a request that was open in this hour belonged to."""
        self._ended: dict[tuple[str, str], list[tuple[Owner | None, str]]] = defaultdict(list)
        """By price and request: how those ended that did in this hour."""

    def take(self, entry: AnyEntry, price_id: str) -> None:
        for joined in entry.joined:
            self._join(joined.request_id, (joined.key_id, joined.tag))
        if isinstance(entry, Step) and not entry.is_failed:
            for member in entry.members:
                self._find(member.request_id)
        for ended in entry.ended:
            self._end(ended.request_id, price_id, ended.reason.value)
        if isinstance(entry, Released):
            for request_id in list(self._open):
                self._end(request_id, price_id, FAULT)

    async def close(self, session: AsyncSession, hour: int, check: Check) -> None:
        """Compare an hour with its lines, then forget it."""
        where = (Charge.group_id == self._group_id, Charge.hour == hour)
        query = select(
            Charge.price_id, Charge.request_id, Charge.key_id, Charge.tag, Charge.status
        ).where(*where, Charge.kind == "charge")
        lines: dict[tuple[str, str], list[Told]] = defaultdict(list)
        for price_id, request_id, *told in await session.execute(query):
            lines[price_id, request_id].append((told[0], told[1], told[2]))
        for at in lines.keys() | self._ended.keys():
            check.checked += 1
            if not self._fits(at[1], lines.get(at, []), self._ended.get(at, [])):
                check.fail(
                    f"request {at[1]} of group {self._group_id} in hour {hour} has another key, tag or "
                    "end than the log tells"
                )
        await self._close_open(session, hour, check)
        self.forget()

    def forget(self) -> None:
        """The hour; who is open stays so."""
        self._seen = defaultdict(set, {name: {owner} for name, owner in self._open.items()})
        self._ended.clear()

    async def _close_open(self, session: AsyncSession, hour: int, check: Check) -> None:
        query = select(OpenCharge.request_id, OpenCharge.key_id, OpenCharge.tag).where(
            OpenCharge.group_id == self._group_id, OpenCharge.hour == hour
        )
        for request_id, key_id, tag in await session.execute(query):
            if self._open.get(request_id) not in (None, (key_id, tag)):
                check.fail(
                    f"the open request {request_id} of group {self._group_id} has another key or tag "
                    "than the log tells"
                )

    def _fits(
        self, request_id: str, lines: list[Told], ended: list[tuple[Owner | None, str]]
    ) -> bool:
        """Each end has its line; what else there is goes on, and is one of the owners'."""
        left = list(lines)
        for owner, status in ended:
            found = next(
                (one for one in left if one[2] == status and owner in (None, one[:2])), None
            )
            if found is None:
                return False
            left.remove(found)
        if not self._is_whole and request_id not in self._seen:
            return True
        owners = self._seen[request_id]
        return all(
            status == RUNNING and (None in owners or (key_id, tag) in owners)
            for key_id, tag, status in left
        )

    def _join(self, request_id: str, owner: Owner | None) -> None:
        self._open[request_id] = owner
        self._seen[request_id].add(owner)

    def _find(self, request_id: str) -> None:
        """Nobody's, if its beginning was not told."""
        if request_id not in self._open:
            self._join(request_id, ("", "") if self._is_whole else None)

    def _end(self, request_id: str, price_id: str, reason: str) -> None:
        self._find(request_id)
        self._ended[price_id, request_id].append((self._open.pop(request_id), reason))
