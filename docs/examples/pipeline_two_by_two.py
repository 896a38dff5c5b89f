"""Two peers of two pipeline stages each: torch.distributed.pipelining within a peer, p2pavg between them.

    .venv/bin/python docs/examples/pipeline_two_by_two.py

starts two peers with torchrun on this machine, trains one process with the same batches beside them, and draws the
losses. To start a single peer, on a machine with two GPUs or with none:

    torchrun --nproc-per-node=2 docs/examples/pipeline_two_by_two.py
    torchrun --nproc-per-node=2 docs/examples/pipeline_two_by_two.py --join ADDRESS      (ADDRESS: printed by the first)

On two machines, make a run with `p2pavg run create digits --count 3`, and start one peer with --run digits --run LINK1,
and the other with --run LINK2 --run LINK3 --peer B: each process is a peer of its own.

They learn scikit-learn's handwritten digits. Rank 0 of a peer has the first layers and rank 1 the others; each stage
averages its gradients with the same stage of the other peer.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from sklearn.datasets import load_digits
from torch import nn
from torch.nn import functional

import p2pavg
from p2pavg.blocking import open_averager
from p2pavg.strategies import DataParallel, ModelParallel

PEERS = ("A", "B")
BATCH = 32  # of each peer
STRATEGY = ModelParallel(
    training=DataParallel(target_batch_size=BATCH * len(PEERS)), stages=2, microbatches=4
)


def layers() -> nn.Sequential:
    """Return the whole network, with the same first parameters everywhere."""
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(64, 128), nn.ReLU(), nn.Linear(128, 64), nn.ReLU(), nn.Linear(64, 10))


def stage_of(network: nn.Sequential, stage: int) -> nn.Sequential:
    """Return the layers of one stage."""
    modules = list(network)
    return nn.Sequential(*(modules[:2] if stage == 0 else modules[2:]))


def inner_of(module: nn.Module) -> torch.optim.Optimizer:
    """Return the optimizer of a stage, or of the whole network."""
    return torch.optim.SGD(module.parameters(), lr=0.1, momentum=0.9)


def batches(peer: str) -> Iterator[tuple[torch.Tensor, torch.Tensor]]:
    """Yield a peer's batches: pixels, float32 (32, 64), and labels. It draws from a half of the images."""
    pixels, shown = load_digits(return_X_y=True)
    index = PEERS.index(peer)
    inputs = torch.tensor(pixels[index : 1500 : len(PEERS)], dtype=torch.float32) / 16
    labels, draw = torch.tensor(shown[index : 1500 : len(PEERS)]), torch.Generator().manual_seed(index)
    while True:
        chosen = torch.randint(len(labels), (BATCH,), generator=draw)
        yield inputs[chosen], labels[chosen]


def train(how: argparse.Namespace) -> None:
    """Run one rank of one peer, started by torchrun."""
    cuda = torch.cuda.device_count() >= int(os.environ["LOCAL_WORLD_SIZE"])
    device = torch.device("cuda", int(os.environ["LOCAL_RANK"])) if cuda else torch.device("cpu")
    if cuda:
        torch.cuda.set_device(device)
    dist.init_process_group("nccl" if cuda else "gloo")
    place = STRATEGY.place(device.type)
    module = stage_of(layers(), place.stage).to(device)
    schedule = STRATEGY.pipeline(module, place, functional.cross_entropy)
    settings: dict[str, Any] = {"match_timeout": 10.0, "compression": None}
    if how.run:
        config = p2pavg.join_run(how.run[place.stage], **settings)
    else:
        config = p2pavg.AveragingConfig(run_id="pipeline-digits", **settings)
    losses: list[float] = []
    with ExitStack() as stack:
        config = place.config(STRATEGY.config(config))
        join: list[Any] = [how.join]
        if place.stage == 1:
            dist.broadcast_object_list(join, src=0)  # waits until rank 0 has opened its averager
        averager = stack.enter_context(open_averager(config, bootstrap=join[0]))
        if place.stage == 0:  # the other rank joins this one, and so finds the other peers
            print("others join with", averager.addresses[0], flush=True)
            dist.broadcast_object_list([[*how.join, *averager.addresses]], src=0)
        optimizer = STRATEGY.optimizer(
            module,
            averager,
            inner_of(module),
            place=place,
            peers_to_start=len(PEERS),
            max_samples_per_peer=BATCH,
        )
        drawn = batches(how.peer)
        while optimizer.epoch < how.steps:
            inputs, labels = (tensor.to(device) for tensor in next(drawn))
            optimizer.zero_grad()
            told: list[torch.Tensor] = []
            if place.stage == 0:
                schedule.step(inputs)
            else:
                schedule.step(target=labels, losses=told)
            metrics = {"loss": torch.stack(told).mean().item()} if told else {}
            report = optimizer.step(samples=BATCH, metrics=metrics)
            if report.updated and told:
                losses.append(report.metrics["loss"])  # the mean over both peers
                if report.epoch % 25 == 0:
                    print(f"peer {how.peer}  update {report.epoch:4}  loss {losses[-1]:.3f}", flush=True)
    if how.result is not None:
        found = {"losses": losses, "parameters": [each.tolist() for each in module.parameters()]}
        Path(f"{how.result}.{place.stage}").write_text(json.dumps(found))
    dist.destroy_process_group()


