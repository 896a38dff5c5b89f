"""The work functions of the processes in the swarm tests."""

from __future__ import annotations

import atexit
import hashlib
import logging
import os
import random
import resource
import signal
import subprocess
import sys
import threading
import time
from typing import Any

import numpy
import psutil
import torch

import p2pavg
from p2pavg import blocking
from p2pavg.testing.swarm import Member

TILE = 65_536


def values(index: int, elements: int, seed: int = 0) -> torch.Tensor:
    return torch.randn(elements, generator=torch.Generator().manual_seed(1_000 * seed + index))


def configure(member: Member) -> p2pavg.AveragingConfig:
    torch.set_num_threads(1)
    defaults: dict[str, Any] = {"run_id": "swarm", "match_timeout": 20.0, "exchange_timeout": 20.0}
    return p2pavg.AveragingConfig(**{**defaults, **member.arguments.get("config", {})})


def describe(result: p2pavg.RoundResult, exact: torch.Tensor) -> dict[str, object]:
    """Return a result as JSON values, with the average's digest and its distance from the exact mean."""
    if not isinstance(result, p2pavg.Success):
        return {"result": type(result).__name__, "reason": result.reason}
    assert isinstance(result.averaged, list)
    averaged = torch.cat([tensor.reshape(-1).double() for tensor in result.averaged])
    bits = b"".join(tensor.numpy().tobytes() for tensor in result.averaged)
    return {
        "result": "Success",
        "peers": sorted(result.peers),
        "total_weight": result.total_weight,
        "group_id": result.group_id,
        "digest": hashlib.sha256(bits).hexdigest(),
        "error": float((averaged - exact).norm() / exact.norm()),
        "ratio": result.compression_ratio,
        "duration": result.duration,
        "exchange_duration": result.exchange_duration,
    }


def exact_mean(count: int, elements: int, weights: list[float], seed: int = 0) -> torch.Tensor:
    total = torch.zeros(elements, dtype=torch.float64)
    for index in range(count):
        total += weights[index] * values(index, elements, seed).double()
    return total / sum(weights)


def average_on_two_processors(member: Member) -> None:
    """Run one round of all processes, which share two processors with whatever else runs there."""
    os.sched_setaffinity(0, member.arguments["processors"])
    average_with(member)


def average_with(member: Member) -> None:
    """Run one round of all processes for each list of ``weights``, or one of equal weights.

    Each process has its own values and weight.
    """
    count, elements = member.arguments["count"], member.arguments["elements"]
    with member.averager(configure(member)) as averager:
        for weights in member.arguments.get("weights", [[1.0] * count]):
            averager.accumulate([values(member.index, elements)], weight=weights[member.index])
            result = averager.step(wait=None)
            while isinstance(result, p2pavg.InProgress):
                result = averager.step(wait=None)
            member.report(at=time.time(), **describe(result, exact_mean(count, elements, weights)))


def tile(peer_id: str) -> torch.Tensor:
    """Return the values that a peer repeats in :func:`survive`, which follow from its id."""
    seed = int.from_bytes(hashlib.sha256(peer_id.encode()).digest()[:4], "big")
    return torch.randn(TILE, generator=torch.Generator().manual_seed(seed))


