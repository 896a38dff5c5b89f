"""The work of a process of ``scripts/faults chaos``: it averages round after round and reports every event.

The parent makes the same samples from the same seed, so it can check an average without receiving it. A process reports
only a digest of the average's bits, and its :func:`sketch`. Sketches are linear: the sketch of a weighted mean is the
weighted mean of the sketches.
"""

from __future__ import annotations

import ctypes
import faulthandler
import functools
import hashlib
import logging
import random
import signal
import time
from pathlib import Path
from typing import Any

import torch

import p2pavg
from p2pavg import blocking
from p2pavg.peer.peer import peer_over
from p2pavg.testing.swarm import Member

SKETCH = 64
"""Number of elements of a sketch."""
WEIGHT_UNIT = 2.0**-36
"""All weights are multiples of it, so that their sums are exact up to 2**17, in any order."""
BETWEEN = 0.3  # fraction of rounds during which a sample is accumulated
WATCHED = 0.7  # fraction of rounds in which the process reports the exchange, so that the parent can aim
WATCH_SECONDS = 3.0
EXCHANGES = "the group exchanges"
SETTLE_SECONDS = 60.0
"""Time for which a finished process waits to learn the fate of withheld contributions."""


@functools.cache
def _signs(elements: int) -> torch.Tensor:
    padded = -(-elements // SKETCH) * SKETCH
    generator = torch.Generator().manual_seed(elements)
    return torch.randint(0, 2, (padded,), generator=generator, dtype=torch.float64) * 2 - 1


def sketch(values: torch.Tensor) -> list[float]:
    """Return a random projection that keeps norms within about ten percent (Johnson and Lindenstrauss 1984).

    Element ``i`` goes into number ``i % SKETCH`` with a random sign, so an error in any range of elements shows.
    """
    padded = torch.zeros_like(_signs(values.numel()))
    padded[: values.numel()] = values
    folded: list[float] = (padded * _signs(values.numel())).view(-1, SKETCH).sum(0).tolist()
    return folded


def draw_sample(seed: int, slot: int, life: int, number: int, elements: int) -> tuple[float, torch.Tensor]:
    """Return a sample's weight and values. Different sets of a slot's samples have different total weights."""
    dice = random.Random(f"sample/{seed}/{slot}/{life}/{number}")
    weight = dice.randrange(round(0.5 / WEIGHT_UNIT), round(4.0 / WEIGHT_UNIT)) * WEIGHT_UNIT
    generator = torch.Generator().manual_seed(dice.getrandbits(63))
    return weight, torch.randn(elements, generator=generator)


def clock_file(folder: Path, slot: int) -> Path:
    """Return the file that says by how many seconds the wall clock of a process is wrong."""
    return folder / f"{slot}.clock"


def _set_clock(file: Path) -> None:
    """Let the peer of this process have a wall clock that is wrong by what a file says, if it exists."""

    def now() -> float:
        return time.time() + (float(file.read_text()) if file.exists() else 0.0)

    # Only simulations give a peer a clock, so no caller of an averager of one's own can.
    peer_over.__wrapped__.__kwdefaults__["wall_clock"] = now  # type: ignore[attr-defined]


def _enter(namespace: str) -> None:
    """Go into a network namespace, with this thread and those that it starts."""
    with Path("/run/netns", namespace).open() as opened:
        if ctypes.CDLL(None, use_errno=True).setns(opened.fileno(), 0):
            raise OSError(ctypes.get_errno(), f"cannot enter the namespace {namespace}")


def average(member: Member) -> None:
    """Run rounds until told to finish, then report the unused samples.

    The averager stays open until the parent leaves.
    """
    torch.set_num_threads(1)
    life, folder = member.arguments["life"], Path(member.arguments["folder"])
    _set_clock(clock_file(folder, member.index))
    host = "127.0.0.1"
    if places := member.arguments["places"]:
        namespace, host = places[member.index]
        _enter(namespace)
    with Path(folder, f"{member.index}-{life}.log").open("w") as log:
        logging.basicConfig(
            level=logging.INFO, format="%(asctime)s.%(msecs)03d %(name)s %(message)s", stream=log
        )
        faulthandler.register(signal.SIGUSR1, file=log, all_threads=True)
        config = p2pavg.AveragingConfig(run_id="chaos", open_run=True, **member.arguments["config"])
        with blocking.open_averager(
            config,
            bootstrap=member.bootstrap,
            listen=[f"/ip4/{host}/tcp/0"],
            identity=folder / f"{member.index}.key",
        ) as averager:
            member.report(address=averager.addresses[0], peer_id=averager.peer_id)
            worker = _Worker(member, averager)
            while member.told(timeout=worker.pause()) is None:
                worker.round()
            worker.finish()
            while True:
                member.told(timeout=SETTLE_SECONDS)


class _Worker:
    """A training loop without training."""

    def __init__(self, member: Member, averager: blocking.Averager) -> None:
        self._member = member
        self._averager = averager
        self._seed: int = member.arguments["seed"]
        self._life: int = member.arguments["life"]
        self._elements: int = member.arguments["elements"]
        self._pause: float = member.arguments["pause"]
        self._dice = random.Random(f"worker/{self._seed}/{member.index}/{self._life}")
        self._samples = 0

    def pause(self) -> float:
        """Return seconds until the next round, in place of training."""
        return self._dice.uniform(0.0, 2 * self._pause)

    def round(self) -> None:
        """Run one round and report it."""
        self._accumulate()
        self._report("begun", weight=self._averager.weight)
        result: p2pavg.RoundResult | None = None
        if self._dice.random() < BETWEEN:
            result = self._averager.step(wait=0)
            if isinstance(result, p2pavg.InProgress):
                self._accumulate()  # belongs to the next round
        if self._dice.random() < WATCHED and (result is None or isinstance(result, p2pavg.InProgress)):
            result = self._watch()
        while result is None or isinstance(result, p2pavg.InProgress):
            result = self._averager.step(wait=None)
            if isinstance(result, p2pavg.InProgress):
                self._report("waits", reason=result.reason)
        self._report("result", **_describe(result), weight=self._averager.weight)

    def _watch(self) -> p2pavg.RoundResult:
        """Step until the group exchanges, and report that."""
        end = time.monotonic() + WATCH_SECONDS
        while True:
            result = self._averager.step(wait=0.03)
            exchanges = isinstance(result, p2pavg.InProgress) and result.reason == EXCHANGES
            if exchanges:
                self._report("waits", reason=EXCHANGES)
            if exchanges or not isinstance(result, p2pavg.InProgress) or time.monotonic() > end:
                return result

    def finish(self) -> None:
        """Report the unused samples, once they are known."""
        end = time.monotonic() + SETTLE_SECONDS
        while self._withheld() and time.monotonic() < end:
            time.sleep(0.1)
        unresolved, weight = self._withheld(), self._averager.weight
        while True:  # a settled contribution may just be moving from one figure to the other
            time.sleep(0.2)
            before, (unresolved, weight) = (unresolved, weight), (self._withheld(), self._averager.weight)
            if before == (unresolved, weight):
                break
        self._report("left", weight=weight, unresolved_weight=unresolved)

    def _withheld(self) -> float:
        return self._averager.unresolved_weight

    def _accumulate(self) -> None:
        weight, values = draw_sample(
            self._seed, self._member.index, self._life, self._samples, self._elements
        )
        # Reported first: so every contribution of a killed process that others may hold has been reported.
        self._report("sample", number=self._samples, weight=weight)
        self._samples += 1
        self._averager.accumulate([values], weight=weight)

    def _report(self, event: str, **what: Any) -> None:
        self._member.report(event=event, at=time.monotonic(), **what)


def _describe(result: p2pavg.RoundResult) -> dict[str, Any]:
    described: dict[str, Any] = {"result": type(result).__name__}
    if isinstance(result, p2pavg.Success):
        assert isinstance(result.averaged, list)
        [averaged] = result.averaged
        described |= {
            "group_id": result.group_id,
            "weights": {peer_id: result.weights[peer_id] for peer_id in result.peers},
            "total_weight": result.total_weight,
            "digest": hashlib.sha256(averaged.numpy().tobytes()).hexdigest(),
            "sketch": sketch(averaged),
            "lost": dict(result.lost),
        }
    else:
        described["reason"] = result.reason
    if isinstance(result, p2pavg.Failed):
        described |= {"peer": result.peer, "used": result.contribution_used}
    return described
