"""Participation rules: every member gets the same answer, and the draw is fair."""

from __future__ import annotations

import math
from collections import Counter
from functools import partial
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from p2pavg.base.errors import ConfigError
from p2pavg.base.numbers import is_rule
from p2pavg.group.candidate import Candidate, sign_candidate
from p2pavg.group.participation import ByCapability, Participation, RandomFraction, observers, silent_members
from p2pavg_dht import Ed25519Signer
from tests.unit.group.samples import KEY

SIGNERS = [Ed25519Signer(bytes([index + 1]) * 32) for index in range(16)]
RULES = [
    None,
    RandomFraction(0.5),
    RandomFraction(0.01, seed=7),
    RandomFraction(1.0),
    ByCapability(),
    ByCapability(tags=("gpu",), min_bandwidth=50.0),
    ByCapability(min_bandwidth=1e6),
]


def candidate(
    index: int,
    *,
    weight: float = 1.0,
    auxiliary: bool = False,
    bandwidth: float = 100.0,
    state: bytes = b"",
    tags: tuple[str, ...] = (),
) -> Candidate:
    return sign_candidate(
        SIGNERS[index],
        key=KEY,
        deadline=1.0,
        expiration_time=2.0,
        weight=0.0 if auxiliary else weight,
        bandwidth=bandwidth,
        codec="fp32",
        auxiliary=auxiliary,
        addresses=(),
        state=state,
        tags=tags,
    )


def drawn(rule: Participation, state: bytes, count: int = 8) -> frozenset[str]:
    return rule.contributors([candidate(index, state=state) for index in range(count)])


members = st.lists(
    st.builds(
        candidate,
        st.integers(0, len(SIGNERS) - 1),
        weight=st.sampled_from([0.0, 0.5, 8.0]),
        auxiliary=st.booleans(),
        bandwidth=st.sampled_from([5.0, 50.0, 1e5]),
        tags=st.sampled_from([(), ("gpu",), ("fp16", "gpu")]),
    ),
    max_size=len(SIGNERS),
    unique_by=lambda member: member.peer_id,
)


class TestRandomFraction:
    @pytest.mark.parametrize("fraction", [1e-9, 0.125, 0.3, 0.5, 1])
    def test_the_fraction_is_rounded_up_to_at_least_one_member(self, fraction: float) -> None:
        for count in range(1, 17):
            assert len(drawn(RandomFraction(fraction), b"7", count)) == math.ceil(fraction * count)

    @pytest.mark.parametrize(
        ("fraction", "count", "contribute"), [(0.07, 100, 7), (0.28, 25, 7), (0.14, 50, 7)]
    )
    def test_an_exact_product_is_not_rounded_up(self, fraction: float, count: int, contribute: int) -> None:
        assert fraction * count > contribute
        assert RandomFraction(fraction)._count(count) == contribute

    @given(st.permutations(range(8)), st.binary(max_size=32), st.integers(-3, 3))
    def test_the_order_of_members_does_not_matter(self, order: list[int], state: bytes, seed: int) -> None:
        group = [candidate(index, state=state) for index in range(8)]
        rule = RandomFraction(0.4, seed)
        assert rule.contributors([group[index] for index in order]) == rule.contributors(group)

    def test_other_signed_fields_do_not_change_the_draw(self) -> None:
        others = [
            candidate(index, weight=9.0, bandwidth=7.0, tags=("gpu",), state=b"7") for index in range(8)
        ]
        assert RandomFraction(0.5).contributors(others) == drawn(RandomFraction(0.5), b"7")

    def test_the_draw_never_changes(self) -> None:
        """Peers of different versions draw the same members."""
        ids = [signer.peer_id for signer in SIGNERS]
        chosen = drawn(RandomFraction(0.5, seed=3), b"round 7", 4)
        assert sorted(ids.index(peer_id) for peer_id in chosen) == [1, 3]

    def test_another_state_is_another_draw(self) -> None:
        assert len({drawn(RandomFraction(0.5), bytes([state])) for state in range(20)}) > 10

    def test_another_seed_is_another_draw(self) -> None:
        assert len({drawn(RandomFraction(0.5, seed), b"7") for seed in range(20)}) > 10

    def test_all_members_are_drawn_about_equally_often(self) -> None:
        """In 1000 draws of 2 of 8 members, each is drawn 250 times, with a standard deviation of 14."""
        often = Counter(
            peer_id for state in range(1000) for peer_id in drawn(RandomFraction(0.25), b"%d" % state)
        )
        assert len(often) == 8
        assert sum(often.values()) == 2000
        assert min(often.values()) > 180
        assert max(often.values()) < 320

    @pytest.mark.parametrize(
        ("name", "value"),
        [
            *[("fraction", value) for value in (0, -0.5, 1.0001, math.nan, math.inf, "half", None, True)],
            *[("seed", value) for value in (1.0, "1", None, True)],
        ],
    )
    def test_an_argument_out_of_range_is_refused_by_name(self, name: str, value: object) -> None:
        arguments: dict[str, Any] = {"fraction": 0.5, name: value}
        with pytest.raises(ConfigError, match=rf"^{name}\b"):
            RandomFraction(**arguments)


