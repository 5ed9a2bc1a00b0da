"""Protects what people read of the ledger: reports are its sums whatever window and lines are asked for, an explanation ends
in the ledger's figures, an audit names the invariant that a changed row breaks, and admins get the same over HTTP."""

import asyncio
import csv
import io
import json
from collections.abc import Iterator
from dataclasses import dataclass
from decimal import Decimal
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner
from sqlalchemy import delete, func, select, update

from cli.main import main
from gateway.db.engine import Database
from gateway.domain.accounting.audit import Audit, audit
from gateway.domain.accounting.booking import Booking
from gateway.domain.accounting.closing import close_hours
from gateway.domain.accounting.explain import Explanation, explain
from gateway.domain.accounting.focus import COLUMNS
from gateway.domain.accounting.price_store import add_prices
from gateway.domain.accounting.prices import Price, PriceBook, Pricing, Term
from gateway.domain.accounting.report import By, Report, Window, report
from gateway.domain.accounting.retention import prune
from gateway.domain.accounting.tables import (
    IDLE,
    Charge,
    ChipEntry,
    ChipGroup,
    Period,
    PriceRow,
    Rollup,
)
from gateway.domain.accounting.waste import WasteLine, waste
from gateway.domain.accounting.what_if import Answer, parse, reprice
from gateway.errors import BadRequestError, NotFoundError
from gateway.settings import GatewaySettings
from tests.conftest import OwnValkey
from tests.fakes.chip_time import SECOND, Life, random_life
from tests.fakes.gateway import GatewayUnderTest, assert_error
from tests.fakes.wire import wait_until
from workers.chip_time import Member, Spent, encode
from workers.protocol import FinishReason

DAY = 1_800_057_600
"""Unix seconds of a midnight."""
HOUR = 3600
WHOLE = Window(DAY - 86400, DAY + 3 * 86400)
OWN = "0123456789abcdef0123456789abcdef"
NANOS_PER_HOUR = 3600 * SECOND


def priced(sku: str, usd: str, term: Term = Term.ON_DEMAND) -> Price:
    return Price(
        sku=sku, region="any", term=term, usd_per_chip_hour=Decimal(usd), effective_from_ns=0,
        effective_to_ns=None, source="a test, https://example.org/prices", retrieved_at="2026-12-01",
    )  # fmt: skip


PRICES = [
    priced("v6e", "2.70"),
    priced("v6e", "1.35", Term.SPOT),
    priced("h200", "5.40"),
]
PRICING = Pricing(PriceBook(PRICES), Term.SPOT)


def member(request_id: str, num_tokens: int, context_len: int, *, is_prefill: bool) -> Member:
    return Member(request_id, 0, is_prefill, num_tokens, context_len)


def midnight_life() -> Life:
    """Two requests of one client that run over midnight together, and one that runs on."""
    life = Life("late", model="night", granted_unix_ns=(DAY - 60) * SECOND)
    life.span(30 * SECOND, Spent.WEIGHTS)
    for name in (OWN, f"{OWN}-1"):
        life.join(name, "key-a", "night")
    members = [member(OWN, 7, 0, is_prefill=True), member(f"{OWN}-1", 3, 0, is_prefill=True)]
    life.step(members, 10 * SECOND, idle_ns=SECOND, num_padded=6)
    members = [member(OWN, 1, 7, is_prefill=False), member(f"{OWN}-1", 1, 3, is_prefill=False)]
    life.step(members, 30 * SECOND + 1, compile_ns=SECOND)
    life.end(OWN, 2)
    life.end(f"{OWN}-1", 1, FinishReason.ABORT)
    life.step(members, 5 * SECOND)
    life.join("runs-on", "key-b")
    life.step([member("runs-on", 5, 0, is_prefill=True)], 5 * SECOND)
    return life


def idle_life() -> Life:
    """Of a model that nobody asked, on chips without a price."""
    life = Life("idle", model="quiet", sku="v7x", granted_unix_ns=DAY * SECOND)
    for _ in range(20):
        life.span(4 * SECOND, Spent.IDLE)
    return life


