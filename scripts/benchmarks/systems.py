"""What is measured: p2pavg with a codec, gloo, and hivemind with a codec."""

from __future__ import annotations

from typing import Any

from p2pavg_compression import Fp32, resolve_codec
from scripts.benchmarks.crew import System

EXACT = 1e-5
EIGHT_BITS = 0.05  # encoded twice, of normal values; a result with a member missing is ten times as far off

HIVEMIND_CODECS = {"fp32": "NONE"}
"""Its counterpart of a codec of ours; of all that is not in here, its block-wise 8 bits."""


def p2pavg(codec: str, peers: int, *, timeout: float = 60.0, **config: Any) -> System:
    """A group of ``peers``, complete or not at all."""
    return System(
        name=f"p2pavg {codec}",
        module="scripts.benchmarks.p2pavg_worker",
        arguments={
            "config": {
                "group_size": peers,
                "min_group_size": peers,
                "match_timeout": 60.0,
                "exchange_timeout": timeout,
                "compression": codec,
                **config,
            }
        },
        tolerance=EXACT if isinstance(resolve_codec(codec), Fp32) else EIGHT_BITS,
    )


def gloo() -> System:
    """``torch.distributed``: fp32, nothing encrypted."""
    return System(name="gloo", module="scripts.benchmarks.gloo_worker")


def hivemind(codec: str, python: str) -> System:
    """The counterpart of p2pavg with ``codec``, in its own environment."""
    theirs = hivemind_codec(codec)
    return System(
        name=f"hivemind {theirs}",
        module="scripts.benchmarks.hivemind_worker",
        arguments={"codec": theirs},
        tolerance=EXACT if theirs == "NONE" else EIGHT_BITS,
        python=python,
    )


def hivemind_codec(codec: str) -> str:
    """What hivemind calls that which is nearest to ours."""
    return HIVEMIND_CODECS.get(codec, "BLOCKWISE_8BIT")


def encoded_bytes(codec: str, elements: int) -> int:
    """Bytes of a vector on the wire, without headers."""
    return resolve_codec(codec).encoded_nbytes(elements)
