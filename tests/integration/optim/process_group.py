"""Ranks of a peer in processes of their own: they meet in gloo, work, and leave it without an abort."""

from __future__ import annotations

import functools
import gc
from collections.abc import Callable
from typing import Any

import torch.distributed as dist

Work = Callable[[dict[str, Any]], None]


def with_ranks(work: Work) -> Work:
    """Return a function that runs ``work`` while the ranks of its peer form a process group.

    Its argument has the ``folder`` in which they meet, the number of the ``peer``, the ``rank`` and the number of
    ``ranks``. A rank that raises an exception leaves the group as it is.
    """

    @functools.wraps(work)
    def run(how: dict[str, Any]) -> None:
        dist.init_process_group(
            "gloo",
            init_method=f"file://{how['folder']}/rendezvous{how['peer']}",
            rank=how["rank"],
            world_size=how["ranks"],
        )
        work(how)
        dist.barrier()
        # The model has gone with the variables of work, in a cycle of references. It would keep gloo's threads alive,
        # and one of them may abort the process when Python ends: https://github.com/pytorch/pytorch/issues/190489.
        gc.collect()
        dist.destroy_process_group()

    return run
