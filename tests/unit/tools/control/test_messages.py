"""Questions to a daemon, and its answers."""

from __future__ import annotations

import pytest
from msgspec.structs import fields

from p2pavg.base.errors import RemoteProtocolError
from p2pavg.base.messages import pack
from p2pavg.tools.control.messages import (
    MAX_TEXTS,
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
from tests.unit.tools.control.statuses import STATUS, status


@pytest.mark.parametrize("question", list(Question))
def test_questions_come_back(question: Question) -> None:
    data = encode_question(question)
    assert read_question(data) is question
    assert data == pack(2, pack(question.value)), "the encoding is frozen"


@pytest.mark.parametrize("answer", [STATUS, status(addresses=(), run_id=""), Done(), RefusedRequest("no")])
def test_answers_come_back(answer: Answer) -> None:
    assert read_answer(encode_answer(answer)) == answer


def test_the_encoding_of_an_answer_is_frozen() -> None:
    assert encode_answer(Done()) == pack(2, pack("done"))
    assert encode_answer(RefusedRequest("no")) == pack(2, pack("refused", "no"))


def test_another_version_is_named_with_the_remedy() -> None:
    with pytest.raises(
        RemoteProtocolError, match=r"version 3 of the control messages.*start the daemon again"
    ):
        read_question(pack(3, pack("status", "with a field that this version does not know")))
    with pytest.raises(RemoteProtocolError, match="version 9"):
        read_answer(pack(9, b"what a later version may say"))


NOT_MESSAGES = (b"", b"\xff", pack("status", 1), pack(2), pack(2, b""), pack(2, pack("unknown")))


@pytest.mark.parametrize("data", [*NOT_MESSAGES, pack(2, pack("status", 1)), pack(2, pack("done"))])
def test_bytes_that_are_no_question_are_refused(data: bytes) -> None:
    with pytest.raises(RemoteProtocolError):
        read_question(data)


@pytest.mark.parametrize("data", [*NOT_MESSAGES, pack(2, pack("done", 1)), pack(2, pack("status"))])
def test_bytes_that_are_no_answer_are_refused(data: bytes) -> None:
    with pytest.raises(RemoteProtocolError):
        read_answer(data)


@pytest.mark.parametrize(
    ("name", "value"),
    [
        *[("rounds", -1), ("uptime", -0.5), ("uptime", float("nan")), ("rounds", 1.5), ("leaving", 1)],
        *[("run_id", "two\nlines"), ("reachability", "\x1b[2J"), ("version", "v" * 1025)],
        *[("addresses", ("a",) * (MAX_TEXTS + 1)), ("addresses", (1,)), ("roles", ("\x00",))],
    ],
)
def test_a_status_out_of_range_is_refused(name: str, value: object) -> None:
    values = [value if each.name == name else getattr(STATUS, each.name) for each in fields(DaemonStatus)]
    with pytest.raises(RemoteProtocolError):
        read_answer(pack(2, pack("status", *values)))
