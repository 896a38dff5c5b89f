"""Sites, the shares of their members, and the relays of shares: rules that every member computes alike."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

import p2pavg
from p2pavg.base.errors import ConfigError
from p2pavg.group.aggregation import Aggregation, Audits, check_codec_for, read_aggregation
from p2pavg.group.candidate import Candidate
from p2pavg.group.roster import ShareCutter, relays_of, shares_of_sites, sites_of
from p2pavg.group.topology import Butterfly, Hierarchical, resolve_topology, site_of
from p2pavg_compression import TopK, resolve_codec
from tests.unit.group.samples import candidate

ELEMENTS = 10_000
NAMES = st.lists(st.sampled_from(["", "a", "b", "c"]), min_size=2, max_size=8)


def members(*names: str) -> list[Candidate]:
    """Return candidates in sites of these names."""
    return [candidate(index, site=name) for index, name in enumerate(names)]


def test_members_with_one_name_are_one_site() -> None:
    assert sites_of(members("a", "b", "", "a", "")) == ((0, 3), (1,), (2,), (4,))


@pytest.mark.parametrize("names", [("", "", ""), ("a", "b", "c"), ("a", "a", "a"), ("a", "", "b")])
def test_without_two_sites_of_which_one_has_two_members_all_are_one_site(names: tuple[str, ...]) -> None:
    assert sites_of(members(*names)) == ((0, 1, 2),)
    assert shares_of_sites(ELEMENTS, 64, members(*names)) is None
    butterfly, sited = (
        ShareCutter(ELEMENTS, 64, topology).cut(members(*names)) for topology in (Butterfly(), Hierarchical())
    )
    assert butterfly == sited


def test_another_topology_takes_no_notice_of_sites() -> None:
    cut = ShareCutter(ELEMENTS, 64, Butterfly()).cut
    assert cut(members("a", "a", "b")) == cut(members("", "", ""))
    assert cut(members("a", "a", "b")) != ShareCutter(ELEMENTS, 64, Hierarchical()).cut(
        members("a", "a", "b")
    )


def test_an_auxiliary_is_a_site_of_its_own_without_a_share() -> None:
    group = [*members("a", "a", "b"), candidate(3, auxiliary=True)]
    assert sites_of(group) == ((0, 1), (2,), (3,))
    shares = shares_of_sites(ELEMENTS, 64, group)
    assert shares is not None
    assert shares[3] == 0


def test_an_auxiliary_beside_one_site_reduces_as_in_a_butterfly() -> None:
    group = [*members("a", "a"), candidate(2, auxiliary=True)]
    assert sites_of(group) == ((0, 1, 2),)
    assert ShareCutter(ELEMENTS, 64, Hierarchical()).cut(group) == ShareCutter(ELEMENTS, 64).cut(group)


def test_sites_have_equal_parts_and_fast_members_have_more_of_them() -> None:
    group = [
        candidate(0, site="a", bandwidth=1000.0),
        candidate(1, site="b"),
        candidate(2, site="a", bandwidth=100.0),
        candidate(3, site="a", bandwidth=100.0),
    ]
    shares = shares_of_sites(128_000, 64, group)
    assert shares is not None
    assert shares[1] == 64_000
    assert shares[0] > 2 * shares[2]
    assert abs(shares[2] - shares[3]) <= 64


@given(names=NAMES, elements=st.integers(0, 20_000), granularity=st.sampled_from([1, 64]))
def test_sites_cover_the_vector_in_nearly_equal_parts(
    names: list[str], elements: int, granularity: int
) -> None:
    shares = shares_of_sites(elements, granularity, members(*names))
    if shares is None:
        return
    assert sum(shares) == elements
    assert min(shares) >= 0
    of_sites = [sum(shares[position] for position in site) for site in sites_of(members(*names))]
    assert max(of_sites) - min(of_sites) <= 2 * granularity
    assert sum(share % granularity != 0 for share in shares) <= 1, "only the last block may be a piece"


@given(
    names=NAMES,
    shares=st.lists(st.integers(0, 3), min_size=8, max_size=8),
    holds=st.lists(st.booleans(), min_size=8, max_size=8),
)
def test_each_share_has_one_relay_in_each_other_site_that_holds_the_result(
    names: list[str], shares: list[int], holds: list[bool]
) -> None:
    sites, count = sites_of(members(*names)), len(names)
    relays = relays_of(sites, shares[:count], holds[:count])
    wanted = {
        (reducer, number)
        for reducer in range(count)
        for number, site in enumerate(sites)
        if shares[reducer] and reducer not in site and any(holds[position] for position in site)
    }
    assert relays.keys() == wanted
    for (_, number), relay in relays.items():
        assert relay in sites[number]
        assert holds[relay]


def test_relays_are_spread_over_a_site_like_shares() -> None:
    sites = ((0, 1, 2, 3), (4, 5, 6, 7))
    relays = relays_of(sites, [10] * 8, [True] * 8)
    assert sorted(relays[reducer, 1] for reducer in range(4)) == [4, 5, 6, 7]
    relays = relays_of(sites, [10, 10, 10, 10, 20, 10, 10, 0], [True] * 8)
    assert sorted(relays[reducer, 1] for reducer in range(4)) == [4, 4, 5, 6]


# ------------------------------------------------------------------ settings


def test_the_site_is_no_part_of_what_peers_share() -> None:
    assert Hierarchical("lab-a") == Hierarchical("lab-b") == resolve_topology("hierarchical")
    aggregation = Aggregation(audits=None, topology=Hierarchical("lab-a"))
    assert aggregation.text == "audit:off topology:hierarchical"
    assert read_aggregation(aggregation.text) == aggregation
    assert (site_of(Hierarchical("lab-a")), site_of(Butterfly())) == ("lab-a", "")


@pytest.mark.parametrize("site", ["x" * 33, "\n", None, 1, b"lab"])
def test_other_names_are_refused(site: object) -> None:
    with pytest.raises(ConfigError, match="site must be a name of at most 32 bytes"):
        Hierarchical(site)  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({}, "audit must be 'off' with topology 'hierarchical'"),
        ({"audit": Audits(1.0, before=True)}, "audit must be 'off'"),
        ({"audit": "off", "robust": "median"}, "robust must be None with topology 'hierarchical'"),
        ({"audit": "off", "max_norm": 2.0}, "max_norm must be None with topology 'hierarchical'"),
        ({"audit": "off", "compression": TopK()}, "compression cannot be .* with topology 'hierarchical'"),
    ],
)
def test_settings_that_need_the_contributions_of_other_sites_are_refused(
    changes: dict[str, object], words: str
) -> None:
    with pytest.raises(ConfigError, match=words):
        p2pavg.AveragingConfig(run_id="run", topology="hierarchical", **changes)  # type: ignore[arg-type]


def test_another_peer_s_text_with_such_settings_is_refused() -> None:
    with pytest.raises(ConfigError, match="audit must be 'off'"):
        read_aggregation("topology:hierarchical")


def test_dense_codecs_are_allowed() -> None:
    check_codec_for(Hierarchical(), resolve_codec("int4"))
    check_codec_for(Butterfly(), TopK())
