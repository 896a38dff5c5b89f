"""Local updates with error feedback, in which peers are killed and come back by state transfer, beside a calm run.

Each peer is a process. A peer that is killed begins again with its directory: the newest checkpoint has its residual,
and the other peers send the averages that it has missed, or a snapshot.
"""

from __future__ import annotations

import argparse
import statistics
import sys
import tempfile
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import torch

import p2pavg
from p2pavg.optim import RunState, StepReport, sparseloco
from p2pavg.testing import LocalSwarm, Member
from p2pavg.testing.swarm import SwarmProcess
from scripts.benchmarks.training_work import BATCH, Task, in_one_process

WORK = "scripts.benchmarks.training_feedback:train"
SYNC_EVERY = 30
PATIENCE_SECONDS = 600.0
PAUSE_SECONDS = 0.05
"""A batch's computing on a slower machine: a process that begins again misses updates, and not the whole run."""


def feedback(given: argparse.Namespace) -> tuple[str, Sequence[str], Sequence[Sequence[str]]]:
    """Return title, columns and rows of the comparison."""
    peers, updates = given.peers or 4, (given.steps or 600) // SYNC_EVERY
    found: dict[str, list[dict[str, Any]]] = {"calm": [], "killed and come back": []}
    with tempfile.TemporaryDirectory() as folder:
        checkpoint = given.checkpoint or f"{folder}/checkpoint"
        if not given.checkpoint:
            in_one_process(peers, given.first_steps, save_to=checkpoint)
        start = {"peers": peers, "updates": updates, "checkpoint": checkpoint, "first": given.first_steps}
        for seed in range(1, given.seeds + 1):
            for name, ends in found.items():
                kills = [] if name == "calm" else [updates // 3, 2 * updates // 3]
                ends.append(one_run(start | {"seed": seed}, kills))
                print(name, seed, ends[-1], file=sys.stderr, flush=True)
    calm = statistics.fmean(end["held_out"] for end in found["calm"])
    rows = [
        (
            name,
            f"{statistics.fmean(end['held_out'] for end in ends):.4f}",
            f"{min(end['held_out'] for end in ends):.4f} .. {max(end['held_out'] for end in ends):.4f}",
            f"{100 * (statistics.fmean(end['held_out'] for end in ends) / calm - 1):+.2f} %",
            " ".join(str(end["missed"]) for end in ends),
        )
        for name, ends in found.items()
    ]
    title = f"{peers} peers, topk, {updates} outer steps of {SYNC_EVERY} batches, {given.seeds} seeds"
    return (
        title,
        ("", "held-out loss", "from .. to", "against the calm run", "updates that a peer missed"),
        rows,
    )


def one_run(start: Mapping[str, Any], kills: Sequence[int]) -> dict[str, Any]:
    """Train; return the held-out loss after the last update, and the number of updates that killed peers missed.

    Args:
        kills: updates after which a peer is killed, another one each time.
    """
    peers, updates = start["peers"], start["updates"]
    with tempfile.TemporaryDirectory() as folder:
        arguments = {**start, "folder": folder}
        with LocalSwarm(WORK, peers=peers, arguments=arguments) as swarm:
            swarm.start()
            first, missed = swarm.processes[0], 0
            for number, update in enumerate(kills):
                until(first, update)
                name = peers - 1 - number
                swarm.processes[name].kill()
                again = swarm.add(arguments={"name": name}, wait=False)
                missed += sum(report["peers"] < peers for report in until_back(first, again, updates))
            return {"held_out": until(first, updates)["held_out"], "missed": missed}


def until(process: SwarmProcess, update: int) -> dict[str, Any]:
    """Return a process's report of an update."""
    while (report := process.event(PATIENCE_SECONDS))["update"] < update:
        pass
    return report


def until_back(first: SwarmProcess, again: SwarmProcess, updates: int) -> list[dict[str, Any]]:
    """Return the reports of the updates until a process that was started again takes part.

    Raises:
        RuntimeError: the run ended before.
    """
    again.wait_joined(PATIENCE_SECONDS)
    back = until_contributing(again)
    reports = [first.event(PATIENCE_SECONDS)]
    while reports[-1]["update"] < back:
        reports.append(first.event(PATIENCE_SECONDS))
    if reports[-1]["update"] >= updates:
        raise RuntimeError("the run was over before the killed peer was back; give more --steps")
    return reports


def until_contributing(process: SwarmProcess) -> int:
    """Return the first update to which a process has contributed."""
    while not (report := process.event(PATIENCE_SECONDS))["contributed"]:
        pass
    return int(report["update"])


def train(member: Member) -> None:
    """Train with checkpoints of every outer step; report each update, and the held-out loss of the last one."""
    torch.set_num_threads(1)
    given = member.arguments
    name = given.get("name", member.index)
    folder, task = Path(given["folder"]), Task(given["peers"], given["checkpoint"], given["seed"])
    state = RunState(task.model, folder / f"peer{name}", every=1)

    def told(report: StepReport) -> None:
        assert isinstance(report.result, p2pavg.Success)
        event: dict[str, Any] = {"update": report.epoch, "peers": len(report.result.peers)}
        event["contributed"] = averager.peer_id in report.result.peers
        if report.epoch == given["updates"]:
            event["held_out"] = task.held_out_loss()
        member.report(**event)

    config = p2pavg.AveragingConfig(
        run_id="feedback",
        group_size=given["peers"],
        match_timeout=30.0,
        exchange_timeout=30.0,
        compression="topk",
    )
    with member.averager(config, identity=folder / f"{name}.key") as averager:
        optimizer = sparseloco(
            task.optimizer(),
            averager,
            sync_every=SYNC_EVERY,
            peers_to_start=given["peers"],
            state=state,
            on_update=told,
        )
        while optimizer.epoch < given["updates"]:
            step = state.extras["step"] = state.extras.get("step", given["first"] - 1) + 1
            optimizer.zero_grad()
            loss = task.loss(task.batches.of_peer(name, step))
            torch.autograd.backward(loss)
            torch.nn.utils.clip_grad_norm_(task.model.parameters(), 1.0)
            time.sleep(PAUSE_SECONDS)
            optimizer.step(samples=BATCH)
        while member.told(PATIENCE_SECONDS) is None:  # the last update's average may still be asked for
            pass
