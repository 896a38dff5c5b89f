"""What a user does by accident is noticed: another recipe, a forgotten zero_grad, a NaN, a model loaded too late."""

from __future__ import annotations

import copy
import gc
import logging
import math
from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import Any, cast

import pytest
import torch
from torch import nn
from torch.optim import SGD, Adagrad, Adam, AdamW

import p2pavg
from p2pavg.blocking import Averager
from p2pavg.bulletin import Said
from p2pavg.optim import AveragedOptimizer, ErrorFeedback, LocalUpdates, StepReport, diloco
from p2pavg.optim.word import TOPIC, encode_word, read_word
from p2pavg.result import RoundResult
from tests.unit.optim.test_optimizers import Alone, Board, both, large_batch, local, parameter

Either = AveragedOptimizer | LocalUpdates
Make = Callable[..., Either]


def small(seed: int = 3) -> nn.Module:
    model = nn.Sequential(nn.Linear(3, 4), nn.BatchNorm1d(4), nn.Linear(4, 1))
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for weights in model.parameters():
            weights.uniform_(-0.5, 0.5, generator=generator)
    return model


def plain(seed: int = 3) -> nn.Module:
    model = small(seed)
    return nn.Sequential(model[0], model[2])  # type: ignore[index]


def batch(model: nn.Module, optimizer: Either, *, zero: bool = True, scale: float = 1.0) -> StepReport:
    if zero:
        optimizer.zero_grad()
    inputs = torch.randn(4, 3, generator=torch.Generator().manual_seed(optimizer.epoch))
    torch.autograd.backward((scale * model(inputs)).square().mean())
    return optimizer.step(samples=4)


class Talk(Board):
    """What other peers say, as the test has it."""

    def __init__(self) -> None:
        super().__init__()
        self.others: dict[str, bytes] = {}

    @property
    def said(self) -> Mapping[str, Said]:
        return {peer: Said(value, 1, 1e12) for peer, value in self.others.items()}


def with_talk() -> tuple[Alone, Talk]:
    averager, talk = Alone(), Talk()
    averager.boards[TOPIC] = talk
    return averager, talk


class TestRecipe:
    """Peers that train otherwise have another lineage from the first update on."""

    @both
    @pytest.mark.parametrize(
        "change",
        [
            lambda ps: SGD(ps, lr=0.01),
            lambda ps: SGD(ps, lr=0.1, momentum=0.9),
            lambda ps: SGD(ps, lr=0.1, nesterov=True, momentum=0.5),
            lambda ps: AdamW(ps, lr=0.1),
            lambda ps: SGD([{"params": ps[:1]}, {"params": ps[1:]}], lr=0.1),
        ],
    )
    def test_another_optimizer(self, make: Make, change: Callable[[list[nn.Parameter]], SGD]) -> None:
        one, other = list(plain().parameters()), list(plain().parameters())
        assert make(Alone(), SGD(one, lr=0.1)).lineage == make(Alone(), SGD(other, lr=0.1)).lineage
        assert make(Alone(), SGD(one, lr=0.1)).lineage != make(Alone(), change(other)).lineage

    @pytest.mark.parametrize(
        ("make", "change"),
        [
            (large_batch, {"max_grad_norm": 1.0}),
            (large_batch, {"target_batch_size": 5}),
            (large_batch, {"overlap": True}),
            (local, {"sync_every": 2}),
            (local, {"proximal": 0.1}),
        ],
    )
    def test_another_setting(self, make: Make, change: dict[str, Any]) -> None:
        one, other = make(Alone(), SGD([parameter(1.0)], lr=0.1)), SGD([parameter(1.0)], lr=0.1)
        assert one.lineage != make(Alone(), other, **change).lineage

    def test_another_outer_optimizer(self) -> None:
        def made(**options: Any) -> LocalUpdates:
            return diloco(SGD([parameter(1.0)], lr=0.1), cast(Averager, Alone()), **options)

        assert made().lineage == made().lineage
        several: list[dict[str, float]] = [{}, {"lr": 0.5}, {"momentum": 0.8}, {"momentum": 0.0}]
        assert len({made(**options).lineage for options in several}) == 4

    def test_what_each_peer_may_choose_does_not_count(self) -> None:
        def made(**options: Any) -> AveragedOptimizer:
            return large_batch(Alone(), SGD([parameter(1.0)], lr=0.1), **options)

        same: list[dict[str, Any]] = [
            {},
            {"max_samples_per_peer": 2},
            {"patience": 5.0},
            {"peers_to_start": 1},
            {"check_every": None},
        ]
        assert len({made(**options).lineage for options in same}) == 1

    @both
    def test_frozen_parameters_of_the_optimizer(self, make: Make) -> None:
        def made(frozen: float) -> Either:
            still = parameter(frozen).requires_grad_(False)
            return make(Alone(), SGD([parameter(1.0), still], lr=0.1))

        assert made(1.0).lineage == made(1.0).lineage
        assert made(1.0).lineage != made(2.0).lineage

    @both
    def test_frozen_parameters_of_the_model_alone(self, make: Make) -> None:
        """As LoRA has them: the optimizer never sees the weights that it adapts."""

        def made(seed: int) -> Either:
            model = plain(seed)
            model[0].requires_grad_(False)  # type: ignore[index]
            with torch.no_grad():
                for weights in model[1].parameters():  # type: ignore[index]
                    weights.fill_(0.5)
            trained = [p for p in model.parameters() if p.requires_grad]
            return make(Alone(), SGD(trained, lr=0.1), model=model)

        assert made(1).lineage == made(1).lineage
        assert made(1).lineage != made(2).lineage


