"""Carry out the questions of :mod:`p2pavg.net.reach.knowledge`, and tell what follows from the answers."""

from __future__ import annotations

import logging
from collections.abc import Callable, Collection, Sequence

import trio

from p2pavg.errors import ClosedError, UnreachableError
from p2pavg.net.reach import whoami
from p2pavg.net.reach.dial_backs import Endpoint
from p2pavg.net.reach.knowledge import Knowledge
from p2pavg.net.reach.messages import Outcome
from p2pavg.net.reach.probes import Probe
from p2pavg.net.reach.questions import AskDialBack, AskLook, Neighbour, Question
from p2pavg.net.reach.service import ask_dial_back, look
from p2pavg.net.transport import PeerId, Transport

logger = logging.getLogger(__name__)

LOOK_SECONDS = 1.0
PROBE_SECONDS = 5.0


class Watcher:
    """Asks other peers how they see this one, for as long as it runs."""

    def __init__(
        self,
        transport: Transport,
        knowledge: Knowledge,
        *,
        neighbours: Callable[[], Sequence[Neighbour]],
        machine: Callable[[], tuple[Collection[str], Sequence[Endpoint]]],
        arrivals: Callable[[PeerId], int],
        on_look: Callable[[], None],
    ) -> None:
        self._transport = transport
        self._knowledge = knowledge
        self._neighbours = neighbours
        self._machine = machine
        self._arrivals = arrivals
        self._on_look = on_look
        self._changed = trio.Event()

    def look(self) -> None:
        """Look now, because there is a new connection."""
        self._changed.set()

    async def run(self) -> None:
        """Ask, until cancelled."""
        async with trio.open_nursery() as nursery:
            while True:
                self._changed = trio.Event()
                self._knowledge.machine(*self._machine())
                self._knowledge.connected(self._neighbours())
                self._on_look()
                for question in self._knowledge.questions(trio.current_time()):
                    nursery.start_soon(self._ask, question)
                with trio.move_on_after(LOOK_SECONDS):
                    await self._changed.wait()

    async def _ask(self, question: Question) -> None:
        answer: str | bool | Probe | None = None
        try:
            answer = await self._answer(question)
        except (UnreachableError, ClosedError) as error:
            logger.debug("%s did not help (%s): %s", question.peer.peer_id, question.reason, error)
        finally:
            self._knowledge.heard(trio.current_time(), question, answer)
            self.look()

    async def _answer(self, question: Question) -> str | bool | Probe | None:
        peer = question.peer
        if isinstance(question, AskLook):
            return (await look(self._transport, peer.peer_id)).host
        if isinstance(question, AskDialBack):
            before = self._arrivals(peer.peer_id)
            answer = await ask_dial_back(self._transport, peer.peer_id, question.port)
            if answer.outcome is Outcome.REFUSED:
                return None
            return answer.outcome is Outcome.REACHED and self._arrivals(peer.peer_id) > before
        seen = await whoami.ask(peer.host, peer.port, local_port=question.local_port, timeout=PROBE_SECONDS)
        return Probe(peer.host, seen.local_port, seen.port, trio.current_time())
