"""The state of a peer in its run, as a training program configures it: joining, coming back, checkpoints."""

from __future__ import annotations

import copy
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any, Literal, TypeAlias

import torch
from torch import nn

from p2pavg.base.limits import MAX_MBPS
from p2pavg.base.numbers import check_number
from p2pavg.data import SharedSampler
from p2pavg.state.history.recording import HistorySettings
from p2pavg.state.progress import StateProgress

OnProgress = Callable[[StateProgress], None]


class RunState:
    """Fetches the run's state when this peer needs it, offers it to peers that do, and writes checkpoints.

    Give it to an optimizer: ``AveragedOptimizer(..., state=RunState(model))``. One object serves one optimizer.
    Optimizers make one of their own, without a model, if they get none; ``state=False`` shares no states.

    Args:
        model: module whose parameters the optimizer trains. The optimizer averages and compares its buffers too. The
            names of its parameters and buffers are those in checkpoints. Without it, states have no buffers.
        directory: folder of this peer alone, made if it is missing. It holds the checkpoints, and a download that was
            interrupted. If it has a checkpoint, the optimizer continues from the newest one when it is made. Without a
            directory there are no checkpoints, and a download is kept in memory. It needs the model.
        every: number of updates between two checkpoints; ``None`` for none.
        keep: number of checkpoints that are kept; the oldest are deleted.
        log_bytes: memory for the averages of the last updates, in bytes; ``None``: twice the size of a snapshot, and at
            least 16 MiB. Peers that join fetch them.
        upload_mbps: Mbit/s that this peer sends of states; ``None`` is without limit. Rounds have priority anyway.
        download_mbps: Mbit/s that this peer receives of states; ``None`` is without limit.
        scaler: the loop's ``GradScaler``, to be saved in checkpoints.
        history: folder of this peer alone for the history of the run: every update that this peer takes, with its
            proof, and a snapshot now and then. ``p2pavg history verify`` checks it.
        history_keep: number of updates of the history that stay; ``None``: all.
        data: for :class:`~p2pavg.optim.AveragedOptimizer`, the sampler by which the peers of the run take each sample
            once. Each update tells it what the members have contributed, and it is a part of the state.
        on_progress: called about once a second while this peer fetches a state, in the thread of the training loop.

    Raises:
        ValueError: an argument is out of range; the message names it.
    """

    def __init__(
        self,
        model: nn.Module | None = None,
        directory: str | os.PathLike[str] | None = None,
        *,
        every: int | None = None,
        keep: int = 3,
        log_bytes: int | None = None,
        upload_mbps: float | None = None,
        download_mbps: float | None = None,
        scaler: torch.amp.GradScaler | None = None,
        history: str | os.PathLike[str] | None = None,
        history_keep: int | None = None,
        data: SharedSampler | None = None,
        on_progress: OnProgress | None = None,
    ) -> None:
        if model is not None and not isinstance(model, nn.Module):
            raise TypeError(f"model must be a torch.nn.Module, got {type(model).__name__}")
        if every is not None:
            _check_count("every", every)
            if directory is None:
                raise ValueError("every needs a directory for the checkpoints: give directory= too")
        if directory is not None and model is None:
            # Without names and buffers, a checkpoint would fit a changed model by chance.
            raise ValueError(
                "directory needs the model, whose names and buffers are in checkpoints: give model= too"
            )
        _check_count("keep", keep)
        if log_bytes is not None:
            _check_count("log_bytes", log_bytes)
        for name, mbps in (("upload_mbps", upload_mbps), ("download_mbps", download_mbps)):
            if mbps is not None:
                check_number(name, mbps, MAX_MBPS)
        if scaler is not None and not hasattr(scaler, "state_dict"):
            raise TypeError(f"scaler must be a torch.amp.GradScaler, got {type(scaler).__name__}")
        if data is not None and not isinstance(data, SharedSampler):
            raise TypeError(f"data must be a p2pavg.data.SharedSampler, got {type(data).__name__}")
        if on_progress is not None and not callable(on_progress):
            raise TypeError(
                f"on_progress must be a function of one progress, got {type(on_progress).__name__}"
            )
        for name, path in (("directory", directory), ("history", history)):
            if path is not None and not isinstance(path, str | os.PathLike):
                raise TypeError(f"{name} must be a path, got {type(path).__name__}")
        if history_keep is not None:
            _check_count("history_keep", history_keep)
            if history is None:
                raise ValueError("history_keep needs a folder for the history: give history= too")
        self.model = model
        self.directory = None if directory is None else Path(directory)
        self.every = every
        self.keep = keep
        self.log_bytes = log_bytes
        self.upload_mbps = upload_mbps
        self.download_mbps = download_mbps
        self.scaler = scaler
        self.history = None if history is None else Path(history)
        self.history_keep = history_keep
        self.data = data
        self.on_progress = on_progress
        self.continues = True
        """False: the optimizer does not continue from a checkpoint that is in the directory, and writes them only."""
        self._loop: dict[str, dict[str, Any]] = {"extras": {}}
        self._is_used = False

    @property
    def extras(self) -> dict[str, Any]:
        """Values of the training loop that belong into checkpoints, such as ``extras["data_position"]``: numbers,
        texts, bytes, lists, dicts and tensors. After a start from a checkpoint, those of the checkpoint."""
        return self._loop["extras"]

    @extras.setter
    def extras(self, extras: dict[str, Any]) -> None:
        self._loop["extras"] = extras  # copies of this object share them

    def claim(self) -> None:
        """Note that an optimizer uses this object; raise ValueError if another one does."""
        if self._is_used:
            raise ValueError("state: this RunState belongs to another optimizer; make one for each")
        self._is_used = True

    def inside(self, name: str, *, continues: bool = True) -> RunState:
        """Return a copy for another optimizer, whose directory is a folder of this one's. It shares the extras.

        Args:
            continues: the optimizer continues from a checkpoint that is in that folder.
        """
        found = copy.copy(self)
        found.directory = None if self.directory is None else self.directory / name
        found.history = None if self.history is None else self.history / name
        found.continues = continues
        found._is_used = False
        return found

    def history_settings(self, names: tuple[str, ...]) -> HistorySettings | None:
        """Return where the history is kept, if it is; ``names`` are those of the trained parameters."""
        return None if self.history is None else HistorySettings(self.history, self.history_keep, names)


StateOption: TypeAlias = RunState | nn.Module | Literal[False] | None
"""Argument ``state`` of the optimizers: ``None`` shares states of the optimizer's parameters, and ``False`` none."""


def run_state_of(state: StateOption) -> RunState | None:
    """Return the :class:`RunState` of an optimizer's argument ``state``; ``None`` if it shares no states.

    Raises:
        TypeError: ``state`` is something else.
    """
    if state is None:
        return RunState()
    if state is False:
        return None
    if isinstance(state, nn.Module):
        return RunState(state)
    if not isinstance(state, RunState):
        raise TypeError(
            f"state must be a RunState or the model, or False to share no states, got {type(state).__name__}"
        )
    return state


def model_of(model: nn.Module | None, state: RunState | None) -> nn.Module | None:
    """Return the model of an optimizer: ``model``, or that of its :class:`RunState`.

    Raises:
        ValueError: the two are different models.
    """
    if state is None or state.model is None:
        return model
    if model is not None and model is not state.model:
        raise ValueError("model must be the model of the RunState, or left out")
    return state.model


def _check_count(name: str, value: object) -> None:
    if isinstance(value, bool) or not isinstance(value, int) or value <= 0:
        raise ValueError(f"{name} must be a whole number above 0, got {value!r}")
