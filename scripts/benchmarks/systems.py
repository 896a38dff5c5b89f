"""The measured systems: p2pavg with a codec, the floor under it, gloo, and hivemind with a codec."""

from __future__ import annotations

import math
from typing import Any

from p2pavg_compression import Fp32, resolve_codec
from scripts.benchmarks.crew import System

EXACT = 1e-5
NO_MEAN = 1.0  # of a robust rule, which is near the mean; zeros would be as far
EIGHT_BITS = 0.05  # for normal values, encoded twice; the error of a result with a missing member is ten times as large

HIVEMIND_CODECS = {"fp32": "NONE"}
"""hivemind's counterpart of each p2pavg codec; for all others, its block-wise 8 bits."""


def p2pavg(codec: str, peers: int, *, timeout: float = 60.0, **config: Any) -> System:
    """Return p2pavg with a group of exactly ``peers``. ``config`` may name a ``robust`` rule, or an ``audit``.

    With ``compiled=False``, torch's expressions do the codec's work, also where numba is installed.
    """
    compiled = config.pop("compiled", True)
    robust = config.get("robust")
    tolerance = EXACT if isinstance(resolve_codec(codec), Fp32) else EIGHT_BITS
    return System(
        name=" ".join(["p2pavg", codec, *map(str, config.values()), *([] if compiled else ["torch"])]),
        module="scripts.benchmarks.p2pavg_worker",
        arguments={
            "compiled": compiled,
            "config": {
                "group_size": peers,
                "min_group_size": peers,
                "match_timeout": 60.0,
                "exchange_timeout": timeout,
                "compression": codec,
                **config,
            },
        },
        tolerance=tolerance if robust is None else NO_MEAN,
    )


def floor(codec: str) -> System:
    """Return what no all-reduce can do without: its bytes over TLS, and the work of the codec's kernels."""
    # It averages nothing, so its result is not compared with the mean.
    return System(
        name=f"floor {codec}",
        module="scripts.benchmarks.floor_worker",
        arguments={"codec": codec},
        tolerance=math.inf,
    )


def gloo() -> System:
    """Return ``torch.distributed`` with gloo: fp32, unencrypted."""
    return System(name="gloo", module="scripts.benchmarks.gloo_worker")


def hivemind(codec: str, python: str) -> System:
    """Return hivemind's counterpart of p2pavg with ``codec``, in its own environment."""
    theirs = hivemind_codec(codec)
    return System(
        name=f"hivemind {theirs}",
        module="scripts.benchmarks.hivemind_worker",
        arguments={"codec": theirs},
        tolerance=EXACT if theirs == "NONE" else EIGHT_BITS,
        python=python,
    )


def hivemind_codec(codec: str) -> str:
    """Return hivemind's name for its closest codec."""
    return HIVEMIND_CODECS.get(codec, "BLOCKWISE_8BIT")


def encoded_bytes(codec: str, elements: int) -> int:
    """Return the bytes of a vector on the wire, without headers."""
    return resolve_codec(codec).encoded_nbytes(elements)
