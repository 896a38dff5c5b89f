"""Checkpoints of one optimizer: what all peers share, and what is this peer's own, every few updates."""

from __future__ import annotations

import logging
from collections.abc import Mapping
from typing import Any

import torch

from p2pavg.base.errors import StateError
from p2pavg.optim.base.joined import plain_buffers
from p2pavg.optim.catching_up.common_state import CommonState
from p2pavg.optim.catching_up.following import Owner
from p2pavg.optim.catching_up.run_state import RunState
from p2pavg.optim.coordination.view import RunView
from p2pavg.optim.ranks.shards import local_of
from p2pavg.state.checkpoint import CheckpointFolder
from p2pavg.state.checkpoint import read as read_checkpoint
from p2pavg.state.nested import flatten, unflatten
from p2pavg.state.sharing import StateSharing
from p2pavg.state.snapshot import Content

logger = logging.getLogger(__name__)

OWN = "own"


class Checkpoints:
    """Writes a checkpoint every few updates, and continues from the newest one.

    Args:
        settings: the caller's.
        common: the state that all peers share.
        owner: the optimizer.
        run: this peer's view of its run; its companions are saved.
        sharing: writes files in the background, one at a time.

    Raises:
        StateError: the directory cannot be used, or a value of this peer's own cannot be saved.
    """

    def __init__(
        self, settings: RunState, common: CommonState, owner: Owner, run: RunView, sharing: StateSharing
    ) -> None:
        self._settings = settings
        self._common = common
        self._owner = owner
        self._run = run
        self._sharing = sharing
        self._folder = (
            None if settings.directory is None else CheckpointFolder(settings.directory, settings.keep)
        )
        self._is_due = False
        self._saved: int | None = None
        """Update of the last checkpoint that was begun."""
        if settings.every is not None:
            self._own_content()  # what cannot be saved is refused now, not after the first updates

    def took(self, epoch: int) -> None:
        """Write a checkpoint if it is its turn, or if an earlier one had to wait for other work with a state."""
        if self._settings.every is not None and epoch % self._settings.every == 0:
            if self._is_due:
                logger.warning(
                    "no checkpoint of the last %d updates: the disk is slower than that", self._settings.every
                )
            self._is_due = True
        if self._is_due and not self._sharing.is_working:
            self._is_due = False
            self.save(epoch)

    def save(self, epoch: int) -> None:
        """Write the checkpoint of an update in the background, unless there is no folder, or it is written already."""
        if self._folder is None or self._saved == epoch:
            return
        folder, self._saved = self._folder, epoch
        try:
            common, own = _copy_of(self._common.content(named=True)), _copy_of(self._own_content())
        except StateError as error:  # the update was taken: its report must not be lost
            logger.error("no checkpoint of update %d: %s", epoch, error)  # noqa: TRY400 - one line is enough
            return

        def write() -> None:
            try:
                folder.write(epoch, common, own)
            except StateError as error:
                logger.error("no checkpoint of update %d: %s", epoch, error)  # noqa: TRY400 - one line is enough

        self._sharing.in_background(write)

    def _own_content(self) -> Content:
        scaler = self._settings.scaler
        saved = {
            "optimizer": self._owner.own_state(),
            "buffers": self._own_buffers(),
            "extras": self._settings.extras,
            "scaler": None if scaler is None else scaler.state_dict(),
            "rng": {
                "cpu": torch.get_rng_state(),
                "cuda": torch.cuda.get_rng_state_all() if torch.cuda.is_available() else [],
            },
            "companions": sorted(self._run.companions),
        }
        tensors, values = flatten(saved, OWN)
        return Content(tensors=tensors, values=values)

    def _own_buffers(self) -> dict[str, torch.Tensor]:
        """Return the model's buffers that peers do not average, such as the numbers of batches."""
        averaged, model = self._common.buffers, self._settings.model
        assert model is not None  # checkpoints need a directory, and that needs the model
        return {name: b for name, b in plain_buffers(model).items() if name not in averaged}

    def load_newest(self) -> None:
        """Continue from the newest checkpoint, if there is one.

        Raises:
            StateError: it does not fit this peer's model, optimizer or settings; the message says why.
        """
        if self._folder is None or not self._settings.continues:
            return
        path = self._folder.newest()
        if path is None:
            return
        found = read_checkpoint(path, verified=True)
        try:
            take = self._common.prepare(found.common)
            own = unflatten(found.own.tensors, found.own.values, OWN)
            take()
            self._load_own(own)
        except KeyError as error:
            raise StateError(f"the checkpoint {path} does not fit: it lacks {error}") from None
        except ValueError as error:
            raise StateError(f"the checkpoint {path} does not fit: {error}") from None
        self._sharing.shelf.begin(found.epoch)
        logger.info("this peer continues from its checkpoint of update %d", found.epoch)

    def _load_own(self, own: Mapping[str, Any]) -> None:
        self._owner.load_own(own["optimizer"])
        self._load_buffers(own["buffers"])
        if self._settings.scaler is not None and own["scaler"] is not None:
            self._settings.scaler.load_state_dict(own["scaler"])
        torch.set_rng_state(own["rng"]["cpu"])
        if own["rng"]["cuda"] and torch.cuda.is_available():
            # The checkpoint may be of a machine, or of a start, with more GPUs.
            torch.cuda.set_rng_state_all(own["rng"]["cuda"][: torch.cuda.device_count()])
        self._settings.extras = dict(own["extras"])
        self._run.remember(frozenset(own["companions"]))

    @torch.no_grad()
    def _load_buffers(self, saved: Mapping[str, torch.Tensor]) -> None:
        buffers = self._own_buffers()
        if {n: b.shape for n, b in saved.items()} != {n: b.shape for n, b in buffers.items()}:
            raise ValueError("it has other buffers")
        for name, buffer in buffers.items():
            buffer.copy_(saved[name])


@torch.no_grad()
def _copy_of(content: Content) -> Content:
    return Content(
        tensors={
            name: local_of(tensor).detach().to("cpu", copy=True) for name, tensor in content.tensors.items()
        },
        values=content.values,
    )
