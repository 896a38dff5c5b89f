"""Profiles of hypothesis, the order of trio's tasks, and the order of the tests.

The suite tries the same examples in every run, so that a failure is caused by the tested change. ``scripts/test
--hypothesis-profile=explore tests/properties`` draws new ones. In the same way, trio wakes the tasks of a test in the
same order in every run, as far as the network is simulated. ``scripts/test --task-order 7 tests/simulation`` tries
another order.

``scripts/test`` runs the suite with four workers of pytest-xdist (``--dist loadgroup``):

* The files whose tests start processes are in one of two groups, which begin first. One worker runs all tests of a
  group. So at most two of these tests run at once, however many workers there are.
* A file of :data:`SHARED` has a fixture for all its tests that takes a minute. One worker runs them, so that it is made
  once, and not by each worker.
* The other tests over real sockets mostly wait, and the simulations compute. They take turns, so that workers that run
  both at once use all of a machine with two cores.
* The short tests of ``unit/`` come last, so that all workers end at about the same time.
"""

from __future__ import annotations

import gc
import importlib
import logging
from collections.abc import Iterator
from itertools import chain, zip_longest
from typing import Any

import pytest
from hypothesis import settings

settings.register_profile("repeatable", derandomize=True, deadline=None, print_blob=True)
settings.register_profile("explore", deadline=None, print_blob=True)
settings.load_profile("repeatable")

PROCESSES = (
    ("test_bench", "test_examples", "test_local_swarm", "test_state", "test_swarm"),
    (
        "test_blocking_ends",
        "test_chaos",
        "test_cli",
        "test_daemon",
        "test_day",
        "test_demo",
        "test_doctor",
        "test_port_mapping",
        "test_readme",
        "test_starts",
    ),
)
"""The files in ``integration/`` whose tests start processes, in two groups that take about as long. Those in ``nat/``
belong to the second one."""
GROUPS = {
    f"tests/integration/{name}.py": f"processes {number}"
    for number, names in enumerate(PROCESSES, start=1)
    for name in names
} | {f"tests/nat/{name}.py": "processes 2" for name in ("test_faults", "test_lab", "test_peers")}

SHARED = {
    f"tests/{name}.py"
    for name in (
        "integration/optim/test_state_checkpoints",
        "integration/optim/test_state_faults",
        "simulation/test_cells",
        "simulation/test_churn",
    )
}


def group_of(test: str) -> str | None:
    """Return the group of a test whose processes share the machine with one other group; ``None`` for other tests."""
    return GROUPS.get(test.partition("::")[0])


def scope_of(test: str) -> str:
    """Return the name of the tests that one worker runs with this one."""
    file = test.partition("::")[0]
    return group_of(test) or (file if file in SHARED else test)


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Put the tests into the order that the top of this file describes."""
    first: list[pytest.Item] = []
    waiting: list[pytest.Item] = []
    computing: list[pytest.Item] = []
    for item in items:
        if group_of(item.nodeid) is not None:
            first.append(item)
        elif item.nodeid.startswith("tests/integration/"):
            waiting.append(item)
        else:
            computing.append(item)
    computing.sort(key=lambda item: item.nodeid.startswith("tests/unit/"))
    turns = chain.from_iterable(zip_longest(waiting, computing))
    items[:] = [*first, *(item for item in turns if item is not None)]


def pytest_collection_finish() -> None:
    """Take what is imported by now out of the garbage collector's sight.

    It goes through a million objects otherwise, again and again, and at each search for the modules of an optimizer.
    """
    gc.collect()
    gc.freeze()


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--task-order", default="0", help="any text: another order in which trio wakes tasks")


@pytest.hookimpl(tryfirst=True)
def pytest_runtest_setup(item: pytest.Item) -> None:
    """Wake the tasks of a test in an order that follows from its name: trio wakes those that are ready in any order."""
    # trio has no public function for this; pytest-trio, too, reaches for the generator that draws the order.
    order: Any = importlib.import_module("trio._core._run")
    order._r.seed(f"{item.config.getoption('--task-order')} {item.nodeid}")


@pytest.fixture(autouse=True)
def _loggers() -> Iterator[None]:
    """Give each test the loggers as they were: a command in this process sets their levels and handlers."""
    loggers = [logging.getLogger(), *(logging.getLogger(name) for name in ("p2pavg", "p2pavg_dht", "libp2p"))]
    before = [(logger, logger.level, logger.propagate, list(logger.handlers)) for logger in loggers]
    yield
    for logger, level, propagate, handlers in before:
        logger.setLevel(level)
        logger.propagate, logger.handlers = propagate, handlers


@pytest.hookimpl(optionalhook=True)
def pytest_xdist_make_scheduler(config: pytest.Config, log: Any) -> Any:
    """Return a scheduler that gives each group to one worker, and other tests to any worker that has time.

    pytest-xdist 3.8 has marks for such groups, which it ignores with pytest 9.2.
    """
    if config.getoption("dist") != "loadgroup":
        return None
    from xdist.scheduler import LoadScopeScheduling

    scheduler = LoadScopeScheduling(config, log)
    scheduler._split_scope = scope_of
    return scheduler
