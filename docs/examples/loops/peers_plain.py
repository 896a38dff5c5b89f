"""Train a small network in a loop of plain torch: python loop_plain.py model.pt."""

import sys
from collections.abc import Iterator

import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

from p2pavg import blocking, optim

UPDATES = 60


def dataset() -> TensorDataset:
    """Return inputs (8) and targets (1) of a noisy function, other ones in each process."""
    inputs = torch.randn(32 * UPDATES, 8)
    return TensorDataset(inputs, inputs.sin().sum(1, keepdim=True) + 0.05 * torch.randn(len(inputs), 1))


def batches() -> Iterator[tuple[torch.Tensor, torch.Tensor]]:
    """Yield batches of 32 without an end."""
    loader = DataLoader(dataset(), batch_size=32, shuffle=True)
    while True:
        yield from loader


def main() -> None:
    torch.manual_seed(0)  # the same first parameters in each process ...
    net = nn.Sequential(nn.Linear(8, 64), nn.Tanh(), nn.Linear(64, 1))
    torch.seed()  # ... and other data
    opt = torch.optim.AdamW(net.parameters(), lr=5e-3)
    averager = blocking.start_averager("sines", bootstrap=sys.argv[2:])
    opt = optim.AveragedOptimizer(opt, averager, target_batch_size=96, batch_size=32, min_peers=3, state=net)
    data = batches()
    while opt.epoch < UPDATES / 3:
        inputs, targets = next(data)
        loss = nn.functional.mse_loss(net(inputs), targets)
        opt.zero_grad()
        loss.backward()
        opt.step()
    print(f"loss {loss.item():.4f}")
    torch.save(net.state_dict(), sys.argv[1])


if __name__ == "__main__":
    main()
