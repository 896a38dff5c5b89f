"""Optimizers whose peers take each sample once: what they refuse, and what a saved state holds."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from p2pavg.base.errors import StateError
from p2pavg.data import SharedSampler
from p2pavg.optim import AveragedOptimizer, RunState, diloco
from tests.simulation.test_optimizer_arguments import SAMPLES, alone, averaged, model_of, sgd, step

LENGTH = 60


def sampler_of(loop: Any, length: int = LENGTH) -> SharedSampler:
    return SharedSampler(length, peer_id=loop.averager.peer_id)


def trained(
    optimizer: AveragedOptimizer, model: torch.nn.Module, sampler: SharedSampler, updates: int
) -> list[int]:
    """Take some updates; return the samples that they were of."""
    samples = iter(sampler)
    taken = []
    for _ in range(updates):
        taken += [next(samples) for _ in range(SAMPLES)]
        assert step(optimizer, model).updated
    return taken


def test_a_peer_alone_takes_each_sample_once_also_after_a_start_from_its_checkpoint(tmp_path: Path) -> None:
    taken: list[int] = []

    def train(loop: Any) -> None:
        model, sampler = model_of(), sampler_of(loop)
        state = RunState(model, tmp_path, every=3, data=sampler)
        taken.extend(trained(averaged(model, loop.averager, state=state), model, sampler, 3))

    def again(loop: Any) -> None:
        model, sampler = model_of(), sampler_of(loop)
        optimizer = averaged(model, loop.averager, state=RunState(model, tmp_path, data=sampler))
        assert optimizer.epoch == 3
        taken.extend(trained(optimizer, model, sampler, 5))

    alone(train)
    alone(again)
    # The first samples are those of the epoch before it began.
    assert len(set(taken[:LENGTH])) == LENGTH


def test_a_saved_state_has_the_plan() -> None:
    def train(loop: Any) -> None:
        model, sampler = model_of(), sampler_of(loop)
        optimizer = averaged(model, loop.averager, state=RunState(model, data=sampler))
        taken = trained(optimizer, model, sampler, 3)
        saved = optimizer.state_dict()
        more = trained(optimizer, model, sampler, 1)
        optimizer.load_state_dict(saved)
        # What was not in the state is taken again, and nothing else.
        samples = iter(sampler)
        assert [next(samples) for _ in range(SAMPLES)] == more
        assert not set(taken) & set(more)
        del saved["data"]
        with pytest.raises(ValueError, match="the state has no plan of the data"):
            optimizer.load_state_dict(saved)

    alone(train)


def test_a_batch_that_is_left_out_moves_the_plan_by_itself_only() -> None:
    def train(loop: Any) -> None:
        model, sampler = model_of(), sampler_of(loop, 10_000)
        optimizer = averaged(model, loop.averager, state=RunState(model, data=sampler))
        taken = trained(optimizer, model, sampler, 2)
        samples = iter(sampler)
        for _ in range(3):
            left_out = [next(samples) for _ in range(SAMPLES)]
            optimizer.zero_grad()
            model(torch.ones(SAMPLES, 8)).square().mean().backward()
            assert optimizer.step(samples=SAMPLES, metrics={"loss": float("nan")}).skipped
            assert not set(left_out) & set(taken)
        more = trained(optimizer, model, sampler, 20)
        assert len({*taken, *more}) >= len(taken) + len(more) - 3 * SAMPLES

    alone(train)


@pytest.mark.parametrize(
    ("make", "words"),
    [
        (lambda model, loop, state: diloco(sgd(model), loop.averager, sync_every=2, min_peers=1, state=state),
         "AveragedOptimizer only"),
        (lambda model, loop, state: averaged(model, loop.averager, state=state), "is a sampler of the peer 'me'"),
    ],
    ids=["diloco", "another peer"],
)  # fmt: skip
def test_what_does_not_fit_is_refused(make: Any, words: str) -> None:
    def train(loop: Any) -> None:
        model = model_of()
        peer_id = loop.averager.peer_id if words == "AveragedOptimizer only" else "me"
        state = RunState(model, data=SharedSampler(LENGTH, peer_id=peer_id))
        with pytest.raises(ValueError, match=words):
            make(model, loop, state)

    alone(train)


def test_a_checkpoint_of_other_data_does_not_fit(tmp_path: Path) -> None:
    def train(loop: Any, length: int) -> None:
        model, sampler = model_of(), sampler_of(loop, length)
        state = RunState(model, tmp_path, every=1, data=sampler)
        trained(averaged(model, loop.averager, state=state), model, sampler, 1)

    def fail(loop: Any) -> None:
        with pytest.raises(StateError, match="data length 100, this peer with 101"):
            train(loop, 101)

    alone(lambda loop: train(loop, 100))
    alone(fail)


def test_data_is_a_sampler() -> None:
    with pytest.raises(TypeError, match=r"data must be a p2pavg\.data\.SharedSampler, got int"):
        RunState(data=5)  # type: ignore[arg-type]


def test_the_next_version_of_a_program_may_begin_with_data(tmp_path: Path) -> None:
    """Its checkpoint is of a version that had none: all of its peers begin a plan."""

    def train(loop: Any) -> None:
        model = model_of()
        optimizer = averaged(model, loop.averager, state=RunState(model, tmp_path, every=1))
        assert step(optimizer, model).updated

    def go_on(loop: Any) -> None:
        model, sampler = model_of(), sampler_of(loop)
        optimizer = averaged(model, loop.averager, state=RunState(model, tmp_path, data=sampler))
        assert optimizer.epoch == 1
        assert trained(optimizer, model, sampler, 2)

    alone(train, version=1)
    alone(go_on, version=2)