LIVES = [
    midnight_life(),
    idle_life(),
    *(
        random_life(seed, f"r{seed}", 60, granted_unix_ns=(DAY + 7 * HOUR * seed) * SECOND)
        for seed in (1, 2, 3)
    ),
]
for life in LIVES[1:]:
    life.release()


@dataclass
class Ledger:
    """A SQLite file with all lives in it; hours that are over are closed."""

    folder: Path

    def ask(self, work: Any, *args: Any) -> Any:
        """`work(database, *args)`, once."""

        async def run() -> Any:
            database = Database(GatewaySettings(data_dir=self.folder))
            try:
                return await work(database, *args)
            finally:
                await database.close()

        return asyncio.run(run())

    def scalar(self, query: Any) -> Any:
        async def work(database: Database) -> Any:
            async with database.session() as session:
                return await session.scalar(query)

        return self.ask(work)

    def change(self, statement: Any) -> None:
        async def work(database: Database) -> None:
            async with database.session() as session:
                await session.execute(statement)

        self.ask(work)

    def copied(self, to: Path) -> "Ledger":
        to.mkdir()
        for file in self.folder.glob("tpugate.sqlite*"):
            (to / file.name).write_bytes(file.read_bytes())
        return Ledger(to)


async def fill(database: Database) -> None:
    await database.create_tables()
    assert (await add_prices(database, PRICES)).refused == []
    booking = Booking(database)
    for life in LIVES:
        await booking.book(life.group, [(e, encode(e)) for e in life.entries], PRICING)
    # The midnight's life goes on in an hour that is not over.
    await close_hours(database, DAY + 10 * 86400)


@pytest.fixture(scope="module")
def ledger(tmp_path_factory: pytest.TempPathFactory) -> Ledger:
    made = Ledger(tmp_path_factory.mktemp("ledger") / "data")
    made.folder.mkdir()
    made.ask(fill)
    return made


def failed(found: Audit) -> set[str]:
    return {check.name for check in found.checks if not check.is_sound}


def total_ns() -> int:
    return sum(life.num_chips * life.end_ns for life in LIVES)


# Reports


@pytest.mark.parametrize("by", [(By.MODEL,), (By.KEY, By.TAG), (By.DAY,), (By.HOUR, By.KEY)])
def test_lines_add_up_to_all_chip_time(ledger: Ledger, by: tuple[By, ...]):
    made: Report = ledger.ask(report, WHOLE, by)
    loaded = sum(line.amounts["loaded_ns"] for line in made.lines)
    assert loaded == made.total.amounts["loaded_ns"]
    closed = select(func.sum(Period.measured_ns)).where(Period.is_closed)
    running = select(func.sum(Charge.loaded_ns)).where(Charge.model == "night", Charge.hour >= DAY)
    assert loaded == ledger.scalar(closed) + ledger.scalar(running)
    assert ledger.scalar(select(func.sum(Period.measured_ns))) == total_ns()


def test_a_window_is_cut_in_mid_day_without_loss(ledger: Ledger):
    whole: Report = ledger.ask(report, WHOLE, (By.KEY,))
    cut = DAY + 12 * HOUR
    parts = [
        ledger.ask(report, window, (By.KEY,))
        for window in (Window(WHOLE.from_s, cut), Window(cut, WHOLE.to_s))
    ]
    for name, amount in whole.total.amounts.items():
        assert sum(part.total.amounts[name] for part in parts) == amount, name
    assert all(part.total.amounts["loaded_ns"] for part in parts)


