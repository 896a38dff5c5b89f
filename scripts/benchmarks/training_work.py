"""A GPT that one peer trains, or one process alone: a small one on Python's documentation, a larger one on its code."""

from __future__ import annotations

import hashlib
import os
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cache, cached_property
from pathlib import Path
from typing import Any

import torch
from torch.nn import functional

import p2pavg
from p2pavg.blocking import Averager
from p2pavg.optim import AveragedOptimizer, LocalUpdates, StepReport, diloco, gossip, noloco
from p2pavg.testing import Member
from scripts.benchmarks.sources import load_sources
from scripts.demo_gpt.batches import Batches, held_out_windows
from scripts.demo_gpt.model import GPT, ModelConfig
from scripts.demo_gpt.text import Text, load_text

BATCH = 8
SIZES = {
    "small": {"context": 32, "width": 64, "heads": 4, "layers": 2},
    "large": {"context": 64, "width": 160, "heads": 4, "layers": 4},
}
"""Of the GPT: 115,000 and 1.3 million parameters."""
TEXTS = {"small": cache(load_text), "large": load_sources}
HELD_OUT = 512
LR = 3e-3
SEED = 1


@dataclass
class Task:
    """The learning task, the same for all peers.

    Args:
        peers: number of peers among which the text is divided.
        checkpoint: of the model, to begin from.
        seed: of the batches.
        size: of the model, one of :data:`SIZES`.
    """

    peers: int
    checkpoint: str | None = None
    seed: int = SEED
    size: str = "small"

    @property
    def context(self) -> int:
        """Return the number of characters from which the model predicts the next one."""
        return SIZES[self.size]["context"]

    @property
    def text(self) -> Text:
        """Return the text, which is longer for the larger model."""
        return TEXTS[self.size]()

    @cached_property
    def model(self) -> GPT:
        """Return the initial model."""
        text = self.text
        config = ModelConfig(vocabulary_size=len(text.vocabulary), **SIZES[self.size])
        model = GPT(config, seed=SEED)
        if self.checkpoint is not None:
            model.load_state_dict(torch.load(self.checkpoint))
        return model

    @cached_property
    def batches(self) -> Batches:
        """Return the batches of every peer."""
        return Batches(
            self.text.train, context=self.context, batch_size=BATCH, peers=self.peers, seed=self.seed
        )

    def loss(self, windows: torch.Tensor) -> torch.Tensor:
        """Return the mean cross entropy, in nats per character, of windows (n, context + 1)."""
        scores = self.model(windows[:, :-1])
        return functional.cross_entropy(scores.flatten(0, 1), windows[:, 1:].flatten())

    @torch.no_grad()
    def held_out_loss(self) -> float:
        """Return the loss on held-out text."""
        windows = held_out_windows(self.text.held_out, context=self.context, count=HELD_OUT)
        return float(self.loss(windows))

    def digest(self) -> str:
        """Return a digest of the parameters' bytes."""
        digest = hashlib.sha256()
        for parameter in self.model.parameters():
            digest.update(parameter.detach().numpy().tobytes())
        return digest.hexdigest()

    def optimizer(self, name: str = "adamw") -> torch.optim.Optimizer:
        """Return the optimizer: the common one, or a peer's inner one."""
        if name == "sgd":
            return torch.optim.SGD(self.model.parameters(), lr=0.3, momentum=0.9)
        return torch.optim.AdamW(self.model.parameters(), lr=LR, betas=(0.9, 0.95))

    def optimizers(self, name: str) -> list[torch.optim.Optimizer]:
        """Return the inner optimizers: one, or Muon for the blocks' matrices and AdamW for the rest."""
        if name != "muon":
            return [self.optimizer(name)]
        named = dict(self.model.named_parameters())
        matrices = [weights for key, weights in named.items() if "blocks." in key and weights.ndim == 2]
        rest = [weights for key, weights in named.items() if not ("blocks." in key and weights.ndim == 2)]
        return [
            torch.optim.Muon(matrices, lr=LR, weight_decay=0.01, adjust_lr_fn="match_rms_adamw"),
            torch.optim.AdamW(rest, lr=LR, betas=(0.9, 0.95)),
        ]


