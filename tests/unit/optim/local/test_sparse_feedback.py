"""Feedback with a sparse codec: what an average does not keep stays with the peers that sent it."""

from __future__ import annotations

from typing import cast

import pytest
import torch
from torch.optim import SGD

from p2pavg.base.result import Success
from p2pavg.blocking import Averager
from p2pavg.optim import AveragedOptimizer, ErrorFeedback, LocalUpdates, diloco, sparseloco
from p2pavg.optim.local.feedback import feedback_for
from p2pavg_compression import Blockwise8, Codec, Int4, Ternary, TopK
from tests.unit.optim.fakes import Alone, local
from tests.unit.optim.samples import (
    ELEMENTS,
    SHAPES,
    flat,
    residual_norm,
    residual_of,
    tensors,
    there_and_back,
)

CODEC = TopK(chunk=64, k=4)
SIZES = [torch.Size(shape).numel() for shape in SHAPES]


def unflat(vector: torch.Tensor) -> list[torch.Tensor]:
    return [piece.view(shape) for piece, shape in zip(torch.split(vector, SIZES), SHAPES, strict=True)]


class Peers:
    """Peers that average with a sparse codec."""

    def __init__(self, count: int, beta: float = 1.0) -> None:
        self.feedbacks = [ErrorFeedback(CODEC, beta=beta) for _ in range(count)]
        self.kept = torch.zeros(ELEMENTS)
        """What the averages kept of the contributions, before their own encoding."""

    def round(self, given: list[list[torch.Tensor]]) -> torch.Tensor:
        pairs = list(zip(self.feedbacks, given, strict=True))
        sent = [there_and_back(CODEC, flat(feedback.compensate(each))) for feedback, each in pairs]
        mean = torch.stack(sent).mean(0)
        average = there_and_back(CODEC, mean)
        self.kept += mean * (average != 0)
        for feedback in self.feedbacks:
            feedback.delivered(0, 100, averaged=unflat(average))
        return average


def test_what_the_average_does_not_keep_stays_with_its_senders() -> None:
    peers, total = Peers(3), torch.zeros(ELEMENTS)
    for step in range(15):
        given = [tensors(10 * step + index) for index in range(3)]
        total += torch.stack([flat(each) for each in given]).mean(0)
        peers.round(given)
    left = torch.stack([residual_of(feedback) for feedback in peers.feedbacks]).mean(0)
    torch.testing.assert_close(peers.kept + left, total, rtol=0, atol=1e-4)
    assert left.norm() > 1.0


def test_a_value_that_only_one_peer_sends_is_sent_again_until_the_average_keeps_it() -> None:
    peers, arrived = Peers(2), torch.zeros(ELEMENTS)
    first, nothing = torch.zeros(ELEMENTS), torch.zeros(ELEMENTS)
    first[:16] = torch.arange(1.0, 17.0)
    for step in range(8):
        arrived += peers.round([unflat(first if step == 0 else nothing), unflat(nothing)])
    assert (arrived[:16] > 0).all()
    assert arrived.sum().item() == pytest.approx(first.sum().item() / 2, rel=0.05)


def test_nothing_is_left_when_a_peer_goes_on_alone() -> None:
    feedback = ErrorFeedback(CODEC)
    feedback.delivered(0, ELEMENTS, averaged=feedback.compensate(tensors(1)))
    assert residual_norm(feedback) == 0.0


def test_the_residual_decays() -> None:
    feedback = ErrorFeedback(CODEC, beta=0.5)
    first = flat(feedback.compensate(tensors(1)))
    feedback.delivered(0, 0, averaged=unflat(torch.zeros(ELEMENTS)))
    second = flat(feedback.compensate(tensors(2)))
    torch.testing.assert_close(second, flat(tensors(2)) + 0.5 * first)


@pytest.mark.parametrize("beta", [0.0, -1.0, 1.01, True, None, float("nan")])
def test_beta_is_checked(beta: float) -> None:
    with pytest.raises(ValueError, match="beta must be a number above 0 and at most 1"):
        ErrorFeedback(CODEC, beta=beta)


