"""One attempt at an all-reduce: a sender, a receiver, and the values between them.

Theory of operation
-------------------

**What it must guarantee.** Every member that holds the result has the same bits. A part is counted once. What one
slow or hostile member does costs that member, not the lanes of the others, and no more memory than a few parts.

**Butterfly** (Patarasuk and Yuan 2009). The vector is cut into shares, and a share into parts. Every contributor
sends each reducer the parts of its share (reduce-scatter). The reducer averages a part as soon as its last
contribution is in, in the roster's order, so that rounding does not depend on arrival. It encodes the average once,
and sends these bytes to every holder (all-gather). All decode the same bytes.

**What can happen.**

* A direct lane comes about late, never, or breaks. Then the parts go over streams (:mod:`p2pavg.allreduce.sender`).
* A member is faster than the others. Then it waits (:mod:`p2pavg.allreduce.messages`).
* A member sends what is wrong. It is reported as hostile, and the lanes of the others go on.
* A reducer is lost after it has sent its averages to some members. One of these passes them on
  (:meth:`Sender.pass_on`).

**Sites.** With several sites, contributions and averages go through relays (:mod:`p2pavg.allreduce.movers.routes`).
What a relay makes of its site's contributions is encoded once, and is kept until the attempt ends.

**Why this way.** A fault is only reported here. What follows from it is one decision for the whole group
(:mod:`p2pavg.consensus.agreement`), which may begin another attempt: an attempt is never repaired. What the next one
takes over are contributions, as the bytes that came (:mod:`p2pavg.allreduce.movers.reuse`), and no average.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from functools import partial
from typing import TypeAlias

import torch
import trio

from p2pavg.allreduce.context import AttemptPlan, RunContext
from p2pavg.allreduce.events import AttemptEvent, BadContributionError
from p2pavg.allreduce.messages import Lane, members_digest
from p2pavg.allreduce.movers.lobby import Lanes
from p2pavg.allreduce.movers.reuse import Leftover
from p2pavg.allreduce.proofs import Proofs, Subject
from p2pavg.allreduce.receiver import Receiver
from p2pavg.allreduce.reduction import PartTracker
from p2pavg.allreduce.sender import Sender
from p2pavg.allreduce.signals import Signals
from p2pavg.allreduce.values import AttemptData
from p2pavg.group.roster import Roster, sites_of
from p2pavg.group.topology import Hierarchical

OnAttemptEvent: TypeAlias = Callable[["Attempt", AttemptEvent], None]
"""Takes an event of an attempt, on the event loop."""


class Attempt:
    """One member's side of one attempt.

    Args:
        group: the roster of the whole group. Its id is in the header of every lane.
        roster: the members that take part, with the shares that they have in this attempt.
        vector: float32, the length of the shares together, on any device; this member's weighted mean. Not changed,
            and not read any more once :meth:`run` has returned. Only contributors have one.
        leftover: contributions of the attempt before.
    """

    def __init__(
        self,
        *,
        number: int,
        context: RunContext,
        group: Roster,
        roster: Roster,
        lanes: Lanes,
        vector: torch.Tensor | None,
        on_event: OnAttemptEvent,
        leftover: Leftover | None = None,
    ) -> None:
        me = context.transport.peer_id
        self.number = number
        self.roster = roster
        sites = sites_of(roster.members) if isinstance(context.aggregation.topology, Hierarchical) else None
        self.ledger = PartTracker(roster, me, context.codec.granularity, sites)
        self.scope = trio.CancelScope()
        """Cancel it to end the attempt."""
        self.values = AttemptData(
            ledger=self.ledger,
            codec=context.codec,
            vector=vector,
            buffers=context.buffers,
            aggregation=context.aggregation,
            proofs=_proofs(context, number, group, self.ledger),
            leftover=leftover,
        )
        self.signals = Signals(
            partial(on_event, self), context.on_milestone, self.values, self.ledger, self.scope
        )
        self.plan = AttemptPlan(
            number=number,
            context=context,
            group=group,
            members_digest=members_digest(number, (member.peer_id for member in roster.members)),
            roster=roster,
            me=me,
            contributes=vector is not None,
            ledger=self.ledger,
            values=self.values,
        )
        self.sender = Sender(self.plan, self.signals)
        self.receiver = Receiver(self.plan, self.signals, lanes)

    @property
    def streamed(self) -> set[str]:
        """Members to or from which parts have gone over streams instead of direct lanes."""
        return self.sender.streamed | self.receiver.streamed

    @property
    def plain_bytes(self) -> int:
        """Bytes of values that this member would send and receive without a codec."""
        return 4 * self.ledger.routes.elements(self.plan.me)

    @property
    def relayed(self) -> set[str]:
        """Those of :attr:`streamed` whose streams went through a relay."""
        return self.sender.stream_bytes.relayed | self.receiver.stream_bytes.relayed

    async def run(self) -> None:
        """Move parts until cancelled: what others still need is sent even when this member has everything."""
        self.signals.open()
        with self.scope:
            async with trio.open_nursery() as nursery:
                nursery.start_soon(self.receiver.run, nursery)
                self.sender.start(nursery)
                for member in self.roster.members:
                    if member.peer_id != self.plan.me:
                        contributes = self.ledger.expects(member.peer_id, Lane.CONTRIBUTIONS) > 0
                        self.signals.note_owes(member.peer_id, contributes)
                await self._average([*self.values.carry.complete, *self.ledger.unfed])
                self.signals.check_complete()
                await trio.sleep_forever()

    async def _average(self, parts: Iterable[int]) -> None:
        """Do tasks of this member whose contributions are all there from the beginning."""
        for index in parts:
            try:
                await self.plan.context.run_in_thread(self.values.average, index)
            except BadContributionError as error:
                self.signals.broken(error.peer_id, error)
                return
            self.signals.ready(index)


def _proofs(context: RunContext, number: int, group: Roster, ledger: PartTracker) -> Proofs:
    """Return the proofs of an attempt."""
    positions = {member.peer_id: group.position(member.peer_id) for member in ledger.roster.members}
    subject = Subject(group.group_id, number, tuple(sorted(positions.values())), context.aggregation.text)
    audited = context.aggregation.audits is not None
    return Proofs(subject, ledger, context.signer, positions, audited=audited)
