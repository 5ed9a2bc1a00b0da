"""Fixtures for all tests. Nothing here loads torch unless a test asks for a device."""

import os
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import redis
from xdist.scheduler import LoadScopeScheduling

from models.errors import SourceUnavailableError
from models.library import resolve
from models.settings import ModelSettings
from tests.fakes.postgres import OwnPostgres
from tests.fakes.processes import WorkerUnderTest
from tests.fakes.valkey import OwnValkey
from tests.fakes.wire import GatewayPeer
from torchtpu import environment
from torchtpu.bringup import bring_up
from torchtpu.device import Device

# Here and not in a fixture: test modules may import torch while they are collected, and torch would
# then load TorchTPU before `bring_up` has said what it is to find.
environment.apply(environment.plain_variables())


TOGETHER = (
    ("tests/integration/test_sampling_over_http", "tests/integration/test_serve_"),
    ("tests/device/test_engine", "tests/device/test_grammars"),
)
"""Beginnings of files that share a fixture which is long in the making: a model's server, the real engine."""


def group_of(nodeid: str) -> str:
    """What stays in one process where several share the tests (`make test`): a file, or one of `TOGETHER`."""
    return next(
        (beginnings[0] for beginnings in TOGETHER if nodeid.startswith(beginnings)),
        nodeid.partition("::")[0],
    )


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """The longest first, so that no process ends long after the others."""
    longest = {beginnings[0] for beginnings in TOGETHER}
    items.sort(key=lambda item: group_of(item.nodeid) not in longest)


@pytest.hookimpl(optionalhook=True)
def pytest_xdist_make_scheduler(config: pytest.Config, log: Any) -> LoadScopeScheduling:
    # Not `--dist loadgroup`: the marks of xdist 3.8 do not reach the scheduler under pytest 9.2.
    return Groups(config, log)


class Groups(LoadScopeScheduling):
    def _split_scope(self, nodeid: str) -> str:
        return group_of(nodeid)


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter) -> None:
    """What tests have to say that fails none of them: ties with the reference."""
    for reports in terminalreporter.stats.values():
        for report in reports:
            if getattr(report, "when", None) == "teardown":
                for name, text in report.user_properties:
                    terminalreporter.write_line(f"{name}: {text}")


@pytest.fixture(scope="session")
def tpu_device() -> Iterator[Device]:
    """The `tpu` device of this process: a TPU if there is one, else XLA:CPU."""
    yield bring_up("tpu")


@pytest.fixture(scope="session")
def smollm2_dir() -> Path:
    """The embedded default model's folder."""
    return pulled("smollm2-135m-instruct")


@pytest.fixture(scope="session")
def gemma3_dir() -> Path:
    return pulled("gemma-3-270m")


def pulled(model: str) -> Path:
    """The model's folder, pulled once into the user's own model cache.

    `TPUGATE_MODELS_DIR` or `TPUGATE_CACHE_DIR` puts that cache elsewhere. Without weights tests are
    skipped, but fail where `CI` is set.
    """
    try:
        return resolve(model, ModelSettings.from_environment()).path
    except SourceUnavailableError as error:
        if os.environ.get("CI"):
            raise  # a green run there says that the model was tested
        pytest.skip(f"needs the weights of {model}: {error}")


@pytest.fixture(scope="session")
def valkey_server() -> Iterator[OwnValkey]:
    with OwnValkey() as server:
        yield server


@pytest.fixture
def redis_url(valkey_server: OwnValkey) -> str:
    """URL of an empty Valkey."""
    with redis.Redis.from_url(valkey_server.url) as client:
        client.flushall()
    return valkey_server.url


@pytest.fixture(scope="session")
def postgres_server() -> Iterator[OwnPostgres]:
    with OwnPostgres() as server:
        yield server


@pytest.fixture(params=["sqlite", "postgresql"])
def database_url(request: pytest.FixtureRequest, tmp_path: Path) -> str:
    """SQLAlchemy URL of an empty database, of both kinds in turn."""
    if request.param == "sqlite":
        return f"sqlite+aiosqlite:///{tmp_path / 'test.sqlite'}"
    url: str = request.getfixturevalue("postgres_server").database()
    return url


@pytest.fixture
def peer(redis_url: str) -> Iterator[GatewayPeer]:
    """The gateway's end of the wire for the model `m-small`."""
    peer = GatewayPeer(redis_url)
    yield peer
    peer.close()


StartWorker = Callable[..., WorkerUnderTest]


@pytest.fixture
def start_worker(redis_url: str, tmp_path: Path) -> Iterator[StartWorker]:
    """`start_worker("a", max_rows="1")`: a scripted worker process, killed at the end of the test."""
    workers: list[WorkerUnderTest] = []

    def start(name: str, url: str = redis_url, **settings: str) -> WorkerUnderTest:
        workers.append(WorkerUnderTest(url, name, tmp_path / f"worker-{name}.log", **settings))
        return workers[-1]

    yield start
    for worker in workers:
        worker.kill()
