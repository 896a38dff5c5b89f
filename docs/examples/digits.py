"""Peers that each know few of the ten digits learn all of them together: FedAvg and FedYogi.

    .venv/bin/python docs/examples/digits.py        (pip install scikit-learn matplotlib)

Each of five peers has the images of two of the ten digits of scikit-learn's handwritten digits, and keeps them to
itself. In every round each peer trains locally for a while, and only the changes of the parameters are averaged. The
picture shows the accuracy on held-out images of all ten digits: of one peer alone, and after each round.
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
    """Return the 1797 images, float32 (n, 64), from 0 to 1, and their labels, shuffled with a fixed seed."""
    pixels, shown = load_digits(return_X_y=True)
    order = torch.randperm(len(shown), generator=torch.Generator().manual_seed(0))
    return torch.tensor(pixels, dtype=torch.float32)[order] / 16, torch.tensor(shown)[order]


def held_out() -> tuple[torch.Tensor, torch.Tensor]:
    """Return the held-out images: the last 297."""
    pixels, shown = images()
    return pixels[1500:], shown[1500:]


def images_of(peer: int, peers: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Return this peer's images: those of its digits among the first 1500. No two peers share an image."""
    pixels, shown = images()
    mine = torch.isin(shown[:1500], torch.arange(DIGITS).tensor_split(peers)[peer])
    return pixels[:1500][mine], shown[:1500][mine]


def batches(peer: int, peers: int) -> Iterator[tuple[torch.Tensor, torch.Tensor]]:
    """Draw random batches without end."""
    pixels, shown = images_of(peer, peers)
    draw = torch.Generator().manual_seed(peer)
    while True:
        chosen = torch.randint(len(shown), (BATCH,), generator=draw)
        yield pixels[chosen], shown[chosen]


def network() -> nn.Module:
    """Return the network, with the same parameters on every peer."""
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(64, 64), nn.ReLU(), nn.Linear(64, DIGITS))


@torch.no_grad()
def accuracy(model: nn.Module, parameters: list[torch.Tensor]) -> float:
    """Return the model's accuracy on the held-out images with these parameters."""
    pixels, shown = held_out()
    names = [name for name, _ in model.named_parameters()]
    scores = torch.func.functional_call(model, dict(zip(names, parameters, strict=True)), pixels)
    return float((scores.argmax(1) == shown).float().mean())


def peer(member: Member) -> None:
    """Train as one of the peers.

    Outside a swarm, ``p2pavg.blocking.open_averager(config, bootstrap=[...])`` makes the averager.
    """
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
                # All peers share the anchor. The parameters of a peer that was not drawn may have moved on from it.
                member.report(
                    round=report.epoch, accuracy=accuracy(model, optimizer.anchor), **report.metrics
                )
            if report.epoch == how["rounds"]:
                return


def alone(peers: int, steps: int) -> float:
    """Return the accuracy of one peer that trains alone."""
    model = network()
    optimizer = torch.optim.SGD(model.parameters(), lr=LR)
    for (pixels, shown), _ in zip(batches(0, peers), range(steps), strict=False):
        optimizer.zero_grad()
        torch.autograd.backward(functional.cross_entropy(model(pixels), shown))
        optimizer.step()
    return accuracy(model, list(model.parameters()))


def together(algorithm: str, how: argparse.Namespace) -> list[float]:
    """Run a swarm on this machine; return the accuracy after each round."""
    arguments = {"algorithm": algorithm, "peers": how.peers, "rounds": how.rounds}
    arguments |= {"sync_every": how.sync_every, "fraction": how.fraction}
    found: list[float] = []
    with LocalSwarm(peer, peers=how.peers, arguments=arguments) as swarm:
        swarm.start()
        for event in swarm.processes[0].events(600.0):
            found.append(event["accuracy"])
            print(f"  round {event['round']:3}   mean loss of the contributors {event['loss']:.3f}", end="")
            print(f"   recognised {found[-1]:.1%}", flush=True)
        swarm.wait_ended(60.0)
    return found


def draw(by_oneself: float, curves: dict[str, list[float]], where: Path) -> None:
    """Draw the accuracy of each algorithm over the rounds."""
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
    """Run every algorithm in turn; print and draw the accuracies."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument(
        "--peers", type=int, default=5, help="2 to 10; each has some of the digits [%(default)s]"
    )
    parser.add_argument("--rounds", type=int, default=40, help="of each algorithm [%(default)s]")
    parser.add_argument("--sync-every", type=int, default=10, help="steps between rounds [%(default)s]")
    parser.add_argument(
        "--fraction", type=float, default=1.0, help="of the peers that contribute to a round [%(default)s]"
    )
    parser.add_argument("--output", type=Path, default=Path("examples-output"), help="a folder [%(default)s]")
    how = parser.parse_args()
    if not 2 <= how.peers <= DIGITS:
        parser.error("--peers: 2 to 10")
    if how.rounds < 1 or how.sync_every < 1:
        parser.error("--rounds and --sync-every: at least 1")
    if not 0 < how.fraction <= 1:
        parser.error("--fraction: above 0, and at most 1")
    torch.set_num_threads(1)  # like the peers: so small a model is slower with more threads
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
