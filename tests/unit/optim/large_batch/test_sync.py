"""Common start: from the named source, within the caller's timeout, and the same for all members."""

from __future__ import annotations

import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import replace
from typing import Any, cast

import pytest
import torch

import p2pavg
from p2pavg.base.limits import MAX_TIMEOUT_SECONDS
from p2pavg.base.messages import pack
from p2pavg.base.result import RoundResult, Success
from p2pavg.blocking import Averager
from p2pavg.optim import SyncError, sync_parameters
from p2pavg.optim.base.state import digest_of
from p2pavg.runs.membership.certificate import Role
from p2pavg.runs.records.board import Entry
from tests.unit.runs.membership.runs import Authority, signer

GROUP = "07" * 32


class Board:
    """A board with the digests that the other members received."""

    version = 0

    def __init__(self) -> None:
        self.mine: list[bytes] = []
        self.others: dict[str, bytes] = {}

    def publish(self, value: bytes, *, now: bool) -> None:
        assert now
        self.mine.append(value)

    @property
    def entries(self) -> Mapping[str, Entry]:
        return {peer: Entry(value, 1, 1e12) for peer, value in self.others.items()}

    def wait(self, version: int, timeout: float) -> None:
        time.sleep(min(timeout, 0.01))


class Rounds:
    """An averager whose rounds have results that the test sets."""

    peer_id = "me"
    weight = 0.0
    round_state = None

    def __init__(self, *results: RoundResult) -> None:
        self.config = p2pavg.AveragingConfig(run_id="run", match_timeout=30.0, exchange_timeout=60.0)
        self.sync_board = Board()
        self.results = list(results)
        self.opened: list[p2pavg.AveragingConfig] = []

    @contextmanager
    def sibling(self, config: p2pavg.AveragingConfig) -> Iterator[Rounds]:
        self.opened.append(config)
        yield self

    def board(self, topic: str, *, lasts: float) -> Board:
        assert topic == "sync"
        return self.sync_board

    def declare(self, tensors: object) -> None: ...

    def accumulate(self, tensors: object) -> None: ...

    def clear(self) -> None: ...

    def step(self, **_: Any) -> RoundResult:
        return self.results.pop(0) if len(self.results) > 1 else self.results[0]


def came(value: float, *sources: str, observers: tuple[str, ...] = ("me",)) -> Success:
    return Success(
        averaged=[torch.full((3,), value)],
        peers=sources,
        weights={},
        total_weight=1.0,
        compression_ratio=1.0,
        bytes_sent=0,
        bytes_received=0,
        duration=0.0,
        exchange_duration=0.0,
        group_id=GROUP,
        share=(0, 0),
        observers=observers,
    )


def received(value: float) -> bytes:
    return pack(2, bytes.fromhex(GROUP), digest_of([torch.full((3,), value)]))


def sync(rounds: Rounds, tensors: list[torch.Tensor], **options: Any) -> None:
    given: dict[str, Any] = {"source": False, "peers": 2, "timeout": 5.0}
    sync_parameters(cast(Averager, rounds), tensors, **(given | options))


class TestSource:
    def test_other_source_is_ignored(self, caplog: pytest.LogCaptureFixture) -> None:
        tensors = [torch.zeros(3)]
        rounds = Rounds(came(6.0, "stranger"), came(7.0, "source", "stranger"), came(2.0, "source"))
        rounds.sync_board.others["source"] = received(2.0)
        sync(rounds, tensors, source_id="source")
        assert torch.equal(tensors[0], torch.full((3,), 2.0))
        assert caplog.text.count("not the named source: stranger") == 2

    def test_source_detects_a_false_share(self) -> None:
        """An observer that reduces a share can send all others, and the source, the same false share."""
        tensors = [torch.full((3,), 1.0)]
        rounds = Rounds(came(6.0, "me", observers=("other",)))
        rounds.sync_board.others["other"] = received(6.0)
        with pytest.raises(SyncError, match="received other parameters"):
            sync(rounds, tensors, source=True, source_id="me")
        assert torch.equal(tensors[0], torch.full((3,), 1.0))

    def test_tensors_are_refused_without_the_sources_digest(self) -> None:
        tensors = [torch.zeros(3)]
        rounds = Rounds(replace(came(2.0, "source"), lost={"source": "it closed its stream"}))
        with pytest.raises(SyncError, match="published no digest"):
            sync(rounds, tensors, source_id="source", timeout=0.3)
        assert torch.equal(tensors[0], torch.zeros(3))

    def test_other_source_alone_is_an_error(self) -> None:
        tensors = [torch.zeros(3)]
        with pytest.raises(SyncError, match="peer stranger claims to be the source, not source"):
            sync(Rounds(came(6.0, "stranger")), tensors, source_id="source", timeout=0.3)
        assert torch.equal(tensors[0], torch.zeros(3))

    @pytest.mark.parametrize(
        ("options", "named"),
        [
            ({"source_id": "me", "source": False}, "source must be true on"),
            ({"source_id": "other", "source": True}, "source must be true on"),
            ({"source_id": ""}, "source_id"),
            ({"source_id": 7}, "source_id"),
            ({"timeout": 0}, "timeout"),
        ],
    )
    def test_wrong_arguments_are_named(self, options: dict[str, Any], named: str) -> None:
        with pytest.raises(ValueError, match=named):
            sync(Rounds(came(1.0, "source")), [torch.zeros(3)], **options)