def test_dollars_are_price_times_time_and_null_where_a_price_is_missing(ledger: Ledger):
    made: Report = ledger.ask(report, WHOLE, (By.MODEL,))
    ours, quiet = (
        next(x for x in made.lines if x.keys["model"] == name) for name in ("m", "quiet")
    )
    assert ours.loaded_usd == Decimal("1.35") * ours.amounts["loaded_ns"] / NANOS_PER_HOUR
    each = ours.per_million()
    assert each["output_4_to_1"] == 4 * (each["input_4_to_1"] or 0)
    tokens = ours.input_tokens + 4 * ours.amounts["delivered_tokens"]
    assert each["input_4_to_1"] == ours.loaded_usd * 10**6 / tokens
    assert ours.prefill_usd is not None
    assert ours.decode_usd is not None
    assert each["output"] == ours.decode_usd * 10**6 / ours.amounts["delivered_tokens"]
    assert abs(ours.prefill_usd + ours.decode_usd - ours.loaded_usd) < Decimal("1e-20")
    assert (quiet.loaded_usd, quiet.reason) == (None, "no_price")
    assert set(quiet.per_million().values()) == {None}
    assert (made.total.loaded_usd, made.total.reason) == (None, "no_price")
    idle: Report = ledger.ask(report, WHOLE, (By.KEY,))
    nobody = next(line for line in idle.lines if line.keys["key"] == IDLE)
    assert nobody.amounts["loaded_ns"] >= LIVES[1].num_chips * LIVES[1].end_ns


def test_waste_is_what_periods_and_requests_say(ledger: Ledger):
    found: list[WasteLine] = ledger.ask(waste, WHOLE)
    for kind in ("idle", "bubble", "compile", "fault", "padding", "rejected"):
        booked = ledger.scalar(select(func.sum(getattr(Period, f"{kind}_ns"))))
        assert sum(line.chip_ns for line in found if line.kind == kind) == booked > 0, kind
    for kind, status in (("aborted", ["abort"]), ("failed", ["error", "fault"])):
        spent = func.sum(Charge.prefill_ns + Charge.decode_ns)
        booked = ledger.scalar(select(spent).where(Charge.status.in_(status)))
        assert sum(line.chip_ns for line in found if line.kind == kind) == booked > 0, kind
    assert {line.kind for line in found} >= {"preempted", "discarded"}
    for line in found:
        if line.model != "quiet":
            assert line.usd == Decimal("1.35") * line.chip_ns / NANOS_PER_HOUR
        else:
            assert (line.usd, line.reason) == (None, "no_price")
        assert line.sort == ("overhead" if hasattr(Spent, line.kind.upper()) else "in_steps")


def test_what_if_is_the_same_time_at_another_price(ledger: Ledger):
    made: Report = ledger.ask(report, WHOLE, (By.MODEL, By.DAY))

    def asked(text: str) -> Answer:
        answer: Answer = ledger.ask(reprice, made, parse(text), DAY * SECOND)
        return answer

    other = asked("sku=h200,term=on_demand")
    assert other.price is not None
    assert other.price.sku == "h200"
    ratios = {line.ratio for line in other.lines if line.line.keys["model"] != "quiet"}
    assert ratios == {Decimal(4)}
    assert asked("sku=h200,term=on_demand,speed=0.25").lines[0].ratio == 1
    assert (
        other.total.loaded_usd == Decimal("5.40") * made.total.amounts["loaded_ns"] / NANOS_PER_HOUR
    )
    active = made.total.amounts["prefill_ns"] + made.total.amounts["decode_ns"]
    full = asked("usd=1,utilisation=0.5").total.loaded_usd
    assert full == Decimal(2 * active) / NANOS_PER_HOUR
    assert any("not measured" in said for said in other.assumptions)
    assert asked("utilisation=1").total.reason == "no_price"


@pytest.mark.parametrize(
    "text",
    ["", "sku", "sku=", "moon=1", "usd=0", "usd=-1", "usd=1e3", "usd=..", "utilisation=1.1", "speed=0",
     "usd=1,sku=v6e", "sku=v6e,sku=v5e", "sku=v9", "sku=v6e,term=1y", "region=mars"],
)  # fmt: skip
def test_a_what_if_that_means_nothing_is_refused_by_name(ledger: Ledger, text: str):
    made: Report = ledger.ask(report, WHOLE, (By.MODEL,))
    with pytest.raises(BadRequestError) as error:
        ledger.ask(reprice, made, parse(text), DAY * SECOND)
    assert error.value.param == "what_if"


