"""`tpugate prices`: what an hour of a chip costs, and who says so."""

import json
from datetime import UTC, datetime
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from cli.database import database_options, with_database
from cli.errors import SettingError

if TYPE_CHECKING:
    from gateway.db.engine import Database
    from gateway.domain.accounting.price_file import Checked
    from gateway.domain.accounting.price_store import Added
    from gateway.domain.accounting.prices import Price

REFUSED = 1
"""Exit code if a row was not taken."""


@click.group()
def prices() -> None:
    """The price book: dollars per chip-hour, with source and date. Rows are added, never changed."""


@prices.command("list")
@click.option("--sku", help="Only of this chip.")
@database_options
def list_prices(
    sku: str | None, as_json: bool, database_url: str | None, data_dir: str | None
) -> None:
    """List all prices with their sources."""
    from gateway.domain.accounting.price_store import read_book

    async def work(database: "Database") -> "list[Price]":
        async with database.session() as session:
            return list(await read_book(session))

    rows = sorted(
        (
            price
            for price in with_database(work, database_url, data_dir)
            if sku in (None, price.sku)
        ),
        key=lambda price: (*price.line, price.effective_from_ns),
    )
    if as_json:
        click.echo(json.dumps([_fields(price) for price in rows], indent=2))
        return
    for price in rows:
        click.echo(_shown(price))
    if not rows:
        click.echo("no prices: tpugate prices import --builtin, or tpugate prices add")


@prices.command()
@click.argument("sku")
@click.argument("usd_per_chip_hour")
@click.option("--region", default="any", show_default=True, help="cloud/region, cloud/all or any.")
@click.option(
    "--term", default="on_demand", show_default=True, help="on_demand, spot, flex, 1y, 3y."
)
@click.option("--from", "effective_from", metavar="DATE", help="Valid from (default: today).")
@click.option("--to", "effective_to", metavar="DATE", help="Valid until, exclusive.")
@click.option("--source", required=True, help="Who says so: a contract, a page and its address.")
@database_options
def add(
    sku: str,
    usd_per_chip_hour: str,
    effective_from: str | None,
    effective_to: str | None,
    **flags: Any,  # noqa: ANN401
) -> None:
    """Add one price: what you pay for an hour of a chip."""
    from gateway.domain.accounting.price_file import price_of
    from gateway.domain.accounting.strict_yaml import YamlError, parse_yaml

    now = datetime.now(UTC)
    today = now.date().isoformat()
    row: dict[str, object] = {
        "sku": sku,
        "region": flags["region"],
        "term": flags["term"],
        "effective_from": effective_from or today,
        "source": flags["source"],
        "retrieved_at": today,
    }
    if effective_to:
        row["effective_to"] = effective_to
    try:
        row["usd_per_chip_hour"] = parse_yaml(usd_per_chip_hour)
        price = price_of(row, now)
    except (ValueError, YamlError) as error:
        raise SettingError(f"The price cannot be added: {error}.") from error
    _store([price], flags, is_trial=False)


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
    checked = _checked(file, builtin=builtin)
    rows = list(checked.good)
    for price, why in checked.quarantined:
        click.echo(
            f"{'taken though' if accept_quarantined else 'put aside:'} {_shown(price)}: {why}",
            err=True,
        )
        if accept_quarantined:
            rows.append(price)
    _store(rows, flags, is_trial=dry_run, refused=checked.refused)


@prices.command()
@click.argument("file", type=click.Path(path_type=Path), required=False)
@click.option("--builtin", is_flag=True, help="The list prices that come with tpugate.")
@click.option("--json", "as_json", is_flag=True, help="Print JSON.")
def check(file: Path | None, builtin: bool, as_json: bool) -> None:
    """Check a YAML FILE of prices without a database; exit code 1 if a row is wrong."""
    checked = _checked(file, builtin=builtin)
    if as_json:
        click.echo(
            json.dumps(
                {
                    "good": [_fields(price) for price in checked.good],
                    "refused": checked.refused,
                    "quarantined": [
                        {**_fields(price), "reason": why} for price, why in checked.quarantined
                    ],
                },
                indent=2,
            )
        )
    else:
        click.echo(f"{len(checked.good)} rows are good")
        for price, why in checked.quarantined:
            click.echo(f"put aside: {_shown(price)}: {why}")
        for why in checked.refused:
            click.echo(f"refused: {why}")
    if checked.refused:
        raise SystemExit(REFUSED)


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


def _store(
    rows: "list[Price]", flags: dict[str, Any], *, is_trial: bool, refused: list[str] | None = None
) -> None:
    from gateway.domain.accounting.price_store import add_prices

    async def work(database: "Database") -> "Added":
        return await add_prices(database, rows, is_trial=is_trial)

    found = with_database(work, flags["database_url"], flags["data_dir"], is_new=True)
    wrong = [*(refused or []), *found.refused]
    if flags["as_json"]:
        click.echo(
            json.dumps(
                {
                    "added": [_fields(price) for price in found.added],
                    "known": len(found.known),
                    "refused": wrong,
                    "dry_run": is_trial,
                },
                indent=2,
            )
        )
    else:
        would = "would be " if is_trial else ""
        click.echo(f"{len(found.added)} {would}added, {len(found.known)} were there already")
        for why in wrong:
            click.echo(f"refused: {why}", err=True)
    if wrong:
        raise SystemExit(REFUSED)


def _fields(price: "Price") -> dict[str, object]:
    return {
        "price_id": price.id,
        "sku": price.sku,
        "region": price.region,
        "term": price.term.value,
        "usd_per_chip_hour": format(price.usd_per_chip_hour, "f"),
        "effective_from": _when(price.effective_from_ns),
        "effective_to": None if price.effective_to_ns is None else _when(price.effective_to_ns),
        "currency": price.currency,
        "source": price.source,
        "retrieved_at": price.retrieved_at,
        **price.detail,
    }


def _shown(price: "Price") -> str:
    usd = format(price.usd_per_chip_hour, "f")
    until = "" if price.effective_to_ns is None else f" to {_when(price.effective_to_ns)}"
    return (
        f"{price.sku:8} {price.region:24} {price.term.value:10} US$ {usd:>9}  from "
        f"{_when(price.effective_from_ns)}{until}  {price.source_line}"
    )


def _when(unix_ns: int) -> str:
    moment = datetime.fromtimestamp(unix_ns // 10**9, UTC)
    return (
        f"{moment:%Y-%m-%d}"
        if moment.hour == moment.minute == moment.second == 0
        else f"{moment:%Y-%m-%dT%H:%M:%SZ}"
    )
