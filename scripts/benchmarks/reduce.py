"""Combining one part, as a reducer does: the weighted mean beside the robust rules, in milliseconds of CPU time.

A part has 524,288 elements, the largest that there is. All contributions but the reducer's own are encoded, and so is
the result. ``equal`` and ``unequal`` are the members' weights: robust rules combine unequal ones by other code.
"""

from __future__ import annotations

import argparse
import statistics
import time
from typing import Any

import torch

from p2pavg.allreduce.reduction import PartContribution, average_part
from p2pavg.allreduce.vector.buffers import Buffers
from p2pavg.group.aggregation import resolve_rule
from p2pavg.group.shares import MAX_PART_ELEMENTS
from p2pavg_compression import Codec, resolve_codec
from scripts.benchmarks.figures import Report

NAME = "reduce"
MEAN = "mean"
RULES = f"{MEAN},trimmed_mean:0.25,median,centered_clip:1.0:1,centered_clip:1.0:3"


def add_arguments(parser: argparse.ArgumentParser, *, small: bool) -> None:
    """The options of this benchmark."""
    parser.add_argument("--members", default="3" if small else "4,8")
    parser.add_argument("--elements", type=int, default=5_000 if small else MAX_PART_ELEMENTS)
    parser.add_argument("--codecs", default="fp32,blockwise8")
    parser.add_argument("--rules", default=RULES, help=f"texts of rules, after {MEAN}")
    parser.add_argument("--repeats", type=int, default=2 if small else 15)


def run(arguments: argparse.Namespace, report: Report) -> None:
    """Measure all rules in turn, and report."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        for codec in map(resolve_codec, arguments.codecs.split(",")):
            for members in map(int, arguments.members.split(",")):
                for weights in ("equal", "unequal"):
                    _measure(codec, members, weights, arguments, report)
    finally:
        torch.set_num_threads(threads)


def _measure(codec: Codec, members: int, weights: str, arguments: argparse.Namespace, report: Report) -> None:
    elements, generator = arguments.elements, torch.Generator().manual_seed(0)
    rows = [torch.randn(elements, generator=generator) for _ in range(members)]
    counts = [1.0 + (index if weights == "unequal" else 0) for index in range(members)]
    contributions = [
        PartContribution(str(index), count, row if index == 0 else bytearray(codec.encode(row)))
        for index, (row, count) in enumerate(zip(rows, counts, strict=True))
    ]
    buffers = Buffers(4 * elements * (members + 2))
    out, payload = torch.empty(elements), memoryview(bytearray(codec.encoded_nbytes(elements)))
    rules = arguments.rules.split(",")
    found: dict[str, list[float]] = {rule: [] for rule in rules}
    for number in range(arguments.repeats + 1):
        for rule in rules:
            robust = resolve_rule(None if rule == MEAN else rule)
            began = time.thread_time()
            average_part(
                codec, contributions, sum(counts), out, robust=robust, buffers=buffers, payload=payload
            )
            if number:
                found[rule].append(1e3 * (time.thread_time() - began))
    for rule in rules:
        conditions: dict[str, Any] = {"codec": codec.name, "members": members, "weights": weights}
        report.figure(NAME, "one part", "ms of CPU", found[rule], system=rule, **conditions)
        if rule != MEAN and MEAN in rules:
            report.figure(
                NAME,
                "ratio to the mean",
                "x",
                [rule_ms / mean_ms for rule_ms, mean_ms in zip(found[rule], found[MEAN], strict=True)],
                median=statistics.median(found[rule]) / statistics.median(found[MEAN]),
                system=rule,
                **conditions,
            )