def test_the_average_is_needed() -> None:
    feedback = ErrorFeedback(CODEC)
    given = feedback.compensate(tensors(1))
    for wrong in (None, given[:-1], [*given, torch.zeros(1)], [each.reshape(-1) for each in given]):
        with pytest.raises(ValueError, match="needs the averaged tensors"):
            feedback.delivered(0, 0, averaged=wrong)
    feedback.delivered(0, 0, averaged=given)


def test_an_average_that_is_heard_of_later_counts_once() -> None:
    feedback = ErrorFeedback(CODEC)
    given = flat(feedback.compensate(tensors(1)))
    average = unflat(there_and_back(CODEC, given))
    feedback.found_out(average)
    left = residual_of(feedback).clone()
    torch.testing.assert_close(left, given - there_and_back(CODEC, given))
    feedback.found_out(average)
    assert torch.equal(residual_of(feedback), left)
    dense = ErrorFeedback("int8")
    dense.compensate(tensors(1))
    dense.found_out(average)
    assert residual_norm(dense) == 0.0


class TestChoice:
    @pytest.mark.parametrize(
        ("codec", "given", "beta"),
        [
            (CODEC, None, 0.95),
            (CODEC, True, 0.95),
            (Ternary(), None, 1.0),
            (Int4(), None, None),
            (Int4(), False, None),
            (Int4(), True, 1.0),
        ],
    )
    def test_a_codec_that_needs_feedback_has_it_and_others_when_asked(
        self, codec: Codec, given: bool | None, beta: float | None
    ) -> None:
        """The residual of a sparse codec decays."""
        found = feedback_for(codec, given)
        assert (None if found is None else (found.codec, found.beta)) == (beta and (codec, beta))

    @pytest.mark.parametrize("codec", [CODEC, Blockwise8()])
    def test_own_feedback_is_taken(self, codec: Codec) -> None:
        own = ErrorFeedback(codec, beta=0.9)
        assert feedback_for(codec, own) is own

    def test_a_sparse_codec_cannot_do_without(self) -> None:
        with pytest.raises(ValueError, match="topk:64:4:2 needs error feedback"):
            feedback_for(CODEC, False)
        with pytest.raises(ValueError, match="ternary:256 needs error feedback"):
            feedback_for(Ternary(), False)
        with pytest.raises(
            ValueError, match="for the codec int4:64, and the averager has the codec topk:64:4:2"
        ):
            feedback_for(CODEC, ErrorFeedback("int4"))
        with pytest.raises(TypeError, match="feedback must be an ErrorFeedback, a bool or None, got str"):
            feedback_for(CODEC, cast(bool, "yes"))


