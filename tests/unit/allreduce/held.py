"""The values of one member for tests: vectors, rosters, and the exact averages that must come of them."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterable
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest
import torch

from p2pavg.allreduce.reduction import PartContribution, PartTracker, average_part
from p2pavg.allreduce.values import AttemptData
from p2pavg.allreduce.vector.buffers import Buffers
from p2pavg.group.aggregation import PLAIN, Aggregation
from p2pavg.group.roster import Roster
from p2pavg.group.shares import SharePart
from p2pavg.net.transport import Buffer
from p2pavg_compression import Blockwise8, Codec, Fp16, Fp32, Int8
from tests.unit.group.samples import SIGNERS, candidate, roster

IDS = [signer.peer_id for signer in SIGNERS]
PART = 64
SHARE = 4 * PART
SIZE = 3
ELEMENTS = SIZE * SHARE
WEIGHTS = [1.0, 5.0, 0.25]
CODECS: list[Codec] = [Fp32(), Fp16(), Int8(block_size=64), Blockwise8(block_size=64)]

codecs = pytest.mark.parametrize("codec", CODECS, ids=lambda codec: codec.name)


def use_small_parts(patch: pytest.MonkeyPatch) -> None:
    """Cut shares into parts of ``PART`` elements."""
    patch.setattr("p2pavg.allreduce.reduction.part_size", lambda _elements, _reducers: PART)


def members() -> Roster:
    return roster([candidate(index, weight=WEIGHTS[index]) for index in range(SIZE)], [SHARE] * SIZE)


def with_auxiliary() -> Roster:
    found = [candidate(0, weight=1.0), candidate(1, weight=5.0), candidate(2, auxiliary=True)]
    return roster(found, [SHARE] * SIZE)


def with_observer() -> Roster:
    """Return a roster whose last member has a vector but only observes."""
    found = [candidate(index, weight=WEIGHTS[index]) for index in range(SIZE)]
    return roster(found, [SHARE] * SIZE, observers=found[2:])


def sole() -> Roster:
    """Return a roster in which only the first member contributes."""
    found = [candidate(index, weight=WEIGHTS[index]) for index in range(SIZE)]
    return roster(found, [SHARE] * SIZE, observers=found[1:])


def vector(index: int) -> torch.Tensor:
    return torch.randn(ELEMENTS, generator=torch.Generator().manual_seed(index))


class Held(AttemptData):
    """The values of one member."""

    def __init__(
        self, codec: Codec, me: int = 0, group: Roster | None = None, aggregation: Aggregation = PLAIN
    ) -> None:
        group = members() if group is None else group
        self.buffers = Buffers(1 << 30)
        self.ledger = PartTracker(group, IDS[me], codec.granularity)
        contributes = group.members[me] in group.contributors
        super().__init__(
            ledger=self.ledger,
            codec=codec,
            vector=vector(me) if contributes else None,
            buffers=self.buffers,
            aggregation=aggregation,
        )

    @property
    def ready(self) -> list[int]:
        """Numbers of what is ready."""
        return [index for index, ready in enumerate(self._ready) if ready]

    def contribute(self, member: int, index: int, payload: Buffer | None = None) -> None:
        """Let a member's part come. The last contribution to a part averages it."""
        part = self.ledger.parts[self.ledger.me][index]
        if payload is None:
            payload = self._codec.encode(vector(member)[part.start : part.stop])
        if self.contributed(IDS[member], index, payload):
            self.average(index)

    def reduce_all(self, others: Iterable[int] = (1, 2)) -> None:
        for member in others:
            for part in self.ledger.parts[self.ledger.me]:
                self.contribute(member, part.index)

    def receive_all(self, reducers: Iterable[int] = (1, 2)) -> None:
        for reducer in reducers:
            for part, payload in zip(self.parts(reducer), share(self._codec, reducer), strict=True):
                self.receive_average(IDS[reducer], part, payload)

    def parts(self, reducer: int) -> tuple[SharePart, ...]:
        return self.ledger.parts[IDS[reducer]]

    def share_of(self, reducer: int) -> list[int]:
        """Return the bits of a share's averages."""
        found = self.averages.values[reducer * SHARE : (reducer + 1) * SHARE]
        return [int(bits) for bits in found.view(torch.int32)]


def averaged_part(codec: Codec, part: SharePart, group: Roster | None = None) -> tuple[bytes, torch.Tensor]:
    """Return the result of :func:`average_part` for a part whose reducer holds its own values unencoded."""
    group = members() if group is None else group
    reducer = part.start // SHARE
    out = torch.empty(part.elements)
    contributions = []
    for index, member in enumerate(group.members):
        values = vector(index)[part.start : part.stop]
        if member in group.contributors:
            sent: torch.Tensor | Buffer = values if index == reducer else codec.encode(values)
            contributions.append(PartContribution(member.peer_id, member.weight, sent))
    encoded = bytes(average_part(codec, contributions, group.total_weight, out))
    return encoded, out


def share(codec: Codec, reducer: int) -> list[Buffer]:
    """Return the averaged parts that a reducer sends."""
    starts = range(reducer * SHARE, (reducer + 1) * SHARE, PART)
    return [
        averaged_part(codec, SharePart(index, start, start + PART))[0] for index, start in enumerate(starts)
    ]


def bits(values: torch.Tensor) -> list[int]:
    return [int(each) for each in values.view(torch.int32)]


def expected(codec: Codec) -> list[int]:
    """Return the bits of the whole result."""
    return [
        each
        for start in range(0, ELEMENTS, PART)
        for each in bits(averaged_part(codec, SharePart(0, start, start + PART))[1])
    ]


def in_threads(*work: Callable[[], Any]) -> None:
    """Run all functions at once, each in its own thread."""
    begin = threading.Barrier(len(work))

    def run(one: Callable[[], Any]) -> None:
        begin.wait(30.0)
        one()

    with ThreadPoolExecutor(len(work)) as pool:
        for future in [pool.submit(run, one) for one in work]:
            future.result(30.0)
