"""Measures, with real processes on this machine, what is promised of four peers, and prints a table.

scripts/measure            everything, about six minutes
scripts/measure cold kill  only some: cold, group, kill, soak, round, codecs
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
from tests.integration.test_swarm import check_survivor

WORK = "tests.integration.swarm_work:"
PEERS = 4


def swarm(work: str, **arguments: Any) -> LocalSwarm:
    return LocalSwarm(WORK + work, peers=PEERS, arguments={"count": PEERS, **arguments})


def spread(values: list[float]) -> str:
    ordered = sorted(values)
    return f"median {statistics.median(ordered):.2f} s, {ordered[0]:.2f} to {ordered[-1]:.2f}"


def cold(repeats: int = 7) -> list[tuple[str, str]]:
    """From the start of the first process to the last of the first successes, imports included."""
    seconds = []
    for _ in range(repeats):
        began = time.time()
        config = {"group_size": PEERS, "min_group_size": PEERS}
        with swarm("average_once", elements=1_000_000, config=config) as found:
            found.start()
            ends = [list(process.events(60.0))[-1] for process in found.processes]
        assert all(end["result"] == "Success" for end in ends), ends
        seconds.append(max(end["at"] for end in ends) - began)
    return [("start of four processes to the first Success on all, 1 M elements", spread(seconds))]


def group(rounds: int = 40) -> list[tuple[str, str]]:
    """From the moment the last peer is ready to the commit: the shortest of a group's members."""
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


def kill(repeats: int = 10) -> list[tuple[str, str]]:
    """SIGKILL of one at a random moment of a round: every survivor's results, checked."""
    tally: Counter[str] = Counter()
    longest = 0.0
    config = {"group_size": PEERS, "min_group_size": 3, "match_timeout": 5.0, "compression": None}
    for seed in range(repeats):
        with swarm("survive", elements=4_000_000, victim=3, config=config) as found:
            found.start()
            victim = found.processes[3]
            while victim.event(60.0).get("size") != PEERS:
                pass
            time.sleep(random.Random(seed).uniform(0.0, 0.8))
            victim.kill()
            killed = time.monotonic()
            for process in found.processes[:3]:
                results = [event for event in process.events(60.0) if "result" in event]
                check_survivor(results, victim.peer_id)
                tally.update(
                    f"{event['result']} of {event['size']}" if event["size"] else event["result"]
                    for event in results
                    if event["together"]
                )
            longest = max(longest, time.monotonic() - killed)
    counts = ", ".join(f"{count} {name}" for name, count in sorted(tally.items()))
    return [
        (f"SIGKILL of one of four at {repeats} random moments: the survivors' results from then on", counts),
        (
            "longest from a kill to the survivors' next Success, with a match timeout of 5 s",
            f"{longest:.1f} s",
        ),
    ]


def soak(rounds: int = 200) -> list[tuple[str, str]]:
    """Two hundred rounds in a row, and what a process holds after the tenth and after the last."""
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
    """Group and exchange of 16 M elements, for everybody in every round."""
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
    """The default codec beside bitsandbytes' own on a CPU: MB of fp32 per second, one thread, a vector of 64 MiB."""
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


PARTS: dict[str, Callable[[], list[tuple[str, str]]]] = {
    "cold": cold,
    "group": group,
    "kill": kill,
    "soak": soak,
    "round": large_round,
    "codecs": codecs,
}


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("parts", nargs="*", choices=[[], *PARTS], default=[])
    chosen = parser.parse_args().parts or list(PARTS)
    table = Table("what", "measured", title="four peer processes on localhost")
    for name in chosen:
        for row in PARTS[name]():
            table.add_row(*row)
    Console(width=150).print(table)


if __name__ == "__main__":
    main()