class TestOptimizers:
    def model(self) -> torch.nn.Linear:
        torch.manual_seed(0)
        return torch.nn.Linear(16, 16)

    def train(self, optimizer: LocalUpdates, model: torch.nn.Linear, steps: int = 3) -> None:
        for step in range(steps):
            optimizer.zero_grad()
            torch.autograd.backward(model(torch.full((1, 16), 1.0 + step)).square().mean())
            optimizer.step(samples=1)

    def test_local_updates_keep_a_residual_in_their_state(self) -> None:
        model, averager = self.model(), Coded()
        optimizer = local(averager, SGD(model.parameters(), lr=0.1))
        self.train(optimizer, model)
        saved = optimizer.state_dict()["feedback"]
        assert float(saved["residual"].norm()) > 0
        again = local(Coded(), SGD(self.model().parameters(), lr=0.1))
        again.load_state_dict(optimizer.state_dict())
        assert torch.equal(again.state_dict()["feedback"]["residual"], saved["residual"])

    def test_a_residual_belongs_to_one_peer(self) -> None:
        """A peer that loads another one's state begins without a residual."""
        model = self.model()
        optimizer = local(Coded(), SGD(model.parameters(), lr=0.1))
        self.train(optimizer, model)
        newcomer = Coded()
        newcomer.peer_id = "newcomer"
        other = local(newcomer, SGD(self.model().parameters(), lr=0.1))
        other.load_state_dict(optimizer.state_dict())
        assert other.state_dict()["feedback"]["residual"] is None

    def test_averaged_optimizer_refuses_a_sparse_codec(self) -> None:
        inner = SGD(self.model().parameters(), lr=0.1)
        with pytest.raises(
            ValueError, match=r"AveragedOptimizer cannot use the codec topk:64:4:2.*sparseloco"
        ):
            AveragedOptimizer(inner, cast(Averager, Coded()), target_batch_size=4)

    def test_sparseloco_has_no_momentum(self) -> None:
        optimizer = sparseloco(SGD(self.model().parameters(), lr=0.1), cast(Averager, Coded()))
        assert optimizer.outer.param_groups[0]["lr"] == 2.0
        assert optimizer.outer.param_groups[0]["momentum"] == 0.0

    def test_outer_momentum_is_warned_of(self, caplog: pytest.LogCaptureFixture) -> None:
        diloco(SGD(self.model().parameters(), lr=0.1), cast(Averager, Coded()))
        assert "momentum" in caplog.text
        caplog.clear()
        sparseloco(SGD(self.model().parameters(), lr=0.1), cast(Averager, Coded()))
        diloco(SGD(self.model().parameters(), lr=0.1), cast(Averager, Coded()), momentum=0.0)
        diloco(SGD(self.model().parameters(), lr=0.1), cast(Averager, Alone()))
        assert not caplog.text

    def test_an_average_that_is_replayed_counts_once(self) -> None:
        """This peer contributed, was cut off, and takes the average from the run's log."""
        model, averager = self.model(), Coded()
        optimizer = local(averager, SGD(model.parameters(), lr=0.1), sync_timeout=1e-9)
        averager.runs_for = 10
        self.train(optimizer, model, steps=1)
        assert optimizer.state_dict()["feedback"]["residual"] is None
        sent = averager._taken.mean.clone()
        success = Success(
            averaged=(averaged := averager.taken()),
            peers=("me", "other"),
            weights={"me": 1.0, "other": 1.0},
            total_weight=2.0,
            compression_ratio=1.0,
            bytes_sent=0,
            bytes_received=0,
            duration=0.0,
            exchange_duration=0.0,
            group_id="11" * 32,
            share=(0, 0),
        )
        optimizer.replay(averaged, success)
        left = optimizer.state_dict()["feedback"]["residual"]
        torch.testing.assert_close(left, sent - there_and_back(CODEC, sent))

    def test_an_outer_optimizer_that_changes_the_average_does_not_change_the_residual(self) -> None:
        def residual(outer: type[SGD]) -> torch.Tensor:
            model = self.model()
            optimizer = LocalUpdates(
                SGD(model.parameters(), lr=0.1),
                lambda anchor: outer(anchor, lr=1.0),
                cast(Averager, Coded()),
                sync_every=1,
                peers_to_start=2,
            )
            self.train(optimizer, model, steps=1)
            found = optimizer.state_dict()["feedback"]["residual"]
            assert isinstance(found, torch.Tensor)
            return found

        assert torch.equal(residual(SGD), residual(Filling))


class Filling(SGD):
    """Overwrites its gradients, as foreach implementations with Nesterov momentum do."""

    def step(self, closure: object = None) -> None:  # type: ignore[override]
        for group in self.param_groups:
            for parameter in group["params"]:
                parameter.grad.fill_(1.0)


class Coded(Alone):
    """An averager of one contributor, whose average is encoded as in a group."""

    def __init__(self) -> None:
        super().__init__(compression=CODEC)

    def taken(self) -> list[torch.Tensor]:
        mean = self._taken.mean
        averaged = self._taken.schema.unflatten(there_and_back(CODEC, there_and_back(CODEC, mean)))
        assert isinstance(averaged, list)
        return averaged
