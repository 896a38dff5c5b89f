"""Comparison of training with peers and training in one process with the whole batch.

scripts/bench training synchronous     four peers with AveragedOptimizer against one process with the fourfold batch
scripts/bench training table           bytes against loss: DiLoCo and every step, by codec
scripts/bench training bits            bits a parameter against loss, by codec of local updates, and in small groups
scripts/bench training rates           outer rates by hand beside lr="auto", at three intervals
scripts/bench training adapter         bytes on the wire of a LoRA adapter in 200 tensors
scripts/bench training feedback        peers with error feedback that are killed and come back, against a calm run
scripts/bench training mixing          NoLoCo and gossip between pairs beside DiLoCo
scripts/bench training churn           eight peers, of which one is killed and another joins, again and again

A GPT of 115,000 parameters learns Python's documentation, eight sequences per batch, in processes on this machine.
Bytes are those that a peer sends in exchanges: encoded parts with their frames. Losses are those of held-out text, in
nats per character.
"""

from __future__ import annotations

import argparse
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from contextlib import suppress
from typing import Any

from rich.console import Console
from rich.table import Table

from p2pavg.testing import LocalSwarm, SwarmProcess
from scripts.benchmarks import training_adapter, training_bits, training_feedback, training_mixing
from scripts.benchmarks.training_work import in_one_process

WORK = "scripts.benchmarks.training_work:"
CODECS = ("fp32", "bf16", "blockwise8", "int8")


