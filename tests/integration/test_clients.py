"""Programs written for other servers work against this one: their own clients, in environments of their own.

The suites lie in tests/clients/ and run as processes against one gateway over the scripted engine, without
a network. `make clients` sets up their environment; `make test` does that itself.
"""

import os
import subprocess
import sys
from collections.abc import Iterable
from pathlib import Path

import pytest

from tests.fakes.gateway import ADMIN_KEY, GatewayUnderTest

ROOT = Path(__file__).resolve().parents[2]
FOLDER = ROOT / "tests" / "clients"
SELECTED = "not stream_time"
"""That test replays recordings of which there are none."""
ALL = ("openai_client.py", "langchain_client.py", "litellm_client.py", "compliance.py")


@pytest.fixture(scope="session")
def clients_python() -> Path:
    """Python of the clients' environment, set up or brought up to date by the Makefile."""
    environment = {k: v for k, v in os.environ.items() if not k.startswith(("MAKE", "MFLAGS"))}
    make = ["make", "--no-print-directory", "clients"]
    ran = subprocess.run(make, cwd=ROOT, env=environment, capture_output=True, text=True)
    assert ran.returncode == 0, f"`make clients` failed:\n{ran.stdout}{ran.stderr}"
    return ROOT / ".venv-clients" / "bin" / "python"


def run(python: Path, files: Iterable[str], selection: str, gateway: GatewayUnderTest) -> None:
    """One process for all suites, as most of their time is the clients' imports."""
    environment = {
        **os.environ,
        "TPUGATE_TEST_URL": gateway.url,
        "TPUGATE_TEST_KEY": ADMIN_KEY,
        # Prices of models come with the package; nothing is fetched.
        "LITELLM_LOCAL_MODEL_COST_MAP": "True",
        "LANGSMITH_TRACING": "false",
        "PYTEST_DISABLE_PLUGIN_AUTOLOAD": "1",
    }
    command = [str(python), "-m", "pytest", "-c", "pytest.ini", "--rootdir", ".", *files]
    ran = subprocess.run(
        [*command, "-k", selection],
        cwd=FOLDER,
        env=environment,
        capture_output=True,
        text=True,
        timeout=300,
    )
    assert ran.returncode == 0, f"{ran.stdout}{ran.stderr}"


def test_all_clients(shared_gateway: GatewayUnderTest, clients_python: Path):
    run(clients_python, ALL, SELECTED, shared_gateway)


def test_our_own_openapi_document(shared_gateway: GatewayUnderTest, clients_python: Path):
    plugins = ("-p", "schemathesis.pytest.plugin", "-p", "_hypothesis_pytestplugin")
    run(clients_python, ("document.py", *plugins), "test", shared_gateway)


def test_the_current_openai_client(shared_gateway: GatewayUnderTest):
    run(Path(sys.executable), ALL[:1], SELECTED, shared_gateway)
