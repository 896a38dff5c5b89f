"""Spot checks of contributions: who checks whom, and what differs."""

from __future__ import annotations

import math
from collections import Counter

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from p2pavg.base.errors import RemoteProtocolError
from p2pavg.base.result import DrawnContribution
from p2pavg.group.candidate import Candidate, sign_candidate
from p2pavg.group.recheck import TOLERANCE, compare, drawn_targets
from p2pavg.group.roster import Roster
from p2pavg.testing.simulation import simulated_signer
from p2pavg_compression import resolve_codec

ELEMENTS = 8192


def member(number: int, *, weight: float = 1.0, auxiliary: bool = False) -> Candidate:
    return sign_candidate(
        simulated_signer(number),
        key=b"k" * 32,
        deadline=100.0 + number,
        expiration_time=1000.0,
        weight=weight,
        bandwidth=100.0,
        codec="fp32",
        auxiliary=auxiliary,
        addresses=("/ip4/203.0.113.7/tcp/40001",),
    )


def roster_of(count: int, *, shares: tuple[int, ...] | None = None, auxiliary: bool = False) -> Roster:
    members = [member(number) for number in range(count)]
    if auxiliary:
        members.append(member(count, weight=0.0, auxiliary=True))
    return Roster(members=tuple(members), shares=shares or (10,) * len(members), proposal=1)


def drawn(roster: Roster, fraction: float, seed: int = 0) -> dict[str, list[str]]:
    """Return what each member was drawn for."""
    return {
        each.peer_id: drawn_targets(each.peer_id, f"{seed} {each.peer_id}".encode(), roster, fraction)
        for each in roster.members
    }


@given(st.integers(2, 8), st.integers(), st.floats(0.0, 1.0))
def test_nobody_checks_itself_and_an_auxiliary_checks_nobody(count: int, seed: int, fraction: float) -> None:
    roster = roster_of(count, auxiliary=True)
    found = drawn(roster, fraction, seed)
    assert all(checker not in targets for checker, targets in found.items())
    assert found[roster.members[-1].peer_id] == []  # an auxiliary computes nothing
    assert not any(drawn(roster, 0.0, seed).values())


def test_only_members_that_hold_a_part_of_it_check() -> None:
    roster = roster_of(4, shares=(40, 0, 0, 0))
    first, *others = [each.peer_id for each in roster.members]
    found = drawn(roster, 1.0)
    assert sorted(found[first]) == sorted(others)
    assert not any(found[peer_id] for peer_id in others)


def test_each_contribution_is_checked_as_often_as_the_fraction_says() -> None:
    roster = roster_of(4)
    checked, checkers = Counter[str](), Counter[str]()
    for seed in range(4000):
        for checker, targets in drawn(roster, 0.1, seed).items():
            checked.update(targets)
            checkers[checker] += len(targets)
    # Binomial: 400 expected with a standard deviation of 19.
    assert all(300 < checked[each.peer_id] < 500 for each in roster.members)
    assert all(300 < checkers[each.peer_id] < 500 for each in roster.members)


def test_the_draw_follows_from_the_checkers_signature_alone() -> None:
    """Else the last one to send could try contributions until it is not drawn."""
    roster, me = roster_of(4), roster_of(4).members[0].peer_id
    assert drawn_targets(me, b"one", roster, 1.0) == drawn_targets(me, b"one", roster_of(4), 1.0)
    assert len({str(drawn_targets(me, str(number).encode(), roster, 1.0)) for number in range(64)}) == 8


def contribution(
    gradient: torch.Tensor, codec: str, start: int = 0, stop: int = ELEMENTS
) -> DrawnContribution:
    middle = (start + stop) // 2 // 64 * 64
    made = resolve_codec(codec)
    parts = ((start, middle), (middle, stop))
    return DrawnContribution("peer", 8.0, tuple((a, b, bytes(made.encode(gradient[a:b]))) for a, b in parts))


GRADIENT = torch.randn(ELEMENTS, generator=torch.Generator().manual_seed(1))
TENSORS = [GRADIENT[:1000].view(10, 100), GRADIENT[1000:]]


@pytest.mark.parametrize("codec", ["fp32", "fp16", "blockwise8", "int8", "int4", "nf4"])
@pytest.mark.parametrize(("start", "stop"), [(0, ELEMENTS), (2048, 4096)])
def test_an_honest_contribution_is_explained(codec: str, start: int, stop: int) -> None:
    noise = torch.randn(ELEMENTS, generator=torch.Generator().manual_seed(2))
    # As much as float32 and bfloat16 differ at most: with few levels, many values fall on another one.
    other = GRADIENT + 0.05 * noise
    found = compare(contribution(other, codec, start, stop), TENSORS, resolve_codec(codec))
    assert not found.differs, found.why


@pytest.mark.parametrize("codec", ["fp32", "blockwise8", "int4"])
@pytest.mark.parametrize("cheat", ["another's", "noise", "half", "scaled", "nothing", "infinite"])
def test_a_cheat_differs(codec: str, cheat: str) -> None:
    noise = torch.randn(ELEMENTS, generator=torch.Generator().manual_seed(3))
    sent = {
        "another's": noise,
        "noise": 0.1 * noise,
        "half": GRADIENT + noise,  # as much noise of a batch as signal
        "scaled": 2.0 * GRADIENT,
        "nothing": torch.zeros(ELEMENTS),
        "infinite": GRADIENT * 1e20,
    }[cheat]
    found = compare(contribution(sent, codec), TENSORS, resolve_codec(codec))
    assert found.differs
    assert f"and its samples give {found.mine:.4g}" in found.why
    assert math.isclose(found.mine, float(GRADIENT.norm()), rel_tol=1e-6)


def test_the_values_behind_the_gradients_are_not_compared() -> None:
    drawn_of = contribution(torch.cat([GRADIENT[:4096], torch.full((4096,), 7.0)]), "fp32")
    found = compare(drawn_of, [GRADIENT[:4096]], resolve_codec("fp32"))
    assert (found.differs, found.difference) == (False, 0.0)
    assert found.allowed == TOLERANCE


def test_what_does_not_decode_is_no_lie() -> None:
    with pytest.raises(RemoteProtocolError, match="does not decode"):
        compare(DrawnContribution("peer", 1.0, ((0, 64, b"short"),)), TENSORS, resolve_codec("fp32"))


def test_no_gradient_at_all_is_compared_with_nothing() -> None:
    zeros = [torch.zeros(ELEMENTS)]
    assert not compare(contribution(torch.zeros(ELEMENTS), "fp32"), zeros, resolve_codec("fp32")).differs
    assert compare(contribution(GRADIENT, "fp32"), zeros, resolve_codec("fp32")).differs
