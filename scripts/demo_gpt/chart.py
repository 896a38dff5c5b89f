"""The loss curves as a PNG: every peer, the reference, and the differences between them."""

import math
from itertools import pairwise
from pathlib import Path

import matplotlib as mpl

mpl.use("Agg")
from matplotlib import pyplot as plt
from matplotlib.axes import Axes
from matplotlib.ticker import MaxNLocator, PercentFormatter

from .progress import Progress, Run, State
from .recipe import evaluated_every
from .report import final_loss, peers_final_loss, percent, relative_difference

COLOURS = ("#3b6fb6", "#e08a2e", "#3f9a6b", "#b0508f", "#7a68b5", "#98814a", "#4aa3b5", "#8c8f94")
FAILURE = "#d1302b"
INK = "#26292e"
FAINT = "#6f747c"
TITLE = "Peers that share only gradients, and one process trained on the same batches"
STYLE = {
    "font.size": 10,
    "text.color": INK,
    "axes.labelcolor": INK,
    "axes.edgecolor": "#9a9ea6",
    "axes.grid": True,
    "axes.axisbelow": True,
    "axes.spines.top": False,
    "axes.spines.right": False,
    "grid.color": "#e8eaee",
    "xtick.color": INK,
    "ytick.color": INK,
    "legend.frameon": False,
}


def save_chart(run: Run, path: Path) -> None:
    """Draw held-out losses over faint training losses and, below, each peer's difference from the reference."""
    with plt.style.context(STYLE):
        figure, (losses, distance) = plt.subplots(
            2, 1, figsize=(9, 6.4), sharex=True, height_ratios=(3.2, 1), layout="constrained"
        )
        draw_losses(losses, run)
        draw_distance(distance, run)
        figure.suptitle(TITLE, x=0.015, ha="left", fontsize=12.5, fontweight="bold")
        losses.set_title(subtitle(run), loc="left", fontsize=10, color=FAINT)
        figure.savefig(path, dpi=140)
        plt.close(figure)


def subtitle(run: Run) -> str:
    peers, reference, difference = peers_final_loss(run), final_loss(run.reference), relative_difference(run)
    if peers is None or reference is None or difference is None:
        return f"{run.settings.steps} steps were planned; no peer took them all"
    return (
        f"held-out loss after {run.settings.steps} steps: peers {peers:.4f}, reference {reference:.4f}, "
        f"{percent(difference)} apart"
    )


def colour(index: int) -> str:
    return COLOURS[index % len(COLOURS)]


def nested_width(index: int, peers: int) -> float:
    """Return the width of a line. Wide lines lie below narrow ones, so that coinciding curves stay visible."""
    return 2.0 + 1.8 * (peers - 1 - index)


def draw_losses(axes: Axes, run: Run) -> None:
    for index, peer in enumerate(run.peers):
        draw_train(axes, peer, colour(index))
    for index in range(len(run.peers)):
        draw_held_out(axes, run, index)
    steps, losses = held_out_curve(run.reference, run.settings.steps)
    axes.plot(steps, losses, color=INK, linestyle=(0, (4, 3)), linewidth=1.4, label="reference", zorder=5)
    axes.set_ylabel("held-out loss (nats a character)")
    axes.text(0.01, 0.03, "faint: each peer's training loss", transform=axes.transAxes, color=FAINT)
    axes.legend(loc="upper right")


def draw_train(axes: Axes, peer: Progress, line_colour: str) -> None:
    losses = {
        entry.step - 1: entry.loss for entry in peer.train
    }  # a step's loss is that of the weights before it
    axes.plot(list(losses), list(losses.values()), color=line_colour, linewidth=0.7, alpha=0.4)


def draw_held_out(axes: Axes, run: Run, index: int) -> None:
    peer, line_colour, width = run.peers[index], colour(index), nested_width(index, len(run.peers))
    steps, losses = held_out_curve(peer, run.settings.steps)
    label = f"{peer.name}, failed at step {peer.step}" if peer.state is State.FAILED else peer.name
    axes.plot(steps, losses, color=line_colour, linewidth=width, solid_capstyle="round", label=label)
    if peer.state is State.FAILED and steps:
        axes.plot(steps[-1], losses[-1], "X", color=FAILURE, markersize=9, zorder=6)


def draw_distance(axes: Axes, run: Run) -> None:
    reference = {entry.step: entry.loss for entry in run.reference.held_out}
    axes.axhline(0, color=INK, linewidth=1)
    for index, peer in enumerate(run.peers):
        distances = {
            entry.step: entry.loss / reference[entry.step] - 1
            for entry in peer.held_out
            if entry.step in reference
        }
        axes.plot(
            *with_gaps(distances, evaluated_every(run.settings.steps)),
            color=colour(index),
            linewidth=nested_width(index, len(run.peers)) / 1.6,
            solid_capstyle="round",
        )
    widest = max((abs(float(value)) for value in axes.get_ylim()), default=0.0)
    limit = max(1.1 * widest, 0.002)  # rounding alone must not look like a difference
    axes.set_ylim(-limit, limit)
    axes.yaxis.set_major_formatter(PercentFormatter(xmax=1, decimals=1))
    axes.set_ylabel("from reference")
    axes.set_xlabel("step")
    axes.xaxis.set_major_locator(MaxNLocator(integer=True))


def held_out_curve(progress: Progress, steps: int) -> tuple[list[int], list[float]]:
    losses = {
        entry.step: entry.loss for entry in progress.held_out
    }  # a peer that starts again begins at 0 again
    return with_gaps(losses, evaluated_every(steps))


def with_gaps(values: dict[int, float], usual: int) -> tuple[list[int], list[float]]:
    """Return the points of a curve that is broken where more than `usual` steps are missing: the peer was gone."""
    steps = sorted(values)
    xs, ys = steps[:1], [values[step] for step in steps[:1]]
    for before, step in pairwise(steps):
        if step - before > usual:
            xs.append(before)
            ys.append(math.nan)
        xs.append(step)
        ys.append(values[step])
    return xs, ys
