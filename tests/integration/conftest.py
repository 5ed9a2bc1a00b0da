"""Gateways of the integration tests: one shared by a module, and fresh ones for tests that break things."""

from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from tests.fakes.gateway import GatewayUnderTest
from tests.fakes.model_server import ModelServer
from tests.fakes.processes import WorkerUnderTest
from tests.fakes.valkey import OwnValkey

StartGateway = Callable[..., GatewayUnderTest]


@pytest.fixture(scope="module")
def shared_gateway(tmp_path_factory: pytest.TempPathFactory) -> Iterator[GatewayUnderTest]:
    """A gateway and a ready worker of the scripted model `m-small`, with a Valkey of their own."""
    yield from _served(tmp_path_factory.mktemp("shared"))


@pytest.fixture(scope="session")
def steady_gateway(tmp_path_factory: pytest.TempPathFactory) -> Iterator[GatewayUnderTest]:
    """The same, for modules that count nothing and break nothing: one for all of them."""
    yield from _served(tmp_path_factory.mktemp("steady"))


def _served(folder: Path) -> Iterator[GatewayUnderTest]:
    with (
        OwnValkey() as valkey,
        WorkerUnderTest(valkey.url, "shared", folder / "worker.log"),
        GatewayUnderTest(valkey.url, folder / "data") as gateway,
    ):
        gateway.wait_for_ready()
        yield gateway


@pytest.fixture
def start_gateway(redis_url: str, tmp_path: Path) -> Iterator[StartGateway]:
    """`start_gateway(queue_limit="2")`: a gateway process that listens, killed at the end of the test."""
    gateways: list[GatewayUnderTest] = []

    def start(
        url: str = redis_url, data_dir: Path | None = None, **settings: str
    ) -> GatewayUnderTest:
        folder = data_dir or tmp_path / f"gateway-{len(gateways)}"
        gateway = GatewayUnderTest(url, folder, **settings)
        gateways.append(gateway)
        gateway.wait_for_listening()
        return gateway

    yield start
    for gateway in gateways:
        gateway.kill()


@pytest.fixture(scope="session")
def model_server(
    tmp_path_factory: pytest.TempPathFactory, smollm2_dir: Path
) -> Iterator[ModelServer]:
    """A real model behind a gateway: one for all tests, as its start takes long."""
    served = ModelServer(tmp_path_factory.mktemp("model"))
    with served.process:
        served.wait_for_ready()
        yield served
