"""The boards of a run that the processes of one peer share."""

from __future__ import annotations

from collections.abc import Callable

from p2pavg.attached.guest import Guest
from p2pavg.attached.messages import WHILE_ATTACHED, process_id
from p2pavg.attached.words import joint_word
from p2pavg.runs.records.board import Board, Entry


class SharedBoard:
    """One topic: each process sees the other processes' entries and other peers', and these see one of this peer.

    Args:
        peer_id: this peer.
        topic: the topic.
        board: of this peer.
        channels: returns the channel of a process's averager.
        said: is told what this peer says for its processes.
    """

    def __init__(
        self,
        peer_id: str,
        topic: str,
        board: Board,
        channels: Callable[[str], int],
        said: Callable[[str, bytes], None],
    ) -> None:
        self._on_word = said
        self._peer_id = peer_id
        self._topic = topic
        self._board = board
        self._channels = channels
        self._said: dict[str, bytes] = {}
        self._guests: dict[str, Guest] = {}
        self._known: dict[str, Entry] = {}
        self._sequence = 0
        board.subscribe(self._look)

    def join(self, guest: Guest) -> None:
        """Show a process the present entries, and every change from now on."""
        self._guests[guest.name] = guest
        for publisher, entry in self._known.items():
            self._show(guest, publisher, entry)
        for name in self._said:
            if name != guest.name:
                self._show(guest, process_id(self._peer_id, name), self._entry(name))

    def say(self, name: str, value: bytes, *, urgent: bool) -> None:
        """Replace the entry of a process; an empty value withdraws it."""
        if value:
            self._said[name] = value
        else:
            self._said.pop(name, None)
        self._sequence += 1
        for guest in self._guests.values():
            if guest.name != name:
                self._show(guest, process_id(self._peer_id, name), self._entry(name))
        joint = joint_word(self._topic, self._said)
        if joint:
            self._board.publish(joint, now=urgent)
        else:
            self._board.withdraw()
        self._on_word(self._topic, joint)

    def leave(self, name: str) -> None:
        """Forget a process, and withdraw its entry."""
        self._guests.pop(name, None)
        if name in self._said:
            self.say(name, b"", urgent=True)

    def _entry(self, name: str) -> Entry:
        return Entry(self._said.get(name, b""), self._sequence, WHILE_ATTACHED)

    def _look(self) -> None:
        """Pass on the entries of other peers that have changed."""
        now = dict(self._board.entries)
        gone = {peer: Entry(b"", said.sequence, said.expiration_time) for peer, said in self._known.items()}
        changed = {peer: entry for peer, entry in (gone | now).items() if self._known.get(peer) != entry}
        self._known = now
        for guest in self._guests.values():
            for publisher, entry in changed.items():
                self._show(guest, publisher, entry)

    def _show(self, guest: Guest, publisher: str, entry: Entry) -> None:
        channel = self._channels(guest.name)
        guest.send(
            "entry",
            channel,
            self._topic,
            publisher,
            entry.value,
            entry.sequence,
            float(entry.expiration_time),
        )
