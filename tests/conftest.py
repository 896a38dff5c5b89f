"""Profiles of hypothesis, the order of trio's tasks, and the order of the tests.

The suite tries the same examples in every run, so that a failure is caused by the tested change. ``scripts/test
--hypothesis-profile=explore tests/properties`` draws new ones. In the same way, trio wakes the tasks of a test in the
same order in every run, as far as the network is simulated. ``scripts/test --task-order 7 tests/simulation`` tries
another order.

``scripts/test`` runs the suite with four workers of pytest-xdist (``--dist loadgroup``):

* The files that are marked ``processes`` are in two groups, which begin first. One worker runs all tests of a group. So
  at most two of these tests run at once, however many workers there are.
* A file that is marked ``one_worker`` has a fixture for all its tests that takes a minute, or imports for seconds what
  no other file does. One worker runs them, so that it is made once, and not by each worker.
* The other tests over real sockets mostly wait, and the simulations compute. They take turns, so that workers that run
  both at once use all of a machine with two cores.
* The short tests of ``unit/`` come last, so that all workers end at about the same time.
"""

from __future__ import annotations

import gc
import importlib
import inspect
import logging
import re
from collections.abc import Callable, Iterator
from functools import cache
from itertools import chain, zip_longest
from pathlib import Path
from typing import Any

import pytest
import trio
from hypothesis import settings
from trio.testing import MockClock

settings.register_profile("repeatable", derandomize=True, deadline=None, print_blob=True)
settings.register_profile("explore", deadline=None, print_blob=True)
settings.load_profile("repeatable")

ROOT = Path(__file__).parent
SIMULATIONS = ("tests/simulation/", "tests/unit/round/")
MARKED = re.compile(r"^pytestmark = \[?pytest\.mark\.(\w+)", re.MULTILINE)


@cache
def _groups() -> dict[str, str]:
    """Return the group of each file that is marked.

    The process that hands tests out to workers knows their names only, so the marks are read from the files.
    """
    found: dict[str, str] = {}
    processes = 0
    for path in sorted(ROOT.rglob("test_*.py")):
        mark = MARKED.search(path.read_text(encoding="utf-8"))
        file = f"tests/{path.relative_to(ROOT).as_posix()}"
        if mark is not None and mark[1] == "processes":
            processes += 1
            found[file] = f"processes {processes % 2}"
        elif mark is not None and mark[1] == "one_worker":
            found[file] = file
    return found


def scope_of(test: str) -> str:
    """Return the name of the tests that one worker runs with this one."""
    return _groups().get(test.partition("::")[0], test)


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Put the tests into the order that the top of this file describes."""
    first: list[pytest.Item] = []
    waiting: list[pytest.Item] = []
    computing: list[pytest.Item] = []
    for item in items:
        if scope_of(item.nodeid).startswith("processes"):
            first.append(item)
        elif item.nodeid.startswith("tests/integration/"):
            waiting.append(item)
        else:
            computing.append(item)
    computing.sort(key=lambda item: item.nodeid.startswith("tests/unit/"))
    turns = chain.from_iterable(zip_longest(waiting, computing))
    items[:] = [*first, *(item for item in turns if item is not None)]


def pytest_collectstart() -> None:
    """Collect no garbage while modules are imported: there is none, and a million objects to look through."""
    gc.disable()


def pytest_collection_finish() -> None:
    """Take what is imported by now out of the garbage collector's sight.

    It goes through a million objects otherwise, again and again, and at each search for the modules of an optimizer.
    """
    gc.collect()
    gc.freeze()
    gc.enable()


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--task-order", default="0", help="any text: another order in which trio wakes tasks")


def pytest_itemcollected(item: pytest.Item) -> None:
    """Run the coroutines of simulations on the virtual clock, so that no test has to ask for it."""
    if item.nodeid.startswith(SIMULATIONS) and inspect.iscoroutinefunction(getattr(item, "obj", None)):
        item.add_marker(pytest.mark.trio(run=on_the_virtual_clock), append=False)


def on_the_virtual_clock(main: Callable[..., Any], *, clock: MockClock | None, **named: Any) -> Any:
    """Run a test on the clock of its fixture, if it has one, or else on one that jumps to whatever is due next."""
    return trio.run(main, clock=clock or MockClock(autojump_threshold=0), **named)


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
