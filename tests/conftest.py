"""Fixtures for all tests. Nothing here loads torch unless a test asks for a device."""

from collections.abc import Iterator

import pytest

from torchtpu import environment
from torchtpu.bringup import bring_up
from torchtpu.device import Device

# Here and not in a fixture: test modules may import torch while they are collected, and torch would
# then load TorchTPU before `bring_up` has said what it is to find.
environment.apply(environment.plain_variables())


@pytest.fixture(scope="session")
def tpu_device() -> Iterator[Device]:
    """The `tpu` device of this process: a TPU if there is one, else XLA:CPU."""
    yield bring_up("tpu")
