"""The terminal's screen shows the same as the page, and obeys no text of a peer."""

from __future__ import annotations

import io
from typing import Any

import pytest
from msgspec.structs import replace
from rich.console import Console

from p2pavg.telemetry.status import PeerStatus, key_of
from p2pavg.tools.monitor.overview import Overview
from p2pavg.tools.monitor.terminal import screen
from tests.unit.telemetry.statuses import FULL, HOSTILE_TEXTS

NOW = 1_800_000_010.0


def text_of(statuses: dict[str, PeerStatus], height: int = 60) -> str:
    overview = Overview("the run", begins=NOW)
    overview.receive({peer_id: (status, NOW) for peer_id, status in statuses.items()}, NOW)
    run: Any = overview.shown(NOW + 1)
    console = Console(file=io.StringIO(), width=140, height=height, force_terminal=False)
    console.print(screen(run, height))
    assert isinstance(console.file, io.StringIO)
    return console.file.getvalue()


def test_screen_shows_peers_rounds_metrics_parameters_transfers_and_exchanges() -> None:
    text = text_of({"one": FULL, "two": replace(FULL, name="second", lanes=(key_of("one"),))})
    for expected in ("the run", "garage, 3090", "second", "waiting", "01010101", "done", "no group", "loss"):
        assert expected in text
    for expected in ("fetches 5 B of 10 B", "1 by lane", "update 7", "says that it holds other parameters"):
        assert expected in text


def test_empty_run_has_a_screen() -> None:
    assert "0 peers" in text_of({})


def test_markup_in_a_name_is_shown_as_it_is() -> None:
    text = text_of({"one": PeerStatus(name="[red]boo[/red]")})
    assert text.count("[red]boo[/red]") == 2, "in the table of peers and in the news"


@pytest.mark.parametrize("said", HOSTILE_TEXTS)
def test_no_text_of_a_peer_is_obeyed(said: str) -> None:
    rounds = (replace(FULL.rounds[1], reason=said),)
    status = replace(
        FULL, name=said, role=said, reach_sentence=said, drift=said, rounds=rounds,
        metrics=((said, 1.0),), history_of=said, history=((1, 2.0), (2, 1.0)),
    )  # fmt: skip
    assert text_of({"one": status}).count(said) >= 3, "the name, the metric and the drift"


def test_a_helper_is_said_to_help() -> None:
    """It trains nothing: "idle" at update 0 would read as if it did nothing."""
    text = text_of({"one": PeerStatus(name="vera", role="auxiliary", total_rounds=33)})
    (row,) = [line for line in text.splitlines() if "vera" in line and "33" in line]
    assert "helping" in row
    assert "idle" not in row
    assert row.split()[2:4] == ["-", "-"]
    assert "no peer trains now" in text, "also after the trainers have left, where yet would be wrong"


def test_a_peer_whose_history_is_later_than_its_update_has_no_curve() -> None:
    """It contradicts itself. Without any point, there would be no last value to show."""
    liar = PeerStatus(history_of="loss", history=((5, 1.0),))
    assert "no metric yet" in text_of({"one": liar})


def test_many_peers_leave_room_for_the_rest() -> None:
    text = text_of({f"peer {index}": replace(FULL, name=f"name {index}") for index in range(100)}, height=40)
    assert "more" in text
    assert "Rounds" in text
    assert len(text.splitlines()) <= 45
