"""`tpugate prices`: what an hour of a chip costs, and who says so."""

import json
import time
from datetime import UTC, datetime
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from cli.database import database_options, with_database
from cli.errors import SettingError
from cli.price_tables import fields, moment, render

if TYPE_CHECKING:
    from gateway.db.engine import Database
    from gateway.domain.accounting.price_check import BookCheck
    from gateway.domain.accounting.price_file import Checked
    from gateway.domain.accounting.price_store import Added
    from gateway.domain.accounting.prices import Price, PriceBook

REFUSED = 1
"""Exit code if a row was not taken, or the book is not sound."""


@click.group()
def prices() -> None:
    """The price book: dollars per chip-hour, with source and date. Rows are added, never changed."""


@prices.command("list")
@click.option("--sku", help="Only of this chip.")
@click.option("--term", help="Only on this term.")
@click.option("--valid", "only_valid", is_flag=True, help="Only what is valid now.")
@database_options
def list_prices(sku: str | None, term: str | None, only_valid: bool, **flags: Any) -> None:  # noqa: ANN401
    """List prices with their sources: amortised, and beside them the on-demand price of the same place."""
    from gateway.domain.accounting.price_store import read_book

    async def work(database: "Database") -> "PriceBook":
        async with database.session() as session:
            return await read_book(session)

    book = with_database(work, flags["database_url"], flags["data_dir"])
    now_ns = time.time_ns()
    valid = book.valid_at(now_ns)
    rows = [
        (price, book.list_price(price, now_ns if price in valid else price.effective_from_ns))
        for price in (valid if only_valid else book)
        if sku in (None, price.sku) and term in (None, price.term.value)
    ]
    rows.sort(key=lambda row: (*row[0].line, row[0].effective_from_ns))
    if flags["as_json"]:
        click.echo(json.dumps([fields(*row) for row in rows], indent=2))
    elif rows:
        click.echo(render(rows))
    else:
        click.echo("no prices: tpugate prices import --builtin, or tpugate prices add")


@prices.command()
@click.argument("sku")
@click.argument("usd_per_chip_hour")
@click.option("--region", default="any", show_default=True, help="cloud/region, cloud/all or any.")
@click.option(
    "--term", default="on_demand", show_default=True, help="on_demand, spot, flex, 1y, 3y."
)
@click.option(
    "--from", "effective_from", metavar="WHEN",
    help="Valid from: a date (UTC), or a time with its zone (default: today; now, if a price of today is there).",
)  # fmt: skip
@click.option("--to", "effective_to", metavar="WHEN", help="Valid until, exclusive.")
@click.option("--source", required=True, help="Who says so: a contract, a page and its address.")
@click.option("--dry-run", is_flag=True, help="Say what would be done, and do nothing.")
@database_options
def add(
    sku: str,
    usd_per_chip_hour: str,
    effective_from: str | None,
    effective_to: str | None,
    **flags: Any,  # noqa: ANN401
) -> None:
    """Add one price: what you pay for an hour of a chip."""
    from gateway.domain.accounting.price_store import add_prices, read_book

    row: dict[str, object] = {
        "sku": sku,
        "region": flags["region"],
        "term": flags["term"],
        "source": flags["source"],
    }
    if effective_to:
        row["effective_to"] = effective_to
    now = datetime.now(UTC)
    price = _own_price(row, usd_per_chip_hour, effective_from or f"{now:%Y-%m-%d}", now)

    async def work(database: "Database") -> "Added":
        wanted = price
        async with database.session() as session:
            book = await read_book(session)
        if effective_from is None and price.id not in {known.id for known in book}:
            begins = [other.effective_from_ns for other in book if other.line == price.line]
            if any(begin >= price.effective_from_ns for begin in begins):
                wanted = _own_price(row, usd_per_chip_hour, now.isoformat(timespec="seconds"), now)
        return await add_prices(database, [wanted], is_trial=flags["dry_run"], takes_doubtful=True)

    found = with_database(work, flags["database_url"], flags["data_dir"], is_new=True)
    _tell(found, as_json=flags["as_json"], is_trial=flags["dry_run"], is_doubtful_taken=True)


@prices.command("import")
@click.argument("file", type=click.Path(path_type=Path), required=False)
@click.option("--builtin", is_flag=True, help="The list prices that come with tpugate.")
@click.option("--dry-run", is_flag=True, help="Say what would be done, and do nothing.")
@click.option("--accept-quarantined", is_flag=True, help="Import doubtful rows too.")
@database_options
def import_prices(
    file: Path | None,
    builtin: bool,
    dry_run: bool,
    accept_quarantined: bool,
    **flags: Any,  # noqa: ANN401
) -> None:
    """Import prices from a YAML FILE; each row is checked, and what is wrong or doubtful is left out."""
    from gateway.domain.accounting.price_store import add_prices

    checked = _checked(file, builtin=builtin)
    rows = [*checked.good, *(price for price, _ in checked.quarantined)]

    async def work(database: "Database") -> "Added":
        return await add_prices(database, rows, is_trial=dry_run, takes_doubtful=accept_quarantined)

    found = with_database(work, flags["database_url"], flags["data_dir"], is_new=True)
    found.refused[:0] = checked.refused
    _tell(found, as_json=flags["as_json"], is_trial=dry_run, is_doubtful_taken=accept_quarantined)


