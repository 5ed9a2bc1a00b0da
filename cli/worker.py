"""`tpugate worker`: one worker process."""

from collections.abc import Callable
from typing import Any, TypeVar

import click

from cli.errors import SettingError

F = TypeVar("F", bound=Callable[..., Any])

WORKER_OPTIONS = (
    click.option(
        "--engine", metavar="model|fake", help="A model (the default), or scripted answers."
    ),
    click.option("--device", metavar="tpu|cpu|cuda", help="Where the model runs (default: tpu)."),
    click.option(
        "--dtype",
        metavar="auto|bfloat16|float16|float32",
        help="Type of the weights (default: auto, bfloat16).",
    ),
    click.option("--max-rows", metavar="N", help="Choices that run at once (default: 32)."),
    click.option(
        "--max-step-tokens",
        metavar="N",
        help="Tokens of one step, prompts and running choices (default: what programs hold).",
    ),
    click.option(
        "--memory-share",
        metavar="X",
        help="Of the device's memory, for weights, programs and KV cache (default: 0.9).",
    ),
    click.option(
        "--num-blocks", metavar="N", help="KV blocks (default: for all rows, as memory allows)."
    ),
    click.option("--block-len", metavar="N", help="Tokens of one KV block (default: 16)."),
    click.option(
        "--context-len",
        metavar="N",
        help="Tokens of prompt and answer together (default: 2048, at most the model's own).",
    ),
    click.option(
        "--tool-parser",
        metavar="FORMAT",
        help="How the model writes calls: hermes, llama3, mistral or json (default: its template's).",
    ),
    click.option(
        "--reasoning-parser",
        metavar="NAME",
        help="Marks around reasoning: think, mistral, seed, cohere, kimi, none (default: found out).",
    ),
    click.option(
        "--drain-timeout-s",
        metavar="S",
        help="Seconds that running answers may go on at a stop (default: 30).",
    ),
    click.option(
        "--sku",
        metavar="NAME",
        help="Accelerator in the price book: v6e, h200 … (default: found on a TPU VM, else cpu).",
    ),
    click.option(
        "--num-chips",
        metavar="N",
        help="Chips that the process holds (default: found on a TPU VM, else 1).",
    ),
    click.option("--region", metavar="NAME", help="Where the chips are, for their price."),
    click.option(
        "--compile-cache-dir",
        metavar="DIR",
        help="Where compiled programs are kept (default: in ~/.cache/tpugate).",
    ),
    click.option(
        "--step-delay-s", metavar="S", help="Seconds of a step of the fake engine (default: 0)."
    ),
)
"""Shared by `serve` and `worker`. Values are checked in `workers.config`, where the environment is too."""


def worker_options(command: F) -> F:
    for option in reversed(WORKER_OPTIONS):
        command = option(command)
    return command


@click.command(epilog="Every option can also be given as TPUGATE_ and its name in capitals.")
@click.option("--model", metavar="REF", help="Catalogue id, hub id, folder or .gguf file.")
@click.option(
    "--served-name", metavar="NAME", help="What clients call the model (default: its own id)."
)
@click.option(
    "--redis-url", metavar="URL", help="redis://, rediss:// or unix:// (default: on this machine)."
)
@worker_options
@click.option("--worker-id", metavar="ID", help="Unique name of this process (default: made up).")
@click.option(
    "--profile",
    metavar="DIR|FILE.json",
    help="Write a trace of every step, for ui.perfetto.dev (default: none).",
)
@click.option("--log-level", metavar="LEVEL", help="DEBUG, INFO (the default), WARNING or ERROR.")
def worker(**flags: str | None) -> None:
    """Run one worker process: it claims a model's requests from Redis and answers them."""
    from workers.config import load_config
    from workers.errors import ConfigError
    from workers.process import run_process

    try:
        run_process(load_config(flags))
    except ConfigError as error:
        raise SettingError(str(error)) from error
