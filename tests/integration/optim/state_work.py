"""The work functions of the processes in the tests of states."""

from __future__ import annotations

import hashlib
import logging
import os
import resource
import sys
import time
from pathlib import Path
from typing import Any

import torch

import p2pavg
from p2pavg.base.result import Success
from p2pavg.optim import AveragedOptimizer, RunState, StepReport
from p2pavg.state.donor.shelf import Shelf
from p2pavg.state.joiner.fetching import BlobDownload
from p2pavg.state.progress import StateProgress
from p2pavg.state.tree import BlobKind
from p2pavg.testing.swarm import Member

INPUTS = 8
BATCH = 16


class Told(logging.Handler):
    """Reports the log lines of optimizers and states to the test."""

    def __init__(self, member: Member) -> None:
        super().__init__(logging.INFO)
        self._member = member

    def emit(self, record: logging.LogRecord) -> None:
        self._member.report(log=record.getMessage(), level=record.levelname)


def digest_of(model: torch.nn.Module) -> str:
    """Return a digest of the parameters."""
    return hashlib.sha256(b"".join(p.detach().numpy().tobytes() for p in model.parameters())).hexdigest()


def train(member: Member) -> None:
    """Train with checkpoints, and report each update, until the test tells the number of the ``last`` update.

    Arguments: ``folder`` for this peer's directory and identity, which are named ``name``, or by the process's index;
    ``waits``, to begin with the message ``go``, which may have more arguments; ``peers`` to start; ``elements`` of a
    parameter that only makes the state large; ``state``, further arguments of :class:`RunState`; ``file_bytes``, the
    largest file that this process may write; ``die_at``, the number of bytes of a download at which it kills itself;
    ``die_loading``, the number of replaced tensors at which it kills itself; ``patience`` for donors that are gone;
    ``batch_seconds`` of computing; ``sync_timeout``; ``checks``, for digests of the parameters after each update, and
    before and after each step; ``seed`` of the first parameters. The message ``say`` asks for a digest, ``sabotage``
    for the fault of this donor (:class:`Sabotage`).
    """
    torch.set_num_threads(1)
    given = member.arguments
    if given.get("waits"):
        torch.optim.SGD([torch.nn.Parameter(torch.zeros(1))], lr=0.1)  # the first one imports much
        while (told := member.told(60.0)) is None:
            pass
        given.update(told["go"])
    for name in ("p2pavg.optim", "p2pavg.state"):
        logging.getLogger(name).setLevel(logging.INFO)
        logging.getLogger(name).addHandler(Told(member))
    if given.get("die_loading"):
        die_while_loading(given["die_loading"])
    if "patience" in given:
        assert BlobDownload.__init__.__kwdefaults__ is not None
        BlobDownload.__init__.__kwdefaults__["patience"] = given["patience"]
    folder = Path(given["folder"])
    name = given.get("name", str(member.index))
    config = p2pavg.AveragingConfig(run_id="states", match_timeout=20.0, exchange_timeout=30.0)
    torch.manual_seed(given.get("seed", 0))
    model = torch.nn.Sequential(torch.nn.Linear(INPUTS, 1))
    model.register_parameter("ballast", torch.nn.Parameter(torch.randn(given.get("elements", 1))))

    def progress(now: StateProgress) -> None:
        member.report(done=now.bytes_done, total=now.bytes_total, reason=now.reason, epoch=now.epoch)
        if now.bytes_done >= given.get("die_at", float("inf")):
            os.kill(os.getpid(), 9)

    state = RunState(model, folder / name, on_progress=progress, **given.get("state", {}))
    with member.averager(config, identity=folder / f"{name}.key") as averager:
        inner = torch.optim.SGD(model.parameters(), lr=0.02, momentum=0.9)
        optimizer = AveragedOptimizer(
            inner,
            averager,
            target_batch_size=given["peers"] * BATCH,
            peers_to_start=given["peers"],
            on_update=lambda report: member.report(
                **described(report), digest=digest_of(model) if given.get("checks") else ""
            ),
            sync_timeout=given.get("sync_timeout", 600.0),
            state=state,
        )
        if "file_bytes" in given:
            resource.setrlimit(resource.RLIMIT_FSIZE, (given["file_bytes"], given["file_bytes"]))
        member.report(began=optimizer.epoch, extras=state.extras, digest=digest_of(model))
        _loop(member, model, optimizer, state)
        member.report(ended=optimizer.epoch, digest=digest_of(model), lineage=optimizer.lineage.state.hex())
        while member.told(60.0) is None:
            pass


