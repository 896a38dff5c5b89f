"""The errors with which a session ends: several of its tasks may raise at once, because one connection broke.

No I/O, no clock.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

from p2pavg.base.errors import ClosedError, P2PAvgError, RemoteProtocolError, StreamBrokenError

ENDINGS = (RemoteProtocolError, StreamBrokenError, ClosedError)


@contextmanager
def of_the_remote() -> Iterator[None]:
    """Raise one error of the other side or its connection instead of a group of several. All others are raised too."""
    endings: list[P2PAvgError] = []
    try:
        yield
    except* ENDINGS as group:
        endings += _leaves(group)
    if endings:
        raise next((error for error in endings if isinstance(error, RemoteProtocolError)), endings[0])


def _leaves(error: BaseException) -> Iterator[P2PAvgError]:
    if isinstance(error, BaseExceptionGroup):
        for inner in error.exceptions:
            yield from _leaves(inner)
    elif isinstance(error, P2PAvgError):
        yield error
