"""`tpugate bench`: how fast a server is under a load of fixed lengths."""

import asyncio
import json
import math
import random
import signal
import sys
from collections.abc import Mapping
from contextlib import AsyncExitStack
from dataclasses import asdict, dataclass, field, fields
from importlib.metadata import version
from typing import Any
from urllib.parse import urlsplit

import click
import uvloop

from cli.database import with_database
from cli.errors import SettingError
from cli.load.closed_loop import Server
from cli.load.fixed_lengths import Lengths
from cli.load.measurement import Load, Measured, measure, only_model
from cli.load.own_server import own_server
from cli.settings import load_serve_settings
from cli.worker import worker_options
from workers.config import WORD, WorkerConfig, load_config
from workers.errors import ConfigError

INTERRUPTED = 130
SERVED_CONTEXT = 2048
"""Tokens of a request and rows that a worker has if nobody says more."""
SERVED_ROWS = 32
DEFAULT_TURNS = 8
LATENCIES = {
    "first token": "ttft",
    "between pieces": "inter_token",
    "token after first": "per_token",
    "whole answer": "e2e",
}
"""Names on a terminal, and of the figures."""
WORKER_FLAGS = {item.name for item in fields(WorkerConfig)} - {"model"}
ABOUT_SERVERS = {"dtype", "num_chips"}
"""Of them, what may be told of a server that runs already."""
_COUNT = click.IntRange(min=1)


@dataclass(frozen=True)
class Where:
    """A server that runs already, or one of our own."""

    url: str
    api_key: str
    model: str
    worker: WorkerConfig | None = None
    """Of our own server."""
    flags: Mapping[str, str] = field(default_factory=dict)
    """That were given for it."""
    num_chips: int = 1
    dtype: str = ""
    """Of the weights."""

    def server_flags(self, load: Load) -> Mapping[str, str]:
        """What our own server must be told to take the load."""
        assert self.worker is not None
        limit = str(2 * load.concurrency)
        flags = {**self.flags, "model": self.worker.model}
        flags |= {"queue_limit": limit, "key_limit": limit}
        needed = load.lengths.input_tokens + load.lengths.output_tokens
        if self.worker.context_len is None and needed > SERVED_CONTEXT:
            flags["context_len"] = str(needed)
        if self.worker.max_rows is None and load.concurrency > SERVED_ROWS:
            flags["max_rows"] = str(load.concurrency)
        return flags


@click.command()
@click.option("--url", metavar="URL", help="An OpenAI-compatible server; else one is started here.")
@click.option(
    "--api-key", metavar="KEY", help="For --url (or TPUGATE_API_KEY).", envvar="TPUGATE_API_KEY"
)
@click.option("--model", metavar="REF", help="As `serve` has it; with --url its only one.")
@click.option("--input-tokens", type=_COUNT, default=128, show_default=True, help="Of each prompt.")
@click.option("--output-tokens", type=_COUNT, default=64, show_default=True, help="Of each answer.")
@click.option("--concurrency", type=_COUNT, default=8, show_default=True, help="Requests at once.")
@click.option("--requests", "num_requests", type=_COUNT, help="How many (default: 8 a client).")
@click.option("--seconds", type=click.FloatRange(min=0, min_open=True), help="How long, instead.")
@click.option(
    "--vocab-size", type=click.IntRange(min=2), default=30_000, show_default=True,
    help="Prompts are random token ids below it.",
)  # fmt: skip
@click.option(
    "--save-baseline", metavar="SKU", help="Keep it as what this accelerator does: h200, v6e …"
)
@click.option("--engine-name", metavar="NAME", help="Of --url, with its version, for the baseline.")
@click.option("--database-url", metavar="URL", help="For the baseline (default: in --data-dir).")
@click.option("--data-dir", metavar="DIR", help="For the baseline (default: the gateway's).")
@click.option("--seed", type=int, help="Of the prompts (default: another one each time).")
@click.option("--json", "as_json", is_flag=True, help="Print one JSON object.")
@worker_options
def bench(**given: Any) -> None:  # noqa: ANN401
    """Load a server with requests of fixed lengths; print throughput and latencies.

    Each of --concurrency clients sends its next request when the last one is answered. Exits with 0 if all were
    answered, 1 if one was not or nothing could be measured, 2 if a setting is wrong, 130 if interrupted.
    """
    load = _load(given)
    where = _where(given)
    if given["save_baseline"] is not None:
        _check_baseline(given, where)
    try:
        # uvloop costs less, but starts no processes the way that the supervisor wants them.
        go = uvloop.run if where.worker is None else asyncio.run
        measured = go(_run(where, load))
    except asyncio.CancelledError:
        click.echo("Interrupted before anything was measured.", err=True)
        sys.exit(INTERRUPTED)
    facts = {"load": asdict(load), **measured.facts(where.num_chips)}
    click.echo(json.dumps(facts, indent=2) if given["as_json"] else render(facts))
    if measured.is_interrupted:
        sys.exit(INTERRUPTED)
    if given["save_baseline"] is not None and measured.figures.num_requests:
        _save_baseline(given, where, facts)
    sys.exit(1 if measured.figures.num_errors or not measured.figures.num_requests else 0)


