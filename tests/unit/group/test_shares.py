"""Shares and parts that must be the same in every version, because each member computes them itself."""

from __future__ import annotations

from fractions import Fraction

import pytest

from p2pavg.group.reach import Reach
from p2pavg.group.shares import (
    MAX_PART_ELEMENTS,
    MIN_PART_ELEMENTS,
    MemberLink,
    SharePart,
    best_fractions,
    bound_seconds,
    cut_into_parts,
    fastest_shares,
    largest_fraction,
    levelled,
    part_size,
)


def contributors(*bandwidths: float) -> list[MemberLink]:
    return [MemberLink(bandwidth) for bandwidth in bandwidths]


def auxiliary(bandwidth: float) -> MemberLink:
    return MemberLink(bandwidth, contributes=False)


def undialled(bandwidth: float, *, contributes: bool = True) -> MemberLink:
    return MemberLink(bandwidth, contributes=contributes, reach=Reach.RELAYED)


def of_kinds(kinds: str, bandwidth: float = 100.0) -> list[MemberLink]:
    """Return contributors of equal bandwidth that are dialable (d), punchable (p) or relayed (r)."""
    return [MemberLink(bandwidth, reach=Reach("dpr".index(kind))) for kind in kinds]


@pytest.mark.parametrize(
    ("elements", "members", "granularity", "shares"),
    [
        (0, [], 64, ()),
        (1, contributors(5.0), 64, (1,)),
        (0, contributors(1.0, 2.0), 64, (0, 0)),
        # Two contributors share in proportion, and an auxiliary of theirs counts half.
        (1000, contributors(1.0, 1.0), 1, (500, 500)),
        (1000, contributors(300.0, 100.0), 64, (768, 232)),
        (1000, contributors(100.0, 300.0), 64, (256, 744)),
        (4096, contributors(1e6, 1e-3), 64, (4096, 0)),
        (4096, contributors(1e-3, 1e6), 64, (0, 4096)),
        (1000, [*contributors(100.0, 100.0), auxiliary(100.0)], 1, (400, 400, 200)),
        # Equal members share equally, as far as blocks and cuts allow.
        (1000, contributors(1.0, 1.0, 1.0), 1, (333, 334, 333)),
        (100, contributors(*[1.0] * 4), 64, (64, 0, 36, 0)),
        (3, contributors(*[1.0] * 4), 1, (1, 1, 0, 1)),
        (5, contributors(*[0.1] * 10), 1, (1, 0, 1, 0, 1, 0, 1, 0, 1, 0)),
        (10**9, contributors(*[0.1] * 10), 64, (10**8,) * 10),
        # T = 3 / 200: the member with 50 Mbit/s needs longer than that for its own contribution.
        (1000, contributors(100.0, 100.0, 50.0), 1, (500, 500, 0)),
        # T = 4 / 290: 100 T - 1 = 11/29 twice, and 90 T - 1 = 7/29.
        (1300, contributors(100.0, 100.0, 90.0), 1, (493, 493, 314)),
        # A member with a fifth of the others' bandwidth only sends its own contribution.
        (1200, contributors(100.0, 100.0, 100.0, 20.0), 1, (400, 400, 400, 0)),
        (1200, contributors(20.0, 100.0, 100.0, 100.0), 1, (0, 400, 400, 400)),
        # A slightly slower member reduces much less: T = 6 / 380.
        (1900, contributors(100.0, 100.0, 100.0, 80.0), 1, (550, 550, 550, 250)),
        # T = (1 + 3) / (300 + 100 / 3): 0.2 for each contributor, and an auxiliary only carries its share.
        (1000, [*contributors(100.0, 100.0, 100.0), auxiliary(100.0)], 1, (200, 200, 200, 400)),
        (1000, [*contributors(1.0, 1.0, 1.0), auxiliary(1000.0)], 1, (0, 0, 0, 1000)),
        # A member that cannot be dialled reduces nothing, unless no member can be dialled.
        (1000, [undialled(100.0), *contributors(100.0, 100.0)], 1, (0, 500, 500)),
        (1000, [undialled(1000.0), *contributors(1.0, 3.0, 1.0)], 1, (0, 0, 1000, 0)),
        (1000, [undialled(100.0), *contributors(100.0)], 1, (0, 1000)),
        (1000, [undialled(100.0), undialled(300.0)], 1, (250, 750)),
        (900, [undialled(100.0)] * 3, 1, (300, 300, 300)),
        (900, [*[undialled(100.0)] * 3, auxiliary(1.0)], 1, (0, 0, 0, 900)),
        (900, [*contributors(1.0, 1.0, 1.0), undialled(1e6, contributes=False)], 1, (300, 300, 300, 0)),
        # Punchable members reduce like those that can be dialled, in a group without relayed pairs.
        (900, of_kinds("dpp"), 1, (300, 300, 300)),
        (900, of_kinds("ppp"), 1, (300, 300, 300)),
        # T = 2/105: the punchable one reduces 5 T, which a relay carries in that time.
        (2100, of_kinds("dpr"), 1, (1900, 200, 0)),
        # On links of 10 Gbit/s a relay carries next to nothing in the time of the round.
        (100, of_kinds("ddppr", 1e4), 1, (50, 50, 0, 0, 0)),
        # On links of 1 Mbit/s relays are fast enough for equal shares.
        (1000, of_kinds("ddppr", 1.0), 1, (250, 250, 250, 250, 0)),
        # Without a member that can be dialled, punchable ones reduce everything, and without these, relayed ones.
        (1000, of_kinds("ppr"), 1, (500, 500, 0)),
        (1000, of_kinds("pr"), 1, (1000, 0)),
        (900, of_kinds("rrr"), 1, (300, 300, 300)),
        # A relayed auxiliary has nothing to send through a relay, so it limits no punchable reducer.
        (900, [*of_kinds("dpp"), undialled(100.0, contributes=False)], 1, (300, 300, 300, 0)),
        # The largest and least bandwidths, and numbers as they are measured.
        (640, contributors(5e-324, 5e-324, 5e-324, 1e6), 64, (0, 0, 0, 640)),
        (
            10**9,
            [*contributors(93.7, 41.2, 310.5, 12.9, 188.8), auxiliary(55.5)],
            64,
            (0, 0, 638_315_200, 0, 257_479_040, 104_205_760),
        ),
    ],
)
def test_shares(elements: int, members: list[MemberLink], granularity: int, shares: tuple[int, ...]) -> None:
    assert fastest_shares(elements, members, granularity) == shares


