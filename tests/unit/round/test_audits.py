"""A reducer answers its auditors, also those that ask before it has heard how the round ended."""

from __future__ import annotations

from collections.abc import Sequence

import pytest
import trio
from trio.testing import wait_all_tasks_blocked

from p2pavg.allreduce.attempt import Attempt
from p2pavg.allreduce.messages import PROTOCOL
from p2pavg.base.limits import REPLY_SECONDS
from p2pavg.group.aggregation import Aggregation, Audits
from p2pavg.net.transport import LENGTH_BYTES, Stream
from p2pavg.round.audits import AUDIT_SECONDS, Finding, RoundAudits
from p2pavg.testing import MemoryNetwork
from p2pavg.verification.audit.keeping import AuditRequest
from p2pavg_compression import Fp32
from tests.unit.allreduce.contexts import context_over
from tests.unit.allreduce.streams import Silent
from tests.unit.group.samples import SIGNERS
from tests.unit.verification.audit.played import ALWAYS, IDS, Played


class Learnt:
    """Notes what the audits find, and does nothing about it."""

    def __init__(self) -> None:
        self.found: list[tuple[str, Finding]] = []

    def accuse(self, evidence: bytes) -> None: ...

    def audited(self, peer_id: str, finding: Finding) -> None:
        self.found.append((peer_id, finding))

    def hold(self, attempt: Attempt, digests: Sequence[bytes]) -> None: ...

    def lose(self, peer_id: str, reason: str, *, hostile: bool) -> None: ...


AGGREGATION = Aggregation(audits=Audits(1.0))


@pytest.fixture(autouse=True)
def small_parts(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("p2pavg.allreduce.reduction.part_size", lambda _elements, _reducers: 64)


def asking(request: AuditRequest) -> Silent:
    """Return the stream of the first member, which has sent a request."""
    message = request.pack()
    return Silent(len(message).to_bytes(LENGTH_BYTES, "big") + message, IDS[0])


async def test_an_auditor_that_asks_too_early_is_answered_later() -> None:
    played = Played(Fp32(), AGGREGATION)
    async with MemoryNetwork().transport(IDS[1]) as transport, trio.open_nursery() as nursery:
        context = context_over(transport, Fp32(), 1_000, aggregation=AGGREGATION)
        audits = RoundAudits(context, played.group, Learnt(), Learnt())
        stream = asking(played.request(0))
        nursery.start_soon(context.lobby.audited[played.group.group_id], stream, 0)
        await wait_all_tasks_blocked()
        assert not stream.sent
        audits._kept = played.kept(1)
        audits._settled.set()
        await trio.sleep(REPLY_SECONDS)  # an answer takes a part of the link, and this long at most
        task = played.tasks(0)[IDS[1]]
        assert len(stream.sent) > task.share.manifest_bytes(len(task.indices))
        audits.close()


async def test_an_auditor_of_a_round_without_an_end_is_let_go() -> None:
    played = Played(Fp32(), AGGREGATION)
    async with MemoryNetwork().transport(IDS[1]) as transport:
        context = context_over(transport, Fp32(), 1_000, aggregation=AGGREGATION)
        RoundAudits(context, played.group, Learnt(), Learnt())
        began = trio.current_time()
        await context.lobby.audited[played.group.group_id](asking(played.request(0, ALWAYS)), 0)
        assert trio.current_time() - began == pytest.approx(REPLY_SECONDS)


async def test_after_the_end_no_auditor_is_served() -> None:
    played = Played(Fp32(), AGGREGATION)
    async with MemoryNetwork().transport(IDS[1]) as transport:
        context = context_over(transport, Fp32(), 1_000, aggregation=AGGREGATION)
        audits = RoundAudits(context, played.group, Learnt(), Learnt())
        audits.close()
        assert not context.lobby.audited


@pytest.mark.parametrize("after", [None, 1.0], ids=["slow rounds", "short rounds"])
async def test_a_reducer_that_never_answers_is_found_silent(after: float | None) -> None:
    """The ninth round after this one ends what is kept of it. In short rounds, that is before an audit has ended."""
    played, network, learnt = Played(Fp32(), AGGREGATION), MemoryNetwork(), Learnt()

    async def keep_silent(_stream: Stream) -> None:
        await trio.sleep_forever()

    async with network.transport(SIGNERS[0]) as transport, network.transport(SIGNERS[1]) as reducer:
        reducer.serve(PROTOCOL, keep_silent)
        await transport.dial(reducer.addresses[0], timeout=1.0)
        context = context_over(transport, Fp32(), 1_000, aggregation=AGGREGATION)
        audits = RoundAudits(context, played.group, learnt, learnt)
        audits._tasks = [played.tasks(0)[IDS[1]]]
        began = trio.current_time()
        async with trio.open_nursery() as nursery:
            nursery.start_soon(audits.run)
            if after is not None:
                await trio.sleep(after)
                audits.close()
        assert trio.current_time() - began == pytest.approx(AUDIT_SECONDS)
    assert [peer_id for peer_id, _ in learnt.found] == [IDS[1]]
    assert "answered no audit" in str(learnt.found[0][1])
