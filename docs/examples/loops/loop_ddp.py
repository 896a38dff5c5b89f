"""Train a small network on several ranks: torchrun --nproc-per-node 2 loop_ddp.py model.pt."""

import gc
import sys
from collections.abc import Iterator

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, TensorDataset

UPDATES = 60


def dataset() -> TensorDataset:
    """Return inputs (8) and targets (1) of a noisy function, other ones in each process."""
    inputs = torch.randn(32 * UPDATES, 8)
    return TensorDataset(inputs, inputs.sin().sum(1, keepdim=True) + 0.05 * torch.randn(len(inputs), 1))


def batches() -> Iterator[tuple[torch.Tensor, torch.Tensor]]:
    """Yield batches of 16, half of one for two ranks, without an end."""
    loader = DataLoader(dataset(), batch_size=16, shuffle=True)
    while True:
        yield from loader


def main() -> None:
    dist.init_process_group("gloo")
    rank = dist.get_rank()
    torch.manual_seed(0)  # the same first parameters in each process ...
    net = nn.Sequential(nn.Linear(8, 64), nn.Tanh(), nn.Linear(64, 1))
    torch.seed()  # ... and other data
    opt = torch.optim.AdamW(net.parameters(), lr=5e-3)
    model, data = DistributedDataParallel(net), batches()
    for _ in range(UPDATES):
        inputs, targets = next(data)
        loss = nn.functional.mse_loss(model(inputs), targets)
        opt.zero_grad()
        loss.backward()
        opt.step()
    print(f"rank {rank}: loss {loss.item():.4f}")
    torch.save(net.state_dict(), f"{sys.argv[1]}.{rank}")
    dist.barrier()
    del model
    gc.collect()  # with the model, gloo's threads end: else one may abort the exit (PyTorch issue 190489)
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
