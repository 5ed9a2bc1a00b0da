"""Protects `tpugate prices`: what is typed or imported reaches the book on both databases, once and with its source, and
whatever is wrong is a sentence and an exit code."""

import asyncio
import json
from decimal import Decimal
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner, Result
from sqlalchemy import text
from sqlalchemy.ext.asyncio import create_async_engine

from cli.main import main
from gateway.db.engine import Database
from gateway.domain.accounting.price_store import add_prices
from gateway.domain.accounting.prices import Price, Term
from gateway.settings import GatewaySettings

ROW = {
    "sku": "v6e",
    "region": "gcp/us-east5",
    "term": "on_demand",
    "usd_per_chip_hour": 2.7,
    "effective_from": "2026-01-01",
    "retrieved_at": "2026-01-01",
    "source": "a page, https://example.com",
}


class Book:
    """The command on one database."""

    def __init__(self, url: str, folder: Path) -> None:
        self.url = url
        self._folder = folder

    def call(self, *arguments: str) -> Result:
        where = ("--database-url", self.url, "--data-dir", str(self._folder))
        result = CliRunner().invoke(main, ["prices", *arguments, *where])
        assert result.exception is None or isinstance(result.exception, SystemExit), result.output
        return result

    def rows(self, *arguments: str) -> list[dict[str, Any]]:
        found: list[dict[str, Any]] = json.loads(self.call("list", "--json", *arguments).stdout)
        return found

    def file(self, *rows: object) -> str:
        """JSON is YAML."""
        path = self._folder / "prices.yaml"
        path.write_text(json.dumps({"prices": rows}))
        return str(path)

    def execute(self, statement: str) -> None:
        async def run() -> None:
            engine = create_async_engine(self.url)
            async with engine.begin() as connection:
                await connection.execute(text(statement))
            await engine.dispose()

        asyncio.run(run())


@pytest.fixture
def book(database_url: str, tmp_path: Path) -> Book:
    return Book(database_url, tmp_path)


def test_the_built_in_prices_are_imported_once_and_listed_with_their_sources(book: Book):
    trial = book.call("import", "--builtin", "--dry-run")
    assert (trial.exit_code, book.rows()) == (0, [])
    assert "would be added" in trial.stdout
    assert book.call("import", "--builtin").exit_code == 0
    rows = book.rows()
    assert len(rows) > 50
    again = json.loads(book.call("import", "--builtin", "--json").stdout)
    assert (again["added"], again["known"]) == ([], len(rows))
    spot = next(row for row in rows if row["term"] == "spot" and row["sku"] == "v4")
    assert (spot["usd_per_chip_hour"], spot["list_usd_per_chip_hour"]) == ("0.9215", "3.22")
    shown = book.call("list", "--sku", "v4").stdout
    assert "[1] skypilot-catalog" in shown
    assert "0.9215" in shown
    assert "2.7" not in shown
    checked = book.call("check")
    assert (checked.exit_code, f"{len(rows)} prices, 0 faults" in checked.stdout) == (0, True)


def test_a_price_of_ones_own_follows_the_one_that_is_there(book: Book):
    assert book.call("add", "cpu", "4.0", "--source", "a slip of the pen").exit_code == 0
    assert book.call("add", "cpu", "0.40", "--source", "our bill").exit_code == 0
    assert book.call("add", "cpu", "0.40", "--source", "our bill").exit_code == 0
    valid = book.rows("--valid")
    assert [row["usd_per_chip_hour"] for row in valid] == ["0.40"]
    assert valid[0]["source"] == "our bill"


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (("cpu", "free"), "is no number"),
        (("cpu", "0"), "above 0"),
        (("cpu", ".nan"), "no finite"),
        (("cpu", "1", "--from", "9999-01-01"), "effective_from"),
        (("cpu", "1", "--from", "2026-01-01T00:00"), "without a zone"),
        (("cpu", "1", "--from", "2026-02-01", "--to", "2026-01-01"), "not after"),
        (("cpu", "1", "--term", "5y"), "term is one of"),
        (("\udcff", "\udcff"), "YAML does not allow"),
    ],
)
def test_what_is_typed_wrong_is_a_sentence(tmp_path: Path, arguments: tuple[str, ...], said: str):
    book = Book(f"sqlite+aiosqlite:///{tmp_path / 'test.sqlite'}", tmp_path)
    result = book.call("add", *arguments, "--source", "a page")
    assert result.exit_code == 2
    assert said in result.stderr


def test_rows_are_held_against_those_of_the_book(book: Book):
    spot = {**ROW, "term": "spot", "usd_per_chip_hour": 1.2}
    elsewhere = {**ROW, "region": "gcp/us-east1", "usd_per_chip_hour": 1.5}
    assert book.call("import", book.file(ROW, spot)).exit_code == 0
    low = book.call("add", "v6e", "1", "--region", "gcp/us-east5", "--source", "s")
    assert (low.exit_code, "below the spot price" in low.stderr) == (1, True)
    same = book.call("import", book.file({**ROW, "usd_per_chip_hour": 2.8}))
    assert (same.exit_code, "2.8" in same.stderr, "2.7" in same.stderr) == (1, True, True)
    doubtful = book.call("import", book.file(elsewhere))
    assert (doubtful.exit_code, "put aside" in doubtful.stderr, len(book.rows())) == (0, True, 2)
    assert book.call("import", book.file(elsewhere), "--accept-quarantined").exit_code == 0
    assert "warning" in book.call("check").stdout
    assert len(book.rows()) == 3


def test_what_is_right_of_a_file_is_imported_and_the_rest_is_told(book: Book):
    path = book.file(ROW, {**ROW, "usd_per_chip_hour": 700.0}, {**ROW, "sku": "x", "source": ""}, 3)
    checked = book.call("check", path)
    assert (checked.exit_code, checked.stderr.count("refused: row")) == (1, 3)
    assert book.call("import", path).exit_code == 1
    assert len(book.rows()) == 1


@pytest.mark.parametrize(
    "content", [b"", b"prices: [&a [*a]]", b"\xff", b"prices: " + b"[" * 5000, b"prices: [!!float .]"]
)  # fmt: skip
def test_a_file_that_is_no_price_file_is_a_sentence(tmp_path: Path, content: bytes):
    path = tmp_path / "x.yaml"
    path.write_bytes(content)
    for arguments in (("check",), ("import",), ("import", "--dry-run")):
        result = CliRunner().invoke(
            main, ["prices", *arguments, str(path), "--data-dir", str(tmp_path)]
        )
        assert (result.exit_code, str(path) in result.stderr) == (2, True)


def test_check_finds_a_row_that_somebody_has_changed(book: Book):
    assert book.call("import", book.file(ROW)).exit_code == 0
    book.execute("UPDATE prices SET usd_per_chip_hour = '0.01'")
    result = book.call("check", "--json")
    assert result.exit_code == 1
    (fault,) = json.loads(result.stdout)["faults"]
    assert "was changed" in fault


async def test_of_those_who_add_at_once_one_is_right(database_url: str, tmp_path: Path):
    database = Database(GatewaySettings(database_url=database_url, data_dir=tmp_path))
    await database.create_tables()
    prices = [
        Price("cpu", "any", Term.ON_DEMAND, Decimal(usd), 0, None, "s", "2026-01-01")
        for usd in range(1, 5)
    ]
    found = await asyncio.gather(*(add_prices(database, [price]) for price in prices))
    await database.close()
    assert sorted(len(one.added) for one in found) == [0, 0, 0, 1]
    assert sorted(len(one.refused) for one in found) == [0, 1, 1, 1]
