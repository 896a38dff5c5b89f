"""Measure the documented figures of four peers with real processes on this machine; print a table.

scripts/bench measure            everything, about an hour, most of it kill and stop
scripts/bench measure cold kill  only some of: cold, group, kill, stop, soak, round, codecs
"""

from __future__ import annotations

import argparse
import random
import statistics
import time
from collections import Counter
from collections.abc import Callable
from typing import Any

import torch
from rich.console import Console
from rich.table import Table

from p2pavg.testing import LocalSwarm
from p2pavg_compression import Blockwise8
from scripts.benchmarks.allreduce import busy
from tests.integration.survival import Trial, trials
from tests.integration.swarm_work import TILE

WORK = "tests.integration.swarm_work:"
PEERS = 4


def swarm(work: str, **arguments: Any) -> LocalSwarm:
    return LocalSwarm(WORK + work, peers=PEERS, arguments={"count": PEERS, **arguments})


def spread(values: list[float]) -> str:
    if not values:
        return "never"
    ordered = sorted(values)
    return f"median {statistics.median(ordered):.2f} s, {ordered[0]:.2f} to {ordered[-1]:.2f}"


def cold(repeats: int = 7) -> list[tuple[str, str]]:
    """Measure from the start of the first process to the last peer's first success, imports included."""
    seconds = []
    for _ in range(repeats):
        began = time.time()
        config = {"group_size": PEERS, "min_group_size": PEERS}
        with swarm("average_with", elements=1_000_000, config=config) as found:
            found.start()
            ends = [list(process.events(60.0))[-1] for process in found.processes]
        assert all(end["result"] == "Success" for end in ends), ends
        seconds.append(max(end["at"] for end in ends) - began)
    return [("start of four processes to the first Success on all, 1 M elements", spread(seconds))]


def group(rounds: int = 40) -> list[tuple[str, str]]:
    """Measure from the moment the last peer is ready to the commit: the shortest time among the members."""
    config = {"group_size": PEERS, "min_group_size": PEERS}
    with swarm("rounds", elements=1_000, rounds=rounds, config=config) as found:
        found.start()
        events = [event for process in found.processes for event in process.events(300.0)]
    times: dict[str, list[float]] = {}
    for event in events:
        assert event["result"] == "Success", event
        times.setdefault(event["group_id"], []).append(event["to_group"])
    waits = sorted(min(members) for members in times.values())
    quantile = waits[int(0.95 * len(waits))]
    text = f"median {statistics.median(waits):.3f} s, 95th percentile {quantile:.3f} s, {len(waits)} rounds"
    return [("last peer ready to the group's commit", text)]


THIRDS = {"early": (0.0, 1 / 3), "middle": (1 / 3, 2 / 3), "late": (2 / 3, 1.0)}


def kill(repeats: int = 30) -> list[tuple[str, str]]:
    """Kill one of four peers (SIGKILL) during the exchange; measure the survivors' results and times."""
    return lose("SIGKILL", repeats)


def stop(repeats: int = 10) -> list[tuple[str, str]]:
    """Stop one of four peers (SIGSTOP) during the exchange; later it resumes and learns that it was dropped."""
    return lose("SIGSTOP", repeats)


