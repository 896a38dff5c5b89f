"""Text of other peers: made where the bytes come in, and shown as it is wherever it is printed."""

from __future__ import annotations

import ast
import copy
import pickle
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from p2pavg.base.formats import PeerText
from p2pavg.base.messages import pack
from p2pavg.matchmaking import messages as matches
from p2pavg.net.lanes import halfway as lanes
from p2pavg.net.nat.punch import plan as punches
from p2pavg.net.nat.reach.service import NONCE_BYTES, DialBackOutcome, DialledBack, read_dialled_back
from p2pavg.net.nat.relay import messages as relays
from p2pavg.state.messages import Welcome, read_reason
from p2pavg.tools.control.messages import RefusedRequest as RefusedCommand
from p2pavg.tools.control.messages import encode_answer as encode_command_answer
from p2pavg.tools.control.messages import read_answer as read_command_answer
from p2pavg.verification.evidence.accusation import EvidenceAnswer

ROOT = Path(__file__).parents[4]
MARKUP = "[/b] no {0} %s $x_{ <i>"
"""Words of every language that a place which shows text may have, all of them printable."""
NONCE = bytes(NONCE_BYTES)


def attribute(name: str, decode: Callable[[bytes], object]) -> Callable[[bytes], object]:
    return lambda data: getattr(decode(data), name)


def dialled_back(reason: str) -> bytes:
    return DialledBack(NONCE, DialBackOutcome.FAILED, reason).encode()


def read_outcome(data: bytes) -> DialledBack:
    return read_dialled_back(data, NONCE)


DECODERS: dict[str, tuple[Callable[[str], bytes], Callable[[bytes], object]]] = {
    "a leader declines": (
        lambda text: matches.encode(matches.Declined(text)),
        attribute("reason", matches.decode),
    ),
    "a member refuses a roster": (
        lambda text: matches.encode(matches.Refuse(bytes(32), text)),
        attribute("reason", matches.decode),
    ),
    "a leader disbands": (
        lambda text: matches.encode(matches.Disband(text)),
        attribute("reason", matches.decode),
    ),
    "a lane is refused": (
        lambda text: lanes.LaneOffer(text).encode(),
        attribute("refusal", lanes.LaneOffer.decode),
    ),
    "a dial for a lane failed": (
        lambda text: lanes.LaneVerdict(1, text).encode(),
        attribute("reason", lanes.LaneVerdict.decode),
    ),
    "a punch is refused": (
        lambda text: punches.PunchAnswer(text).encode(),
        attribute("refusal", punches.PunchAnswer.decode),
    ),
    "a punch failed": (
        lambda text: punches.PunchVerdict(text).encode(),
        attribute("reason", punches.PunchVerdict.decode),
    ),
    "a relay refuses": (lambda text: relays.RelayRefusal(text).encode(), attribute("reason", relays.decode)),
    "a dial-back failed": (dialled_back, attribute("reason", read_outcome)),
    "a daemon refuses": (
        lambda text: encode_command_answer(RefusedCommand(text)),
        attribute("reason", read_command_answer),
    ),
}
STRICT = {
    "evidence is refused": (lambda text: pack(1, text), attribute("refusal", EvidenceAnswer.decode)),
    "a donor serves nothing": (lambda text: pack(1, text), attribute("refusal", Welcome.decode)),
    "a donor refuses a request": (str.encode, read_reason),
}
"""Decoders that take no message with control characters at all."""


@pytest.mark.parametrize("case", [*DECODERS, *STRICT])
def test_a_decoder_returns_the_text_as_a_peers_text(case: str) -> None:
    write, read = (DECODERS | STRICT)[case]
    found = read(write(MARKUP))
    assert type(found) is PeerText
    assert found == MARKUP


@pytest.mark.parametrize("case", DECODERS)
def test_a_decoder_leaves_no_control_character(case: str) -> None:
    write, read = DECODERS[case]
    found = read(write("a\x1b[2J\n\u202eb"))
    assert found == "a?[2J??b"


class TestTheType:
    def test_it_is_the_text_in_all_other_respects(self) -> None:
        text = PeerText(MARKUP)
        assert (text, hash(text), f"{text:>30}", text + "x") == (
            MARKUP,
            hash(MARKUP),
            f"{MARKUP:>30}",
            MARKUP + "x",
        )
        assert pack(text) == pack(MARKUP)
        for same in (copy.deepcopy(text), pickle.loads(pickle.dumps(text))):
            assert (type(same), same) == (PeerText, MARKUP)

    def test_it_is_never_a_format(self) -> None:
        text = PeerText("%d {0}")
        with pytest.raises(TypeError, match="no format"):
            text % 1
        with pytest.raises(TypeError, match="no format"):
            text.format(1)
        with pytest.raises(TypeError, match="no format"):
            text.format_map({})
        assert "says %s" % text == "says %d {0}"  # noqa: UP031 - the old way is what loggers do


def calls_of(names: set[str]) -> Iterator[tuple[Path, ast.Call]]:
    for folder in ("p2pavg", "dht", "compression", "scripts/demo_gpt"):
        for file in (ROOT / folder).rglob("*.py"):
            text = file.read_text()
            for node in ast.walk(ast.parse(text)) if any(name in text for name in names) else ():
                if isinstance(node, ast.Call):
                    name = getattr(node.func, "attr", getattr(node.func, "id", ""))
                    if name in names:
                        yield file, node


def test_no_column_of_a_progress_bar_reads_markup() -> None:
    """A TextColumn formats a string, which is markup unless it says otherwise: no escaping in between is possible."""
    found = list(calls_of({"TextColumn"}))
    assert found
    for file, call in found:
        given = {each.arg: getattr(each.value, "value", None) for each in call.keywords}
        assert given.get("markup") is False, f"{file}:{call.lineno}: TextColumn without markup=False"
