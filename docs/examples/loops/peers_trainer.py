"""Train a small network with the Trainer of transformers: python loop_trainer.py model.pt."""

import sys

import torch
from torch import nn
from torch.utils.data import Dataset
from transformers import Trainer, TrainingArguments

import p2pavg.integrations.transformers

UPDATES = 60


class Sines(Dataset[dict[str, torch.Tensor]]):
    """Inputs (8) and targets (1) of a noisy function, other ones in each process."""

    def __len__(self) -> int:
        return 32 * UPDATES

    def __getitem__(self, index: int) -> dict[str, torch.Tensor]:
        inputs = torch.randn(8)
        return {"inputs": inputs, "labels": inputs.sin().sum(0, keepdim=True) + 0.05 * torch.randn(1)}


class Network(nn.Module):
    """A network of 64 hidden units that returns its loss, as the Trainer wants it."""

    def __init__(self) -> None:
        super().__init__()
        self.net = nn.Sequential(nn.Linear(8, 64), nn.Tanh(), nn.Linear(64, 1))

    def forward(self, inputs: torch.Tensor, labels: torch.Tensor) -> dict[str, torch.Tensor]:
        return {"loss": nn.functional.mse_loss(self.net(inputs), labels)}


def main() -> None:
    args = TrainingArguments(
        max_steps=UPDATES, per_device_train_batch_size=32, lr_scheduler_type="constant", max_grad_norm=0.0,
        use_cpu=True, save_strategy="no", report_to="none", disable_tqdm=True,
    )  # fmt: skip
    torch.manual_seed(0)  # the same first parameters in each process
    model = Network()
    opt = torch.optim.AdamW(model.parameters(), lr=5e-3)
    averager = p2pavg.blocking.start_averager("sines", bootstrap=sys.argv[2:])
    settings = {"target_batch_size": 96, "batch_size": 32, "min_peers": 3, "state": model}
    opt = p2pavg.optim.AveragedOptimizer(opt, averager, **settings)
    trainer = Trainer(model, args, train_dataset=Sines(), optimizers=(opt, None))
    trainer.add_callback(p2pavg.integrations.transformers.TransformersCallback(opt, updates=UPDATES // 3))
    trainer.train()
    torch.save(model.net.state_dict(), sys.argv[1])


if __name__ == "__main__":
    main()