def in_one_process(
    peers: int,
    steps: int,
    name: str = "adamw",
    *,
    first: int = 0,
    one_by_one: bool = False,
    delay: int = 0,
    checkpoint: str | None = None,
    save_to: str | None = None,
    seed: int = SEED,
    size: str = "small",
    fractions: Sequence[float] = (),
) -> tuple[list[float], float]:
    """Train in one process; return the loss of every step on all peers' batches, and the final held-out loss.

    Args:
        first: number of the first batch.
        one_by_one: accumulate the gradients of the peers' batches separately, which changes the rounding.
        delay: number of updates by which each gradient is late.
        checkpoint: of the model, to begin from.
        save_to: file for the final model.
        seed: of the batches.
        size: of the model.
        fractions: of the rate, one for each step; empty: the whole rate.
    """
    task = Task(peers, checkpoint, seed, size)
    optimizer = task.optimizer(name)
    losses: list[float] = []
    late: list[list[torch.Tensor | None]] = []
    for step in range(first, first + steps):
        if fractions:
            optimizer.param_groups[0]["lr"] = LR * fractions[step - first]
        optimizer.zero_grad()
        parts = [task.batches.of_peer(peer, step) for peer in range(peers)]
        batches = parts if one_by_one else [torch.cat(parts)]
        losses.append(0.0)
        for batch in batches:
            loss = task.loss(batch) / len(batches)
            torch.autograd.backward(loss)
            losses[-1] += loss.item()
        late.append([parameter.grad for parameter in task.model.parameters()])
        if len(late) > delay:
            for parameter, gradient in zip(task.model.parameters(), late.pop(0), strict=True):
                parameter.grad = gradient
            torch.nn.utils.clip_grad_norm_(task.model.parameters(), 1.0)
            optimizer.step()
    if save_to is not None:
        torch.save(task.model.state_dict(), save_to)
    return losses, task.held_out_loss()


def config_of(arguments: dict[str, Any]) -> p2pavg.AveragingConfig:
    """Return the configuration of a run on one machine."""
    return p2pavg.AveragingConfig(
        run_id="training",
        group_size=arguments["peers"],
        match_timeout=arguments.get("match_timeout", 30.0),
        exchange_timeout=30.0,
        compression=None if arguments["codec"] == "fp32" else arguments["codec"],
    )


def averaged(task: Task, averager: Averager, arguments: dict[str, Any], **options: Any) -> AveragedOptimizer:
    """Train with one common optimizer step for each batch of all peers."""
    given: dict[str, Any] = {
        "target_batch_size": BATCH * arguments["peers"],
        "max_samples_per_peer": BATCH,
        "max_grad_norm": 1.0,
        "peers_to_start": arguments["peers"],
        "overlap": arguments.get("overlap", False),
    }
    inner = task.optimizer(arguments.get("optimizer", "adamw"))
    return AveragedOptimizer(inner, averager, **(given | options))


def local(task: Task, averager: Averager, arguments: dict[str, Any]) -> LocalUpdates:
    """Train with local updates."""
    recipes: dict[str, Callable[..., LocalUpdates]] = {"diloco": diloco, "noloco": noloco, "gossip": gossip}
    recipe = recipes[arguments.get("recipe", "diloco")]
    options: dict[str, Any] = arguments.get("options", {})
    every, peers = arguments["sync_every"], arguments["peers"]
    return recipe(task.optimizer(), averager, sync_every=every, peers_to_start=peers, **options)


