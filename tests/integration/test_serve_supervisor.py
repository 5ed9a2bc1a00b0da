"""The supervisor with small programs as children: who is started again, who ends everything, and that
no process is left, however stubborn."""

import asyncio
import sys
from collections.abc import AsyncIterator, Callable
from pathlib import Path

import pytest

from cli.errors import CommandError, SettingError
from cli.settings import child_environment
from cli.supervisor import Child, Supervisor
from tests.fakes.wire import PATIENCE_S

STUBBORN = """
import signal, subprocess, sys, time
signal.signal(signal.SIGTERM, signal.SIG_IGN)
inner = subprocess.Popen([sys.executable, '-c', 'import time; time.sleep(600)'])
open(sys.argv[1], 'w').write(str(inner.pid))
print('running', flush=True)
time.sleep(600)
"""


def program(text: str, *arguments: str, stop_timeout_s: float = 10.0) -> Child:
    command = (sys.executable, "-c", text, *arguments)
    return Child("program", command, child_environment, stop_timeout_s)


async def is_true(condition: Callable[[], object], what: str) -> None:
    """Wait until `condition()` is true; `what` is for the reader."""
    async with asyncio.timeout(PATIENCE_S):
        while not condition():  # noqa: ASYNC110  other processes have no Event
            await asyncio.sleep(0.02)


@pytest.fixture
async def supervisor() -> AsyncIterator[Supervisor]:
    supervisor = Supervisor()
    yield supervisor
    supervisor.kill()
    await supervisor.stop(list(supervisor.children))


async def failure(supervisor: Supervisor) -> CommandError:
    async with asyncio.timeout(PATIENCE_S):
        return await supervisor.failure


async def test_a_wrong_setting_ends_everything_with_the_childs_sentence(supervisor: Supervisor):
    supervisor.start(program("print('Error: The dial is wrong.'); raise SystemExit(2)"))
    error = await failure(supervisor)
    assert isinstance(error, SettingError)
    assert (error.message, error.exit_code) == ("The dial is wrong.", 2)


async def test_three_failed_starts_end_everything_with_the_last_sentence(
    supervisor: Supervisor, tmp_path: Path
):
    count = tmp_path / "count"
    supervisor.start(
        program(
            "import sys; open(sys.argv[1], 'a').write('x');"
            "print('12:00:00 worker ERROR The weights are torn.'); sys.exit(1)",
            str(count),
        )
    )
    error = await failure(supervisor)
    assert (error.message, error.exit_code) == ("The weights are torn.", 1)
    assert count.read_text() == "xxx"


async def test_a_child_that_was_ready_is_started_again(supervisor: Supervisor):
    child = program("import time; time.sleep(600)")
    supervisor.start(child)
    await is_true(lambda: child.is_running, "it runs")
    assert child.process is not None
    first = child.process.pid
    child.was_ready = True
    child.process.kill()
    await is_true(lambda: child.process and child.process.pid != first, "another one runs")
    assert not supervisor.failure.done()


async def test_a_program_that_does_not_exist_is_named(supervisor: Supervisor):
    supervisor.start(Child("ghost", ("/no/such/program",), child_environment, 1.0))
    error = await failure(supervisor)
    assert error.message == "A process could not be started: No such file or directory."


async def test_a_stubborn_child_is_killed_with_all_it_started(
    supervisor: Supervisor, tmp_path: Path, capfd: pytest.CaptureFixture[str]
):
    pid_file = tmp_path / "pid"
    child = program(STUBBORN, str(pid_file), stop_timeout_s=0.1)
    supervisor.start(child)
    await is_true(lambda: "running" in capfd.readouterr().err, "it runs")
    supervisor.begin_stop()
    await supervisor.stop([child])
    assert child.process is not None
    assert child.process.returncode == -9
    inner = Path(f"/proc/{pid_file.read_text()}/stat")
    await is_true(lambda: not inner.exists() or ") Z" in inner.read_text(), "its own child is gone")


async def test_output_comes_behind_the_childs_name(
    supervisor: Supervisor, capfd: pytest.CaptureFixture[str]
):
    child = program(
        "import sys; print('out'); print('a quiet line'); print('é', file=sys.stderr);"
        "print('x' * 3_000_000); print('end'); sys.exit(2)"
    )
    child.noise = ("quiet",)
    supervisor.start(child)
    await failure(supervisor)
    lines = capfd.readouterr().err.splitlines()
    assert lines[:2] == ["program    | out", "program    | é"]
    assert lines[-1] == "program    | end"
    assert max(map(len, lines)) < 10_000
    assert not any("quiet" in line for line in lines)