def lose(signal: str, repeats: int) -> list[tuple[str, str]]:
    """Repeat a loss for the leader and a follower; early, in the middle and late; in fp32 and blockwise8."""
    rows = []
    for name, compression in (("blockwise8", "blockwise8"), ("fp32", None)):
        dice = random.Random(f"{signal}/{name}")
        with trials(compression, 256 * TILE) as tried:
            found: dict[tuple[str, str], list[Trial]] = {}
            for number in range(repeats * 2 * len(THIRDS)):
                role = ("leader", "last follower")[number % 2]
                third = list(THIRDS)[number // 2 % len(THIRDS)]
                trial = tried.lose(signal, role, dice.uniform(*THIRDS[third]))
                found.setdefault((role, third), []).append(trial)
        usual = statistics.median(tried.undisturbed)
        rows.append((f"{name}: an undisturbed exchange of 16 M elements", spread(tried.undisturbed)))
        for (role, third), some in sorted(found.items()):
            sizes = Counter(trial.peers for trial in some)
            late = sum(trial.took > 2 * usual + trial.grace for trial in some)
            rows.append(
                (
                    f"{name}: {signal} of the {role}, {third}: the survivors' exchange",
                    f"{spread([trial.took for trial in some])}; {sizes[3]} times of three, {sizes[4]} of all four; "
                    f"{late} of {len(some)} above {2 * usual + some[0].grace:.2f} s; "
                    f"noticed after {spread([trial.noticed for trial in some if trial.noticed])}",
                )
            )
    return rows


def soak(rounds: int = 200) -> list[tuple[str, str]]:
    """Run two hundred rounds in a row; compare a process's memory after the tenth and after the last."""
    config = {"group_size": PEERS, "min_group_size": PEERS}
    with swarm("soak", elements=1_000_000, rounds=rounds, config=config) as found:
        found.start()
        reports = [list(process.events(600.0)) for process in found.processes]
    rows = []
    for index, events in enumerate(reports):
        assert [event["round"] for event in events] == [9, rounds - 1], events
        early, late = events
        text = (
            f"memory {early['rss'] / 1e6:.0f} -> {late['rss'] / 1e6:.0f} MB, "
            f"files {early['files']} -> {late['files']}, threads {early['threads']} -> {late['threads']}"
        )
        rows.append(
            (f"{rounds} rounds of 1 M elements, no failure; peer {index} after the 10th -> last", text)
        )
    return rows


def large_round(rounds: int = 7) -> list[tuple[str, str]]:
    """Measure matchmaking and exchange of 16 M elements, for every peer in every round."""
    rows = []
    for compression in ("blockwise8", "fp32"):
        config = {"group_size": PEERS, "min_group_size": PEERS, "compression": compression}
        with swarm("rounds", elements=16_000_000, rounds=rounds, config=config) as found:
            found.start()
            events = [event for process in found.processes for event in process.events(300.0)]
        assert all(event["result"] == "Success" for event in events), events
        seconds = [event["to_group"] + event["exchange"] for event in events]
        rows.append((f"a round of 16 M elements, {compression}", spread(seconds)))
    return rows


def codecs(repeats: int = 5) -> list[tuple[str, str]]:
    """Compare the default codec with bitsandbytes' own on a CPU: MB of fp32 per second, one thread, 64 MiB."""
    import bitsandbytes  # takes seconds, and only this part needs it

    torch.set_num_threads(1)
    values, codec = torch.randn(16 * 2**20), Blockwise8()
    payload = codec.encode(values)
    out = torch.empty_like(values)
    work: dict[str, Callable[[], object]] = {
        "blockwise8 encodes": lambda: codec.encode(values, payload),
        "bitsandbytes encodes": lambda: bitsandbytes.functional.quantize_blockwise(values, blocksize=64),
        "blockwise8 decodes": lambda: codec.decode(payload, values.numel(), out),
    }
    rates: dict[str, list[float]] = {name: [] for name in work}
    for _ in range(repeats):
        for name, function in work.items():
            began = time.perf_counter()
            function()
            rates[name].append(values.nbytes / 1e6 / (time.perf_counter() - began))
    return [
        (name, f"median {statistics.median(found):.0f} MB/s, {min(found):.0f} to {max(found):.0f}")
        for name, found in rates.items()
    ]


PARTS: dict[str, Callable[..., list[tuple[str, str]]]] = {
    "cold": cold,
    "group": group,
    "kill": kill,
    "stop": stop,
    "soak": soak,
    "round": large_round,
    "codecs": codecs,
}


def main() -> None:
    parser = argparse.ArgumentParser(
        prog="scripts/bench measure",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("parts", nargs="*", choices=[[], *PARTS], default=[])
    parser.add_argument("--repeats", type=int, help="of each kind, for kill and stop")
    parser.add_argument("--beside", type=int, default=0, help="processes that compute all the time")
    arguments = parser.parse_args()
    chosen = arguments.parts or list(PARTS)
    table = Table("what", "measured", title="four peer processes on localhost")
    for name in chosen:
        again = {"repeats": arguments.repeats} if arguments.repeats and name in ("kill", "stop") else {}
        with busy(arguments.beside):
            for row in PARTS[name](**again):
                table.add_row(*row)
    Console(width=150).print(table)


if __name__ == "__main__":
    main()
