"""The part of a job's program in a run: the run's averager, and its folders. The same program runs on a desk.

`p2pavg join LINK` and `p2pavg launch` name the places in environment variables. Without them, the program is on its
author's desk: it is a peer of a run of its own on this machine.
"""

from __future__ import annotations

import hashlib
import os
import re
import sys
from collections.abc import Iterator, Sized
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

import torch

from p2pavg.base.errors import ConfigError, RunEndedError
from p2pavg.blocking import Averager, open_averager
from p2pavg.data import SharedSampler
from p2pavg.runs.config import AveragingConfig
from p2pavg.runs.membership.run_file import PeerFiles
from p2pavg.strategies.base import Strategy
from p2pavg.strategies.reading import strategy_of

GATE = "P2PAVG_GATE"
"""Socket of the process that has the network."""
RUN_FILE = "P2PAVG_RUN_FILE"
CERTIFICATE = "P2PAVG_CERTIFICATE"
SCRATCH = "P2PAVG_SCRATCH"
"""Folder that stays from one start of the program to the next."""
GPU_MEMORY = "P2PAVG_GPU_MEMORY_GB"
"""GB of each GPU that the program may take, as its manifest says."""
RUN_ID = "P2PAVG_RUN_ID"
"""Of a run without an authority, whose peers stay on this machine."""
BOOTSTRAP = "P2PAVG_BOOTSTRAP"
"""Addresses of peers of that run, separated by spaces."""


@dataclass(frozen=True)
class Job:
    """A program's part in a run. Made by :func:`job`."""

    averager: Averager
    """Averages with the other peers of the run; the program makes its optimizer with it."""
    strategy: Strategy | None
    """The strategy of all peers of the run, if its run file has one; see :mod:`p2pavg.strategies`."""
    folder: Path
    """The job's folder, with the program and its data. In a fence, it cannot be written to."""
    scratch: Path
    """A folder of this peer's own, for checkpoints and metrics, that stays from one start to the next."""
    min_peers: int
    """For the optimizer: peers that an update needs. 1 on the author's desk, where no other peer will come."""

    def samples(self, dataset_or_length: Sized | int) -> SharedSampler:
        """Return this peer's samples of a data set that all peers have alike: together they take each sample once.

        Give them to the optimizer, too: ``RunState(model, data=samples)``.

        Raises:
            ValueError: there is no sample.
        """
        seed = int.from_bytes(hashlib.sha256(self.averager.config.run_id.encode()).digest()[:7], "big")
        return SharedSampler(dataset_or_length, peer_id=self.averager.peer_id, seed=seed)


@contextmanager
def job() -> Iterator[Job]:
    """Take part in the run that this program was started for, until the end of the block.

    A program that ``p2pavg join LINK`` has started gets that run, through the process that has its network; one that
    ``p2pavg launch`` has started a run among processes of this machine; and one that was started by ``python train.py``
    a run of its own. If the user stops the job, or the run has ended, an exception leaves the block, and the program
    of a volunteer ends with exit code 0.

    Raises:
        ConfigError, ControlError, BusyError: the environment variables name what is not there.
    """
    folder = Path(sys.argv[0]).resolve().parent
    scratch = Path(os.environ.get(SCRATCH) or folder / ".scratch")
    scratch.mkdir(parents=True, exist_ok=True)
    gate, run_id = os.environ.get(GATE), os.environ.get(RUN_ID)
    if memory := float(os.environ.get(GPU_MEMORY) or 0.0):
        _bound_gpu_memory(memory * 2**30)
    # On its author's desk, the run has the folder's name.
    named = run_id or re.sub(r"[^A-Za-z0-9._-]", "_", folder.name) or "job"
    config = _config_behind(Path(gate)) if gate else AveragingConfig(run_id=named)
    # A run file never runs code: a strategy of the author's own has to be allowed by the program.
    strategy = strategy_of(config) if config.strategy else None
    try:
        bootstrap = () if gate else os.environ.get(BOOTSTRAP, "").split()
        with open_averager(config, bootstrap=bootstrap) as averager:
            alone = not gate and not run_id
            yield Job(averager, strategy, folder, scratch, 1 if alone else config.min_group_size)
    except RunEndedError as error:
        if not gate:
            raise
        # A volunteer that comes too late has nothing to do. Another start would hear the same.
        print(error, flush=True)
        raise SystemExit(0) from None
    except KeyboardInterrupt:
        if not gate:
            raise
        # The user has stopped it, which is no error. There is no terminal here to press Ctrl-C in.
        raise SystemExit(0) from None


def _bound_gpu_memory(count: float) -> None:
    """Let torch take at most so many bytes of each GPU. Nothing outside of the program can see to that."""
    for index in range(torch.cuda.device_count()):
        total = torch.cuda.get_device_properties(index).total_memory
        torch.cuda.set_per_process_memory_fraction(min(1.0, count / total), index)


def _config_behind(gate: Path) -> AveragingConfig:
    """Return the configuration of a peer behind a gate, by the files that were handed to the program."""
    try:
        run_file, certificate = Path(os.environ[RUN_FILE]), Path(os.environ[CERTIFICATE])
    except KeyError as error:
        raise ConfigError(f"{GATE} is set, and {error.args[0]} is not: `p2pavg join` sets both") from None
    # The key is with the process behind the gate: there is no such file here.
    files = PeerFiles(run_file.parent, run_file, certificate, run_file.parent / "no.key", gate)
    return AveragingConfig.from_run(run_file, certificate=certificate, files=files)
