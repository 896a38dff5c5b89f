"""The work of the processes in the tests of runs with an authority."""

from __future__ import annotations

import time
from functools import partial
from pathlib import Path
from typing import Any

import torch

import p2pavg
import p2pavg.peer.peer
from p2pavg.testing.swarm import Member
from tests.integration.swarm_work import tile


def run_rounds(member: Member) -> None:
    """Run rounds of a run with an authority until the process is ended. Report each result.

    Arguments: ``identity`` (key file), ``access`` (the fields of a RunAccess in hex), ``clock`` (seconds by which this
    process' clock is off).
    """
    torch.set_num_threads(1)
    off = member.arguments.get("clock", 0.0)
    if off:
        p2pavg.peer.peer.peer_over = partial(p2pavg.peer.peer.peer_over, wall_clock=lambda: time.time() + off)
    fields: dict[str, Any] = {name: bytes.fromhex(text) for name, text in member.arguments["access"].items()}
    config = p2pavg.AveragingConfig(
        run_id="admission",
        group_size=4,
        compression=None,
        match_timeout=member.arguments["match_timeout"],
        access=p2pavg.RunAccess(**fields),
    )
    with member.averager(config, identity=Path(member.arguments["identity"])) as averager:
        mine = tile(averager.peer_id)
        while True:
            if averager.weight == 0:
                averager.accumulate([mine])
            result = averager.step(wait=None)
            report: dict[str, object] = {"result": type(result).__name__, "at": time.time()}
            if isinstance(result, p2pavg.Success):
                assert isinstance(result.averaged, list)
                exact = torch.stack([tile(peer_id) for peer_id in result.peers]).mean(0)
                assert torch.allclose(result.averaged[0], exact, atol=1e-5)
                report |= {"peers": sorted(result.peers), "duration": result.duration}
            else:
                report["reason"] = result.reason
            member.report(**report)
