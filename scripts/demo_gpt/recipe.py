"""The common training recipe of peers and reference: initial weights, optimizer, schedule, evaluation."""

import hashlib
import math

import torch
from torch.optim.lr_scheduler import LambdaLR

from .batches import Batches, held_out_windows
from .model import GPT, ModelConfig
from .settings import Settings
from .text import load_text

# Twice this rate after half this warm-up reaches a lower loss, but the run is then on the edge of stability: rounding
# to 8 bits alone moves its last loss by up to 0.3 %, where it moves this one's by 0.02 %.
PEAK_LEARNING_RATE = 1e-3
FINAL_SHARE = 0.1
WARMUP_STEPS = 20
CLIP_NORM = 1.0
HELD_OUT_WINDOWS = 32
EVALUATIONS = 24


class Recipe:
    """One copy of the model, with all that its training needs."""

    def __init__(self, settings: Settings) -> None:
        text = load_text()
        config = ModelConfig(vocabulary_size=len(text.vocabulary))
        self.model = GPT(config, seed=settings.seed)
        self.batches = Batches(
            text.train,
            context=config.context,
            batch_size=settings.batch_size,
            peers=settings.peers,
            seed=settings.seed,
        )
        self.optimizer = torch.optim.AdamW(
            self.model.parameters(), lr=PEAK_LEARNING_RATE, betas=(0.9, 0.95), weight_decay=0.1
        )
        self.scheduler = LambdaLR(self.optimizer, lambda step: rate_factor(step, settings.steps))
        self._held_out = held_out_windows(text.held_out, context=config.context, count=HELD_OUT_WINDOWS)

    @property
    def parameter_count(self) -> int:
        return sum(parameter.numel() for parameter in self.model.parameters())

    @torch.no_grad()
    def held_out_loss(self) -> float:
        return self.model.loss(self._held_out).item()

    def digest(self) -> str:
        """SHA-256 of all parameters: equal digests mean equal models, bit for bit."""
        digest = hashlib.sha256()
        for parameter in self.model.parameters():
            digest.update(parameter.detach().numpy().tobytes())
        return digest.hexdigest()


def rate_factor(step: int, steps: int) -> float:
    """Return the share of the peak rate: linear warm-up, then half a cosine (Loshchilov & Hutter, 2017, section 3)."""
    warmup = min(1.0, (step + 1) / WARMUP_STEPS)
    cosine = 0.5 * (1 + math.cos(math.pi * step / steps))
    return warmup * (FINAL_SHARE + (1 - FINAL_SHARE) * cosine)


def evaluated_every(steps: int) -> int:
    return max(1, steps // EVALUATIONS)


def is_evaluated(steps_done: int, steps: int) -> bool:
    return steps_done == steps or steps_done % evaluated_every(steps) == 0


def use_one_thread() -> None:
    """Limit torch to one thread: several processes share the machine, and more threads would only compete."""
    torch.set_num_threads(1)