# Explanations


def explained(ledger: Ledger, request_id: str) -> Explanation:
    found: Explanation = ledger.ask(explain, request_id)
    return found


@pytest.mark.parametrize("quoted", [OWN, f"req_{OWN}", f"chatcmpl-{OWN}", f"resp_{OWN}"])
def test_a_request_over_midnight_is_worked_out_by_any_of_its_names(ledger: Ledger, quoted: str):
    found = explained(ledger, quoted)
    assert found.request_ids == [OWN, f"{OWN}-1"]
    assert found.is_equal is True
    assert found.ledger["delivered_tokens"] == 3
    hours = {line.hour for line in found.lines}
    assert hours == {"2027-01-15T23:00:00.000000Z", "2027-01-16T00:00:00.000000Z"}
    # Two chips; the first step is shared by tokens, 7 to 3.
    assert [step.share_ns for step in found.steps[:2]] == [14 * SECOND, 6 * SECOND]
    assert [(step.weight, step.weight_of_all) for step in found.steps[:2]] == [(7, 10), (3, 10)]
    assert found.steps[-1].sum_ns == sum(step.share_ns for step in found.steps)
    assert found.steps[-1].sum_ns == 2 * (45 * SECOND + 1)
    for line in found.lines:
        assert line.usd_per_chip_hour == Decimal("1.35")
        assert "https://" in line.price_source
        assert line.kappa is not None
        assert line.kappa > 1


def test_a_running_request_is_explained_as_far_as_it_is(ledger: Ledger):
    found = explained(ledger, "runs-on")
    assert found.is_equal is True
    assert found.recomputed == {"prefill_ns": 10 * SECOND, "decode_ns": 0}
    assert found.lines[-1].status == "running"
    assert (found.lines[-1].loaded_usd, found.lines[-1].reason) == (None, "hour_not_closed")


def test_every_request_of_a_mixed_ledger_is_equal(ledger: Ledger):
    entries = LIVES[2].entries
    names = {m.request_id for entry in entries for m in getattr(entry, "members", ())}

    async def work(database: Database) -> list[bool | None]:
        return [(await explain(database, name)).is_equal for name in names]

    assert set(ledger.ask(work)) == {True}


def test_a_request_that_is_unknown_or_let_go_of_is_told_so(ledger: Ledger, tmp_path: Path):
    for name in ("chatcmpl-" + "0" * 32, "nobody", "' OR 1=1 --", ""):
        with pytest.raises(NotFoundError):
            explained(ledger, name)
    kept = ledger.copied(tmp_path / "kept")
    kept.change(update(Period).values(is_closed=True))
    while kept.ask(prune, DAY + HOUR):
        pass
    found = explained(kept, OWN)
    assert found.pruned
    assert found.is_equal is None
    assert found.ledger["prefill_ns"] > 0
    told = CliRunner().invoke(main, ["cost", "explain", OWN, "--data-dir", str(kept.folder)])
    assert "not in the log any more" in told.output
    assert "cannot be compared" in told.output


# Audits


def test_a_sound_ledger_has_no_residual(ledger: Ledger):
    found: Audit = ledger.ask(audit)
    assert failed(found) == set()
    assert [check.residual for check in found.checks] == [0] * 6
    assert all(check.checked for check in found.checks)
    assert found.scope.num_entries == sum(len(life.entries) for life in LIVES)


def test_an_audit_says_what_retention_has_taken_and_passes_over_it(ledger: Ledger, tmp_path: Path):
    kept = ledger.copied(tmp_path / "kept")
    kept.change(update(Period).values(is_closed=True))
    while kept.ask(prune, DAY + 14 * HOUR):
        pass
    found: Audit = kept.ask(audit)
    assert found.scope.num_pruned_entries > 0
    assert {"I1", "I2", "I4", "I5", "I6"}.isdisjoint(failed(found))
    kept.change(update(ChipGroup).values(checkpoint=b"x" * 16))
    assert "I6" in failed(kept.ask(audit))


