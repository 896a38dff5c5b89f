"""Train a small network with Lightning: python loop_lightning.py model.pt."""

import sys

import torch
from lightning.pytorch import LightningModule, Trainer
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

import p2pavg
from p2pavg.integrations.lightning import LightningCallback

UPDATES = 60


def dataset() -> TensorDataset:
    """Return inputs (8) and targets (1) of a noisy function, other ones in each process."""
    inputs = torch.randn(32 * UPDATES, 8)
    return TensorDataset(inputs, inputs.sin().sum(1, keepdim=True) + 0.05 * torch.randn(len(inputs), 1))


class Module(LightningModule):
    """A network of 64 hidden units."""

    def __init__(self) -> None:
        super().__init__()
        self.net = nn.Sequential(nn.Linear(8, 64), nn.Tanh(), nn.Linear(64, 1))

    def training_step(self, batch: tuple[torch.Tensor, torch.Tensor]) -> torch.Tensor:
        inputs, targets = batch
        return nn.functional.mse_loss(self.net(inputs), targets)

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.AdamW(self.parameters(), lr=5e-3)


def main() -> None:
    torch.manual_seed(0)  # the same first parameters in each process ...
    module = Module()
    torch.seed()  # ... and other data
    quiet = {"logger": False, "enable_checkpointing": False, "enable_progress_bar": False}
    averager = p2pavg.blocking.start_averager("sines", bootstrap=sys.argv[2:])
    peers = LightningCallback(averager, target_batch_size=96, min_peers=3, updates=UPDATES // 3, state=module)
    trainer = Trainer(accelerator="cpu", max_steps=UPDATES, callbacks=[peers], **quiet)
    trainer.fit(module, DataLoader(dataset(), batch_size=32, shuffle=True))
    torch.save(module.net.state_dict(), sys.argv[1])


if __name__ == "__main__":
    main()
