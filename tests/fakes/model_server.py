"""`tpugate serve` with a real model, for tests that talk to it over HTTP."""

import re
import subprocess
import sys
from pathlib import Path

import httpx
import openai

from tests.fakes.gateway import free_port
from tests.fakes.processes import SERVE, ProcessUnderTest
from tests.fakes.wire import wait_until

MODEL = "smollm2-135m-instruct"
CONTEXT_LEN = 256
# A short ladder of buckets: what is tested with it does not depend on its length.
LADDER = ("--max-rows", "8", "--context-len", str(CONTEXT_LEN))
READY_S = 600.0


class ModelServer:
    def __init__(self, folder: Path) -> None:
        self.port = free_port()
        self.url = f"http://127.0.0.1:{self.port}"
        self.data_dir = folder / "data"
        # Before the first chip-time is booked: what was booked without a price stays without one.
        self.command("prices", "import", "--builtin")
        self.command(
            "prices",
            "add",
            "cpu",
            "0.096",
            "--source",
            "a machine of this size",
            "--from",
            "2026-01-01",
        )
        self.process = ProcessUnderTest(
            *SERVE, "--model", MODEL, "--port", str(self.port), "--data-dir", str(self.data_dir),
            *LADDER, output=folder / "serve.log",
        )  # fmt: skip

    def command(self, *arguments: str) -> subprocess.CompletedProcess[str]:
        """A `tpugate` command on the server's database."""
        given = [*arguments, "--data-dir", str(self.data_dir)]
        return subprocess.run(
            [sys.executable, "-m", "cli.main", *given],
            capture_output=True, text=True, check=False, timeout=120,
        )  # fmt: skip

    def wait_for_ready(self) -> None:
        wait_until(self._is_ready, "the model is ready", seconds=READY_S)

    def _is_ready(self) -> bool:
        assert self.process.is_running, self.process.output
        try:
            return httpx.get(f"{self.url}/ready").status_code == 200
        except httpx.TransportError:
            return False

    @property
    def key(self) -> str:
        return (self.data_dir / "admin.key").read_text().strip()

    def client(self, **options: object) -> openai.OpenAI:
        return openai.OpenAI(
            base_url=f"{self.url}/v1", api_key=self.key, _strict_response_validation=True, **options
        )

    def metric(self, name: str) -> float:
        """Sum over all labels."""
        headers = {"authorization": f"Bearer {self.key}"}
        text = httpx.get(f"{self.url}/metrics", headers=headers).text
        values = re.findall(rf"^{re.escape(name)}(?:{{.*}})? (\S+)$", text, re.MULTILINE)
        assert values, f"no metric {name}"
        return sum(float(value) for value in values)

    def worker_pid(self) -> int:
        for folder in Path("/proc").iterdir():
            if folder.name.isdigit() and self._is_worker(folder):
                return int(folder.name)
        raise AssertionError("no worker process")

    def _is_worker(self, folder: Path) -> bool:
        try:
            command = (folder / "cmdline").read_bytes()
            parent = (folder / "stat").read_text().rsplit(")", 1)[1].split()[1]
        except OSError:
            return False
        return command.endswith(b"worker\0") and int(parent) == self.process.pid