def one(table: Any, *where: Any) -> Any:
    keys = table.__table__.primary_key.columns
    return select(*keys).where(*where).limit(1)


def change_of(name: str) -> tuple[Any, Any]:
    """A table and what is done to one row of it."""
    step = ChipEntry.kind == "step"
    return {
        "entry deleted": (one(ChipEntry, step, ChipEntry.number == 20), None),
        "entry begins late": (one(ChipEntry, step), {"begin_ns": ChipEntry.begin_ns + 1}),
        "class": (one(Period, Period.idle_ns > 0), {"idle_ns": Period.idle_ns + 1}),
        "share": (
            one(Charge, Charge.kind == "charge", Charge.prefill_ns > 0),
            {"prefill_ns": Charge.prefill_ns + 1},
        ),
        "loaded": (one(Charge, Charge.kind == "correction"), {"loaded_ns": Charge.loaded_ns + 1}),
        "correction deleted": (one(Charge, Charge.kind == "correction"), None),
        "rollup": (one(Rollup, Rollup.loaded_ns > 0), {"loaded_ns": Rollup.loaded_ns - 1}),
        "price deleted": (one(PriceRow, PriceRow.term == "spot"), None),
        "delivered": (
            one(Charge, Charge.delivered_tokens > 0),
            {"delivered_tokens": Charge.delivered_tokens - 1},
        ),
        "counter": (one(ChipGroup), {"computed_tokens": ChipGroup.computed_tokens + 1}),
        "negative": (one(Period, Period.probe_ns == 0), {"probe_ns": -1}),
        "payload": (one(ChipEntry, step), {"payload": ChipEntry.hash}),
        "hash": (one(ChipEntry, step), {"hash": b"x" * 16}),
        "head": (one(ChipGroup), {"head": b"x" * 16}),
        "request": (one(Charge, Charge.kind == "charge"), {"request_id": "somebody-else"}),
    }[name]


@pytest.mark.parametrize(
    ("name", "invariant"),
    [
        ("entry deleted", "I1"), ("entry begins late", "I1"), ("class", "I1"), ("share", "I2"),
        ("loaded", "I3"), ("correction deleted", "I3"), ("rollup", "I3"), ("price deleted", "I3"),
        ("delivered", "I4"), ("counter", "I4"), ("negative", "I5"), ("payload", "I6"), ("hash", "I6"),
        ("head", "I6"), ("request", "I6"),
    ],
)  # fmt: skip
def test_an_audit_names_what_a_changed_row_breaks(
    ledger: Ledger, tmp_path: Path, name: str, invariant: str
):
    changed = ledger.copied(tmp_path / "changed")
    row, values = change_of(name)
    table = row.get_final_froms()[0]

    async def work(database: Database) -> None:
        async with database.session() as session:
            keys = (await session.execute(row)).one()
            is_it = [column == keys[i] for i, column in enumerate(table.primary_key.columns)]
            done = delete(table) if values is None else update(table).values(values)
            await session.execute(done.where(*is_it))

    changed.ask(work)
    found: Audit = changed.ask(audit)
    assert invariant in failed(found)


def test_an_audit_ends_with_1_and_tells_where_it_looked(ledger: Ledger, tmp_path: Path):
    changed = ledger.copied(tmp_path / "changed")
    changed.change(update(ChipGroup).where(ChipGroup.group_id == "late").values(head=b"x" * 16))
    told = CliRunner().invoke(main, ["cost", "audit", "--json", "--data-dir", str(changed.folder)])
    assert told.exit_code == 1
    found = json.loads(told.output)
    assert found["is_sound"] is False
    assert found["checks"][5]["faults"] == ["the hash chain of group late does not end in its head"]
    told = CliRunner().invoke(main, ["cost", "audit", "--data-dir", str(ledger.folder)])
    assert told.exit_code == 0
    assert told.output.count("  residual 0 ") == 6


