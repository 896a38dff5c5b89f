"""The measures of the house."""

from __future__ import annotations

from pathlib import Path

import pytest

from scripts.house import Figure, House, SourceFile, room_of

TEXT = '''"""A module.

Of two paragraphs.
"""

from collections.abc import Callable  # a comment behind code

# A comment of
# two lines.
WAIT_SECONDS = 1.0
"""A docstring of a constant."""
_PAUSE_SECONDS: float = 2.0
wait_seconds = 3.0


class One:
    """A class."""

    class Inner: ...

    def short(self, done: Callable[[], None], *, more: "Callable[[int], None] | None" = None) -> None:
        """Do nothing.

        Much.
        """
        if more is None:
            done()


def long() -> int:
    a = 1
    b = 2  # noqa: F841
    c = 3
    return a + c
'''


@pytest.fixture
def file(tmp_path: Path) -> SourceFile:
    path = tmp_path / "one.py"
    path.write_text(TEXT, encoding="utf-8")
    return SourceFile(path)


def test_code_is_without_blank_lines_comments_and_docstrings(file: SourceFile) -> None:
    assert file.code == 14


def test_comments_for_tools_do_not_count(file: SourceFile) -> None:
    assert file.comments == 3


def test_classes_and_constants_are_those_of_the_module(file: SourceFile) -> None:
    assert (list(file.classes), list(file.seconds)) == (["One"], ["WAIT_SECONDS", "_PAUSE_SECONDS"])


def test_a_short_function_has_three_lines_without_its_docstring(file: SourceFile) -> None:
    assert (len(file.functions), file.short_functions, file.callables) == (2, 1, 2)


def test_rooms_stand_at_the_top() -> None:
    assert [room_of(name) for name in ("p2pavg.net.libp2p.host", "p2pavg.peer.peer", "p2pavg_dht.node")] == [
        "p2pavg.net",
        "p2pavg.peer",
        "p2pavg_dht",
    ]


def test_the_house_has_arrows_that_point_down_only() -> None:
    house = House()
    assert "p2pavg_dht" in house.arrows["p2pavg.runs"]
    assert 1 < house.floors <= len(house.arrows)


def test_a_figure_is_worse_on_the_wrong_side_of_its_ceiling_only() -> None:
    assert Figure("files", 11, 9, 10, 5).is_worse
    assert not Figure("files", 10, 9, 10, 5).is_worse
    assert Figure("comments", 2, 9, 3, 5, more_is_better=True).is_worse