@prices.command()
@click.argument("file", type=click.Path(path_type=Path), required=False)
@click.option("--builtin", is_flag=True, help="The list prices that come with tpugate.")
@database_options
def check(file: Path | None, builtin: bool, **flags: Any) -> None:  # noqa: ANN401
    """Check the price book, or a YAML FILE of prices without a database; exit code 1 if a row is wrong."""
    if file is None and not builtin:
        _check_book(flags)
        return
    checked = _checked(file, builtin=builtin)
    if flags["as_json"]:
        quarantined = [{**fields(price), "reason": why} for price, why in checked.quarantined]
        good = [fields(price) for price in checked.good]
        told = {"good": good, "refused": checked.refused, "quarantined": quarantined}
        click.echo(json.dumps(told, indent=2))
    else:
        click.echo(f"{len(checked.good)} rows are good")
        _tell_doubtful([price for price, _ in checked.quarantined], "put aside")
        _tell_refused(checked.refused)
    if checked.refused:
        raise SystemExit(REFUSED)


def _check_book(flags: dict[str, Any]) -> None:
    from gateway.domain.accounting.price_check import check_book
    from gateway.errors import SettingsError
    from gateway.settings import GatewaySettings

    try:
        settings = GatewaySettings.from_environment()
    except SettingsError as error:
        raise SettingError(str(error)) from error

    async def work(database: "Database") -> "BookCheck":
        return await check_book(database, settings, time.time_ns())

    found = with_database(work, flags["database_url"], flags["data_dir"])
    if flags["as_json"]:
        told = {
            "prices": found.num_prices,
            "faults": found.faults,
            "warnings": found.warnings,
        }
        click.echo(json.dumps(told, indent=2))
    else:
        click.echo(f"{found.num_prices} prices, {len(found.faults)} faults")
        for kind, sentences in (("fault", found.faults), ("warning", found.warnings)):
            for sentence in sentences:
                click.echo(f"{kind}: {sentence}")
    if found.faults:
        raise SystemExit(REFUSED)


def _own_price(
    row: dict[str, object], usd_per_chip_hour: str, effective_from: str, now: datetime
) -> "Price":
    """Raises `SettingError` if it is none."""
    from gateway.domain.accounting.price_file import price_of
    from gateway.domain.accounting.strict_yaml import YamlError, parse_yaml

    try:
        return price_of(
            {
                **row,
                "usd_per_chip_hour": parse_yaml(usd_per_chip_hour),
                "effective_from": effective_from,
                "retrieved_at": f"{now:%Y-%m-%d}",
            },
            now,
        )
    except (ValueError, YamlError) as error:
        raise SettingError(f"The price cannot be added: {error}.") from error


def _checked(file: Path | None, *, builtin: bool) -> "Checked":
    from gateway.domain.accounting.price_file import read_builtin, read_price_file
    from gateway.domain.accounting.strict_yaml import YamlError

    if (file is None) != builtin:
        raise SettingError("Give either a file or --builtin.")
    now = datetime.now(UTC)
    try:
        return read_builtin(now) if file is None else read_price_file(file, now)
    except YamlError as error:
        raise SettingError(str(error)) from error


def _tell(found: "Added", *, as_json: bool, is_trial: bool, is_doubtful_taken: bool) -> None:
    """Exits with `REFUSED` if a row was."""
    if as_json:
        told = {
            "added": [fields(price) for price in found.added],
            "known": len(found.known),
            "refused": found.refused,
            "doubtful": [fields(price) for price in found.doubtful],
            "dry_run": is_trial,
        }
        click.echo(json.dumps(told, indent=2))
    else:
        would = "would be " if is_trial else ""
        click.echo(f"{len(found.added)} {would}added, {len(found.known)} were there already")
        for price in found.added if len(found.added) == 1 else ():
            click.echo(f"valid from {moment(price.effective_from_ns)}: {price.source_line}")
        _tell_doubtful(found.doubtful, "taken though" if is_doubtful_taken else "put aside")
        _tell_refused(found.refused)
    if found.refused:
        raise SystemExit(REFUSED)


def _tell_doubtful(doubtful: "list[Price]", what: str) -> None:
    from gateway.domain.accounting.price_rules import DOUBTFUL, named

    for price in doubtful:
        click.echo(f"{what}: {named(price)} ({price.source_line}): {DOUBTFUL}", err=True)


def _tell_refused(refused: list[str]) -> None:
    for why in refused:
        click.echo(f"refused: {why}", err=True)