# Command line and HTTP


def test_the_command_tells_the_same_in_words_json_and_csv(ledger: Ledger, tmp_path: Path):
    asked = [
        "cost",
        "report",
        "--data-dir",
        str(ledger.folder),
        "--from",
        "2027-01-14",
        "--to",
        "2027-01-20",
    ]
    told = CliRunner().invoke(main, [*asked, "--by", "model,day", "--waste", "--what-if", "usd=1"])
    assert told.exit_code == 0, told.output
    assert "not measured" in told.output
    assert "hours still open: 1;" in told.output
    document = json.loads(CliRunner().invoke(main, [*asked, "--json"]).output)
    rows = list(csv.DictReader(io.StringIO(CliRunner().invoke(main, [*asked, "--csv"]).output)))
    assert [int(row["loaded_ns"]) for row in rows] == [x["loaded_ns"] for x in document["lines"]]
    for wrong in (
        ["--by", "moon"],
        ["--from", "yesterday"],
        ["--what-if", "usd=0"],
        ["--to", "2027-99-01"],
    ):
        told = CliRunner().invoke(main, [*asked, *wrong])
        assert told.exit_code == 2
        assert f"'{wrong[0].strip('-').replace('-', '_')}'" in told.output
    told = CliRunner().invoke(main, ["cost", "audit", "--data-dir", str(tmp_path)])
    assert told.exit_code == 1
    assert "no ledger" in told.output
    assert list(tmp_path.iterdir()) == []


