"""A guard for the handling of one peer's message: an unexpected exception costs that peer, never the process.

Messages are checked when they are decoded, and again by the rules, so no message should cause an exception. If one
does, it has found a bug of this project. Then the peer is dropped, the bug is logged with its traceback, and the
caller's training loop goes on. Use the guard around the handling of messages only. An exception in a timer or in an
action of this process was not caused by a message, and must stay loud.
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
    """Log an exception that leaves the block, and call ``on_fault(peer_id, exception)`` instead of raising it.

    The rest of the block is skipped, and the statement after the block runs. Cancellation, KeyboardInterrupt and every
    other exception that is not an ``Exception`` pass through, also inside an exception group. An exception of
    ``on_fault`` passes through too, because the peer has not caused it.

    Args:
        peer_id: the peer whose message is handled. It must be authenticated, or the log would accuse another peer.
        on_fault: a synchronous function that drops the peer, so that it cannot repeat the message.
        what: the name of the message in the log, such as ``"a vote"``.
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
