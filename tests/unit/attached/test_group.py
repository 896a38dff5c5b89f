"""When the processes of one peer begin a round, and with how many other peers."""

from __future__ import annotations

import pytest

from p2pavg.attached.group import Begin, Gather, GiveUp, LocalGroup
from p2pavg.attached.messages import Step

STATE, OTHER = bytes(32), bytes([1]) * 32


def group(*names: str, **settings: float) -> LocalGroup:
    found = LocalGroup(**{"group_size": 4, "min_group_size": 2, "match_timeout": 30.0, **settings})  # type: ignore[arg-type]
    for name in names:
        found.join(name)
    return found


def ask(
    of: LocalGroup, name: str, *expected: str, now: float = 0.0, state: bytes = STATE, **more: object
) -> None:
    """Ask for a round with the named peers and processes."""
    fields: dict[str, object] = {
        "number": 1,
        "weight": 4.0,
        "state": state,
        "hinted": True,
        "expected": expected,
    }
    of.ask(name, Step(**(fields | more)), "P", now)  # type: ignore[arg-type]


def ask_plainly(of: LocalGroup, name: str, now: float = 0.0) -> None:
    """Ask for a round without a hint."""
    of.ask(name, Step(number=1, weight=4.0, state=STATE), "P", now)


class TestWaiting:
    def test_a_round_waits_for_the_expected_processes(self) -> None:
        local = group("a", "b")
        ask(local, "a", "P/b", now=5.0)
        found = local.decide(6.0)
        assert found == Gather(35.0, {"a": "waiting for the process b"})
        ask(local, "b", "P/a", now=7.0)
        assert local.decide(7.0) == Begin(
            members=("a", "b"),
            contributors=("a", "b"),
            state=STATE,
            remote=0,
            remote_contributors=0,
            target=2,
        )

    def test_a_process_that_is_not_expected_is_not_waited_for(self) -> None:
        local = group("a", "b", "c")
        ask(local, "a", "P/b")
        ask(local, "b", "P/a")
        found = local.decide(0.0)
        assert isinstance(found, Begin)
        assert found.members == ("a", "b")

    def test_without_a_hint_all_processes_are_waited_for(self) -> None:
        local = group("a", "b", "c")
        ask_plainly(local, "a")
        ask_plainly(local, "b")
        assert isinstance(local.decide(0.0), Gather)
        ask_plainly(local, "c")
        assert isinstance(local.decide(0.0), Begin)

    def test_a_process_that_has_left_is_not_waited_for(self) -> None:
        local = group("a", "b", "c")
        for name in ("a", "b"):
            ask(local, name, "P/a", "P/b", "P/c")
        assert isinstance(local.decide(0.0), Gather)
        local.leave("c")
        found = local.decide(0.0)
        assert isinstance(found, Begin)
        assert (found.members, found.remote) == (("a", "b"), 0)

    def test_a_process_that_is_on_its_way_is_waited_for(self) -> None:
        """The peer was started again, and one process is faster to attach than the other."""
        local = group("a")
        ask(local, "a", "P/b")
        assert isinstance(local.decide(0.0), Gather)
        local.join("b")
        ask(local, "b", "P/a", now=2.0)
        found = local.decide(2.0)
        assert isinstance(found, Begin)
        assert (found.members, found.remote) == (("a", "b"), 0)

    def test_the_others_begin_at_the_match_timeout(self) -> None:
        local = group("a", "b", "c")
        ask(local, "a", "P/b", "P/c", now=1.0)
        ask(local, "b", "P/a", "P/c", now=20.0)
        assert local.decide(30.9) == Gather(31.0, dict.fromkeys("ab", "waiting for the process c"))
        found = local.decide(31.0)
        assert isinstance(found, Begin)
        assert found.members == ("a", "b")

    def test_a_process_that_stayed_alone_hears_for_whom_it_waited(self) -> None:
        local = group("a", "b")
        ask(local, "a", "P/b")
        assert local.decide(30.0) == GiveUp("a", "waiting for the process b, which did not come")

    def test_processes_of_other_states_do_not_meet(self) -> None:
        local = group("a", "b")
        ask(local, "a", "P/b")
        ask(local, "b", "P/a", state=OTHER)
        found = local.decide(0.0)
        assert isinstance(found, Begin), "neither waits for the other: it cannot come"
        assert found.members == ("a",)
        assert found.remote == 3

    def test_no_request_waits_for_nothing(self) -> None:
        assert group("a").decide(0.0) == Gather(float("inf"), {})

    def test_a_cancelled_request_takes_no_part(self) -> None:
        local = group("a", "b")
        ask(local, "a", "P/b")
        ask(local, "b")
        local.cancel("b")
        assert isinstance(local.decide(0.0), Gather)


class TestOtherPeers:
    def test_the_group_on_the_network_counts_this_peer_once(self) -> None:
        local = group("a", "b")
        ask(local, "a", "P/b", "R", "S")
        ask(local, "b", "P/a", "R")
        found = local.decide(0.0)
        assert isinstance(found, Begin)
        assert (found.remote, found.target) == (2, 4)
        assert found.others == {"R", "S"}

    def test_without_a_hint_other_peers_fill_the_group(self) -> None:
        local = group("a", "b")
        ask_plainly(local, "a")
        ask_plainly(local, "b")
        found = local.decide(0.0)
        assert isinstance(found, Begin)
        assert found.remote == 2
        assert not found.others

    def test_a_full_group_of_processes_needs_no_other_peer(self) -> None:
        local = group("a", "b", group_size=2)
        ask_plainly(local, "a")
        ask_plainly(local, "b")
        found = local.decide(0.0)
        assert isinstance(found, Begin)
        assert found.remote == 0

    def test_a_process_alone_looks_for_another_peer(self) -> None:
        local = group("a")
        ask(local, "a", target=2)
        found = local.decide(0.0)
        assert isinstance(found, Begin)
        assert found.remote == 1

    def test_too_few_processes_look_for_the_rest(self) -> None:
        local = group("a", "b", min_group_size=3)
        ask(local, "a", "P/b")
        ask(local, "b", "P/a")
        found = local.decide(0.0)
        assert isinstance(found, Begin)
        assert found.remote == 1
        assert not local.may_average_alone(found)

    def test_observers_alone_look_for_a_contributor(self) -> None:
        local = group("a", "b")
        for name, other in ("ab", "ba"):
            ask(local, name, f"P/{other}", observes=True, weight=0.0)
        found = local.decide(0.0)
        assert isinstance(found, Begin)
        assert (found.contributors, found.remote) == ((), 1)
        assert not local.may_average_alone(found)

    def test_an_observer_is_a_member_and_contributes_nothing(self) -> None:
        local = group("a", "b")
        ask(local, "a", "P/b", contributors=1)
        ask(local, "b", "P/a", observes=True, weight=0.0)
        found = local.decide(0.0)
        assert isinstance(found, Begin)
        assert (found.members, found.contributors) == (("a", "b"), ("a",))
        assert local.may_average_alone(found)

    @pytest.mark.parametrize(("wanted", "expected"), [(0, 0), (3, 1), (2, 0)])
    def test_contributors_of_other_peers(self, wanted: int, expected: int) -> None:
        local = group("a", "b")
        for name, other in ("ab", "ba"):
            ask(local, name, f"P/{other}", "R", "S", contributors=wanted)
        found = local.decide(0.0)
        assert isinstance(found, Begin)
        assert found.remote_contributors == expected
