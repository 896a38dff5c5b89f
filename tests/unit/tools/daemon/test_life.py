"""A daemon that is told to leave: which word counts, and when it ends."""

from __future__ import annotations

from typing import cast

import pytest

from p2pavg.peer.peer import Peer
from p2pavg.tools.daemon.life import DaemonProcess


@pytest.mark.parametrize(
    ("words", "restarts"), [((True,), True), ((True, False), False), ((False, True), True)]
)
@pytest.mark.parametrize("joined", [False, True])
async def test_the_last_word_decides_whether_it_starts_again(
    words: tuple[bool, ...], restarts: bool, joined: bool
) -> None:
    """It counts while the peer still joins too: otherwise SIGHUP would end a daemon that nothing starts again."""
    life = DaemonProcess("run", None, None)
    if joined:
        life._peer = cast(Peer, object())
    for restart in words:
        life.leave("a test", restart=restart)
    assert life.leaving.is_set()
    assert life.restarts is restarts
    assert life._scope.cancel_called is (not joined or len(words) > 1)