class TestComparison:
    def test_tensors_with_differing_digests_are_refused(self) -> None:
        tensors, rounds = [torch.zeros(3)], Rounds(came(2.0, "source", observers=("me", "third")))
        rounds.sync_board.others = {"source": received(2.0), "third": received(9.0)}
        with pytest.raises(SyncError, match=r"1 peer \(third\) received other parameters"):
            sync(rounds, tensors)
        assert torch.equal(tensors[0], torch.zeros(3))

    @pytest.mark.parametrize(
        "word", [b"", b"nonsense", pack(2, b"", b""), pack(1, bytes(32), bytes(32)), None]
    )
    def test_peer_without_a_digest_is_named(self, word: bytes | None) -> None:
        tensors, rounds = [torch.zeros(3)], Rounds(came(2.0, "source"))
        rounds.sync_board.others = {} if word is None else {"source": word}
        with pytest.raises(SyncError, match=r"1 peer \(source\) published no digest"):
            sync(rounds, tensors, timeout=0.2)
        assert torch.equal(tensors[0], torch.zeros(3))

    def test_digests_of_strangers_are_ignored(self) -> None:
        tensors, rounds = [torch.zeros(3)], Rounds(came(2.0, "source"))
        rounds.sync_board.others = {"source": received(2.0), "stranger": received(9.0)}
        sync(rounds, tensors)
        assert torch.equal(tensors[0], torch.full((3,), 2.0))
        assert rounds.sync_board.mine == [received(2.0)]

    def test_lost_member_is_not_waited_for(self) -> None:
        tensors, result = [torch.zeros(3)], came(2.0, "source", observers=("me", "gone"))
        rounds = Rounds(replace(result, lost={"gone": "cut off"}))
        rounds.sync_board.others = {"source": received(2.0)}
        sync(rounds, tensors)
        assert torch.equal(tensors[0], torch.full((3,), 2.0))


@pytest.mark.parametrize(("timeout", "exchange"), [(900.0, 900.0), (5.0, 5.0), (1e6, MAX_TIMEOUT_SECONDS)])
def test_exchange_may_take_the_callers_timeout(timeout: float, exchange: float) -> None:
    """Whole uncompressed parameters take longer than the rounds for which `exchange_timeout` was chosen."""
    rounds = Rounds(came(2.0, "source"))
    rounds.sync_board.others["source"] = received(2.0)
    sync(rounds, [torch.zeros(3)], timeout=timeout)
    [config] = rounds.opened
    assert config.exchange_timeout == exchange
    assert config.match_timeout == min(30.0, timeout)


class TestRunWithAnAuthority:
    """Only a peer whose certificate grants the role ``source`` gives its parameters to others."""

    def closed(self, *roles: Role) -> Rounds:
        rounds = Rounds(came(2.0, "me", observers=("other",)))
        access = Authority().access(signer(1), roles=roles)
        rounds.config = replace(rounds.config, access=access)
        rounds.sync_board.others["other"] = received(2.0)
        return rounds

    def test_the_round_admits_only_sources_as_contributors(self) -> None:
        rounds = self.closed(Role.CONTRIBUTOR, Role.SOURCE)
        sync(rounds, [torch.full((3,), 2.0)], source=True)
        (opened,) = rounds.opened
        assert opened.access is not None
        assert opened.access.contributing is Role.SOURCE

    def test_a_peer_without_the_role_cannot_be_the_source(self) -> None:
        with pytest.raises(ValueError, match="certificate does not grant the role source"):
            sync(self.closed(Role.CONTRIBUTOR), [torch.zeros(3)], source=True)


@pytest.mark.parametrize(
    ("changes", "none"),
    [
        ({"robust": "median", "max_norm": 2.0, "participation": p2pavg.RandomFraction(0.5)}, None),
        ({"topology": "gossip"}, p2pavg.Butterfly()),
    ],
    ids=["rules", "gossip"],
)
def test_one_peers_tensors_are_taken_as_they_are_by_all_at_once(
    changes: dict[str, Any], none: object
) -> None:
    """A rule that all peers of the run share is for contributions of several peers, and a topology for many rounds."""
    rounds = Rounds(came(2.0, "source"))
    rounds.config = replace(rounds.config, **changes)
    rounds.sync_board.others["source"] = received(2.0)
    sync(rounds, [torch.zeros(3)], peers=5)
    [config] = rounds.opened
    assert {getattr(config, name) for name in changes} == {none}
    assert config.group_size == 5
