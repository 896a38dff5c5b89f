"""An unexpected exception while one peer's message is handled costs that peer, never the process.

Messages are checked when they are decoded and again by the rules, so no message should cause an exception. Should one
do so all the same, it is a bug of this project that the peer's message reached. The peer is dropped and the bug is
logged with its traceback; the caller's training loop goes on. Use it around the handling of messages only: an exception
in a timer or in an own action was caused by no message and must stay loud.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator
from contextlib import contextmanager

logger = logging.getLogger(__name__)


@contextmanager
def guarded(
    peer_id: str,
    on_fault: Callable[[str, Exception], None],
    *,
    what: str = "a message",
    expected: tuple[type[Exception], ...] = (),
) -> Iterator[None]:
    """Log an exception that leaves the block, and call ``on_fault(peer_id, exception)`` once instead of raising it.

    What comes after the statement that raised is not run; the statement after the block is. Cancellation,
    KeyboardInterrupt and every other exception that is no ``Exception`` pass through, also in an exception group.
    What ``on_fault`` itself raises passes through as well: by then the peer is no longer to blame.

    Args:
        peer_id: the peer whose message is handled; authenticated, or the log would accuse another peer.
        on_fault: has to drop the peer, so that it cannot repeat the message. Synchronous.
        what: the thing that is handled, for the log: ``"a vote"``.
        expected: exceptions that the code around the block handles itself; they pass through.
    """
    try:
        yield
    except expected:
        raise
    except Exception as error:
        logger.exception(
            "handling %s of %s raised %s; the peer is dropped. This is a bug of p2pavg: please report it",
            what,
            peer_id,
            type(error).__name__,
        )
        on_fault(peer_id, error)