def alone(steps: int) -> tuple[nn.Sequential, list[float]]:
    """Train in one process with the batches of both peers; return the network and the losses."""
    network, losses = layers(), []
    optimizer, drawn = inner_of(network), [batches(peer) for peer in PEERS]
    for _ in range(steps):
        pairs = [next(each) for each in drawn]
        loss = functional.cross_entropy(
            network(torch.cat([inputs for inputs, _ in pairs])), torch.cat([labels for _, labels in pairs])
        )
        optimizer.zero_grad()
        torch.autograd.backward(loss)
        optimizer.step()
        losses.append(loss.item())
    return network, losses


def start(peer: str, result: Path, how: argparse.Namespace, join: str | None) -> subprocess.Popen[str]:
    """Start a peer of two ranks on this machine."""
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone"]
    command += [f"--nproc-per-node={STRATEGY.ranks}", os.path.abspath(__file__)]
    command += ["--peer", peer, "--steps", str(how.steps), "--result", str(result)]
    if join is not None:
        command += ["--join", join]
    stdout = subprocess.PIPE if join is None else None  # the first peer prints its address
    return subprocess.Popen(command, stdout=stdout, text=True, env=os.environ | {"OMP_NUM_THREADS": "1"})


def both(how: argparse.Namespace) -> list[list[dict[str, Any]]]:
    """Run two peers; return the results of their stages."""
    with tempfile.TemporaryDirectory() as folder, ExitStack() as stack:
        results = [Path(folder, peer) for peer in PEERS]
        processes = [start(PEERS[0], results[0], how, None)]
        stack.callback(processes[0].terminate)  # has no effect if it has ended
        assert processes[0].stdout is not None
        for line in processes[0].stdout:
            print(line, end="", flush=True)
            if line.startswith("others join with") and len(processes) == 1:
                processes.append(start(PEERS[1], results[1], how, line.split()[-1]))
                stack.callback(processes[1].terminate)
        if any(process.wait() for process in processes):
            raise SystemExit("a peer failed")
        stages = range(STRATEGY.stages)
        return [[json.loads(Path(f"{each}.{stage}").read_text()) for stage in stages] for each in results]


def draw_losses(found: list[list[dict[str, Any]]], losses: list[float], where: Path) -> None:
    """Draw the losses of the peers' last stages, and of the one process."""
    import matplotlib

    matplotlib.use("agg")
    from matplotlib import pyplot

    figure, axes = pyplot.subplots(figsize=(8, 5))
    axes.plot(losses, label="one process", linewidth=4, alpha=0.4)
    axes.plot(found[0][-1]["losses"], label="two peers of two stages")
    axes.set(xlabel="update", ylabel="loss of the batch", yscale="log")
    axes.legend()
    figure.savefig(where, dpi=120)


def main() -> None:
    """Run both peers or, under torchrun, one rank of one."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--steps", type=int, default=100, help="[%(default)s]")
    parser.add_argument("--output", type=Path, default=Path("examples-output"), help="a folder [%(default)s]")
    one = parser.add_argument_group("a peer by itself, under torchrun")
    one.add_argument("--peer", choices=PEERS, help="name of this peer, which decides its half of the images")
    one.add_argument("--join", action="append", default=[], help="an address that another peer printed")
    one.add_argument(
        "--run",
        action="append",
        default=[],
        help="on several machines: the folder or link of `p2pavg run create`, once for each stage in turn",
    )
    one.add_argument("--result", type=Path, help="file for the results; the stage's number is added")
    how = parser.parse_args()
    if how.steps < 1:
        parser.error("--steps: at least 1")
    if "RANK" in os.environ:
        how.peer = how.peer or ("B" if how.join else "A")
        train(how)
        return
    if how.join or how.peer:
        parser.error("--join and --peer: of a peer by itself, under torchrun")
    how.output.mkdir(parents=True, exist_ok=True)
    found = both(how)
    network, losses = alone(how.steps)
    picture = how.output / "pipeline-two-by-two.png"
    draw_losses(found, losses, picture)
    same = all(one["parameters"] == other["parameters"] for one, other in zip(*found, strict=True))
    peer = [torch.tensor(each) for stage in found[0] for each in stage["parameters"]]
    away = max(
        float((mine - its).abs().max()) for mine, its in zip(peer, network.state_dict().values(), strict=True)
    )
    print(f"The two peers' stages are {'identical' if same else 'DIFFERENT'}: {picture}")
    print(f"The largest difference to one process that takes both batches: {away:.1e}")
    if not same:
        raise SystemExit(1)


if __name__ == "__main__":
    try:
        main()
    except KeyboardInterrupt:
        raise SystemExit(130) from None
