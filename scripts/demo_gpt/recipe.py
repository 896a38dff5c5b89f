"""The common training recipe of peers and reference: initial weights, optimizer, schedule, evaluation."""

import hashlib
import math
from collections.abc import Sequence

import torch
from torch import Tensor

from .batches import Batches, held_out_windows
from .model import GPT, ModelConfig
from .settings import Settings
from .text import load_text

PEAK_LEARNING_RATE = 2e-3
FINAL_SHARE = 0.1
WARMUP_STEPS = 10
CLIP_NORM = 1.0
HELD_OUT_WINDOWS = 32
EVALUATIONS = 24


class Trainer:
    """One copy of the model in training; its owner provides the gradients."""

    def __init__(self, settings: Settings) -> None:
        text = load_text()
        config = ModelConfig(vocabulary_size=len(text.vocabulary))
        self.model = GPT(config, seed=settings.seed)
        self.parameters = list(self.model.parameters())
        self.batches = Batches(
            text.train,
            context=config.context,
            batch_size=settings.batch_size,
            peers=settings.peers,
            seed=settings.seed,
        )
        self._held_out = held_out_windows(text.held_out, context=config.context, count=HELD_OUT_WINDOWS)
        self._steps = settings.steps
        self._optimizer = torch.optim.AdamW(self.parameters, betas=(0.9, 0.95), weight_decay=0.1)

    @property
    def parameter_count(self) -> int:
        return sum(parameter.numel() for parameter in self.parameters)

    def compute_gradients(self, windows: Tensor) -> tuple[float, list[Tensor]]:
        """Return the loss on the windows and its gradients, in the order of the parameters."""
        loss = self.model.loss(windows)
        return loss.item(), list(torch.autograd.grad(loss, self.parameters))

    def apply_gradients(self, step: int, gradients: Sequence[Tensor]) -> None:
        for parameter, gradient in zip(self.parameters, gradients, strict=True):
            parameter.grad = gradient.detach().clone()
        torch.nn.utils.clip_grad_norm_(self.parameters, CLIP_NORM)
        for group in self._optimizer.param_groups:
            group["lr"] = learning_rate(step, self._steps)
        self._optimizer.step()

    @torch.no_grad()
    def held_out_loss(self) -> float:
        return self.model.loss(self._held_out).item()

    def digest(self) -> str:
        """SHA-256 of all parameters: equal digests mean equal models, bit for bit."""
        digest = hashlib.sha256()
        for parameter in self.parameters:
            digest.update(parameter.detach().numpy().tobytes())
        return digest.hexdigest()


def learning_rate(step: int, steps: int) -> float:
    """Return the learning rate: linear warm-up, then half a cosine (Loshchilov & Hutter, 2017, section 3)."""
    warmup = min(1.0, (step + 1) / WARMUP_STEPS)
    cosine = 0.5 * (1 + math.cos(math.pi * step / steps))
    return PEAK_LEARNING_RATE * warmup * (FINAL_SHARE + (1 - FINAL_SHARE) * cosine)


def is_evaluated(steps_done: int, steps: int) -> bool:
    return steps_done == steps or steps_done % max(1, steps // EVALUATIONS) == 0


def use_one_thread() -> None:
    """Limit torch to one thread: several processes share the machine, and more threads would only compete."""
    torch.set_num_threads(1)
