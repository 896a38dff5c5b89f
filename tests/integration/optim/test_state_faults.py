"""Faults while a state is fetched: donors and joiners that are killed, wrong bytes, and full disks.

``scripts/faults state`` repeats these faults with drawn chunks.
"""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from p2pavg.testing import LocalSwarm
from p2pavg.testing.swarm import SwarmProcess
from tests.integration.optim import state_faults as faults

pytestmark = pytest.mark.one_worker

JOINERS = ("resumes", "resumes", "loads", "loads", "full", "believes", "takes over", "alone")
"""In the order of the tests."""
AHEAD = 2


class Company:
    """Two donors, and processes that wait to become joiners: the next ones import what they need meanwhile."""

    def __init__(self, swarm: LocalSwarm) -> None:
        self.swarm = swarm
        self._later = list(JOINERS)
        self._ready: list[tuple[str, SwarmProcess]] = []
        self._prepare_next()
        faults.until_training(swarm)

    def _prepare_next(self) -> None:
        while self._later and len(self._ready) < AHEAD:
            name = self._later.pop(0)
            self._ready.append((name, faults.prepare(self.swarm, name)))

    @property
    def donors(self) -> list[SwarmProcess]:
        """The donors that run."""
        return [process for process in self.swarm.processes[: faults.DONORS] if process.running]

    def joiner(self, name: str) -> SwarmProcess:
        """Return a process of a name; it is ready if the tests run in their order."""
        found = next((entry for entry in self._ready if entry[0] == name), None)
        if found is None:
            return faults.prepare(self.swarm, name)
        self._ready.remove(found)
        self._prepare_next()
        return found[1]


@pytest.fixture(scope="module")
def company(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Company]:
    """Run the processes for all tests: each takes joiners of its own, and the last ones kill donors."""
    with faults.donors(tmp_path_factory.mktemp("donors")) as swarm:
        yield Company(swarm)


@pytest.mark.long
def test_a_joiner_that_is_killed_resumes_its_download(company: Company) -> None:
    first, again = company.joiner("resumes"), company.joiner("resumes")
    faults.joiner_dies_downloading(first, again, company.donors[0], part=0.4)
    again.kill()


@pytest.mark.long
def test_a_joiner_that_is_killed_while_it_loads_a_state_is_a_valid_peer_again(company: Company) -> None:
    first, again = company.joiner("loads"), company.joiner("loads")
    faults.joiner_dies_loading(first, again, company.donors[0], tensors=2)
    again.kill()


def test_a_full_disk_stops_the_download_and_not_the_joiner(company: Company) -> None:
    joiner = company.joiner("full")
    faults.disk_is_full(joiner, 8 * faults.MIB)
    joiner.kill()


def test_a_donor_that_sends_a_wrong_chunk_is_excluded_by_name(company: Company) -> None:
    donor, liar = company.donors[:2]
    faults.arm(liar, 1, spoils=True)
    for _ in range(faults.TRIES):
        joiner = company.joiner("believes")
        lied = faults.donor_lies(joiner, liar, donor)
        joiner.kill()
        if lied:
            return
    raise AssertionError("the wrong chunk was not noticed")


@pytest.mark.long
def test_a_joiner_goes_on_with_the_other_donors_when_one_is_killed(company: Company) -> None:
    donor, victim = company.donors[:2]
    faults.arm(victim, 1)
    for _ in range(faults.TRIES):
        joiner = company.joiner("takes over")
        died = faults.donor_dies(joiner, victim, donor)
        joiner.kill()
        if died:
            return
    raise AssertionError("the donor did not come to the chunk at which it dies")


@pytest.mark.long
def test_a_joiner_without_any_donor_keeps_its_state(company: Company) -> None:
    faults.donors_vanish(company.joiner("alone"), company.swarm)
