"""The `tpugate` command. Subcommands are imported when they are called: help is quick, and a gateway
never loads what only a worker needs."""

from importlib import import_module
from importlib.metadata import version
from typing import NamedTuple

import click


class Command(NamedTuple):
    target: str
    """`module:attribute` of a click command."""
    help: str


COMMANDS = {
    "serve": Command(
        "cli.serve:serve", "Start everything on this machine: queue, gateway, workers."
    ),
    "gateway": Command("cli.gateway:gateway", "Run one gateway process (for a cluster)."),
    "worker": Command("cli.worker:worker", "Run one worker process (for a cluster)."),
    "models": Command("cli.models:models", "List, fetch, show and remove models."),
    "plan": Command("cli.plan:plan", "Compile for a TPU that is not here: does it fit?"),
    "bench": Command("cli.bench:bench", "Load a server; how fast is it, how long does one wait?"),
    "cost": Command("cli.cost:cost", "What was spent: reports, one request's steps, an audit."),
    "prices": Command(
        "cli.prices:prices", "The price book: dollars per chip-hour, and who says so."
    ),
    "doctor": Command("cli.doctor:doctor", "Report devices and versions, and what is missing."),
}


class LazyGroup(click.Group):
    """A group that knows its commands' names and one-line helps without importing them."""

    def list_commands(self, ctx: click.Context) -> list[str]:
        return list(COMMANDS)

    def get_command(self, ctx: click.Context, cmd_name: str) -> click.Command | None:
        command = COMMANDS.get(cmd_name)
        if command is None:
            return None
        module, attribute = command.target.split(":")
        loaded: click.Command = getattr(import_module(module), attribute)
        return loaded

    def format_commands(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:
        with formatter.section("Commands"):
            formatter.write_dl([(name, command.help) for name, command in COMMANDS.items()])


def _print_version(ctx: click.Context, _: click.Parameter, is_asked: bool) -> None:
    if is_asked:
        click.echo(f"tpugate {version('tpugate')}")
        ctx.exit()


@click.group(cls=LazyGroup, context_settings={"help_option_names": ["-h", "--help"]})
@click.option(
    "--version",
    is_flag=True,
    is_eager=True,
    expose_value=False,
    callback=_print_version,
    help="Show the version and exit.",
)
def main() -> None:
    """Serve unmodified Hugging Face models on TorchTPU behind OpenAI's HTTP API."""


if __name__ == "__main__":
    main(prog_name="tpugate")
