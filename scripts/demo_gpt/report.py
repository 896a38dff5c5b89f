"""The outcome of a run: its figures, as an object for JSON and as plain sentences."""

from dataclasses import asdict
from pathlib import Path
from statistics import fmean
from typing import Any

from .events import Update
from .progress import Progress, Run, State


def final_loss(progress: Progress) -> float | None:
    """Return the held-out loss after the last step; None for a process that did not reach it."""
    return progress.held_out[-1].loss if progress.state is State.DONE else None


def peers_final_loss(run: Run) -> float | None:
    losses = [loss for peer in run.peers if (loss := final_loss(peer)) is not None]
    return fmean(losses) if losses else None


def relative_difference(run: Run) -> float | None:
    """Return the relative difference of the final losses: |peers - reference| / reference."""
    peers, reference = peers_final_loss(run), final_loss(run.reference)
    return abs(peers - reference) / reference if peers is not None and reference is not None else None


def are_identical(run: Run) -> bool:
    """Return whether all peers that finished hold the same parameters, bit for bit."""
    return len({peer.digest for peer in run.peers if peer.state is State.DONE}) == 1


def mean_compression_ratio(run: Run) -> float | None:
    ratios = [entry.compression_ratio for peer in run.peers for entry in peer.updates.values()]
    return fmean(ratios) if ratios else None


def sentences(run: Run) -> str:
    """Return the outcome as sentences that stand on their own."""
    return " ".join(
        [_losses_sentence(run), *_bits_sentence(run), *_events_sentence(run), *_failures_sentence(run)]
    )


def _losses_sentence(run: Run) -> str:
    done = _finished(run)
    peers, reference = peers_final_loss(run), final_loss(run.reference)
    difference = relative_difference(run)
    if peers is None:
        return "No peer took all its steps."
    subject = f"{done} peers" if done == len(run.peers) else f"{done} of {len(run.peers)} peers"
    if reference is None or difference is None:
        return f"{subject} that shared only gradients ended at a held-out loss of {peers:.4f}."
    return (
        f"{subject} that shared only gradients ended at a held-out loss of {peers:.4f}; "
        f"one process that trained on the same batches "
        f"ended at {reference:.4f}, {percent(difference)} apart."
    )


def percent(share: float) -> str:
    return f"{share:.2%}" if share >= 5e-5 else "less than 0.01%"


def _bits_sentence(run: Run) -> list[str]:
    if _finished(run) < 2:
        return []
    if not are_identical(run):
        return ["Their parameters differ: this must not happen, please report it with the logs."]
    whose = "All of them" if _finished(run) == len(run.peers) else f"Those {_finished(run)}"
    return [f"{whose} hold the same parameters, bit for bit."]


def _finished(run: Run) -> int:
    return sum(peer.state is State.DONE for peer in run.peers)


def _events_sentence(run: Run) -> list[str]:
    """Return the story of the peers that came late or were killed, and have finished all the same."""
    late = run.settings.late_peer
    told = []
    if late is not None and run.peers[late].state is State.DONE:
        told.append(f"Peer {late} started late, and fetched what it had missed.")
    told += [
        f"{peer.name.capitalize()} was killed at step {' and '.join(map(str, peer.kills))}, started again,"
        " and caught up."
        for peer in run.peers
        if peer.kills and peer.state is State.DONE
    ]
    return told


def _failures_sentence(run: Run) -> list[str]:
    return [
        f"{process.name.capitalize()} failed {when(process)}: {process.reason.removesuffix('.')}."
        for process in run.processes
        if process.state is State.FAILED
    ]


def when(process: Progress) -> str:
    return f"at step {process.step}" if process.step else "before the first step"


def to_json(run: Run, chart: Path | None) -> dict[str, Any]:
    return {
        "config": asdict(run.settings),
        "parameters": run.reference.parameters,
        "seconds": run.seconds,
        "peers_final_loss": peers_final_loss(run),
        "reference_final_loss": final_loss(run.reference),
        "relative_difference": relative_difference(run),
        "identical_parameters": are_identical(run),
        "compression_ratio": mean_compression_ratio(run),
        "peers": [_process(peer) | _traffic(peer) for peer in run.peers],
        "reference": _process(run.reference),
        "rounds": [_round(run, step) for step in range(1, run.settings.steps + 1)],
        "png": str(chart) if chart else None,
    }


def _process(progress: Progress) -> dict[str, Any]:
    return {
        "name": progress.name,
        "state": progress.state.value,
        "kills": progress.kills,
        "reason": progress.reason,
        "steps": progress.step,
        "final_loss": final_loss(progress),
        "train_losses": [entry.loss for entry in progress.train],
        "held_out_losses": [[entry.step, entry.loss] for entry in progress.held_out],
        "digest": progress.digest,
    }


def _traffic(peer: Progress) -> dict[str, Any]:
    return {"peer_id": peer.peer_id, "bytes_sent": peer.bytes_sent, "bytes_received": peer.bytes_received}


def _round(run: Run, step: int) -> dict[str, Any]:
    """Summarise one step over all peers; group sizes are in the order of the peers, 0 for an absent one."""
    entries = [peer.updates.get(step) for peer in run.peers]
    present: list[Update] = [entry for entry in entries if entry]
    return {
        "step": step,
        "group_sizes": [len(entry.samples) if entry else 0 for entry in entries],
        "seconds": max((entry.seconds for entry in present), default=None),
        "exchange_seconds": max((entry.exchange_seconds for entry in present), default=None),
        "bytes_sent": sum(entry.bytes_sent for entry in present),
        "bytes_received": sum(entry.bytes_received for entry in present),
    }
