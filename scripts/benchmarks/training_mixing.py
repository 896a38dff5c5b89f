"""Local updates that mix between pairs beside DiLoCo: held-out loss and bytes, with real peers on this machine."""

from __future__ import annotations

import argparse
import statistics
import sys
import tempfile
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from p2pavg.testing import LocalSwarm
from scripts.benchmarks.training_work import in_one_process

WORK = "scripts.benchmarks.training_work:train"
RECIPES = ("diloco", "noloco", "gossip")


@dataclass(frozen=True, slots=True)
class Found:
    """The figures of one run."""

    loss: float
    """Mean held-out loss of the peers, in nats per character."""
    spread: float
    """Largest minus smallest held-out loss of the peers."""
    sent: float
    """Mean of the bytes that a peer has sent in exchanges."""
    distance: float
    """Mean distance of an anchor from its group's mean anchor at the last outer step, per norm of the parameters."""
    seconds: float


def mixing(given: argparse.Namespace) -> tuple[str, Sequence[str], Sequence[Sequence[str]]]:
    """Return title, columns and rows of the comparison."""
    peers, steps = given.peers or 8, given.steps or 1000
    every = int(given.sync_every.split(",")[-1])
    rows: list[tuple[str, ...]] = []
    with tempfile.TemporaryDirectory() as folder:
        checkpoint = f"{folder}/checkpoint"
        in_one_process(peers, given.first_steps, save_to=checkpoint)
        for codec in given.codecs.split(","):
            base = 0.0
            for recipe in RECIPES:
                found = [
                    _run(peers, steps, every, codec, recipe, checkpoint, given.first_steps, seed)
                    for seed in range(1, given.seeds + 1)
                ]
                loss = statistics.fmean(each.loss for each in found)
                base = base or loss
                rows.append(_row(recipe, codec, found, loss, base))
                print(*rows[-1], flush=True, file=sys.stderr)
    title = (
        f"{peers} peers, {steps} batches each from a checkpoint of {given.first_steps}, outer step every {every},"
        f" {given.seeds} seeds"
    )
    columns = (
        "recipe",
        "codec",
        "held-out loss",
        "range of seeds",
        "against diloco",
        "spread of peers",
        "sent by a peer",
        "distance",
        "time",
    )
    return title, columns, rows


def _row(recipe: str, codec: str, found: Sequence[Found], loss: float, base: float) -> tuple[str, ...]:
    losses = [each.loss for each in found]
    return (
        recipe,
        codec,
        f"{loss:.4f}",
        f"{min(losses):.4f} .. {max(losses):.4f}",
        f"{100 * (loss / base - 1):+.2f} %",
        f"{max(each.spread for each in found):.4f}",
        f"{statistics.fmean(each.sent for each in found) / 1e6:.2f} MB",
        f"{100 * statistics.fmean(each.distance for each in found):.1f} %",
        f"{statistics.fmean(each.seconds for each in found):.0f} s",
    )


def _run(
    peers: int, steps: int, every: int, codec: str, recipe: str, checkpoint: str, first: int, seed: int
) -> Found:
    arguments: dict[str, Any] = {
        "peers": peers,
        "codec": codec,
        "steps": steps,
        "first": first,
        "checkpoint": checkpoint,
        "sync_every": every,
        "recipe": recipe,
        "seed": seed,
    }
    with LocalSwarm(WORK, peers=peers, arguments=arguments) as swarm:
        swarm.start()
        ends = [list(process.events(3600))[-1] for process in swarm.processes]
    losses = [end["held_out"] for end in ends]
    distances = [
        end["distances"][-1] / end["norm"]
        for end in ends
        if end["distances"] and end["distances"][-1] is not None
    ]
    return Found(
        loss=statistics.fmean(losses),
        spread=max(losses) - min(losses),
        sent=statistics.fmean(end["bytes_sent"] for end in ends),
        distance=statistics.fmean(distances) if distances else 0.0,
        seconds=max(end["seconds"] for end in ends),
    )
