"""For any knowledge and any promises of the members, one side decides, and the cost of a liar is bounded."""

from __future__ import annotations

from hypothesis import given, settings
from hypothesis import strategies as st

from p2pavg.consensus.choice import MemberAnswers, Stuck, choose, choose_view, is_quorum
from p2pavg.consensus.votes import Accepted, Complete, Members, Promise

SIZE = 8
positions = st.integers(0, SIZE - 1)
members = st.frozensets(positions, max_size=SIZE)
some_members = st.frozensets(positions, min_size=1, max_size=SIZE)

# Each member's role: on one of two sides, on none, or dead. One side, both or none may know that it is dead.
roles = st.lists(
    st.sampled_from(["one", "other", "neither", "dead", "dead to one", "dead to other", "dead to both"]),
    min_size=1,
    max_size=SIZE,
)


def of(roles: list[str], *wanted: str) -> Members:
    return frozenset(position for position, role in enumerate(roles) if role in wanted)


@settings(deadline=None, max_examples=1000)
@given(roles)
def test_two_sides_never_both_decide(roles: list[str]) -> None:
    one = is_quorum(of(roles, "one"), len(roles), of(roles, "dead to one", "dead to both"))
    other = is_quorum(of(roles, "other"), len(roles), of(roles, "dead to other", "dead to both"))
    assert not (one and other)


@settings(deadline=None)
@given(st.lists(st.sampled_from(["one", "other", "dead"]), min_size=1, max_size=SIZE))
def test_of_two_sides_that_know_all_deaths_one_decides(roles: list[str]) -> None:
    dead = of(roles, "dead")
    deciding = [is_quorum(of(roles, side), len(roles), dead) for side in ("one", "other")]
    assert sum(deciding) == (len(dead) < len(roles))


@settings(deadline=None)
@given(roles, st.integers(0, SIZE - 1))
def test_a_quorum_with_more_members_is_a_quorum(roles: list[str], joining: int) -> None:
    side, dead = of(roles, "one"), of(roles, "dead to one")
    if is_quorum(side, len(roles), dead):
        assert is_quorum(side | {joining % len(roles)}, len(roles), dead)


def promises_of(apart: Members, hostile: Members) -> Promise:
    return Promise(9, 0, None, None, apart | hostile, hostile)


promises = st.dictionaries(positions, st.builds(promises_of, members, members), min_size=1, max_size=SIZE)


@settings(deadline=None)
@given(promises)
def test_all_members_of_a_view_can_exchange(promises: dict[int, Promise]) -> None:
    for me in promises:
        view = choose_view(me, promises)
        assert me in view
        assert view <= promises.keys()
        for position in view:
            assert view.isdisjoint(promises[position].apart - {position})


@settings(deadline=None)
@given(st.integers(3, SIZE), st.integers(1, SIZE - 1), members)
def test_a_liar_costs_the_view_one_honest_member_at_most(size: int, liar: int, accused: Members) -> None:
    """It costs one by one accusation, and itself by several."""
    liar = 1 + liar % (size - 1)
    told = {position: promises_of(frozenset(), frozenset()) for position in range(size)}
    told[liar] = promises_of(frozenset(), accused & told.keys() - {liar})
    view = choose_view(0, told)
    left_out = told.keys() - view
    if len(told[liar].hostile) > 1 or 0 in told[liar].hostile:
        assert left_out == {liar}
    else:
        assert left_out == told[liar].hostile


@settings(deadline=None, max_examples=500)
@given(
    st.integers(3, SIZE),
    st.sets(positions),
    st.lists(st.tuples(positions, positions, st.booleans()), max_size=40),
)
def test_accusations_of_a_third_of_liars_bound_the_attempts(
    size: int, chosen: set[int], accusations: list[tuple[int, int, bool]]
) -> None:
    """Each attempt costs the liars a pair of members of the view, and pairs stay apart for the round.

    So there are few attempts, however the liars choose, and each view is a quorum.
    """
    liars = sorted(position for position in chosen if 0 < position < size)[: size // 3]
    apart: dict[int, set[int]] = {position: set() for position in range(size)}
    hostile: dict[int, set[int]] = {position: set() for position in range(size)}
    attempts, view = 1, frozenset(range(size))
    for accuser, accused, is_hostile in accusations:
        if not liars:
            break
        liar, other = liars[accuser % len(liars)], accused % size
        if liar == other or not {liar, other} <= view or other in apart[liar]:
            continue  # such an accusation begins no attempt
        apart[liar].add(other)
        if is_hostile:
            hostile[liar].add(other)
        told = {
            position: promises_of(frozenset(apart[position]), frozenset(hostile[position]))
            for position in range(size)
        }
        view, attempts = choose_view(0, told), attempts + 1
        assert is_quorum(view, size, frozenset())
        assert len(set(range(size)) - view - set(liars)) <= len(liars)
    assert attempts <= 1 + len(liars) * (size - 1)


attempts = st.integers(0, 3)
accepted = st.builds(
    lambda attempt, later, *rest: Accepted(attempt + later, attempt, *rest),
    attempts,
    attempts,
    some_members,
    some_members,
    st.booleans(),
)
answers = st.builds(
    lambda promises, holders, dead, left: MemberAnswers(
        me=min(promises),
        size=SIZE,
        holders=holders,
        contributors=holders,
        minimum=2,
        ballot=9,
        promises=promises,
        dead=dead - promises.keys(),
        left={position: ballot for position, ballot in left.items() if position not in promises},
    ),
    st.dictionaries(
        positions,
        st.builds(
            Promise,
            st.just(9),
            attempts,
            st.none() | accepted,
            st.none() | st.builds(Complete, attempts, some_members),
            st.frozensets(positions, max_size=1),
            st.frozensets(positions, max_size=1),
        ),
        min_size=1,
        max_size=SIZE,
    ),
    some_members,
    members,
    st.dictionaries(positions, st.integers(-1, 6), max_size=2),
)


@settings(deadline=None, max_examples=500)
@given(answers)
def test_for_any_answers_the_begun_ballot_can_be_carried_out(answers: MemberAnswers) -> None:
    """The answers include combinations that honest members never give, because a liar may give any answer."""
    found = choose(answers)
    if isinstance(found, Stuck):
        assert found.reason
        return
    assert found.ballot == answers.ballot
    assert answers.me in found.view <= answers.promises.keys()
    assert is_quorum(found.view, SIZE, answers.gone)
    assert found.source in found.view
    assert found.lacking <= found.view & found.members & answers.holders
    if found.attempt == found.ballot:
        assert found.members == found.view
        assert len(found.members & answers.holders) >= answers.minimum
        assert not found.lacking
        return
    for position in found.view & found.members & answers.holders - found.lacking:
        assert answers.promises[position].complete == Complete(found.attempt, found.members)
    if found.lacking:
        assert answers.promises[found.source].complete == Complete(found.attempt, found.members)
        assert all(answers.promises[position].attempt == found.attempt for position in found.lacking)
    if not found.must:
        assert found.view <= found.members <= found.view | answers.dead
