"""Profiles of hypothesis, and the order of the tests.

The suite tries the same examples in every run, so that a failure is caused by the tested change. ``scripts/test
--hypothesis-profile=explore tests/properties`` draws new ones.

``scripts/test`` runs the suite with four workers of pytest-xdist (``--dist loadgroup``):

* Tests that start processes are in one of two groups, which begin first. All tests of a group run in one worker. So at
  most two of these tests run at once, however many workers there are.
* The other tests over real sockets mostly wait, and the simulations compute. They take turns, so that workers that run
  both at once use all of a machine with two cores.
* The short tests of ``unit/`` come last, and all workers end at about the same time.
"""

from __future__ import annotations

from itertools import chain, zip_longest

import pytest
from hypothesis import settings

settings.register_profile("repeatable", derandomize=True, deadline=None, print_blob=True)
settings.register_profile("explore", deadline=None, print_blob=True)
settings.load_profile("repeatable")


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Put the tests into the order that the top of this file describes."""
    first: list[pytest.Item] = []
    waiting: list[pytest.Item] = []
    computing: list[pytest.Item] = []
    for item in items:
        if item.get_closest_marker("xdist_group") is not None:
            first.append(item)
        elif item.nodeid.startswith("tests/integration/"):
            waiting.append(item)
        else:
            computing.append(item)
    computing.sort(key=lambda item: item.nodeid.startswith("tests/unit/"))
    turns = chain.from_iterable(zip_longest(waiting, computing))
    items[:] = [*first, *(item for item in turns if item is not None)]