class TestCapable:
    def test_members_with_all_tags_contribute(self) -> None:
        group = [
            candidate(0, tags=("gpu", "fp16")),
            candidate(1, tags=("gpu",)),
            candidate(2),
            candidate(3, tags=("fp16", "other", "gpu")),
        ]
        assert ByCapability(tags=("fp16", "gpu")).contributors(group) == {
            SIGNERS[0].peer_id,
            SIGNERS[3].peer_id,
        }

    def test_members_with_enough_bandwidth_contribute(self) -> None:
        group = [candidate(index, bandwidth=bandwidth) for index, bandwidth in enumerate([49.9, 50.0, 1e5])]
        assert ByCapability(min_bandwidth=50).contributors(group) == {SIGNERS[1].peer_id, SIGNERS[2].peer_id}

    def test_a_contributor_needs_the_tags_and_the_bandwidth(self) -> None:
        group = [candidate(0, tags=("gpu",), bandwidth=1.0), candidate(1, bandwidth=100.0)]
        assert ByCapability(tags=("gpu",), min_bandwidth=50.0).contributors(group) == frozenset()

    def test_without_arguments_all_members_contribute(self) -> None:
        assert len(drawn(ByCapability(), b"")) == 8

    @pytest.mark.parametrize(
        ("name", "value"),
        [
            *[("tags", value) for value in ("gpu", ["gpu"], ("",), ("x" * 33,), ("\x1b",), (5,), None)],
            *[("min_bandwidth", value) for value in (-1.0, math.nan, math.inf, "50", None, True)],
        ],
    )
    def test_an_argument_out_of_range_is_refused_by_name(self, name: str, value: object) -> None:
        arguments: dict[str, Any] = {name: value}
        with pytest.raises(ConfigError, match=rf"^{name}\b"):
            ByCapability(**arguments)


class TestText:
    def test_different_rules_have_different_texts(self) -> None:
        rules: list[Participation] = [
            RandomFraction(0.5),
            RandomFraction(0.5, seed=1),
            RandomFraction(math.nextafter(0.5, 1)),
            ByCapability(),
            ByCapability(tags=("gpu",)),
            ByCapability(tags=("gpu", "fp16")),
            ByCapability(tags=("gpu', 'fp16",)),
            ByCapability(min_bandwidth=50.0),
        ]
        assert len({rule.text for rule in rules}) == len(rules)
        assert all(is_rule(rule.text) and rule.text for rule in rules)

    def test_the_same_rule_has_one_text(self) -> None:
        assert RandomFraction(1).text == RandomFraction(1.0).text
        assert (
            ByCapability(tags=("a", "b"), min_bandwidth=1).text
            == ByCapability(tags=("b", "a"), min_bandwidth=1.0).text
        )

    def test_the_texts_never_change(self) -> None:
        assert RandomFraction(0.5, seed=3).text == "fraction 0x1.0000000000000p-1 seed 3"
        assert (
            ByCapability(tags=("gpu", "fp16"), min_bandwidth=50).text
            == "tags ['fp16', 'gpu'] bandwidth 0x1.9000000000000p+5"
        )


class TestObservers:
    @settings(deadline=None)
    @given(members, st.sampled_from(RULES))
    def test_members_without_weight_observe_and_auxiliaries_never_do(
        self, group: list[Candidate], rule: Participation | None
    ) -> None:
        found = observers(rule, group)
        assert found <= {member.peer_id for member in group if not member.auxiliary}
        assert found >= {m.peer_id for m in group if not m.auxiliary and m.weight == 0}

    @settings(deadline=None)
    @given(members)
    def test_the_fraction_is_of_members_with_something_to_contribute(self, group: list[Candidate]) -> None:
        """Auxiliaries and members without a weight do not count."""
        able = [member for member in group if not member.auxiliary and member.weight]
        found = observers(RandomFraction(0.5), group)
        assert len([m for m in able if m.peer_id not in found]) == math.ceil(len(able) / 2)

    def test_without_a_rule_all_that_have_a_weight_contribute(self) -> None:
        group = [candidate(0), candidate(1, weight=0.0), candidate(2, auxiliary=True)]
        assert observers(None, group) == silent_members(group) == {SIGNERS[1].peer_id}

    def test_a_member_without_the_capability_observes(self) -> None:
        group = [candidate(0, tags=("gpu",)), candidate(1), candidate(2, weight=0.0, tags=("gpu",))]
        choose = partial(observers, ByCapability(tags=("gpu",)))
        assert choose(group) == {SIGNERS[1].peer_id, SIGNERS[2].peer_id}
        assert choose(group[1:]) == {SIGNERS[1].peer_id, SIGNERS[2].peer_id}, (
            "also when no member contributes"
        )
