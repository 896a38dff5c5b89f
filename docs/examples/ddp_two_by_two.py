"""Two peers of two processes each: DistributedDataParallel within a peer, p2pavg between them.

    .venv/bin/python docs/examples/ddp_two_by_two.py

starts two peers with torchrun on this machine, and draws their losses. To start a single peer, on a machine with two
GPUs or with none:

    torchrun --nproc-per-node=2 docs/examples/ddp_two_by_two.py
    torchrun --nproc-per-node=2 docs/examples/ddp_two_by_two.py --join ADDRESS      (ADDRESS: printed by the first)

On two machines, make a run with `p2pavg run create digits`, and start one peer with --run digits --peer A and the other
with --run LINK --peer B, as that command prints.

They learn scikit-learn's handwritten digits; each of the four processes has a quarter of the images, and all of them
take the same steps, as the ranks of one DistributedDataParallel would.
"""

from __future__ import annotations

import argparse
import gc
import json
import os
import subprocess
import sys
import tempfile
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from sklearn.datasets import load_digits
from torch import nn
from torch.nn import functional
from torch.nn.parallel import DistributedDataParallel

import p2pavg
from p2pavg.blocking import open_averager
from p2pavg.optim.ddp import ddp_comm_hook, peer_gradients

PEERS = ("A", "B")
RANKS = 2  # of each
BATCH = 32


def images(part: int, parts: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Return one of several equal parts of the 1500 training images: pixels, float32 (n, 64), and labels."""
    pixels, shown = load_digits(return_X_y=True)
    mine = slice(part, 1500, parts)
    return torch.tensor(pixels[mine], dtype=torch.float32) / 16, torch.tensor(shown[mine])


@torch.no_grad()
def accuracy(network: nn.Module, device: torch.device) -> float:
    """Return the model's accuracy on the 297 held-out images."""
    pixels, shown = load_digits(return_X_y=True)
    scores = network(torch.tensor(pixels[1500:], dtype=torch.float32, device=device) / 16)
    return float((scores.argmax(1).cpu() == torch.tensor(shown[1500:])).float().mean())


def train(how: argparse.Namespace) -> None:
    """Run one rank of one peer, started by torchrun."""
    cuda = torch.cuda.device_count() >= int(os.environ["LOCAL_WORLD_SIZE"])
    dist.init_process_group("nccl" if cuda else "gloo")
    rank, ranks = dist.get_rank(), dist.get_world_size()
    device = torch.device("cuda", int(os.environ["LOCAL_RANK"])) if cuda else torch.device("cpu")
    if cuda:
        torch.cuda.set_device(device)
    torch.manual_seed(0)  # all peers begin with the same parameters
    network = nn.Sequential(nn.Linear(64, 128), nn.ReLU(), nn.Linear(128, 10)).to(device)
    model = DistributedDataParallel(network)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    index = PEERS.index(how.peer) * ranks + rank
    pixels, shown = (tensor.to(device) for tensor in images(index, len(PEERS) * ranks))
    draw = torch.Generator().manual_seed(index)
    losses: list[float] = []
    with ExitStack() as stack:
        averager = None
        if rank == 0:
            settings: dict[str, Any] = {"group_size": len(PEERS), "match_timeout": 10.0}
            if how.run:
                config = p2pavg.join_run(how.run, **settings)
            else:
                config = p2pavg.AveragingConfig(run_id="ddp-digits", **settings)
            averager = stack.enter_context(open_averager(config, bootstrap=how.join))
            print("others join with", averager.addresses[0], flush=True)
        gradients = stack.enter_context(
            peer_gradients(averager, network.parameters(), peers_to_start=len(PEERS))
        )
        model.register_comm_hook(gradients, ddp_comm_hook)
        for step in range(1, how.steps + 1):
            chosen = torch.randint(len(shown), (BATCH,), generator=draw)
            loss = functional.cross_entropy(model(pixels[chosen]), shown[chosen])
            torch.autograd.backward(loss)
            if gradients.averaged():  # otherwise a peer was lost in this step: skip it
                optimizer.step()
            optimizer.zero_grad()
            losses.append(loss.item())
            if rank == 0 and step % 25 == 0:
                print(f"peer {how.peer}  step {step:4}  loss {losses[-1]:.3f}", flush=True)
    if rank == 0:
        recognised = accuracy(network, device)
        print(f"peer {how.peer}  recognised {recognised:.1%} of the held-out images", flush=True)
        if how.result is not None:
            parameters = [parameter.tolist() for parameter in network.parameters()]
            how.result.write_text(json.dumps({"losses": losses, "parameters": parameters}))
    dist.barrier()
    del model, gradients
    gc.collect()  # with the model, gloo's threads end: else one may abort the exit (PyTorch issue 190489)
    dist.destroy_process_group()


def start(peer: str, result: Path, how: argparse.Namespace, join: str | None) -> subprocess.Popen[str]:
    """Start a peer of two ranks on this machine."""
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", f"--nproc-per-node={RANKS}"]
    command += [os.path.abspath(__file__), "--peer", peer, "--steps", str(how.steps), "--result", str(result)]
    if join is not None:
        command += ["--join", join]
    environment = os.environ | {"OMP_NUM_THREADS": "1"}
    stdout = subprocess.PIPE if join is None else None  # the first peer prints its address
    return subprocess.Popen(command, stdout=stdout, text=True, env=environment)


def both(how: argparse.Namespace) -> list[dict[str, Any]]:
    """Run two peers; return their results."""
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
        return [json.loads(result.read_text()) for result in results]


def draw_losses(found: list[dict[str, Any]], where: Path) -> None:
    """Draw the losses of each peer's first rank."""
    import matplotlib

    matplotlib.use("agg")
    from matplotlib import pyplot

    figure, axes = pyplot.subplots(figsize=(8, 5))
    for peer, result in zip(PEERS, found, strict=True):
        axes.plot(result["losses"], label=f"peer {peer}, rank 0")
    axes.set(xlabel="step", ylabel="loss of the batch", yscale="log")
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
    one.add_argument(
        "--peer", choices=PEERS, help="number of this peer, which decides its part of the images"
    )
    one.add_argument("--join", action="append", default=[], help="an address that another peer printed")
    one.add_argument("--run", help="on several machines: the folder or link of `p2pavg run create`")
    one.add_argument("--result", type=Path, help="file for the results")
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
    picture = how.output / "ddp-two-by-two.png"
    draw_losses(found, picture)
    same = found[0]["parameters"] == found[1]["parameters"]
    print(f"The two peers' parameters are {'identical' if same else 'DIFFERENT'}: {picture}")
    if not same:
        raise SystemExit(1)


if __name__ == "__main__":
    try:
        main()
    except KeyboardInterrupt:
        raise SystemExit(130) from None
