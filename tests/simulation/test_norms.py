"""Bounded influence among real peers on a simulated network: long contributions are shortened by all alike."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace

import pytest
import torch

from p2pavg.matchmaking.matchmaker import RoundOffer
from p2pavg.round.roles import Contributor
from tests.simulation.liars import check_costs_itself, name, play
from tests.simulation.swarm import Swarm, config, same_bits, step_all, tensors_of, values

ELEMENTS = 2_000


@pytest.fixture(autouse=True)
def many_small_parts(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("p2pavg.allreduce.reduction.part_size", lambda _elements, _reducers: 64)


async def average(scales: Mapping[int, float], size: int, **changes: object) -> Swarm:
    """Run one step of peers, some of which contribute scaled values."""
    how = config(group_size=size, **changes)
    return await step_all(size, how, lambda index: values(index, ELEMENTS) * scales.get(index, 1.0))


@pytest.mark.parametrize(("robust", "compression"), [(None, "blockwise8"), ("median", None)])
async def test_long_contributions_are_shortened_by_all_reducers(
    robust: str | None, compression: str | None
) -> None:
    found = (
        await average({1: 1e6, 4: -1e3}, 7, max_norm=2.0, robust=robust, compression=compression)
    ).successes()
    assert len(found) == 7
    assert same_bits(found)
    assert {result.clipped for result in found} == {(name(1), name(4))}
    others = [values(index, ELEMENTS) for index in range(7) if index not in (1, 4)]
    median = sorted(row.norm().item() for row in others)[3]  # of seven norms, the liars' are the largest
    shortened = [
        sign * 2.0 * median * torch.nn.functional.normalize(values(index, ELEMENTS), dim=0)
        for index, sign in ((1, 1.0), (4, -1.0))
    ]
    rows = torch.stack([*others, *shortened])
    wanted = rows.mean(0) if robust is None else rows.median(0).values
    slack = 1e-4 if compression is None else 0.1
    torch.testing.assert_close(tensors_of(found[0])[0], wanted, rtol=0, atol=slack)


async def test_honest_contributions_are_not_changed() -> None:
    found = (await average({}, 4, max_norm=2.0)).successes()
    assert {result.clipped for result in found} == {()}
    wanted = torch.stack([values(index, ELEMENTS) for index in range(4)]).mean(0)
    torch.testing.assert_close(tensors_of(found[0])[0], wanted, rtol=1e-5, atol=1e-6)


async def test_a_member_with_a_false_norm_is_excluded_by_name(monkeypatch: pytest.MonkeyPatch) -> None:
    """It signs a hundredth of its norm, so that its values would not be shortened."""
    liar, offer = 0, Contributor.offer

    async def lie(self: Contributor) -> RoundOffer:
        true = await offer(self)
        return replace(true, norm=true.norm / 100) if self._context.transport.peer_id == name(liar) else true

    monkeypatch.setattr(Contributor, "offer", lie)
    swarm = await play(how=config(group_size=4, max_norm=100.0))
    check_costs_itself(swarm, liar, "after it signed a norm of")