def survive(member: Member) -> None:
    """Run rounds until the process is ended. Report each group, its result, and the contribution that is left.

    ``elements`` is a multiple of TILE. If the test tells it that it is ``late``, this process announces itself later
    than others from then on, and so does not lead.
    """
    elements, late = member.arguments["elements"], False
    losses = _Moments()
    with member.averager(configure(member)) as averager:
        mine = tile(averager.peer_id).repeat(elements // TILE)
        while True:
            if averager.weight == 0:
                averager.accumulate([mine])
            while (told := member.told(0.0)) is not None:
                late = told["late"]
            if late:
                time.sleep(0.3)
            formed = False
            losses.seen.clear()
            while isinstance(result := averager.step(wait=0.005), p2pavg.InProgress):
                if not formed and result.reason == "the group exchanges":
                    formed = True
                    member.report(formed=True)
            if not isinstance(result, p2pavg.Success):
                await_withheld(averager)
            if used := averager.weight == 0:
                assert averager.accumulated is None
            else:
                accumulated = averager.accumulated
                assert averager.weight == 1.0
                assert isinstance(accumulated, list)
                assert torch.allclose(accumulated[0], mine)
            if isinstance(result, p2pavg.Failed):
                assert result.contribution_used in (used, None)
            member.report(used=used, noticed=losses.seen[:1], **what_survived(result))


class _Moments(logging.Handler):
    """The moments, in seconds of the wall clock, at which a round here lost a member."""

    def __init__(self) -> None:
        super().__init__()
        self.seen: list[float] = []
        logger = logging.getLogger("p2pavg.round.losses")
        logger.setLevel(logging.INFO)
        logger.addHandler(self)

    def emit(self, record: logging.LogRecord) -> None:
        self.seen.append(record.created)


def await_withheld(averager: blocking.Averager) -> None:
    """Wait until the fate of a withheld contribution is known. The other members may report it late."""
    until = time.monotonic() + 60.0
    while averager.unresolved_weight and time.monotonic() < until:
        time.sleep(0.05)


def what_survived(result: p2pavg.RoundResult) -> dict[str, object]:
    """Return a result as JSON values, with its distance from the mean of the peers that it names."""
    if not isinstance(result, p2pavg.Success):
        return {"result": type(result).__name__, "reason": result.reason}
    assert isinstance(result.averaged, list)
    averaged = result.averaged[0]
    exact = torch.stack([tile(peer_id) for peer_id in result.peers]).mean(0)
    return {
        "result": "Success",
        "peers": sorted(result.peers),
        "lost": dict(result.lost),
        "group_id": result.group_id,
        "digest": hashlib.sha256(averaged.numpy().tobytes()).hexdigest(),
        "error": float((averaged.view(-1, TILE) - exact).norm() / averaged.norm()),
        "exchange_duration": result.exchange_duration,
    }


def soak(member: Member) -> None:
    """Run many rounds, and report the process' memory and files after the tenth round and at the end."""
    count, elements, rounds = (member.arguments[name] for name in ("count", "elements", "rounds"))
    process = psutil.Process()
    lost: list[str] = []
    with member.averager(configure(member)) as averager:
        for number in range(rounds):
            averager.accumulate([values(member.index, elements, number % 3)])
            result = averager.step(wait=None)
            lost += result.lost.values() if isinstance(result, p2pavg.Success) else []
            if number in (9, rounds - 1) or not isinstance(result, p2pavg.Success):
                exact = exact_mean(count, elements, [1.0] * count, number % 3)
                held = {
                    "rss": process.memory_info().rss,
                    "files": process.num_fds(),
                    "threads": process.num_threads(),
                    "peak": resource.getrusage(resource.RUSAGE_SELF).ru_maxrss,
                }
                member.report(round=number, pid=os.getpid(), lost=lost, **held, **describe(result, exact))


def rounds(member: Member) -> None:
    """Run rounds whose members become ready at different moments, and report the time to find each group."""
    pauses = random.Random(member.index)
    mine = values(member.index, member.arguments["elements"])
    with member.averager(configure(member)) as averager:
        for number in range(member.arguments["rounds"]):
            time.sleep(pauses.uniform(0.0, 0.2))
            averager.accumulate([mine])
            result = averager.step(wait=None)
            found = {"round": number, "result": type(result).__name__}
            if isinstance(result, p2pavg.Success):
                found |= {
                    "group_id": result.group_id,
                    "peers": len(result.peers),
                    "to_group": result.duration - result.exchange_duration,
                    "exchange": result.exchange_duration,
                }
            member.report(**found)


def stay(member: Member) -> None:
    """Stay in the swarm, and report each message of the test."""
    with member.averager(configure(member), identity=member.arguments.get("identity")):
        member.report(bootstrap=member.bootstrap, arguments=member.arguments)
        while True:
            message = member.told(timeout=60.0)
            if message is not None:
                member.report(heard=message)


def talk(member: Member) -> None:
    """Print, and report before and after joining."""
    print("not a report")
    member.report(before=1)
    os.write(1, b"{}\n")
    with member.averager(configure(member)):
        member.report(after=2)


def start_another(member: Member) -> None:
    """Start a process that would outlive this one, and that holds the descriptors it inherited."""
    child = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(600)"])
    member.report(pid=child.pid)
    child.wait()


def describe_start(member: Member) -> None:
    """Report with what the process was started, and what differs between two of them."""
    member.report(
        pid=os.getpid(),
        group=os.getpgid(0),
        folder=os.getcwd(),
        first_of_path=sys.path[0],
        variable=os.environ.get("P2PAVG_TEST_VARIABLE"),
        hashes=hash("p2pavg"),
        numbers=[random.random(), float(numpy.random.random())],
        input=os.readlink("/proc/self/fd/0"),
        open_files=psutil.Process().num_fds(),
        threads=[thread.name for thread in threading.enumerate()],
    )
    member.told(60.0)


def end(member: Member) -> None:
    """Leave a thread and a function for the end of the process, and end as the argument says."""

    def linger() -> None:
        time.sleep(0.2)
        member.report(said="thread")

    atexit.register(member.report, said="exit function")
    threading.Thread(target=linger).start()
    match member.arguments["end"]:
        case "return":
            return
        case "raise":
            raise ValueError("wrong")
        case "interrupt":
            os.kill(os.getpid(), signal.SIGINT)
            time.sleep(60.0)
        case code:
            sys.exit(code)
