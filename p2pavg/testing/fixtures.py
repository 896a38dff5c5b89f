"""Fixtures for pytest. Put ``pytest_plugins = ["p2pavg.testing.fixtures"]`` into the ``conftest.py`` of your tests."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import ExitStack
from typing import TypeAlias

import pytest

from p2pavg.testing.swarm import LocalSwarm, Member

StartSwarm: TypeAlias = Callable[..., LocalSwarm]


@pytest.fixture
def start_swarm() -> Iterator[StartSwarm]:
    """Return a function that starts a swarm of processes: ``start_swarm(work, peers=3, arguments={...})``.

    Its arguments are those of :class:`~p2pavg.testing.LocalSwarm`. All processes are up when it returns, and end with
    the test.
    """
    with ExitStack() as stack:

        def start(work: str | Callable[[Member], None], **settings: object) -> LocalSwarm:
            swarm = stack.enter_context(LocalSwarm(work, **settings))  # type: ignore[arg-type]
            swarm.start()
            return swarm

        yield start
