"""Tests in this folder need network namespaces, and say why they are skipped where there are none."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from tests.nat.lab import Lab, lab
from tests.nat.namespaces import may_map_ports, may_run
from tests.nat.trials import Stage, stage


@pytest.fixture(autouse=True)
def _namespaces() -> None:
    if reason := may_run():
        pytest.skip(reason)


@pytest.fixture
def port_mapping() -> None:
    """Skip the test where no router can map ports."""
    if reason := may_map_ports():
        pytest.skip(reason)


@pytest.fixture
def internet() -> Iterator[Lab]:
    """A lab without sites."""
    with lab() as made:
        yield made


@pytest.fixture
def set_up() -> Iterator[Stage]:
    """A lab with a public daemon."""
    with stage() as made:
        yield made
