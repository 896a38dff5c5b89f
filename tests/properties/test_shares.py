"""Shares and parts: for any group and any length, every element has one owner and one part."""

from __future__ import annotations

from dataclasses import replace
from fractions import Fraction
from random import Random

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from scipy.optimize import linprog

from p2pavg.group.reach import Reach, is_direct
from p2pavg.group.shares import (
    RELAY_MBPS,
    MemberLink,
    best_fractions,
    bound_seconds,
    cut_into_parts,
    fastest_shares,
    largest_fraction,
    relayed_traffic,
    share_bounds,
)

lengths = st.integers(0, 200) | st.integers(0, 2**34)
granularities = st.sampled_from([1, 3, 64, 256, 4096])
signed = st.floats(0.0, 1e6, exclude_min=True)
usual = st.sampled_from([10.0, 20.0, 50.0, 100.0, 1000.0]) | st.floats(1.0, 1000.0)


@st.composite
def groups(
    draw: st.DrawFn, bandwidths: st.SearchStrategy[float] = signed, least: int = 2
) -> list[MemberLink]:
    """Draw the links of any group that a roster may have, or of a smaller attempt."""
    contributors = draw(st.integers(least, 12))
    auxiliaries = draw(st.sampled_from([0, 0, 1, 3]))
    reached = draw(st.sampled_from([st.just(Reach.DIALABLE), st.sampled_from(Reach)]))
    members = [
        MemberLink(draw(bandwidths), contributes=index < contributors, reach=draw(reached))
        for index in range(contributors + auxiliaries)
    ]
    return draw(st.permutations(members))


def times(members: list[MemberLink], shares: list[Fraction]) -> list[Fraction]:
    """Return each member's time for a vector of 1 Mbit, counted lane by lane, for sending and receiving."""
    took = []
    for me, (member, own) in enumerate(zip(members, shares, strict=True)):
        sent = received = Fraction(0)
        for other, (peer, theirs) in enumerate(zip(members, shares, strict=True)):
            if other != me:
                sent += member.contributes * theirs + peer.contributes * own
                received += peer.contributes * own + member.contributes * theirs
        assert sent == received
        took.append(sent / Fraction(member.bandwidth))
    return took


def relays_time(members: list[MemberLink], shares: list[Fraction]) -> Fraction:
    """Return the time of the relays for a vector of 1 Mbit, counted pair by pair."""
    carried = Fraction(0)
    for here, reducer in enumerate(members):
        for there, contributor in enumerate(members):
            dialled = Reach.DIALABLE in (reducer.reach, contributor.reach)
            punched = reducer.reach == contributor.reach == Reach.PUNCHABLE
            if here != there and contributor.contributes and not dialled and not punched:
                carried += 2 * shares[here]
    return carried / Fraction(RELAY_MBPS)


def duration(members: list[MemberLink], shares: list[Fraction]) -> Fraction:
    """Return the time of a round for a vector of 1 Mbit."""
    return max(*times(members, shares), relays_time(members, shares))


def may_reduce(members: list[MemberLink]) -> list[bool]:
    return [
        member.reach != Reach.RELAYED or all(other.reach == Reach.RELAYED for other in members)
        for member in members
    ]


def least_time(members: list[MemberLink], most: float = 1.0) -> float:
    """Solve the linear program: least T with no time above T, and fractions of at most ``most`` that sum to 1."""
    contributors = sum(member.contributes for member in members)
    size = len(members)
    by_share = [contributors - 2 if member.contributes else contributors for member in members]
    through_relays = [
        2.0
        * sum(
            other.contributes and not is_direct(member.reach, other.reach)
            for there, other in enumerate(members)
            if there != here
        )
        for here, member in enumerate(members)
    ]
    rates = [*(member.bandwidth for member in members), RELAY_MBPS]
    result = linprog(
        c=[0.0] * size + [1.0],
        A_ub=np.column_stack([np.vstack([np.diag(by_share), through_relays]), [-rate for rate in rates]]),
        b_ub=[-1.0 if member.contributes else 0.0 for member in members] + [0.0],
        A_eq=[[1.0] * size + [0.0]],
        b_eq=[1.0],
        bounds=[(0.0, most if able else 0.0) for able in may_reduce(members)] + [(0.0, None)],
    )
    assert result.status == 0
    return float(result.fun)


@given(
    lengths,
    groups(least=1) | st.lists(st.builds(MemberLink, signed, st.booleans()), min_size=1),
    granularities,
)
def test_shares_sum_and_no_block_is_split(elements: int, members: list[MemberLink], granularity: int) -> None:
    shares = fastest_shares(elements, members, granularity)
    assert sum(shares) == elements
    assert len(shares) == len(members)
    assert min(shares) >= 0
    for position in range(len(shares)):
        start, stop = share_bounds(shares, position)
        assert stop - start == shares[position]
        if stop > start:
            assert start % granularity == 0
            assert stop % granularity == 0 or stop == elements


@given(lengths, groups(least=1), granularities)
def test_shares_differ_from_the_fractions_by_a_block_at_most(
    elements: int, members: list[MemberLink], granularity: int
) -> None:
    fractions = best_fractions(members)
    assert sum(fractions) == 1
    assert min(fractions) >= 0
    shares = fastest_shares(elements, members, granularity)
    for share, fraction in zip(shares, fractions, strict=True):
        # One block, and the missing elements of the last block.
        assert abs(share - fraction * elements) < 2 * granularity
        assert fraction > 0 or share == 0
        if elements % granularity == 0:
            assert abs(share - fraction * elements) < granularity