@pytest.mark.parametrize(
    ("members", "fractions"),
    [
        (contributors(100.0, 100.0, 90.0), ["11/29", "11/29", "7/29"]),
        (contributors(100.0, 100.0, 100.0, 80.0), ["11/38", "11/38", "11/38", "5/38"]),
        ([*contributors(100.0, 100.0, 100.0), auxiliary(50.0)], ["5/19", "5/19", "5/19", "4/19"]),
    ],
)
def test_fractions_are_exact(members: list[MemberLink], fractions: list[str]) -> None:
    assert [str(fraction) for fraction in best_fractions(members)] == fractions


@pytest.mark.parametrize(
    ("payload", "members", "seconds"),
    [
        # 1 MB is 8 Mbit. Each of four members carries 3/4 of it twice, each way.
        (1_000_000, contributors(*[100.0] * 4), 0.12),
        (1_000_000, contributors(8.0, 8.0), 1.0),
        (1_000_000, contributors(8.0, 80.0), 1.0),
        (1_000_000, contributors(100.0, 100.0, 100.0, 20.0), 0.4),
        (1_000_000, contributors(*[8.0] * 64), 1 + 62 / 64),
        (1_000_000, [*contributors(8.0, 8.0, 8.0), auxiliary(8.0)], 1.2),
        (1_000_000, [undialled(8.0), undialled(8.0), undialled(8.0), auxiliary(8.0)], 3.0),
        # Two relayed members send each other half of the vector twice. The relays need longer for it than the two.
        (1_250_000, of_kinds("rr", 10.0), 2.0),
        (1_250_000, of_kinds("rrr", 1000.0), 4.0),
        (1_250_000, of_kinds("ddrr", 10.0), 2.0),
        (0, contributors(8.0, 8.0), 0.0),
    ],
)
def test_the_lower_bound_of_a_rounds_duration(
    payload: int, members: list[MemberLink], seconds: float
) -> None:
    assert bound_seconds(payload, members) == pytest.approx(seconds)