class TestRatesSetByHand:
    def test_an_update_with_another_rate_is_another_lineage(self) -> None:
        lineages = []
        for rate in (0.1, 0.1, 0.2):
            weights = parameter(1.0)
            optimizer = large_batch(Alone(), SGD([weights], lr=0.1))
            for update in range(2):
                optimizer.param_groups[0]["lr"] = rate if update else 0.1
                weights.grad = torch.ones(1)
                assert optimizer.step(samples=4).updated
            lineages.append(optimizer.lineage)
        assert lineages[0] == lineages[1] != lineages[2]

    def test_a_rate_set_before_the_first_step_splits_nobody_at_the_start(self) -> None:
        """A loop that sets it for each batch may be some batches further on one peer, and they have yet to meet."""
        first, second = (large_batch(Alone(), SGD([parameter(1.0)], lr=0.1)) for _ in range(2))
        second.param_groups[0]["lr"] = 0.7
        assert first.lineage == second.lineage

    def test_other_peers_hear_the_sentence(self) -> None:
        averager, talk = with_talk()
        weights = parameter(1.0)
        optimizer = large_batch(averager, SGD([weights], lr=0.1))
        reports = []
        for update in range(4):
            optimizer.param_groups[0]["lr"] = 1.0 / 2**update
            weights.grad = torch.ones(1)
            reports.append(optimizer.step(samples=4))
            said = read_word(talk.mine)
            others = [
                replace(rate, digest=b"x" * 8, text="lr 3") if rate.update == 3 else rate
                for rate in said.rates
            ]
            talk.others["a"] = encode_word(replace(said, rates=tuple(others)))
            talk.version += 1
        assert [rate.text for rate in said.rates] == ["lr 1", "lr 0.5", "lr 0.25", "lr 0.125"]
        assert [report.differs for report in reports[:3]] == [()] * 3
        assert reports[3].differs == ("1 peer of this run took update 3 with lr 3, this one with lr 0.25",)


class TestResult:
    def test_another_average_is_another_lineage(self) -> None:
        """Though the group was the same: a lineage names bits."""
        lineages = []
        for gradient in (1.0, 1.0, 2.0):
            weights = parameter(1.0)
            optimizer = large_batch(Alone(), SGD([weights], lr=0.1))
            weights.grad = torch.full((1,), gradient)
            assert optimizer.step(samples=4).updated
            lineages.append(optimizer.lineage)
        assert lineages[0] == lineages[1] != lineages[2]


