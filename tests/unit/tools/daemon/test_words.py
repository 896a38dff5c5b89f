"""A daemon's status in words, as JSON, and as an exit code."""

from __future__ import annotations

import json
import re
from pathlib import Path

import pytest

from p2pavg.base.formats import in_bytes, in_time
from p2pavg.tools.daemon.words import ExitCode, as_json, as_lines, exit_code
from tests.unit.tools.control.statuses import STATUS, status

ROOT = Path(__file__).parents[4]


@pytest.mark.parametrize(
    ("changes", "code", "said"),
    [
        ({}, 0, "runs for 1 h 2 min"),
        ({"peers": 0}, 4, "runs for 1 h 2 min, without other peers"),
        ({"refusal": "it was revoked"}, 5, "runs for 1 h 2 min; other members refuse it: it was revoked"),
        ({"refusal": "no", "peers": 0}, 5, "runs for 1 h 2 min; other members refuse it: no"),
        ({"leaving": True}, 0, "finishes its rounds, and then ends"),
    ],
)
def test_states_and_exit_codes(changes: dict[str, object], code: int, said: str) -> None:
    assert exit_code(status(**changes)) == code
    assert as_lines("h", status(**changes))[0].split(maxsplit=1) == ["state", said]


def test_exit_codes_are_frozen_and_documented() -> None:
    assert [(each.name, int(each)) for each in ExitCode] == [
        *[("DONE", 0), ("MISTAKE", 1), ("USAGE", 2), ("NOT_RUNNING", 3), ("ALONE", 4), ("REFUSED", 5)],
        *[("BUG", 70), ("TRY_AGAIN", 75)],
    ]
    text = (ROOT / "docs/how-to/run-a-peer.md").read_text()
    documented = re.findall(r"^\| `(\d+)` \|", text, re.MULTILINE)
    assert [int(code) for code in documented] == [int(each) for each in ExitCode]


@pytest.mark.parametrize(
    ("seconds", "text"),
    [
        *[(0, "0 s"), (59.9, "59 s"), (60, "1 min 0 s"), (3725, "1 h 2 min")],
        *[(3 * 86400 + 5, "3 d"), (86400 + 3600, "1 d 1 h")],
    ],
)
def test_durations(seconds: float, text: str) -> None:
    assert in_time(seconds) == text


@pytest.mark.parametrize(
    ("number", "text"), [(0, "0 B"), (999, "999 B"), (1000, "1.0 kB"), (2.5e9, "2.5 GB"), (3e15, "3000.0 TB")]
)
def test_bytes(number: float, text: str) -> None:
    assert in_bytes(number) == text


def test_lines_say_what_the_daemon_does() -> None:
    text = "\n".join(as_lines("/home/me/lab", STATUS))
    for part in (
        "lab as auxiliary",
        "/ip4/203.0.113.7/tcp/4001/p2p/12D3KooWpeer",
        "3 other peers of the network, 2 of the run",
        "helped 17 rounds, and 1 failed; reduced 1,099,511,627,776 elements",
        "123.5 MB sent, 987 B received",
        "valid until 2030-03-17",
        "p2pavg 0.1.0, process 4711",
        "/home/me/lab",
    ):
        assert part in text, part
    assert "certificate" not in "".join(as_lines("h", status(certificate_expires=0.0)))


def test_json_has_every_field() -> None:
    (found,) = json.loads(as_json([("/home/me/lab", STATUS)]))
    assert found["home"] == "/home/me/lab"
    assert (found["code"], found["connected"]) == (0, True)
    assert found["rounds"] == 17
    assert found["addresses"] == list(STATUS.addresses)


def test_a_machine_that_trains_shows_that_in_place_of_helped_rounds() -> None:
    lines = as_lines("/home", status(training="update 5, loss 2.5; this machine gave 50 samples"))
    assert "training      update 5, loss 2.5; this machine gave 50 samples" in lines
    assert not any(line.startswith("rounds") for line in lines)
