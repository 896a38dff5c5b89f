"""An exception in the handling of a message costs its sender; any other exception is raised."""

from __future__ import annotations

import logging

import pytest
import trio

from p2pavg.base.errors import RemoteProtocolError
from p2pavg.net.blame import guarded


class Faults:
    def __init__(self) -> None:
        self.seen: list[tuple[str, Exception]] = []

    def __call__(self, peer_id: str, error: Exception) -> None:
        self.seen.append((peer_id, error))


@pytest.mark.parametrize(
    "error", [KeyError("x"), AssertionError(), ValueError(), ExceptionGroup("g", [OSError()])]
)
def test_an_unexpected_exception_costs_its_peer_and_is_logged_with_its_traceback(
    error: Exception, caplog: pytest.LogCaptureFixture
) -> None:
    faults = Faults()
    with guarded("12D3peer", faults, what="a vote"):
        raise error
    assert faults.seen == [("12D3peer", error)]
    (record,) = caplog.records
    assert record.levelno == logging.ERROR
    assert "a vote of 12D3peer" in record.getMessage()
    assert record.exc_info is not None
    assert record.exc_info[1] is error


def test_expected_exceptions_pass_through(caplog: pytest.LogCaptureFixture) -> None:
    faults = Faults()
    with pytest.raises(RemoteProtocolError), guarded("12D3peer", faults, expected=(RemoteProtocolError,)):
        raise RemoteProtocolError("malformed")
    assert not faults.seen
    assert not caplog.records


@pytest.mark.parametrize("error", [KeyboardInterrupt(), SystemExit(1)])
def test_exceptions_that_end_the_process_pass_through(error: BaseException) -> None:
    faults = Faults()
    with pytest.raises(type(error)), guarded("12D3peer", faults):
        raise error
    with pytest.raises(BaseExceptionGroup), guarded("12D3peer", faults):
        raise BaseExceptionGroup("both", [ValueError(), error])
    assert not faults.seen


async def test_cancellation_passes_through() -> None:
    faults = Faults()
    with trio.CancelScope() as scope:
        scope.cancel()
        with guarded("12D3peer", faults):
            await trio.sleep_forever()
    assert scope.cancelled_caught
    assert not faults.seen


def test_an_exception_in_dropping_the_peer_is_loud() -> None:
    def drop(_peer_id: str, _error: Exception) -> None:
        raise RuntimeError("ours")

    with pytest.raises(RuntimeError, match="ours"), guarded("12D3peer", drop):
        raise ValueError("theirs")