class TestBeginning:
    @both
    def test_a_model_loaded_after_the_optimizer_was_made_is_the_beginning(self, make: Make) -> None:
        """Else two peers with other parameters would have one lineage."""
        late, early = plain(1), plain(2)
        optimizer = make(Alone(), SGD(late.parameters(), lr=0.1))
        late.load_state_dict(early.state_dict())
        reference = make(Alone(), SGD(early.parameters(), lr=0.1))
        assert optimizer.lineage != reference.lineage, "nothing has been seen yet"
        before = [p.detach().clone() for p in late.parameters()]
        reports = [batch(late, optimizer), batch(early, reference)]
        assert all(report.updated for report in reports)
        assert optimizer.lineage == reference.lineage
        assert all(torch.equal(*pair) for pair in zip(late.parameters(), early.parameters(), strict=True))
        assert not all(torch.equal(*pair) for pair in zip(late.parameters(), before, strict=True))

    def test_local_updates_begin_at_the_parameters_of_the_first_step(self) -> None:
        weights = parameter(1.0)
        optimizer = local(Alone(), SGD([weights], lr=0.1))
        with torch.no_grad():
            weights.fill_(5.0)
        weights.grad = torch.ones(1)
        report = optimizer.step(samples=4)
        assert report.grad_norm == pytest.approx(0.1)
        assert optimizer.anchor[0].item() == pytest.approx(4.9)

    def test_what_comes_later_is_not_the_beginning(self) -> None:
        model = plain()
        optimizer = large_batch(Alone(), SGD(model.parameters(), lr=0.1))
        batch(model, optimizer)
        lineage = optimizer.lineage
        with torch.no_grad():
            next(model.parameters()).add_(1.0)
        batch(model, optimizer)
        assert optimizer.epoch == lineage.epoch + 1

    def test_a_state_whose_model_was_not_loaded_is_refused(self) -> None:
        model, fresh = plain(), plain()
        optimizer = large_batch(Alone(), SGD(model.parameters(), lr=0.1))
        batch(model, optimizer)
        saved = copy.deepcopy({"model": model.state_dict(), "optimizer": optimizer.state_dict()})
        second = large_batch(Alone(), SGD(fresh.parameters(), lr=0.1))
        second.load_state_dict(saved["optimizer"])
        before = [p.detach().clone() for p in fresh.parameters()]
        with pytest.raises(ValueError, match="load the model's state"):
            batch(fresh, second)
        assert all(torch.equal(*pair) for pair in zip(fresh.parameters(), before, strict=True))
        fresh.load_state_dict(saved["model"])
        assert batch(fresh, second).updated
        assert second.epoch == 2

    @both
    def test_a_state_loaded_with_other_settings_is_another_lineage(
        self, make: Make, caplog: pytest.LogCaptureFixture
    ) -> None:
        change = {"target_batch_size": 2} if make is large_batch else {"proximal": 0.5}
        model = plain()
        optimizer = make(Alone(), SGD(model.parameters(), lr=0.1))
        batch(model, optimizer)
        found = []
        several: list[dict[str, Any]] = [{}, change, change]
        for options in several:
            other = copy.deepcopy(model)
            second = make(Alone(), SGD(other.parameters(), lr=0.1), **options)
            second.load_state_dict(copy.deepcopy(optimizer.state_dict()))
            second._begin()
            found.append(second.lineage)
        assert found[0] == optimizer.lineage
        assert found[1] == found[2] != found[0]
        assert "with its own settings" in caplog.text

    @pytest.mark.parametrize("origin", [None, {}, {"parameters": "00"}, "x", {"parameters": 7}])
    @both
    def test_a_state_that_does_not_say_where_it_comes_from_is_refused(
        self, make: Make, origin: object
    ) -> None:
        optimizer = make(Alone(), SGD([parameter(1.0)], lr=0.1))
        with pytest.raises(ValueError, match="where it comes from"):
            optimizer.load_state_dict(optimizer.state_dict() | {"origin": origin})