def _save_baseline(given: Mapping[str, Any], where: Where, facts: Mapping[str, Any]) -> None:
    """Into the ledger's database."""
    from cli.load.baseline import Subject, baseline_of, keep

    engine = given["engine_name"] or f"tpugate {version('tpugate')}"
    subject = Subject(given["save_baseline"], engine, where.dtype)
    baseline = baseline_of(facts, subject)
    name = with_database(
        lambda database: keep(database, baseline),
        given["database_url"],
        given["data_dir"],
        is_new=True,
    )
    note = baseline.detail.get("note")
    click.echo(
        f"Kept as baseline {name} of {baseline.accelerator}, grade {baseline.grade.value}"
        + (f": {note}." if note else "."),
        err=True,
    )


def _check_baseline(given: Mapping[str, Any], where: Where) -> None:
    """Before anything is measured. Raises `SettingError`."""
    from gateway.domain.accounting.baselines import dtype_class

    if not WORD.fullmatch(given["save_baseline"]):
        raise SettingError("--save-baseline must name an accelerator, such as h200 or v6e")
    if given["url"] is not None and not given["engine_name"]:
        raise SettingError("--engine-name (with its version) is needed for a baseline of --url")
    if dtype_class(where.dtype) is None:
        raise SettingError(
            "--dtype must name the type of the weights, such as bf16 or fp8, for a baseline"
        )


def _load(given: Mapping[str, Any]) -> Load:
    if given["num_requests"] is not None and given["seconds"] is not None:
        raise SettingError("--requests and --seconds do not go together")
    if given["seconds"] is not None and not math.isfinite(given["seconds"]):
        raise SettingError(f"--seconds must be a number, not {given['seconds']}")
    num_requests = given["num_requests"]
    if given["seconds"] is None and num_requests is None:
        num_requests = DEFAULT_TURNS * given["concurrency"]
    return Load(
        lengths=Lengths(given["input_tokens"], given["output_tokens"]),
        concurrency=given["concurrency"],
        num_requests=num_requests,
        seconds=given["seconds"],
        vocab_size=given["vocab_size"],
        seed=random.randrange(10**9) if given["seed"] is None else given["seed"],
    )


def _where(given: Mapping[str, Any]) -> Where:
    flags = {name: given[name] for name in given.keys() & WORKER_FLAGS if given[name] is not None}
    if given["url"] is None:
        models = (given["model"],) if given["model"] else ()
        (worker,) = load_serve_settings(models, flags).workers[:1]
        dtype = "bfloat16" if worker.dtype == "auto" else worker.dtype
        return Where("", "", worker.served_name, worker, flags, worker.chips.num, dtype)
    if wrong := sorted(set(flags) - ABOUT_SERVERS):
        name = wrong[0].replace("_", "-")
        raise SettingError(f"--{name} is for a server that is started here, not for --url")
    try:
        told = load_config({"engine": "fake", "num_chips": flags.get("num_chips")}, {})
    except ConfigError as error:
        raise SettingError(str(error)) from error
    return Where(
        _root_of(given["url"]),
        given["api_key"] or "",
        given["model"] or "",
        num_chips=told.num_chips or 1,
        dtype=given["dtype"] or "",
    )


def _root_of(url: str) -> str:
    """Without /v1 and what comes after the path."""
    try:
        parts = urlsplit(url)
        is_one = parts.scheme in {"http", "https"} and bool(parts.hostname) and parts.port != 0
    except ValueError:
        is_one = False
    if not is_one:
        raise SettingError(f"--url must be like http://host:8000, not {url!r}")
    return f"{parts.scheme}://{parts.netloc}{parts.path.rstrip('/').removesuffix('/v1')}"


async def _run(where: Where, load: Load) -> Measured:
    task = asyncio.current_task()
    assert task is not None
    for number in (signal.SIGINT, signal.SIGTERM):
        asyncio.get_running_loop().add_signal_handler(number, task.cancel)
    async with AsyncExitStack() as stack:
        if where.worker is None:
            server = Server(where.url, where.api_key)
        else:
            server = await stack.enter_async_context(own_server(where.server_flags(load)))
        model = where.model or await only_model(server)
        return await measure(server, model, load, _say)


def _say(line: str) -> None:
    click.echo(line, err=True)


def render(facts: Mapping[str, Any]) -> str:
    """For a terminal."""
    load, chips = facts["load"], facts["num_chips"]
    lengths = load["lengths"]
    rows = [
        ("model", facts["model"]),
        (
            "load",
            f"{lengths['input_tokens']} tokens in, {lengths['output_tokens']} out, "
            f"{load['concurrency']} at once; seed {load['seed']}",
        ),
        (
            "requests",
            f"{facts['num_requests']} answered in {facts['wall_s']} s, {facts['num_errors']} errors, "
            f"{facts['prompt_tokens_mean']} tokens in and {facts['output_tokens_mean']} out on average",
        ),
        ("output", _rates(facts, "output", chips)),
        ("total", _rates(facts, "total", chips)),
        *((name, _times(facts, key)) for name, key in LATENCIES.items()),
    ]
    if facts["first_error"]:
        rows.append(("first error", facts["first_error"]))
    if facts["interrupted"]:
        rows.append(("interrupted", "these are the requests that were answered until then"))
    return "\n".join(f"{name:<20} {text}" for name, text in rows)


def _rates(facts: Mapping[str, Any], kind: str, chips: int) -> str:
    each = facts[f"{kind}_tokens_per_s_per_chip"]
    return f"{facts[f'{kind}_tokens_per_s']} tokens/s, {each:.1f} a chip ({chips})"


def _times(facts: Mapping[str, Any], key: str) -> str:
    p50, p99 = facts[f"{key}_p50_ms"], facts[f"{key}_p99_ms"]
    return "none" if p50 is None else f"p50 {p50} ms, p99 {p99} ms"
