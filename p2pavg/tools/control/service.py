"""Both sides of the control socket: the daemon's service, and the call of a command."""

from __future__ import annotations

import logging
from collections.abc import Awaitable, Callable
from pathlib import Path

import trio

from p2pavg.base.errors import ControlError, RemoteProtocolError, StreamBrokenError
from p2pavg.base.limits import QUICK_REPLY_SECONDS, REPLY_SECONDS
from p2pavg.base.threads.waits import bare_exceptions
from p2pavg.net.transport import receive_message, send_message
from p2pavg.net.unix import Handler, UnixStream, connect_unix
from p2pavg.tools.control.messages import (
    MAX_MESSAGE_BYTES,
    Answer,
    DaemonStatus,
    Done,
    Question,
    RefusedRequest,
    encode_answer,
    encode_question,
    read_answer,
    read_question,
)

logger = logging.getLogger(__name__)

MAX_QUESTIONS = 1000  # on one connection: a program that watches the daemon may keep it

Answering = Callable[[Question], Awaitable[Answer]]


def control_handler(answering: Answering) -> Handler:
    """Return the handler of a daemon's control socket. It answers one question after another."""

    async def serve(stream: UnixStream) -> None:
        for _ in range(MAX_QUESTIONS):
            with trio.move_on_after(REPLY_SECONDS) as scope:
                data = await receive_message(stream, max_bytes=MAX_MESSAGE_BYTES)
            if scope.cancelled_caught or data is None:
                return
            try:
                question = read_question(data)
            except RemoteProtocolError as error:
                await send_message(stream, encode_answer(RefusedRequest(str(error))))
                return
            logger.debug("%s asks: %s", stream.remote, question)
            await send_message(stream, encode_answer(await _answer(answering, question)))

    return serve


async def _answer(answering: Answering, question: Question) -> Answer:
    try:
        with trio.fail_after(QUICK_REPLY_SECONDS):
            return await answering(question)
    except trio.TooSlowError:
        return RefusedRequest(f"no answer within {QUICK_REPLY_SECONDS:.0f} s")
    except Exception:
        logger.exception("the question %s on the control socket failed", question)
        return RefusedRequest("an exception, which is in its log")


async def ask(
    path: Path, question: Question, *, timeout: float = 2 * QUICK_REPLY_SECONDS
) -> DaemonStatus | Done:
    """Ask the daemon that listens on a socket.

    Raises:
        NotRunningError: no daemon listens there.
        ControlError: it belongs to another user, refuses, answers nothing sensible, or not within ``timeout`` seconds.
    """
    with bare_exceptions(), trio.move_on_after(timeout):
        async with connect_unix(path) as stream:
            try:
                await send_message(stream, encode_question(question))
                data = await receive_message(stream, max_bytes=MAX_MESSAGE_BYTES)
                if data is None:
                    raise ControlError(f"the daemon at {path} ended before it answered")
                answer = read_answer(data)
            except RemoteProtocolError as error:
                raise ControlError(f"the daemon at {path} is of another version: {error}") from None
            except StreamBrokenError as error:
                raise ControlError(f"the daemon at {path} ended before it answered: {error}") from None
        if isinstance(answer, RefusedRequest):
            raise ControlError(f"the daemon refused: {answer.reason}")
        return answer
    raise ControlError(f"the daemon at {path} did not answer within {timeout:.0f} s")