class TestOthersRecipes:
    def test_a_peer_with_another_target_is_told_of(self, caplog: pytest.LogCaptureFixture) -> None:
        theirs, talk = with_talk()
        other = large_batch(theirs, SGD(plain().parameters(), lr=0.1), target_batch_size=4096)
        other._begin()
        averager, mine = with_talk()
        mine.others = {"a": talk.mine, "b": talk.mine, "nonsense": b"\x00" * 99}
        model = plain()
        optimizer = large_batch(averager, SGD(model.parameters(), lr=0.1))
        expected = "2 peers of this run train with target_batch_size 4096, this one with 4"
        assert [batch(model, optimizer).differs for _ in range(3)] == [(expected,)] * 3
        assert [r.getMessage() for r in caplog.records if r.levelno == logging.WARNING].count(expected) == 1

    def test_a_peer_that_waits_is_told_too(self, caplog: pytest.LogCaptureFixture) -> None:
        """Two peers with other targets stand still at the first update, and `step` does not return for minutes."""
        theirs, talk = with_talk()
        large_batch(theirs, SGD([parameter(1.0)], lr=0.1), target_batch_size=4096)._begin()
        averager, mine = with_talk()
        weights = parameter(1.0)
        optimizer = large_batch(averager, SGD([weights], lr=0.1))
        optimizer._begin()
        mine.others = {"a": talk.mine}
        optimizer._together.on_look()
        assert "target_batch_size 4096, this one with 4" in caplog.text