def main() -> int:
    """Run the comparison; return the exit status, 1 if the peers' final parameters differ."""
    parser = argparse.ArgumentParser(
        prog="scripts/bench training",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument(
        "what", choices=["synchronous", "table", "bits", "rates", "adapter", "feedback", "mixing", "churn"]
    )
    parser.add_argument("--peers", type=int, help="4, and 8 for churn and mixing, if not given")
    parser.add_argument(
        "--steps",
        type=int,
        help="batches of every peer: 200, 2000 for the table, 2400 for bits and rates, 600 for feedback, 1000 for"
        " mixing",
    )
    parser.add_argument("--sync-every", default="1,10,50", help="H, for the table")
    parser.add_argument(
        "--first-steps",
        type=int,
        default=2000,
        help="of one process, whose checkpoint all of the table begin from",
    )
    parser.add_argument("--codecs", default=",".join(CODECS), help="for the table")
    parser.add_argument("--updates", type=int, default=200, help="of the calm run, for churn")
    parser.add_argument("--every", type=float, default=20.0, help="seconds between two kills, for churn")
    training_bits.add_arguments(parser)
    given = parser.parse_args()
    run = {
        "synchronous": synchronous,
        "table": table,
        "bits": bits,
        "rates": rates,
        "adapter": adapter,
        "feedback": feedback,
        "mixing": mixing,
        "churn": churn,
    }[given.what]
    return run(given)


def together(peers: int, **arguments: Any) -> list[dict[str, Any]]:
    """Run a swarm; return every peer's final report."""
    with LocalSwarm(WORK + "train", peers=peers, arguments={"peers": peers, **arguments}) as swarm:
        swarm.start()
        return [list(process.events(3600))[-1] for process in swarm.processes]


def are_same(found: list[dict[str, Any]]) -> bool:
    """Return whether all peers ended with the same bits."""
    return len({peer["digest"] for peer in found}) == 1


def synchronous(given: argparse.Namespace) -> int:
    """Compare AveragedOptimizer with one process."""
    peers, steps = given.peers or 4, given.steps or 200
    rows, ok = [], True
    for name, others in (
        ("sgd", (("fp32", False), ("blockwise8", False))),
        ("adamw", (("fp32", False), ("blockwise8", False), ("fp32", True))),
    ):
        losses, held_out = in_one_process(peers, steps, name)
        same = (*in_one_process(peers, steps, name, one_by_one=True), "one process, batch by batch")
        late = (*in_one_process(peers, steps, name, delay=1), "one process, an update late")
        measured: list[tuple[list[float], float, str]] = [same, late]
        for codec, overlap in others:
            found = together(peers, codec=codec, steps=steps, sync_every=0, overlap=overlap, optimizer=name)
            ok &= are_same(found)
            what = f"{peers} peers, {codec}{', overlap' if overlap else ''}"
            what += "" if are_same(found) else ": DIFFERENT PARAMETERS"
            measured.append((found[0]["losses"], found[0]["held_out"], what))
        rows.append((name, "one process", "", f"{held_out:.4f}", ""))
        for found_losses, end, what in measured:
            away = max(abs(a - b) for a, b in zip(found_losses, losses, strict=False))
            is_late = "overlap" in what or "late" in what
            rows.append(
                (
                    name,
                    what,
                    "" if is_late else f"{away:.2g}",
                    f"{end:.4f}",
                    f"{100 * (end / held_out - 1):+.2f} %",
                )
            )
    show(
        f"{steps} updates, each of {8 * peers} sequences",
        ("", "", "largest difference of training losses", "held-out loss", "against one process"),
        rows,
    )
    return 0 if ok else 1


def table(given: argparse.Namespace) -> int:
    """Compare DiLoCo with averaging at every step, by codec."""
    with tempfile.TemporaryDirectory() as folder:
        return _table(given, f"{folder}/checkpoint")


def _table(given: argparse.Namespace, checkpoint: str) -> int:
    peers, steps, first = given.peers or 4, given.steps or 2000, given.first_steps
    _, before = in_one_process(peers, first, save_to=checkpoint)
    _, held_out = in_one_process(peers, steps, first=first, checkpoint=checkpoint)
    rows = [
        ("before", "", "", "", f"{before:.4f}", "", ""),
        ("one process", "every step", "", "", f"{held_out:.4f}", "", ""),
    ]
    ok, most = True, 0.0
    for every in map(int, given.sync_every.split(",")):
        for codec in given.codecs.split(","):
            found = together(
                peers,
                codec=codec,
                steps=steps,
                first=first,
                checkpoint=checkpoint,
                sync_every=0 if every == 1 else every,
            )
            ok &= are_same(found)
            sent = sum(peer["bytes_sent"] for peer in found) / peers
            most = most or sent
            loss = found[0]["held_out"]
            rows.append(
                (
                    "AveragedOptimizer" if every == 1 else "DiLoCo",
                    "every step" if every == 1 else f"every {every}",
                    codec,
                    f"{sent / 1e6:.2f} MB",
                    f"{loss:.4f}",
                    f"{100 * (loss / held_out - 1):+.2f} %",
                    f"{most / sent:.0f}",
                )
            )
            print(*rows[-1], flush=True, file=sys.stderr)
    show(
        f"{peers} peers, {steps} batches each, from a checkpoint of {first}",
        (
            "",
            "averages",
            "codec",
            "sent by a peer",
            "held-out loss",
            "against one process",
            "times fewer bytes",
        ),
        rows,
    )
    return 0 if ok else 1


def bits(given: argparse.Namespace) -> int:
    """Compare the losses of local updates by codec and in small groups, and the bits that an exchange takes."""
    show(*training_bits.table(training_bits.BITS, given, with_bits=True))
    return 0


def rates(given: argparse.Namespace) -> int:
    """Compare the losses of local updates with fixed outer rates and with the default."""
    show(*training_bits.table(training_bits.RATES, given, with_bits=False))
    return 0


def adapter(given: argparse.Namespace) -> int:
    """Compare the bytes of a LoRA adapter with those of its codec."""
    show(*training_adapter.adapter(given))
    return 0


def feedback(given: argparse.Namespace) -> int:
    """Compare the losses of a run in which peers are killed and come back, and of a calm one."""
    show(*training_feedback.feedback(given))
    return 0


def mixing(given: argparse.Namespace) -> int:
    """Compare local updates that mix between pairs with DiLoCo."""
    show(*training_mixing.mixing(given))
    return 0


def churn(given: argparse.Namespace) -> int:
    """Compare the samples that a run with churn and an undisturbed run need for the same loss."""
    peers = given.peers or 8
    calm = one_churn(peers, updates=given.updates, every=None, reach=None)
    wild = one_churn(peers, updates=None, every=given.every, reach=calm["held_out"])
    more = wild["samples"] / calm["samples"] - 1
    rows = [
        (
            name,
            f"{found['samples']:.0f}",
            f"{found['held_out']:.4f}",
            str(found["updates"]),
            str(found["kills"]),
            str(found["behind"]),
            f"{found['seconds']:.0f} s",
        )
        for name, found in (("calm", calm), ("churn", wild))
    ]
    show(
        f"{peers} peers; with churn {100 * more:+.1f} % samples to the same loss",
        ("", "samples computed", "held-out loss", "updates", "killed", "times behind", "time"),
        rows,
    )
    return 0 if calm["same"] and wild["same"] else 1


def one_churn(peers: int, *, updates: int | None, every: float | None, reach: float | None) -> dict[str, Any]:
    """Run until a number of updates, or until the held-out loss is as low as ``reach``."""
    with tempfile.TemporaryDirectory() as folder:
        arguments = {
            "peers": peers,
            "codec": "fp32",
            "sync_every": 0,
            "folder": folder,
            "target": 8 * peers,
            "pause": 0.5,
            "look_every": 10,
            "match_timeout": 3.0,
        }
        with LocalSwarm(WORK + "churn", peers=peers, arguments=arguments) as swarm:
            swarm.start()
            return _watch(swarm, updates, every, reach)


def _watch(
    swarm: LocalSwarm, updates: int | None, every: float | None, reach: float | None
) -> dict[str, Any]:
    began = time.monotonic()
    due = None if every is None else began + every
    found: dict[str, Any] = {
        "samples": 0.0,
        "updates": 0,
        "held_out": 99.0,
        "kills": 0,
        "behind": 0,
        "same": True,
    }
    digests: dict[int, str] = {}
    alive = list(swarm.processes)
    while True:
        for process in alive:
            for event in _said_by(process):
                found["samples"] += event["computed"]
                found["behind"] += event["behind"] is not None
                if "digest" in event:
                    found["updates"] = max(found["updates"], event["epoch"])
                    same = digests.setdefault(event["epoch"], event["digest"]) == event["digest"]
                    found["same"] = found["same"] and same
                found["held_out"] = min(found["held_out"], event.get("held_out", 99.0))
        found["seconds"] = time.monotonic() - began
        if updates is not None and found["updates"] >= updates:
            return found
        if reach is not None and found["held_out"] <= reach:
            return found
        if due is not None and time.monotonic() >= due:
            assert every is not None
            due += every
            victim = alive.pop(found["kills"] % len(alive))
            victim.kill()
            found["kills"] += 1
            alive.append(swarm.add())
        time.sleep(0.05)


def _said_by(process: SwarmProcess) -> Iterator[dict[str, Any]]:
    """Return a process's unread reports."""
    with suppress(TimeoutError, EOFError):
        while True:
            yield process.event(0.0)


def show(title: str, columns: Sequence[str], rows: Sequence[Sequence[str]]) -> None:
    """Print a table."""
    shown = Table(*columns, title=title)
    for row in rows:
        shown.add_row(*row)
    Console(width=140).print(shown)


if __name__ == "__main__":
    sys.exit(main())