def test_parts_never_change() -> None:
    """Members of versions with different parts would not understand each other."""
    assert (MIN_PART_ELEMENTS, MAX_PART_ELEMENTS) == (65_536, 524_288)
    sizes = [part_size(elements, 4) for elements in (0, 2_097_152, 4_000_000, 16_000_000, 64_000_000)]
    assert sizes == [65_536, 65_536, 125_000, 500_000, 524_288]
    assert cut_into_parts(64, 64 + 2 * 640 + 5, 64, 640) == (
        SharePart(0, 64, 704),
        SharePart(1, 704, 1344),
        SharePart(2, 1344, 1349),
    )
    assert cut_into_parts(10, 10, 64, 640) == ()


def test_a_granularity_that_does_not_divide_a_part() -> None:
    assert [part.elements for part in cut_into_parts(0, 250, 30, part_elements=100)] == [90, 90, 70]
    assert [part.elements for part in cut_into_parts(0, 250, 200, part_elements=100)] == [200, 50]


@pytest.mark.parametrize(
    ("bandwidths", "found"),
    [
        ([100.0, 85.0, 93.0, 118.0], [100.0] * 4),
        ([100.0, 100.0, 100.0, 20.0], [100.0, 100.0, 100.0, 100.0 / 1.5**4]),
        ([50.0], [50.0]),
        ([], []),
        ([1e6, 1e-300, 1.0], [1e6, 1e-300, 1.0]),
        # Those that are unknown count as the median, in which they count as the default.
        ([5.0, 5.0, 5.0, 0.0], [5.0] * 4),
        ([0.0] * 3, [100.0] * 3),
        ([0.0, 0.0, 5.0], [100.0, 100.0, 100.0 / 1.5**7]),
    ],
)
def test_bandwidths_that_are_nearly_equal_count_as_equal(bandwidths: list[float], found: list[float]) -> None:
    members = [MemberLink(bandwidth) for bandwidth in bandwidths]
    assert [member.bandwidth for member in levelled(members)] == pytest.approx(found)


def test_levels_change_only_the_bandwidth() -> None:
    members = [MemberLink(10.0, contributes=False), MemberLink(10.0, reach=Reach.PUNCHABLE)]
    assert levelled(members) == members


@pytest.mark.parametrize(
    ("members", "most"),
    [
        (contributors(1.0, 1e5), Fraction(1)),
        ([undialled(1.0), undialled(1.0), auxiliary(1.0)], Fraction(1)),
        ([*contributors(1.0), undialled(1.0), auxiliary(1.0)], Fraction(2, 3)),
        # With a relayed contributor, equal shares are those of the members that can be dialled.
        (of_kinds("ddddpppp"), Fraction(1, 4)),
        (of_kinds("ddddpppr"), Fraction(1, 2)),
        (of_kinds("ddpppppr"), Fraction(2, 3)),
        (of_kinds("dppppppr"), Fraction(1)),
        (of_kinds("pppppppr"), Fraction(2, 7)),
        ([*of_kinds("dddd"), *of_kinds("pppp"), undialled(1.0, contributes=False)], Fraction(1, 4)),
        ([*contributors(1.0, 1.0), auxiliary(1.0)], Fraction(2, 3)),
        (contributors(*[1.0] * 4), Fraction(1, 2)),
        ([undialled(1.0)] * 4, Fraction(1, 2)),
        (contributors(*[1.0] * 64), Fraction(1, 32)),
    ],
)
def test_the_largest_fraction_that_one_member_reduces(members: list[MemberLink], most: Fraction) -> None:
    assert largest_fraction(members) == most


@pytest.mark.parametrize(
    ("members", "shares"),
    [
        # Without the limit, an auxiliary that signs a bandwidth of 1e5 would get everything.
        ([*contributors(100.0, 100.0, 100.0, 100.0), auxiliary(1e5)], (150, 150, 150, 150, 400)),
        ([*contributors(100.0, 100.0), auxiliary(1e5)], (167, 166, 667)),
        (contributors(100.0, 100.0, 100.0, 1e5), (167, 166, 167, 500)),
        # The limit does not change the shares of equal links, or of links within a factor of two.
        (contributors(*[100.0] * 4), (250, 250, 250, 250)),
        (
            contributors(100.0, 100.0, 100.0, 150.0),
            fastest_shares(1000, contributors(100.0, 100.0, 100.0, 150.0), 1),
        ),
    ],
)
def test_no_bandwidth_buys_the_whole_vector(members: list[MemberLink], shares: tuple[int, ...]) -> None:
    assert fastest_shares(1000, members, 1, largest_fraction(members)) == shares
