"""A small GPT learns, from nothing, to add numbers below 100, with all peers of the run.

Runs alone with ``python train.py``, and as a job. It needs no packages but p2pavg's own.
"""

import sys

import torch
from torch import nn
from torch.nn import functional
from torch.utils.data import DataLoader, TensorDataset

import p2pavg
from p2pavg.optim import AveragedOptimizer, RunState

UPDATES = int(sys.argv[1]) if len(sys.argv) > 1 else 1000
CONTEXT, WIDTH = 64, 64

# The same text on every machine, whatever Python it has: all sums of two numbers below 100, in a mixed order.
sums = [divmod(7919 * place % 10_000, 100) for place in range(10_000)]
text = "".join(f"{one}+{other}={one + other}\n" for one, other in sums)
letters = sorted(set(text))
tokens = torch.tensor([letters.index(letter) for letter in text])
windows = TensorDataset(tokens.unfold(0, CONTEXT + 1, CONTEXT))


class GPT(nn.Module):
    """Scores for the next letter: int64 (batch, time) to float32 (batch, time, letters)."""

    def __init__(self) -> None:
        super().__init__()
        self.letters, self.places = nn.Embedding(len(letters), WIDTH), nn.Embedding(CONTEXT, WIDTH)
        layer = nn.TransformerEncoderLayer(
            WIDTH, 4, 4 * WIDTH, 0.0, "gelu", batch_first=True, norm_first=True
        )
        self.layers = nn.TransformerEncoder(layer, 2, nn.LayerNorm(WIDTH), enable_nested_tensor=False)
        self.scores = nn.Linear(WIDTH, len(letters))

    def forward(self, seen: torch.Tensor) -> torch.Tensor:
        """Compute the scores; each position sees the letters up to it."""
        mask = nn.Transformer.generate_square_subsequent_mask(seen.shape[1])
        found: torch.Tensor = self.scores(
            self.layers(self.letters(seen) + self.places.weight[: seen.shape[1]], mask=mask, is_causal=True)
        )
        return found


# The same first parameters on every peer, and a seed of its own for each after that.
torch.manual_seed(0)
model = GPT()
torch.seed()

with p2pavg.job() as job:
    samples = job.samples(windows)
    optimizer = AveragedOptimizer(
        torch.optim.AdamW(model.parameters(), lr=3e-3),
        job.averager,
        target_batch_size=64,
        state=RunState(model, job.scratch / "checkpoints", every=50, data=samples),
        min_peers=job.min_peers,
    )
    loader: DataLoader[tuple[torch.Tensor, ...]] = DataLoader(windows, batch_size=8, sampler=samples)
    for (batch,) in loader:
        loss = functional.cross_entropy(model(batch[:, :-1]).flatten(0, 1), batch[:, 1:].flatten())
        optimizer.zero_grad()
        loss.backward()  # type: ignore[no-untyped-call]
        report = optimizer.step(samples=len(batch), metrics={"loss": loss.item()})
        if report.updated:
            peers = report.result.peers if isinstance(report.result, p2pavg.Success) else ()
            print(
                f"update {report.epoch} of {len(peers)} peers: loss {report.metrics['loss']:.3f}", flush=True
            )
        if optimizer.epoch >= UPDATES:
            break
    job.averager.end()

torch.save(model.state_dict(), job.scratch / "model.pt")
print("saved in", job.scratch, flush=True)
