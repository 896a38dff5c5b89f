"""Words come back as they were, and strangers' bytes are refused."""

from __future__ import annotations

import math
from typing import Any

import pytest
from msgspec.structs import asdict, replace

from p2pavg.base.errors import RemoteProtocolError
from p2pavg.base.messages import pack
from p2pavg.population import Decision, Word, decide
from p2pavg.population.history import Ancestor, pack_ancestors, read_ancestors
from p2pavg.population.settings import MAX_HYPERPARAMETERS, MAX_NAME_CHARS
from p2pavg.population.words import MAX_BASIS, MAX_MEMBER_CHARS, MAX_WORD_BYTES, lineage_after
from tests.unit.population.samples import SETTINGS, population, standing


def word() -> Word:
    words = population([0.1, 0.2, 0.3, 0.4])
    mine = words.pop("peer 3")
    return Word(standing=mine, decision=decide("peer 3", mine, words, SETTINGS)[0])


def changed(index: int, value: Any) -> bytes:
    """Return a word with one field changed: its version, one of its standing from 1 on, or its decision."""
    whole = word()
    version, standing_of, decision = 2, list(asdict(whole.standing).values()), whole.decision
    if index == 0:
        version = value
    elif index <= len(standing_of):
        standing_of[index - 1] = value
    else:
        decision = value
    return pack(version, standing_of, decision)


def test_words_come_back_as_they_were() -> None:
    for each in (word(), Word(standing=standing(1, 0.5))):
        assert Word.decode(each.encode()) == each
        assert Word.decode(each.encode()).encode() == each.encode()


def test_the_longest_word_has_room_in_a_record() -> None:
    pairs = tuple(
        (f"a{number:0{MAX_NAME_CHARS - 1}}", "v" * MAX_NAME_CHARS) for number in range(MAX_HYPERPARAMETERS)
    )
    basis = tuple(number.to_bytes(16, "big") for number in range(MAX_BASIS))
    decision = Decision(donor=basis[0], hyperparameters=pairs, basis=basis, failed=basis[1:4])
    longest = Word(
        standing=standing(1, 0.5, hyperparameters=pairs, member="m" * MAX_MEMBER_CHARS), decision=decision
    )
    assert len(longest.encode()) <= MAX_WORD_BYTES
    assert Word.decode(longest.encode()) == longest


PAIRS = (("lr", 0.1),)
ONE, TWO, THREE = (digit * 16 for digit in (b"1", b"2", b"3"))
WRONG: dict[int, list[Any]] = {
    0: [1],
    1: [b"short"],
    2: ["", "m" * (MAX_MEMBER_CHARS + 1), "red\x1b[31m", "größe"],
    3: [0, 2**60],
    4: [-1],
    5: [math.nan, math.inf, 1e101, 1],
    6: [
        *((), (("lr", math.nan),), (("lr", b"bytes"),), (("lr", 0.1), ("lr", 0.2)), (("z", 0.1), ("a", 0.2))),
        *((("not a name", 0.1),), (("n" * 25, 0.1),), (("lr", "t" * 25),), (("lr",),), (("lr", (1, 2)),)),
        *(("lr",), tuple((f"n{number:02}", 0.1) for number in range(17))),
    ],
    7: [b""],
    8: [bytes(31)],
    9: [bytes(33)],
    10: [0, 2**60],
    11: [
        *((b"",), (b"", PAIRS, tuple(bytes([n]) * 16 for n in range(65)), ()), (b"", PAIRS, (TWO, ONE), ())),
        *((ONE, PAIRS, (TWO,), ()), (b"", PAIRS, (TWO,), (THREE,)), (TWO, PAIRS, (TWO,), (TWO,))),
        *((b"", (("lr", math.inf),), (), ()), (b"", PAIRS, (b"short",), ())),
    ],
}


@pytest.mark.parametrize(
    ("index", "value"), [(index, each) for index, all_ in WRONG.items() for each in all_]
)
def test_a_field_out_of_range_is_refused(index: int, value: Any) -> None:
    assert Word.decode(changed(0, 2)) == word()
    with pytest.raises(RemoteProtocolError):
        Word.decode(changed(index, value))


def test_digests_and_lineages_depend_on_all_that_they_name() -> None:
    one = standing(1, 0.5)
    assert one.digest != replace(one, score=0.25).digest
    assert one.digest != replace(one, root=bytes(32)).digest
    pairs = one.hyperparameters
    lineage = lineage_after(bytes(32), "peer", 1, pairs)
    others = ((bytes(32), "peer", 2), (lineage, "peer", 1), (bytes(32), "other", 1))
    assert lineage not in {lineage_after(*each, pairs) for each in others}


def test_generations_come_back_and_malformed_ones_are_refused() -> None:
    ancestors = (Ancestor("a", 1, 10, 0.5, {"lr": 0.1}), Ancestor("b", 2, 20, 0.25, {"lr": 0.2}))
    packed = pack_ancestors(ancestors)
    assert read_ancestors(packed) == ancestors
    malformed: list[object] = [
        None,
        [[]],
        [["a", 1, 10, math.nan, {"lr": 0.1}]],
        [["a", 0, 10, 0.5, {"lr": 0.1}]],
        [["a", 1, 10, 0.5, {}]],
        [["a", 1, 10, 0.5, {"not a name": 0.1}]],
        [["\x1b", 1, 10, 0.5, {"lr": 0.1}]],
        packed * 600,
    ]
    for value in malformed:
        with pytest.raises(RemoteProtocolError):
            read_ancestors(value)
