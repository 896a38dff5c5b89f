"""Trials of four real processes that average, one of which is lost in the middle of a round."""

from __future__ import annotations

import statistics
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

from p2pavg.testing import LocalSwarm, SwarmProcess

PEERS = 4
WAIT_SECONDS = 120.0
EXCHANGE_SECONDS = 30.0


@dataclass
class Trial:
    """The result of one trial."""

    signal: str
    role: str
    moment: float
    """The moment of the loss, as a fraction of an undisturbed exchange."""
    undisturbed: float
    """The median duration of undisturbed exchanges in this run, in seconds."""
    peers: int
    """The number of contributions in the survivors' result."""
    took: float
    """The longest duration of the survivors' exchange, in seconds."""
    error: float
    noticed: float
    """Seconds from the loss until the last of those survivors knew of it that noticed it themselves; 0 if none did."""

    @property
    def grace(self) -> float:
        """The seconds allowed beyond twice an undisturbed exchange: one, and what a stopped member is waited for."""
        return 1.0 + (EXCHANGE_SECONDS / 3 if self.signal == "SIGSTOP" else 0.0)


@dataclass
class Trials:
    """Four processes, of which one after another is lost and replaced."""

    swarm: LocalSwarm
    bound: float
    living: list[SwarmProcess] = field(default_factory=list)
    undisturbed: list[float] = field(default_factory=list)

    def round(self, processes: list[SwarmProcess]) -> list[dict[str, Any]]:
        """Return the next result of each process."""
        return [next(event for event in iter_events(process) if "result" in event) for process in processes]

    def settle(self) -> None:
        """Run rounds until all four processes have averaged in one group."""
        first, *others = self.living
        for _ in range(5):
            [result] = self.round([first])
            if len(result.get("peers", [])) == PEERS:
                for process in others:  # a process that is a round behind has one more result
                    while self.round([process])[0].get("group_id") != result["group_id"]:
                        pass
                self.undisturbed.append(result["exchange_duration"])
                return
        raise AssertionError("four processes do not come together")

    def _until(self, role: str, moment: float) -> float:
        """Wait until the first process is in a round, at a moment of it. Return what a round takes, in seconds."""
        while len(self.living) < PEERS:  # the last trial has killed one
            self.living.append(self.swarm.add())
        victim = self.living[0]
        for process in self.living:
            late = (process is not victim) == (role == "leader")
            process.tell(late=late)
        self.settle()
        usual = statistics.median(self.undisturbed)
        while "formed" not in victim.event(WAIT_SECONDS):
            pass
        time.sleep(moment * usual)
        return usual

    def hold_up(self, role: str, moment: float, seconds: float) -> list[dict[str, Any]]:
        """Stop a process in a round, let it go on after ``seconds``, and return the results of all four."""
        self._until(role, moment)
        victim = self.living[0]
        victim.stop()
        time.sleep(seconds)
        victim.resume()
        return self.round(self.living)

    def lose(self, signal: str, role: str, moment: float) -> Trial:
        """Run one trial. Raise AssertionError if a survivor's result breaks a guarantee."""
        usual = self._until(role, moment)
        victim, *survivors = self.living
        lost_at = time.time()
        victim.kill() if signal == "SIGKILL" else victim.stop()
        results = self.round(survivors)
        trial = self._check(signal, role, moment, usual, victim, survivors, results)
        trial.noticed = max((at - lost_at for result in results for at in result["noticed"]), default=0.0)
        if signal == "SIGSTOP":
            victim.resume()
            self._check_return(victim, trial)
            self.living = [*survivors, victim]
        else:
            self.living = survivors
        return trial

    def _check(
        self,
        signal: str,
        role: str,
        moment: float,
        usual: float,
        victim: SwarmProcess,
        survivors: list[SwarmProcess],
        results: list[dict[str, Any]],
    ) -> Trial:
        assert all(result["result"] == "Success" for result in results), results
        assert all(result["used"] for result in results), results
        assert len({result["digest"] for result in results}) == 1, results
        assert len({tuple(result["peers"]) for result in results}) == 1, results
        peers = set(results[0]["peers"])
        others = {process.peer_id for process in survivors}
        assert peers in (others, others | {victim.peer_id}), results
        error = max(result["error"] for result in results)
        assert error <= self.bound, results
        took = max(result["exchange_duration"] for result in results)
        return Trial(signal, role, moment, usual, len(peers), took, error, 0.0)

    def _check_return(self, victim: SwarmProcess, trial: Trial) -> None:
        """Check the report of a resumed victim.

        If the others have given it up, it keeps its contribution. If its contribution was used, it has the result or
        knows that it was used.
        """
        [back] = self.round([victim])
        assert back["used"] == (trial.peers == PEERS), back
        assert back["result"] in (("Success", "Failed") if back["used"] else ("Failed",)), back


def iter_events(process: SwarmProcess) -> Iterator[dict[str, Any]]:
    """Yield the reports of a process."""
    while True:
        yield process.event(WAIT_SECONDS)


@contextmanager
def trials(compression: str | None, elements: int) -> Iterator[Trials]:
    """Start four processes whose vectors have ``elements`` elements."""
    config = {
        "group_size": PEERS,
        "min_group_size": 2,
        "match_timeout": 60.0,
        "exchange_timeout": EXCHANGE_SECONDS,
        "compression": compression,
    }
    arguments = {"elements": elements, "config": config}
    with LocalSwarm("tests.integration.swarm_work:survive", peers=PEERS, arguments=arguments) as swarm:
        swarm.start()
        yield Trials(swarm, 1e-6 if compression is None else 0.02, list(swarm.processes))
