"""Peers that train differently have different lineages and get the reason; drifting parameters are reported."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any, cast

import pytest
import torch
from msgspec.structs import replace
from torch import nn
from torch.optim import SGD, AdamW

from p2pavg.blocking import Averager
from p2pavg.optim import AveragedOptimizer, LocalUpdates, diloco
from p2pavg.optim.coordination.word import RecipeRecord, encode_word
from tests.unit.optim.fakes import Alone, both, large_batch, local, parameter
from tests.unit.optim.loops import Either, Make, batch, plain, with_talk


class TestRecipe:
    """Peers that train differently have different lineages from the first update on."""

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
    def test_inner_optimizer_changes_the_lineage(
        self, make: Make, change: Callable[[list[nn.Parameter]], SGD]
    ) -> None:
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
    def test_other_setting_changes_the_lineage(self, make: Make, change: dict[str, Any]) -> None:
        one, other = make(Alone(), SGD([parameter(1.0)], lr=0.1)), SGD([parameter(1.0)], lr=0.1)
        assert one.lineage != make(Alone(), other, **change).lineage

    def test_other_outer_optimizer_changes_the_lineage(self) -> None:
        def made(**options: Any) -> LocalUpdates:
            return diloco(SGD([parameter(1.0)], lr=0.1), cast(Averager, Alone()), **options)

        assert made().lineage == made().lineage
        several: list[dict[str, float]] = [{}, {"lr": 0.5}, {"momentum": 0.8}, {"momentum": 0.0}]
        assert len({made(**options).lineage for options in several}) == 4

    def test_settings_of_a_single_peer_do_not_count(self) -> None:
        def made(**options: Any) -> AveragedOptimizer:
            return large_batch(Alone(), SGD([parameter(1.0)], lr=0.1), **options)

        same: list[dict[str, Any]] = [
            {},
            {"max_samples_per_peer": 2},
            {"sync_timeout": 5.0},
            {"peers_to_start": 1},
            {"check_every": None},
        ]
        assert len({made(**options).lineage for options in same}) == 1

    @both
    def test_frozen_parameters_of_the_optimizer_count(self, make: Make) -> None:
        def made(frozen: float) -> Either:
            still = parameter(frozen).requires_grad_(False)
            return make(Alone(), SGD([parameter(1.0), still], lr=0.1))

        assert made(1.0).lineage == made(1.0).lineage
        assert made(1.0).lineage != made(2.0).lineage

    @both
    def test_frozen_parameters_of_the_model_alone_count(self, make: Make) -> None:
        """As with LoRA: the optimizer does not have the adapted weights."""

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
    def test_update_with_another_rate_changes_the_lineage(self) -> None:
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

    def test_rate_set_before_the_first_step_splits_no_run(self) -> None:
        """In a loop that sets the rate for each batch, one peer may be some batches ahead before they meet."""
        first, second = (large_batch(Alone(), SGD([parameter(1.0)], lr=0.1)) for _ in range(2))
        second.param_groups[0]["lr"] = 0.7
        assert first.lineage == second.lineage


class TestResult:
    def test_different_average_changes_the_lineage(self) -> None:
        """This holds even for the same group: a lineage names bits."""
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
    def test_model_loaded_after_the_optimizer_was_made_defines_the_lineage(self, make: Make) -> None:
        """Otherwise two peers with different parameters would have one lineage."""
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

    def test_later_changes_do_not_change_the_first_lineage(self) -> None:
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
    def test_state_loaded_with_other_settings_changes_the_lineage(
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
            second._training.begin()
            found.append(second.lineage)
        assert found[0] == optimizer.lineage
        assert found[1] == found[2] != found[0]
        assert "with its own settings" in caplog.text

    @pytest.mark.parametrize("origin", [None, {}, {"parameters": "00"}, "x", {"parameters": 7}])
    @both
    def test_state_without_an_origin_is_refused(self, make: Make, origin: object) -> None:
        optimizer = make(Alone(), SGD([parameter(1.0)], lr=0.1))
        with pytest.raises(ValueError, match="it holds no origin"):
            optimizer.load_state_dict(optimizer.state_dict() | {"origin": origin})


def test_digests_of_another_lineage_are_not_compared() -> None:
    averager, talk = with_talk()
    weights = parameter(1.0)
    optimizer = large_batch(averager, SGD([weights], lr=0.1), check_every=1)
    for _ in range(2):
        weights.grad = torch.ones(1)
        optimizer.step(samples=4)
    word = RecipeRecord.decode(talk.mine)
    talk.others = {
        "a": encode_word(replace(word, state=b"x" * 32)),
        "b": encode_word(replace(word, epoch=99)),
    }
    talk.version += 1
    optimizer._together.poll_peers()
    assert optimizer._together.watch.drifted is None
    talk.others["c"] = encode_word(replace(word, digests=b"x" * 8))
    talk.version += 1
    optimizer._together.poll_peers()
    assert optimizer._together.watch.drifted is not None


def test_a_waiting_peer_hears_of_the_difference_too(caplog: pytest.LogCaptureFixture) -> None:
    """Two peers with different targets both wait at the first update, and `step` does not return for minutes."""
    theirs, talk = with_talk()
    large_batch(theirs, SGD([parameter(1.0)], lr=0.1), target_batch_size=4096)._training.begin()
    averager, mine = with_talk()
    optimizer = large_batch(averager, SGD([parameter(1.0)], lr=0.1))
    optimizer._training.begin()
    mine.others = {"a": talk.mine}
    optimizer._together.poll_peers()
    assert "target_batch_size 4096, this one with 4" in caplog.text
