"""Peers that each know few of the ten digits learn all of them together: FedAvg and FedYogi.

    .venv/bin/python docs/examples/digits.py        (pip install scikit-learn matplotlib)

Scikit-learn's handwritten digits are dealt out so that each of five peers has two of the ten, and its images stay with
it. In every round each trains by itself for a while, and only how its parameters changed is averaged. The picture shows
how many of the held-out images, of all ten digits, are recognised: by one peer alone, and after each round.
"""

from __future__ import annotations

import argparse
from collections.abc import Iterator
from pathlib import Path

import torch
from sklearn.datasets import load_digits
from torch import nn
from torch.nn import functional

import p2pavg
from p2pavg.optim import fedavg, fedyogi
from p2pavg.testing import LocalSwarm, Member

DIGITS = 10
BATCH = 16
LR = 0.1
ALGORITHMS = {"FedAvg": fedavg, "FedYogi": fedyogi}


def images() -> tuple[torch.Tensor, torch.Tensor]:
    """1797 images, float32 (n, 64), of 0 to 1, and what they show; always in the same drawn order."""
    pixels, shown = load_digits(return_X_y=True)
    order = torch.randperm(len(shown), generator=torch.Generator().manual_seed(0))
    return torch.tensor(pixels, dtype=torch.float32)[order] / 16, torch.tensor(shown)[order]


def held_out() -> tuple[torch.Tensor, torch.Tensor]:
    """The last 297."""
    pixels, shown = images()
    return pixels[1500:], shown[1500:]


def images_of(peer: int, peers: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Of the first 1500, those that show this peer's digits; no two peers have an image in common."""
    pixels, shown = images()
    mine = torch.isin(shown[:1500], torch.arange(DIGITS).tensor_split(peers)[peer])
    return pixels[:1500][mine], shown[:1500][mine]


def batches(peer: int, peers: int) -> Iterator[tuple[torch.Tensor, torch.Tensor]]:
    """Drawn for ever."""
    pixels, shown = images_of(peer, peers)
    draw = torch.Generator().manual_seed(peer)
    while True:
        chosen = torch.randint(len(shown), (BATCH,), generator=draw)
        yield pixels[chosen], shown[chosen]


def network() -> nn.Module:
    """The same for every peer."""
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(64, 64), nn.ReLU(), nn.Linear(64, DIGITS))


@torch.no_grad()
def accuracy(model: nn.Module, parameters: list[torch.Tensor]) -> float:
    """Of the held-out images, the part that the model recognises with these parameters."""
    pixels, shown = held_out()
    names = [name for name, _ in model.named_parameters()]
    scores = torch.func.functional_call(model, dict(zip(names, parameters, strict=True)), pixels)
    return float((scores.argmax(1) == shown).float().mean())


def peer(member: Member) -> None:
    """One of the peers. Elsewhere, ``p2pavg.blocking.open_averager(config, bootstrap=[...])`` makes the averager."""
    torch.set_num_threads(1)
    how = member.arguments
    config = p2pavg.AveragingConfig(
        run_id="digits",
        group_size=how["peers"],
        participation=None if how["fraction"] == 1 else p2pavg.RandomFraction(how["fraction"]),
    )
    with member.averager(config) as averager:
        model = network()
        optimizer = ALGORITHMS[how["algorithm"]](
            torch.optim.SGD(model.parameters(), lr=LR),
            averager,
            sync_every=how["sync_every"],
            peers_to_start=how["peers"],
        )
        for pixels, shown in batches(member.index, how["peers"]):
            optimizer.zero_grad()
            loss = functional.cross_entropy(model(pixels), shown)
            torch.autograd.backward(loss)
            report = optimizer.step(samples=len(shown), metrics={"loss": loss.item()})
            if report.behind is not None:
                raise SystemExit(f"peer {member.index} was left behind: {report.behind}")
            if report.updated and member.index == 0:
                # What all peers have in common is the anchor; a peer that was not drawn has learned on from there.
                member.report(
                    round=report.epoch, accuracy=accuracy(model, optimizer.anchor), **report.metrics
                )
            if report.epoch == how["rounds"]:
                return