@given(groups(usual), st.booleans())
def test_no_shares_are_faster(members: list[MemberLink], rounded: bool) -> None:
    elements, granularity = 2**34, 64
    fractions = list(best_fractions(members))
    shares = fastest_shares(elements, members, granularity)
    best = least_time(members)
    assert float(duration(members, fractions)) == pytest.approx(best, rel=1e-6)
    assert bound_seconds(125_000, members) == pytest.approx(best, rel=1e-6)
    integers = [Fraction(share, elements) for share in shares]
    assert float(duration(members, integers)) == pytest.approx(best, rel=1e-5)


@given(groups(usual))
def test_no_shares_within_the_limit_are_faster(members: list[MemberLink]) -> None:
    most = largest_fraction(members)
    fractions = best_fractions(members, most)
    assert sum(fractions) == 1
    assert min(fractions) >= 0
    assert max(fractions) <= most
    best = least_time(members, float(most))
    assert float(duration(members, list(fractions))) == pytest.approx(best, rel=1e-6)


@given(groups(least=3))
def test_all_reducers_need_equally_long(members: list[MemberLink]) -> None:
    """All members with a share need equally long, and those that may reduce and do not, at least as long.

    Punchable reducers need less if relays limit them: then the relays need as long as those that can be dialled.
    """
    fractions = best_fractions(members)
    took = times(members, list(fractions))
    levels = {
        reach: {
            seconds
            for seconds, fraction, member in zip(took, fractions, members, strict=True)
            if fraction and member.reach is reach
        }
        for reach in Reach
    }
    assert all(len(level) <= 1 for level in levels.values())
    dialled, punched = levels[Reach.DIALABLE], levels[Reach.PUNCHABLE]
    if dialled and punched and dialled != punched:
        assert max(punched) < max(dialled) == relays_time(members, list(fractions))
    able = may_reduce(members)
    for member, seconds, fraction, reduces in zip(members, took, fractions, able, strict=True):
        if reduces:
            assert fraction or all(seconds >= level for level in levels[member.reach])
        else:
            assert fraction == 0
            assert seconds == 1 / Fraction(member.bandwidth) * member.contributes


@given(groups(usual))
def test_relayed_pairs_make_no_round_longer(members: list[MemberLink]) -> None:
    """They carry what relays carry in the time that the other members need anyway, unless no member can be dialled."""
    fractions = list(best_fractions(members))
    assert relayed_traffic(members, fractions) / Fraction(RELAY_MBPS) == relays_time(members, fractions)
    if any(member.reach is Reach.DIALABLE for member in members):
        no_punching = [
            member if member.reach is Reach.DIALABLE else replace(member, reach=Reach.RELAYED)
            for member in members
        ]
        without_relays = list(best_fractions(no_punching))
        assert relays_time(members, without_relays) == 0
        assert duration(members, fractions) <= duration(members, without_relays)


@given(st.lists(usual, min_size=2, max_size=2), st.lists(usual, max_size=4))
def test_an_auxiliary_of_two_is_never_the_slowest(pair: list[float], helping: list[float]) -> None:
    members = [MemberLink(bandwidth, index < 2) for index, bandwidth in enumerate(pair + helping)]
    fractions = best_fractions(members)
    assert fractions[0] / Fraction(pair[0]) == fractions[1] / Fraction(pair[1])
    assert max(times(members, list(fractions))) == 1 / Fraction(min(pair))


@given(groups(), st.randoms(use_true_random=False), lengths, granularities)
def test_the_order_of_members_changes_no_share(
    members: list[MemberLink], random: Random, elements: int, granularity: int
) -> None:
    order = list(range(len(members)))
    random.shuffle(order)
    shuffled = [members[position] for position in order]
    fractions, again = best_fractions(members), best_fractions(shuffled)
    assert again == tuple(fractions[position] for position in order)
    whole = elements - elements % granularity
    shares, moved = (fastest_shares(whole, each, granularity) for each in (members, shuffled))
    assert all(abs(moved[here] - shares[there]) <= granularity for here, there in enumerate(order))


@given(st.integers(1, 64), signed, st.sampled_from(Reach), lengths, granularities)
def test_equals_share_equally(
    members: int, bandwidth: float, reach: Reach, elements: int, granularity: int
) -> None:
    links = [MemberLink(bandwidth, reach=reach)] * members
    assert set(best_fractions(links)) == {Fraction(1, members)}
    shares = fastest_shares(elements, links, granularity)
    assert max(shares) - min(shares) <= 2 * granularity


@given(groups(), st.integers(0, 14), st.floats(1.0, 8.0))
def test_a_faster_member_slows_no_member_down(
    members: list[MemberLink], position: int, factor: float
) -> None:
    position %= len(members)
    faster = list(members)
    link = members[position]
    faster[position] = MemberLink(link.bandwidth * factor, link.contributes, link.reach)
    before, after = (duration(each, list(best_fractions(each))) for each in (members, faster))
    assert after <= before


@settings(deadline=None)
@given(st.integers(0, 2**40), st.integers(0, 3000), granularities, st.integers(1, 300))
def test_parts_cover_a_share_in_order(
    start: int, elements: int, granularity: int, part_elements: int
) -> None:
    parts = cut_into_parts(start, start + elements, granularity, part_elements)
    assert [part.index for part in parts] == list(range(len(parts)))
    assert [part.start for part in parts] == [start, *(part.stop for part in parts)][: len(parts)]
    assert (parts[-1].stop if parts else start) == start + elements
    assert all(0 < part.elements <= max(part_elements, granularity) for part in parts)
    assert all(part.elements % granularity == 0 for part in parts[:-1])


@settings(deadline=None)
@given(st.integers(0, 5_000_000), granularities, st.integers(4_096, 1_000_000))
def test_parts_are_as_large_as_they_may_be(elements: int, granularity: int, most: int) -> None:
    parts = cut_into_parts(0, elements, granularity, most)
    assert all(most - granularity < part.elements <= most for part in parts[:-1])