def train(member: Member) -> None:
    """Train on ``steps`` batches; report the results."""
    torch.set_num_threads(1)
    arguments = member.arguments
    task = Task(arguments["peers"], arguments.get("checkpoint"), arguments.get("seed", SEED))
    sent, losses, distances = 0, [], []
    with member.averager(config_of(arguments)) as averager:
        make: Callable[..., AveragedOptimizer | LocalUpdates] = (
            averaged if arguments["sync_every"] == 0 else local
        )
        optimizer = make(task, averager, arguments)
        began = time.monotonic()
        first = arguments.get("first", 0)
        for step in range(first, first + arguments["steps"]):
            optimizer.zero_grad()
            loss = task.loss(task.batches.of_peer(member.index, step))
            torch.autograd.backward(loss)
            if arguments["sync_every"]:
                torch.nn.utils.clip_grad_norm_(task.model.parameters(), 1.0)
            report = optimizer.step(samples=BATCH, metrics={"loss": loss.item()})
            if isinstance(report.result, p2pavg.Success):
                sent += report.result.bytes_sent
                losses.append(report.metrics["loss"])
                distances.append(report.consensus_distance)
        member.report(
            epoch=optimizer.epoch,
            losses=losses,
            held_out=task.held_out_loss(),
            digest=task.digest(),
            bytes_sent=sent,
            distances=distances,
            norm=float(torch.nn.utils.get_total_norm(list(task.model.parameters()))),
            seconds=time.monotonic() - began,
        )


def churn(member: Member) -> None:
    """Train from the newest saved state until the run's held-out loss is low enough; report progress."""
    torch.set_num_threads(1)
    arguments = member.arguments
    folder, task = Path(arguments["folder"]), Task(arguments["peers"] * 4)
    with member.averager(config_of(arguments)) as averager:
        optimizer = averaged(
            task,
            averager,
            arguments,
            target_batch_size=arguments["target"],
            max_samples_per_peer=None,
            peers_to_start=arguments["peers"] if member.index < arguments["peers"] else 2,
            sync_timeout=20.0,
        )
        load_newest(folder, task, optimizer)
        for step in range(10**9):
            optimizer.zero_grad()
            loss = task.loss(task.batches.of_peer(member.index % (arguments["peers"] * 4), step))
            torch.autograd.backward(loss)
            time.sleep(arguments["pause"])  # simulates a larger batch
            report = optimizer.step(samples=BATCH, metrics={"loss": loss.item()})
            event: dict[str, Any] = {"computed": BATCH, "epoch": report.epoch, "behind": report.behind}
            if report.updated:
                event |= after_update(folder, task, averager, optimizer, report, arguments)
            member.report(**event)
            if report.behind is not None:
                load_newest(folder, task, optimizer)


def after_update(
    folder: Path,
    task: Task,
    averager: Averager,
    optimizer: AveragedOptimizer,
    report: StepReport,
    arguments: dict[str, Any],
) -> dict[str, Any]:
    """If this peer is the first of the group, save its state for new peers and report its loss now and then."""
    result = report.result
    assert isinstance(result, p2pavg.Success)
    found: dict[str, Any] = {"weight": result.total_weight, "peers": len(result.peers)}
    if averager.peer_id == min(result.peers):
        save(folder, task, optimizer)
        if report.epoch % arguments["look_every"] == 0:
            found["held_out"] = task.held_out_loss()
    found["digest"] = task.digest()
    return found


def save(folder: Path, task: Task, optimizer: AveragedOptimizer) -> None:
    """Save the state atomically; remove older ones."""
    place = folder / f"{optimizer.epoch:08}.state"
    new = folder / f"new.{os.getpid()}"
    torch.save({"model": task.model.state_dict(), "optimizer": optimizer.state_dict()}, new)
    new.rename(place)
    for older in sorted(folder.glob("*.state"))[:-3]:
        older.unlink(missing_ok=True)


def load_newest(folder: Path, task: Task, optimizer: AveragedOptimizer) -> None:
    """Load the newest saved state if it is newer than this peer's."""
    for place in sorted(folder.glob("*.state"), reverse=True):
        if int(place.stem) <= optimizer.epoch:
            return
        try:
            state = torch.load(place)
        except FileNotFoundError:  # replaced by a newer one
            continue
        task.model.load_state_dict(state["model"])
        optimizer.load_state_dict(state["optimizer"])
        return


def exchange(member: Member) -> None:
    """Average a vector of ``elements`` values once; report the bytes that this peer has sent."""
    torch.set_num_threads(1)
    arguments = member.arguments
    values = torch.randn(arguments["elements"], generator=torch.Generator().manual_seed(member.index))
    with member.averager(config_of(arguments)) as averager:
        averager.accumulate([values], weight=1.0)
        result = averager.step(wait=120.0)
        assert isinstance(result, p2pavg.Success), result
        member.report(bytes_sent=result.bytes_sent)