def alone(peers: int, steps: int) -> float:
    """The accuracy of one peer that trains by itself."""
    model = network()
    optimizer = torch.optim.SGD(model.parameters(), lr=LR)
    for (pixels, shown), _ in zip(batches(0, peers), range(steps), strict=False):
        optimizer.zero_grad()
        torch.autograd.backward(functional.cross_entropy(model(pixels), shown))
        optimizer.step()
    return accuracy(model, list(model.parameters()))


def together(algorithm: str, how: argparse.Namespace) -> list[float]:
    """The accuracy after each round of a swarm on this machine."""
    arguments = {"algorithm": algorithm, "peers": how.peers, "rounds": how.rounds}
    arguments |= {"sync_every": how.sync_every, "fraction": how.fraction}
    found: list[float] = []
    with LocalSwarm(peer, peers=how.peers, arguments=arguments) as swarm:
        swarm.start()
        for event in swarm.processes[0].events(600.0):
            found.append(event["accuracy"])
            print(
                f"  round {event['round']:3}   mean loss of those who contributed {event['loss']:.3f}", end=""
            )
            print(f"   recognised {found[-1]:.1%}", flush=True)
        swarm.wait_ended(60.0)
    return found


def draw(by_oneself: float, curves: dict[str, list[float]], where: Path) -> None:
    """The accuracy of each algorithm over the rounds."""
    import matplotlib

    matplotlib.use("agg")
    from matplotlib import pyplot

    figure, axes = pyplot.subplots(figsize=(8, 5))
    for name, curve in curves.items():
        axes.plot(range(1, len(curve) + 1), curve, label=name)
    axes.axhline(by_oneself, color="gray", linestyle="--", label="one peer alone, after as many steps")
    axes.set(xlabel="rounds", ylabel="held-out images that are recognised", ylim=(0, 1))
    axes.legend()
    figure.savefig(where, dpi=120)


def main() -> None:
    """Every algorithm in turn; prints, draws."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument(
        "--peers", type=int, default=5, help="2 to 10; each has some of the digits [%(default)s]"
    )
    parser.add_argument("--rounds", type=int, default=40, help="of each algorithm [%(default)s]")
    parser.add_argument("--sync-every", type=int, default=10, help="steps between rounds [%(default)s]")
    parser.add_argument(
        "--fraction", type=float, default=1.0, help="of the peers who contribute to a round [%(default)s]"
    )
    parser.add_argument("--output", type=Path, default=Path("examples-output"), help="a folder [%(default)s]")
    how = parser.parse_args()
    if not 2 <= how.peers <= DIGITS:
        parser.error("--peers: 2 to 10")
    if how.rounds < 1 or how.sync_every < 1:
        parser.error("--rounds and --sync-every: at least 1")
    if not 0 < how.fraction <= 1:
        parser.error("--fraction: above 0, and at most 1")
    torch.set_num_threads(1)  # as the peers: a model as small as this is slower with more
    how.output.mkdir(parents=True, exist_ok=True)
    by_oneself = alone(how.peers, how.rounds * how.sync_every)
    print(f"one peer alone, as many steps: recognised {by_oneself:.1%}")
    curves = {}
    for algorithm in ALGORITHMS:
        print(f"{algorithm}, {how.peers} peers:")
        curves[algorithm] = together(algorithm, how)
    picture = how.output / "digits.png"
    draw(by_oneself, curves, picture)
    ends = ", ".join(f"{curve[-1]:.1%} with {name}" for name, curve in curves.items())
    print(f"Recognised: {by_oneself:.1%} alone, {ends}: {picture}")


if __name__ == "__main__":
    try:
        main()
    except KeyboardInterrupt:
        raise SystemExit(130) from None