def _loop(member: Member, model: torch.nn.Module, optimizer: AveragedOptimizer, state: RunState) -> None:
    last, said, sabotage = sys.maxsize, None, Sabotage()
    while optimizer.epoch < last:
        batch_ends = time.monotonic() + member.arguments.get("batch_seconds", 0.0)
        while (told := member.told(max(batch_ends - time.monotonic(), 0.0))) is not None:
            last = told.get("last", last)
            if "say" in told:
                member.report(now=digest_of(model))
            if "sabotage" in told:
                sabotage.begin(**told["sabotage"])
                member.report(armed=True)
        inputs = torch.randn(BATCH, INPUTS)
        state.extras["data_position"] = state.extras.get("data_position", 0) + BATCH
        loss = (model[0](inputs) - inputs.sum(1, keepdim=True)).square().mean()  # type: ignore[index]
        optimizer.zero_grad()
        torch.autograd.backward(loss)
        before = digest_of(model) if member.arguments.get("checks") else ""
        report = optimizer.step(samples=BATCH, metrics={"loss": loss.item()})
        if report.behind is not None:
            member.report(behind=report.behind)
        if report.catching_up != said:
            said = report.catching_up
            same = before == digest_of(model) if before else None
            member.report(catching_up=said, epoch=report.epoch, same=same)


def described(report: StepReport) -> dict[str, Any]:
    """Return an update as JSON values."""
    assert isinstance(report.result, Success)
    return {
        "update": report.epoch,
        "peers": len(report.result.peers) + len(report.result.observers),
        "loss": report.metrics.get("loss"),
        "replayed": report.result.duration == 0.0,
    }


class Sabotage:
    """Faults of a donor. They concern the chunks of snapshots that it sends, counted from :meth:`begin`."""

    def __init__(self) -> None:
        self._left = 0
        self._spoils = False
        sabotage, as_it_was = self, Shelf.piece

        def piece(shelf: Shelf, kind: int, blob_id: bytes, index: int) -> Any:
            found = as_it_was(shelf, kind, blob_id, index)
            return sabotage._sent(found) if found is not None and kind == BlobKind.SNAPSHOT else found

        Shelf.piece = piece  # type: ignore[method-assign, assignment]

    def begin(self, chunk: int, *, spoils: bool) -> None:
        """Send a wrong byte in the chunk of this number, which begins at 1, or kill this process."""
        self._left, self._spoils = chunk, spoils

    def _sent(self, found: Any) -> Any:
        self._left -= 1
        if self._left != 0:
            return found
        if not self._spoils:
            os.kill(os.getpid(), 9)
        wrong = bytearray(found)
        wrong[len(wrong) // 2] ^= 1
        return memoryview(wrong)


def die_while_loading(tensors: int) -> None:
    """Kill this process as soon as so many tensors of a received state were replaced."""
    copied, copy = 0, torch.Tensor.copy_

    def copy_and_die(self: torch.Tensor, *arguments: Any, **options: Any) -> torch.Tensor:
        nonlocal copied
        caller = sys._getframe(1).f_code
        if caller.co_name == "_take" and "common_state" in caller.co_filename:
            copied += 1
            if copied == tensors:
                os.kill(os.getpid(), 9)
        return copy(self, *arguments, **options)

    torch.Tensor.copy_ = copy_and_die  # type: ignore[method-assign, assignment]
