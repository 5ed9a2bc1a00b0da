"""`tpugate worker`: one worker process."""

from collections.abc import Callable
from typing import Any, TypeVar

import click

from cli.errors import SettingError

F = TypeVar("F", bound=Callable[..., Any])

WORKER_OPTIONS = (
    click.option(
        "--engine", metavar="model|fake", help="A model, or scripted answers without one."
    ),
    click.option("--device", metavar="tpu|cpu|cuda", help="Where the model runs (default: tpu)."),
    click.option("--dtype", metavar="auto|bfloat16|float16|float32", help="Type of the weights."),
    click.option("--max-rows", metavar="N", help="Choices that run at once."),
    click.option("--num-blocks", metavar="N", help="KV blocks on the device."),
    click.option("--block-len", metavar="N", help="Tokens of one KV block."),
    click.option(
        "--context-len", metavar="N", help="Longest prompt and answer together, in tokens."
    ),
    click.option(
        "--drain-timeout-s", metavar="S", help="How long running answers may go on at a stop."
    ),
    click.option("--compile-cache-dir", metavar="DIR", help="Where compiled programs are kept."),
    click.option("--step-delay-s", metavar="S", help="Length of a step of the fake engine."),
)
"""Shared by `serve` and `worker`. Values are checked in `workers.config`, where the environment is too."""


def worker_options(command: F) -> F:
    for option in reversed(WORKER_OPTIONS):
        command = option(command)
    return command


@click.command(epilog="Every option can also be given as TPUGATE_ and its name in capitals.")
@click.option("--model", metavar="REF", help="Catalogue id, hub id, folder or .gguf file.")
@click.option("--served-name", metavar="NAME", help="What clients call the model.")
@click.option("--redis-url", metavar="URL", help="redis://, rediss:// or unix://.")
@worker_options
@click.option("--worker-id", metavar="ID", help="Unique name of this process (default: made up).")
@click.option("--log-level", metavar="LEVEL", help="DEBUG, INFO, WARNING or ERROR.")
def worker(**flags: str | None) -> None:
    """Run one worker process: it claims a model's requests from Redis and answers them."""
    from workers.config import load_config
    from workers.errors import ConfigError
    from workers.process import run_process

    try:
        config = load_config(flags)
    except ConfigError as error:
        raise SettingError(str(error)) from error
    run_process(config)