@pytest.fixture(scope="module")
def gateway(
    ledger: Ledger, valkey_server: OwnValkey, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[GatewayUnderTest]:
    """With the ledger in its data folder, and nothing to book."""
    data = ledger.copied(tmp_path_factory.mktemp("served") / "data")
    served = GatewayUnderTest(valkey_server.url, data.folder, accountant="off", price_region="any")
    served.wait_for_listening()
    yield served
    served.kill()


WINDOW = "from=2027-01-14&to=2027-01-20"


def costs(gateway: GatewayUnderTest, query: str, **headers: str) -> Any:
    answer = gateway.client.get(f"/admin/api/costs?{WINDOW}&{query}", headers=headers)
    assert answer.status_code == 200, answer.text
    return answer


def test_pages_are_the_whole_report_in_pieces(gateway: GatewayUnderTest):
    whole = costs(gateway, "by=key,hour").json()
    assert whole["num_lines"] == len(whole["lines"]) > 5
    assert whole["next_offset"] is None
    lines, offset = [], 0
    while offset is not None:
        page = costs(gateway, f"by=key,hour&limit=5&offset={offset}").json()
        assert page["total"] == whole["total"]
        lines += page["lines"]
        offset = page["next_offset"]
    assert lines == whole["lines"]
    assert costs(gateway, "by=key&offset=1000").json()["lines"] == []


def test_csv_is_asked_for_by_name_or_by_header(gateway: GatewayUnderTest):
    named = costs(gateway, "by=key&format=csv")
    assert named.headers["content-type"] == "text/csv; charset=utf-8"
    assert costs(gateway, "by=key", accept="text/csv").text == named.text
    assert costs(gateway, "by=key&format=json", accept="text/csv").json()["lines"]
    assert costs(gateway, "waste=true").json()["waste"]


def test_focus_has_its_columns_and_the_ledgers_dollars(gateway: GatewayUnderTest, ledger: Ledger):
    reader = csv.DictReader(io.StringIO(costs(gateway, "format=focus").text))
    rows = list(reader)
    assert tuple(reader.fieldnames or ()) == COLUMNS
    made: Report = ledger.ask(report, WHOLE, (By.MODEL,))
    ours = next(line for line in made.lines if line.keys["model"] == "m")
    spent = [row for row in rows if row["ResourceId"] == "m"]
    billed = sum(Decimal(row["BilledCost"]) for row in spent)
    assert abs(billed - (ours.loaded_usd or 0)) < Decimal("1e-18")
    # Spot is half of the list price.
    assert {row["PricingCategory"] for row in spent} == {"Dynamic"}
    assert all(
        abs(Decimal(row["ListCost"]) - 2 * Decimal(row["BilledCost"])) < Decimal("1e-18")
        for row in spent
    )
    unpriced = [row for row in rows if row["ResourceId"] == "quiet"]
    assert {(row["BilledCost"], row["x_CostReason"]) for row in unpriced} == {("", "no_price")}
    must = {
        "BillingAccountId",
        "BillingCurrency",
        "BillingPeriodStart",
        "ChargePeriodEnd",
        "ServiceName",
    }
    assert all(row[name] for row in rows for name in must)
    assert {json.loads(row["Tags"]).get("tag") for row in spent} >= {"tag", None}


@pytest.mark.parametrize(
    ("query", "param"),
    [
        ("from=yesterday", "from"), ("from=2027-01-02&to=2027-01-01", "from"), ("from=0001-01-01", "from"),
        ("to=2027-13-01", "to"), ("to=2027-01-01T00:30Z", "to"), ("by=moon", "by"), ("by=key,key", "by"),
        ("by=day,hour", "by"), ("format=xml", "format"), ("limit=0", "limit"), ("limit=x", "limit"),
        ("offset=-1", "offset"), ("limit=100000", "limit"), ("what_if=usd=-1", "what_if"),
        ("waste=perhaps", "waste"), ("group_by=key", "group_by"), ("by=" + "x" * 200, "by"),
    ],
)  # fmt: skip
def test_a_mistake_in_the_query_is_named(gateway: GatewayUnderTest, query: str, param: str):
    assert_error(gateway.client.get(f"/admin/api/costs?{query}"), 400, param=param)


def test_metrics_tell_each_running_group_by_opencosts_names(gateway: GatewayUnderTest):
    wait_until(lambda: gateway.metric("node_gpu_count") > 0, "the ledger's sums are told")
    text = gateway.client.get("/metrics").text
    node = 'instance="late",instance_type="v6e",model_name="night",node="late",region=""'
    # The settings say on demand here, whatever the ledger was written with.
    for line in (
        f"node_gpu_hourly_cost{{{node}}} 2.7",
        f"node_total_hourly_cost{{{node}}} 5.4",
        f"node_gpu_count{{{node}}} 2.0",
        f"kubecost_node_is_spot{{{node}}} 0.0",
    ):
        assert line in text
    assert 'tpugate_chip_seconds_total{model_name="quiet",spent="idle"} 160.0' in text
    assert 'tpugate_cost_usd_total{model_name="night"}' in text
    assert 'tpugate_cost_usd_total{model_name="quiet"}' not in text


def test_costs_are_for_admins_and_documented(gateway: GatewayUnderTest):
    made = gateway.client.post("/admin/api/keys", json={"name": "app"}).json()
    headers = {"authorization": f"Bearer {made['key']}"}
    assert_error(gateway.client.get("/admin/api/costs", headers=headers), 403)
    assert_error(gateway.client.get("/admin/api/costs", headers={"authorization": ""}), 401)
    item = gateway.client.get("/schema/openapi.json").json()["paths"]["/admin/api/costs"]["get"]
    names = {parameter["name"] for parameter in item["parameters"]}
    assert names >= {"from", "to", "by", "what_if", "waste", "format", "limit", "offset"}
    schema = item["responses"]["200"]["content"]["application/json"]["schema"]
    (example,) = schema["examples"]
    shown = costs(gateway, "by=model").json()
    assert example.keys() == shown.keys()
    # The document leaves out what is null.
    assert shown["lines"][0].keys() - example["lines"][0].keys() == {"reason"}
