"""Measure the costs of a history: bytes, the archivist's time, and the time and memory of a check.

scripts/bench history                        a million parameters, and 50,000 small updates (about 4 minutes)
scripts/bench history --small-updates 5000   fewer of these

The updates are made without a network, by four members with AdamW. *Bare replay* decodes each average, which is in
memory, and takes the step. A check reads the files too, checks each signature and digest, and computes each state of
the lineage.
"""

from __future__ import annotations

import argparse
import statistics
import sys
import tempfile
import time
from pathlib import Path

import psutil
import torch

from p2pavg.state.average import LoggedAverage
from p2pavg.state.history.segments import segment_files
from p2pavg.state.snapshot import read
from p2pavg.tools.history.checking import CheckOptions, check_history
from p2pavg.tools.history.replica import Replica
from p2pavg_compression import resolve_codec
from scripts.fault_search.made_history import MadeArchivist, MadeRun

CODEC = "blockwise8"
TURNS = 5


def bare_replay(run: MadeRun, start: Replica, averages: list[LoggedAverage]) -> float:
    """Return the seconds that decoding and stepping takes."""
    codec, elements = resolve_codec(CODEC), run.schema.elements
    began = time.perf_counter()
    for average in averages:
        vector = torch.empty(elements)
        at = 0
        for part in average.encoded.parts:
            # Parts of blockwise8: 1 byte a value, and 4 for each block of 256.
            count = codec_elements(len(part))
            codec.decode(part, count, vector[at : at + count])
            at += count
        averaged = run.schema.unflatten(vector)
        assert isinstance(averaged, list)
        start.apply(averaged)
    return time.perf_counter() - began


def codec_elements(nbytes: int) -> int:
    """Return how many values a part of so many bytes has."""
    codec = resolve_codec(CODEC)
    count = nbytes
    while codec.encoded_nbytes(count) > nbytes:
        count -= 1
    return count


def large(elements: int, updates: int) -> None:
    """Measure updates of a large vector."""
    with tempfile.TemporaryDirectory() as folder:
        directory, run = Path(folder), MadeRun(elements=elements, codec=CODEC)
        first = bytes(run.snapshot())
        averages, in_loop = [], []
        with MadeArchivist(directory, run) as archivist:
            for _ in range(updates):
                began = time.perf_counter()
                archivist.before()
                spent = time.perf_counter() - began
                average, after = run.round()
                averages.append(average)
                began = time.perf_counter()
                archivist.take(average, after)
                in_loop.append(spent + time.perf_counter() - began)
                archivist.wait()
            written = archivist.thread_seconds()
        size = sum(path.stat().st_size for path in segment_files(directory)) - len(first)
        theory = sum(average.encoded.nbytes for average in averages)
        proofs = sum(average.nbytes - average.encoded.nbytes for average in averages)
        print(
            f"{elements:,} parameters, {updates} updates: {size / updates:,.0f} bytes each; the average"
            f" {theory / updates:,.0f}, its proof {proofs / updates:,.0f}, the rest"
            f" {(size - theory - proofs) / updates:,.0f}"
        )
        print(
            f"archivist: {statistics.median(in_loop) * 1e6:.0f} us of the training thread for each update (the first"
            f" {max(in_loop) * 1e3:.1f} ms, with a snapshot), {written / updates * 1e3:.2f} ms of processor in its own"
            " thread"
        )
        bare, checked = [], []
        for _ in range(TURNS):
            bare.append(bare_replay(run, Replica(read(memoryview(first))), averages))
            began = time.perf_counter()
            report = check_history(directory)
            checked.append(time.perf_counter() - began)
            assert report.replayed == updates, report.faults
        ratios = sorted(one / other for one, other in zip(bare, checked, strict=True))
        print(
            f"check: {statistics.median(checked) / updates * 1e3:.2f} ms an update ({min(checked) / updates * 1e3:.2f}"
            f" to {max(checked) / updates * 1e3:.2f}), bare replay {statistics.median(bare) / updates * 1e3:.2f}; speed"
            f" of the check {statistics.median(ratios):.2f} of the bare replay ({ratios[0]:.2f} to {ratios[-1]:.2f})"
        )


def small(updates: int) -> None:
    """Measure the memory of many small updates."""
    process = psutil.Process()
    with tempfile.TemporaryDirectory() as folder:
        directory, run = Path(folder), MadeRun(elements=64, codec="fp32", members=2)
        marks = []
        with MadeArchivist(directory, run) as archivist:
            for number in range(updates):
                archivist.before()
                archivist.take(*run.round())
                if number % (updates // 5) == updates // 5 - 1:
                    archivist.wait()
                    marks.append(process.memory_info().rss / 2**20)
        print(
            f"{updates:,} small updates: memory of the archivist's process, MiB: "
            + ", ".join(f"{m:.0f}" for m in marks)
        )
        before = process.memory_info().rss / 2**20
        began, marks = time.perf_counter(), []

        def note(done: int, total: int) -> None:
            if done % (total // 5) == 0:
                marks.append(process.memory_info().rss / 2**20)

        report = check_history(directory, CheckOptions(on_progress=note))
        assert report.replayed == updates, report.faults
        seconds = time.perf_counter() - began
        print(
            f"check: {seconds / updates * 1e3:.2f} ms an update; memory of its process, MiB: {before:.0f} before, then "
            + ", ".join(f"{m:.0f}" for m in marks)
        )


def main() -> int:
    """See the top of this file."""
    parser = argparse.ArgumentParser(
        prog="scripts/bench history",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
        usage=argparse.SUPPRESS,
    )
    parser.add_argument("--elements", type=int, default=2**20)
    parser.add_argument("--updates", type=int, default=60)
    parser.add_argument("--small-updates", type=int, default=50_000)
    arguments = parser.parse_args()
    large(arguments.elements, arguments.updates)
    small(arguments.small_updates)
    return 0


if __name__ == "__main__":
    sys.exit(main())
