"""Bytes on the wire of a LoRA adapter: 8 M values in 200 tensors, beside what its codec takes for as many values.

Two measures: what a round reports, which are the encoded parts with their frames; and all bytes on the loopback device
of this network namespace from before the round until after it, with connections, matchmaking, votes, and the headers of
IP and TCP. Run it in a namespace of its own, or other programs count, too:

    unshare -n sh -c "ip link set lo up; scripts/bench training adapter"

The first round opens connections, and the later ones use them.
"""

from __future__ import annotations

import argparse
import statistics
import time
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch

import p2pavg
from p2pavg.testing import LocalSwarm, Member
from p2pavg_compression import resolve_codec
from scripts.benchmarks.training_work import config_of

WORK = "scripts.benchmarks.training_adapter:exchange"
RANK, WIDTH, LAYERS = 16, 2500, 100
SHAPES = [(WIDTH, RANK), (RANK, WIDTH)] * LAYERS
ELEMENTS = 2 * RANK * WIDTH * LAYERS
ROUNDS = 4
PAUSE_SECONDS = 3.0
"""Before and after each round, so that no bytes of another one are counted. A round may end later for some members."""


def adapter(given: argparse.Namespace) -> tuple[str, Sequence[str], Sequence[Sequence[str]]]:
    """Return title, columns and rows of the comparison."""
    rows = []
    for codec in ("fp32", "blockwise8", "int4", "ternary", "topk"):
        for peers in (2, given.peers or 4):
            arguments: dict[str, Any] = {"peers": peers, "codec": codec}
            with LocalSwarm(WORK, peers=peers, arguments=arguments) as swarm:
                swarm.start()
                found = [list(process.events(600)) for process in swarm.processes]
            used = resolve_codec(codec)
            nbytes = used.encoded_nbytes(ELEMENTS) + used.averages.encoded_nbytes(ELEMENTS)
            wanted = (peers - 1) * nbytes  # each share of a vector goes to its reducer and back
            sent = [sum(member[number]["sent"] for member in found) / wanted for number in range(ROUNDS)]
            wire = [
                max(member[number]["after"] for member in found)
                - min(member[number]["before"] for member in found)
                for number in range(ROUNDS)
            ]
            idle = statistics.median(member[number]["idle"] for member in found for number in range(ROUNDS))
            later = [each / wanted for each in wire[1:]]
            rows.append(
                (
                    codec,
                    str(peers),
                    f"{wanted / 1e6:.2f} MB",
                    f"{max(sent):.4f}",
                    f"{wire[0] / wanted:.4f}",
                    f"{statistics.median(later):.4f} ({min(later):.4f} .. {max(later):.4f})",
                    f"{idle / wanted:.4f}",
                )
            )
    columns = (
        "codec",
        "members",
        "by the codec's bits",
        "parts and frames",
        "all bytes, first round",
        "later rounds",
        f"of these in {2 * PAUSE_SECONDS:g} s without a round",
    )
    return f"{ELEMENTS / 1e6:g} M values in {len(SHAPES)} tensors, audits off", columns, rows


def exchange(member: Member) -> None:
    """Average the adapter in several rounds; report the bytes of each."""
    torch.set_num_threads(1)
    generator = torch.Generator().manual_seed(member.index)
    values = [torch.randn(shape, generator=generator) for shape in SHAPES]
    # An audit sends a part of a share once more, now and then.
    config = replace(config_of(member.arguments), audit="off")
    with member.averager(config) as averager:
        for _ in range(ROUNDS):
            begun = loopback_bytes()
            time.sleep(2 * PAUSE_SECONDS)
            before = loopback_bytes()
            averager.accumulate(values, weight=1.0)
            result = averager.step(wait=120.0)
            assert isinstance(result, p2pavg.Success), result
            time.sleep(PAUSE_SECONDS)
            member.report(sent=result.bytes_sent, before=before, after=loopback_bytes(), idle=before - begun)


def loopback_bytes() -> int:
    """Return the bytes that the loopback device has sent."""
    lines = Path("/proc/net/dev").read_text(encoding="ascii").splitlines()
    return next(int(line.split()[9]) for line in lines if line.split()[0] == "lo:")
