"""One peer's part in the outer steps: what it contributes, and what its parameters become with the result."""

from __future__ import annotations

import copy
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from p2pavg.allreduce.vector.metrics import MetricMeans
from p2pavg.base.limits import MAX_GROUP_SIZE
from p2pavg.base.result import Failed, RoundResult, Success
from p2pavg.optim.base.model import ModelParts
from p2pavg.optim.local.anchor import Anchor, Change
from p2pavg.optim.local.feedback import ErrorFeedback
from p2pavg.optim.local.local_options import LocalOptions
from p2pavg.optim.ranks.shards import Ranks


@dataclass(slots=True)
class Sent:
    """The contribution that this peer has given to a round."""

    fragment: int
    at: float
    """Seconds of the caller's clock."""
    samples: float
    metrics: MetricMeans
    """The means of the metrics over these samples."""
    steps: int = 0
    """Inner steps since then."""
    parameters: list[torch.Tensor] | None = None
    """The fragment's parameters as they were then; ``None`` until the next inner step."""
    is_kept: bool = True
    """False after a return to the anchor: the parameters no longer contain the contribution."""

    @property
    def is_known(self) -> bool:
        """True if it is known which inner steps the contribution has."""
        return not self.steps or not self.is_kept or self.parameters is not None


class OuterSteps:
    """The outer steps of one optimizer.

    Args:
        anchor: steps the common parameters.
        parts: the model's averaged buffers.
        feedback: compensates a codec's errors; each fragment has a copy of its own.
        options: of the optimizer.
        ranks: the ranks of this peer.
        change: steps the outer optimizer.
    """

    def __init__(
        self,
        anchor: Anchor,
        parts: ModelParts,
        feedback: ErrorFeedback | None,
        options: LocalOptions,
        ranks: Ranks,
        change: Change,
    ) -> None:
        self.anchor = anchor
        self._parts = parts
        self._feedback = (
            []
            if feedback is None
            else [feedback, *(copy.deepcopy(feedback) for _ in range(1, options.fragments))]
        )
        self._options = options
        self._ranks = ranks
        self._change = change
        self.samples = [0.0] * options.fragments
        """The samples behind each fragment's next pseudo-gradient."""
        self.metrics = MetricMeans()
        """The metrics of the inner steps that no contribution has told of yet."""
        self.sent: Sent | None = None

    @property
    def like(self) -> list[torch.Tensor]:
        """Tensors with the shapes, dtypes and devices of what is averaged beside the buffers."""
        return self.anchor.like

    @property
    def may_take(self) -> bool:
        """True if the result of the running round is not too early."""
        return self.sent is None or self.sent.steps >= self._options.delay

    def before_inner_step(self) -> None:
        """Keep the parameters that were sent, if the inner step is the first one since.

        The round may have failed by then: the log may still bring the average that has this contribution.
        """
        sent = self.sent
        if sent is not None and not sent.steps and sent.is_kept and self._options.alpha is None:
            sent.parameters = self.anchor.copy(sent.fragment)

    def stepped(self, samples: float, metrics: Mapping[str, float]) -> None:
        """Note an inner step."""
        self.samples = [before + samples for before in self.samples]
        self.metrics.add(metrics, samples)
        if self.sent is not None:
            self.sent.steps += 1

    def contribute(self, fragment: int, now: float) -> tuple[list[torch.Tensor], float, dict[str, float]]:
        """Return what this peer contributes to the next round: tensors, weight and metrics."""
        self._parts.mend()
        pseudo: Sequence[torch.Tensor] = self.anchor.contribution(fragment)
        if self._feedback:
            pseudo = self._feedback[fragment].compensate(pseudo)
        self._take_back()
        weight, means = self.samples[fragment], self.metrics.means
        self.sent, self.metrics = Sent(fragment, now, weight, self.metrics), MetricMeans()
        return [*pseudo, *self._parts.averaged], weight, means

    def _take_back(self) -> None:
        """Note that the contribution, if there is one, is in no average: the next one has its metrics."""
        if self.sent is not None:
            self.metrics.merge(self.sent.metrics)
            self.sent = None

    def update(
        self,
        fragment: int,
        success: Success,
        averaged: list[torch.Tensor],
        me: str,
        *,
        replayed: bool = False,
    ) -> float:
        """Take an outer step; return the L2 norm of the averaged pseudo-gradient.

        Args:
            fragment: that the average is of.
            success: result of the round.
            averaged: the average.
            me: this peer's id.
            replayed: true if the average comes from the log: this peer did not get the round's result.
        """
        contributed, mixed = me in success.peers, self._options.alpha
        later = [] if contributed and mixed is not None else self._later(fragment, contributed=contributed)
        if contributed and self._feedback:  # before the outer optimizer, which may change the average
            self._delivered(fragment, success, averaged, me, replayed=replayed)
        norm = self._step(fragment, averaged)
        if contributed and mixed is not None:
            self.anchor.mix(fragment, mixed)
        else:
            self.anchor.settle(fragment, later)
        sent = self.sent
        if not contributed:
            self._take_back()
        elif sent is not None and sent.fragment == fragment and (sent.is_known or mixed is not None):
            self.samples[fragment] -= sent.samples
        else:  # a contribution of an earlier process: its steps are in the average
            self.samples[fragment] = 0.0
        self.sent = None
        return norm

    @torch.no_grad()
    def _later(self, fragment: int, *, contributed: bool) -> list[torch.Tensor]:
        """Return the pseudo-gradients of a fragment for a later round.

        For a peer that did not contribute they are all of its pseudo-gradients; for others, the part since the
        contribution.
        """
        sent = self.sent
        if not contributed or (sent is not None and not sent.is_kept):
            return self.anchor.away(fragment)
        if sent is None or sent.parameters is None:
            return []  # the usual case
        return self.anchor.since(fragment, sent.parameters)

    def _step(self, fragment: int, averaged: list[torch.Tensor]) -> float:
        count = len(averaged) - len(self._parts.averaged)
        self._parts.take(averaged[count:])
        settled = self._ranks.settle(averaged[:count])
        return self.anchor.step(fragment, settled, self._change, self._ranks.norm)

    def _delivered(
        self, fragment: int, success: Success, averaged: list[torch.Tensor], me: str, *, replayed: bool
    ) -> None:
        feedback = self._feedback[fragment]
        average = averaged[: len(averaged) - len(self._parts.averaged)]
        if replayed:  # this peer contributed, and was cut off before it had the result
            feedback.found_out(average)
        else:
            left_out, factor = success.left_out, success.total_weight / success.weights[me]
            # A peer with a hundredth of the weight would have to contribute a hundred times what the average lacks.
            lacks = None if left_out is None or factor > MAX_GROUP_SIZE else left_out * factor
            feedback.delivered(*success.share, *success.taken_over, averaged=average, left_out=lacks)

    def missed(self, result: RoundResult) -> None:
        """Note the end of a round without a result: the next pseudo-gradients contain the contribution."""
        if isinstance(result, Failed) and result.contribution_used is not False:
            return  # the log may bring the average that it is in
        self._take_back()

    def lose(self) -> float:
        """Return to the anchor; return the samples that are lost."""
        lost, sent = max(self.samples), self.sent
        self.anchor.give()
        self._parts.restore()
        self.forget()
        if sent is not None:  # it may be in an average all the same, and counts no more
            self.sent = Sent(sent.fragment, sent.at, 0.0, MetricMeans(), sent.steps, is_kept=False)
        return lost

    def forget(self) -> None:
        """Forget the inner steps: the parameters are others."""
        self.samples, self.metrics, self.sent = [0.0] * len(self.samples), MetricMeans(), None

    def saved(self) -> dict[str, Any]:
        """Return this peer's own counts and residuals, for a saved state."""
        states = [feedback.state_dict() for feedback in self._feedback]
        return {
            "feedback": None if not states else states[0] if len(states) == 1 else states,
            "samples": self.samples[0] if len(self.samples) == 1 else list(self.samples),
        }

    def load(self, saved: Mapping[str, Any]) -> None:
        """Continue from :meth:`saved`; raise ValueError if it does not fit."""
        states = saved["feedback"]
        if self._feedback:
            states = [states] if isinstance(states, Mapping) else states
            if len(states) != len(self._feedback):
                raise ValueError("state: its feedback is of another number of fragments")
            for feedback, state in zip(self._feedback, states, strict=True):
                feedback.load_state_dict(state)
        given = saved["samples"]
        samples = [float(given)] if isinstance(given, int | float) else [float(count) for count in given]
        if len(samples) != len(self.samples):
            raise ValueError("state: it is of another number of fragments")
        self.forget()
        self.samples = samples