class TestDrift:
    @both
    def test_peers_that_hold_others_are_reported(
        self, make: Make, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        def same() -> list[torch.Tensor]:
            return [torch.full(p.shape, 0.1) for p in plain().parameters()]

        averagers, talks, models, optimizers = [], [], [], []
        for _ in range(2):
            averager, talk = with_talk()
            models.append(plain())
            optimizers.append(
                make(averager, SGD(models[-1].parameters(), lr=0.1), model=models[-1], check_every=2)
            )
            averagers.append(averager)
            talks.append(talk)
        drifted: list[list[str | None]] = [[], []]
        for update in range(1, 7):
            if update == 4:
                with torch.no_grad():
                    changed = models[0][1].bias if make is large_batch else optimizers[0]._anchor[3]  # type: ignore[union-attr, index]
                    changed.add_(1e-3)
            # The same average for both, as of one round: both contribute the same gradients.
            for model in models:
                for weights in model.parameters():
                    weights.grad = torch.full_like(weights, 0.1)
            for optimizer in optimizers:
                if isinstance(optimizer, LocalUpdates):
                    monkeypatch.setattr(optimizer, "_pseudo_gradients", same)
            for index, optimizer in enumerate(optimizers):
                assert optimizer.step(samples=4).updated
                talks[1 - index].others["peer"] = talks[index].mine
                talks[1 - index].version += 1
            for index, optimizer in enumerate(optimizers):
                optimizer._look()
                drifted[index].append(optimizer._watch.drifted)
        for told in drifted:
            assert told[:3] == [None] * 3
            assert told[3] == (
                "1 peer (..peer) says that it holds other parameters after update 4 than this one: 1.bias differs"
            )
            assert told[5] is not None
            assert "after update 6" in told[5]
        errors = [record for record in caplog.records if record.levelno == logging.ERROR]
        assert len(errors) == 2, "one line a minute"

    def test_what_strangers_say_of_another_lineage_is_not_compared(self) -> None:
        averager, talk = with_talk()
        weights = parameter(1.0)
        optimizer = large_batch(averager, SGD([weights], lr=0.1), check_every=1)
        for _ in range(2):
            weights.grad = torch.ones(1)
            optimizer.step(samples=4)
        word = read_word(talk.mine)
        talk.others = {
            "a": encode_word(replace(word, state=b"x" * 32)),
            "b": encode_word(replace(word, epoch=99)),
        }
        talk.version += 1
        optimizer._look()
        assert optimizer._watch.drifted is None
        talk.others["c"] = encode_word(replace(word, digests=b"x" * 8))
        talk.version += 1
        optimizer._look()
        assert optimizer._watch.drifted is not None


class TestZeroing:
    @both
    def test_a_forgotten_zero_grad_is_a_warning(self, make: Make, caplog: pytest.LogCaptureFixture) -> None:
        model = plain()
        optimizer = make(Alone(), SGD(model.parameters(), lr=0.1), **never(make))
        for _ in range(5):
            batch(model, optimizer, zero=False)
        assert caplog.text.count("were not zeroed") == 1

    @both
    @pytest.mark.parametrize("how", ["none", "zeros", "data", "two passes", "clipped"])
    def test_one_that_is_zeroed_is_none(self, make: Make, how: str, caplog: pytest.LogCaptureFixture) -> None:
        model = plain()
        optimizer = make(Alone(), SGD(model.parameters(), lr=0.1), **never(make))
        for _ in range(5):
            if how == "data":
                for weights in model.parameters():
                    if weights.grad is not None:
                        weights.grad.data.zero_()
            else:
                optimizer.zero_grad(set_to_none=how != "zeros")
            for _ in range(2 if how == "two passes" else 1):
                torch.autograd.backward(model(torch.ones(4, 3)).square().mean())
            if how == "clipped":
                torch.nn.utils.clip_grad_norm_(model.parameters(), 0.1)
            optimizer.step(samples=4)
        assert "were not zeroed" not in caplog.text

    def test_a_batch_that_was_refused_is_not_one_that_was_used(
        self, caplog: pytest.LogCaptureFixture
    ) -> None:
        model = plain()
        optimizer = large_batch(Alone(), SGD(model.parameters(), lr=0.1), target_batch_size=1e9)
        with pytest.raises(p2pavg.AccumulateError):
            batch(model, optimizer, scale=math.inf)
        batch(model, optimizer)
        assert "were not zeroed" not in caplog.text

    @both
    def test_hooks_are_gone_after_a_few_steps(self, make: Make) -> None:
        model = plain()
        optimizer = make(Alone(), SGD(model.parameters(), lr=0.1), **never(make))
        assert any(weights._backward_hooks for weights in model.parameters())
        for _ in range(12):
            batch(model, optimizer)
        assert not any(weights._backward_hooks for weights in model.parameters())


def never(make: Make) -> dict[str, Any]:
    """Options with which no update comes, after which the gradients are gone."""
    return {"target_batch_size": 1e9} if make is large_batch else {"sync_every": 10**6}


class TestNotFinite:
    @pytest.mark.parametrize("value", [math.nan, math.inf])
    @pytest.mark.parametrize("kind", [SGD, Adam, Adagrad])
    def test_a_step_that_destroys_the_parameters_goes_back_to_the_anchor(
        self, kind: Any, value: float, caplog: pytest.LogCaptureFixture
    ) -> None:
        weights = parameter(1.0, 2.0)
        averager = Alone()
        optimizer = local(averager, kind([weights], lr=0.1), sync_every=3)
        reports = []
        for step in range(4):
            weights.grad = torch.tensor([1.0, value if step == 1 else 1.0])
            reports.append(optimizer.step(samples=4))
        assert [report.restored is not None for report in reports] == [False, True, False, False]
        assert reports[1].restored is not None
        assert "back at the anchor, and 4 samples" in reports[1].restored
        assert "back at the anchor" in caplog.text
        assert reports[1].samples <= 4, "only the other peer's"
        assert reports[3].updated, "three steps were due, one of which came to nothing"
        assert isinstance(reports[3].result, p2pavg.Success)
        assert reports[3].result.total_weight == 8, "the samples before it are lost"
        assert bool(weights.isfinite().all())
        for _ in range(3):
            weights.grad = torch.ones(2)
            assert optimizer.step(samples=4).restored is None, "the inner optimizer is destroyed"

    def test_at_the_last_step_the_others_wait_one_batch_more(self) -> None:
        weights, averager = parameter(1.0), Alone()
        optimizer = local(averager, SGD([weights], lr=0.1), sync_every=2)
        found = []
        for value in (1.0, math.nan, 1.0):
            weights.grad = torch.full((1,), value)
            found.append(optimizer.step(samples=4).updated)
        assert found == [False, False, True]
        assert weights.item() == pytest.approx(0.9)

    def test_nobody_waits_for_a_peer_whose_every_step_is_nan(self) -> None:
        weights, averager = parameter(1.0), Alone()
        optimizer = local(averager, SGD([weights], lr=0.1), sync_every=2)
        left = []
        for value in (math.nan, math.nan, math.nan, 1.0):
            weights.grad = torch.full((1,), value)
            optimizer.step(samples=4)
            left.append(averager.board.taken_back)
        assert left == [False, False, True, False]

    def test_what_was_given_before_counts_and_what_is_lost_does_not_come_back(self) -> None:
        """A NaN while a late round runs: its average holds this peer's part, the parameters do not any more."""
        averager, weights = Alone(), parameter(1.0)
        averager.runs_for = 3
        optimizer = local(averager, SGD([weights], lr=0.1), sync_every=2, patience=1e-9)
        reports = []
        for value in (1.0, 1.0, 1.0, math.nan, 2.0, 0.0):
            weights.grad = torch.full((1,), value)
            reports.append(optimizer.step(samples=1))
            if reports[-1].updated:
                break
        assert reports[-1].updated
        assert reports[3].restored is not None
        # The anchor is now where the two steps of the round led; of later ones only that after the NaN is kept.
        assert optimizer.anchor[0].item() == pytest.approx(0.8)
        assert weights.item() == pytest.approx(0.6)
        assert optimizer._samples == 2

    def test_buffers_come_back_too(self) -> None:
        model = small()
        optimizer = local(Alone(compression=None), SGD(model.parameters(), lr=0.1), sync_every=5, model=model)
        batch(model, optimizer)
        optimizer.zero_grad()
        torch.autograd.backward(model(torch.full((4, 3), math.nan)).sum())
        assert optimizer.step(samples=4).restored is not None
        assert all(bool(buffer.isfinite().all()) for buffer in model.buffers() if buffer.is_floating_point())

    def test_a_nan_batch_of_a_large_batch_is_refused_and_costs_no_statistics(self) -> None:
        model = small()
        optimizer = large_batch(
            Alone(compression=None), SGD(model.parameters(), lr=0.1), target_batch_size=8, model=model
        )
        batch(model, optimizer)
        optimizer.zero_grad()
        torch.autograd.backward(model(torch.full((4, 3), math.nan)).sum())
        with pytest.raises(p2pavg.AccumulateError, match="NaN"):
            optimizer.step(samples=4)
        assert batch(model, optimizer).updated


class TestBuffers:
    @both
    def test_running_statistics_are_averaged(self, make: Make) -> None:
        model = small()
        averager = Alone(compression=None)
        optimizer = make(averager, SGD(model.parameters(), lr=0.1), model=model)
        given = averager._accumulation.schema
        assert given is not None
        assert len(given.shapes) == len(list(model.parameters())) + 2
        expected = torch.full((4,), 0.25)

        def average() -> list[torch.Tensor]:
            averaged = Alone.taken(averager)
            return [*averaged[:-2], expected, 2 * expected]

        averager.taken = average  # type: ignore[method-assign]
        assert batch(model, optimizer).updated
        assert torch.equal(model[1].running_mean, expected)  # type: ignore[index]
        assert torch.equal(model[1].running_var, 2 * expected)  # type: ignore[index]
        assert model[1].num_batches_tracked == 1  # type: ignore[index]

    @both
    def test_of_another_shape_they_are_another_recipe(self, make: Make) -> None:
        def made(size: int) -> Either:
            model = plain()
            model.register_buffer("mask", torch.zeros(size))
            return make(Alone(), SGD(model.parameters(), lr=0.1), model=model)

        assert made(3).lineage == made(3).lineage
        assert made(3).lineage != made(4).lineage

    @both
    def test_one_that_changes_and_is_not_averaged_is_refused(self, make: Make) -> None:
        model = plain()
        model.register_buffer("ema", torch.zeros(3))
        optimizer = make(Alone(), SGD(model.parameters(), lr=0.1), model=model)
        batch(model, optimizer)
        model.load_state_dict(model.state_dict())  # the same values
        batch(model, optimizer)
        cast(torch.Tensor, model.ema).add_(1.0)
        before = [p.detach().clone() for p in model.parameters()]
        with pytest.raises(ValueError, match=r"buffer 'ema' changes.*buffers=\['ema'"):
            batch(model, optimizer)
        assert all(torch.equal(*pair) for pair in zip(model.parameters(), before, strict=True))

    @both
    def test_it_may_be_named(self, make: Make) -> None:
        model = plain()
        model.register_buffer("ema", torch.zeros(3))
        optimizer = make(Alone(), SGD(model.parameters(), lr=0.1), model=model, buffers=["ema"])
        for _ in range(3):
            cast(torch.Tensor, model.ema).add_(1.0)
            assert batch(model, optimizer).updated

    @both
    def test_statistics_that_stand_still_are_not_averaged(self, make: Make) -> None:
        model = small().eval()
        averager = Alone()
        make(averager, SGD(model.parameters(), lr=0.1), model=model)
        assert averager._accumulation.schema is not None
        assert len(averager._accumulation.schema.shapes) == len(list(model.parameters()))

    @both
    def test_a_codec_that_makes_zeros_of_small_values_is_refused(self, make: Make) -> None:
        for codec in (None, "bf16", "fp16", "blockwise8"):
            make(Alone(compression=codec), SGD(small().parameters(), lr=0.1), model=small())
        with pytest.raises(ValueError, match=r"int8.* too coarse"):
            make(Alone(compression="int8"), SGD(small().parameters(), lr=0.1), model=small())
        make(Alone(compression="int8"), SGD(plain().parameters(), lr=0.1), model=plain())

    @both
    @pytest.mark.parametrize(
        ("changes", "error", "named"),
        [
            ({"model": 3}, TypeError, "model must be a torch.nn.Module, got int"),
            ({"buffers": ["x"]}, ValueError, "give model= too"),
            ({"model": nn.Linear(1, 1), "buffers": ["x"]}, ValueError, "buffers: 'x'"),
            ({"model": nn.Linear(1, 1), "buffers": "x"}, TypeError, "collection of names"),
            ({"check_every": -1}, ValueError, "check_every"),
            ({"check_every": 1.5}, ValueError, "check_every"),
            ({"check_every": True}, ValueError, "check_every"),
        ],
    )
    def test_arguments_that_are_wrong_are_named(
        self, make: Make, changes: dict[str, Any], error: type[Exception], named: str
    ) -> None:
        with pytest.raises(error, match=named):
            make(Alone(), SGD([parameter(1.0)], lr=0.1), **changes)

    def test_feedback_is_not_for_buffers(self) -> None:
        model = small()
        with pytest.raises(ValueError, match="feedback cannot be used"):
            local(Alone(), SGD(model.parameters(), lr=0.1), model=model, feedback=ErrorFeedback("blockwise8"))


class TestMemory:
    ELEMENTS = 30_011

    def test_diloco_holds_two_vectors_beside_the_parameters_and_the_averagers(self) -> None:
        """The anchor and the momentum; what was given is kept neither during a round nor until the next one."""
        weights = parameter(*[0.0] * self.ELEMENTS)
        averager = Alone(compression=None)
        optimizer = diloco(SGD([weights], lr=0.1), cast(Averager, averager), sync_every=1, peers_to_start=2)
        during, after = [], []
        inner_step = averager.step

        def step(**arguments: Any) -> RoundResult:
            during.append(self._vectors())
            return inner_step(**arguments)

        averager.step = step  # type: ignore[method-assign]
        for _ in range(3):
            weights.grad = torch.ones_like(weights)
            assert optimizer.step(samples=1).updated
            optimizer.zero_grad()
            averager._taken = None
            after.append(self._vectors())
        # The parameters, the anchor, the momentum, and the averager's one; during the round the gradient too.
        assert after == [4, 4, 4]
        assert during == [4, 5, 5], "there is no momentum before the first outer step"

    def _vectors(self) -> int:
        gc.collect()
        tensors = [o for o in gc.get_objects() if type(o) in (torch.Tensor, nn.Parameter)]
        held = [tensor for tensor in tensors if tensor.numel() == self.ELEMENTS]
        return len({tensor.untyped_storage().data_ptr() for tensor in held})
