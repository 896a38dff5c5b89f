"""Peers' published recipes: encoded, refused if malformed, and compared in plain sentences."""

from __future__ import annotations

from typing import Any

import pytest
from msgspec.structs import replace

from p2pavg.base.errors import RemoteProtocolError
from p2pavg.base.messages import pack
from p2pavg.optim.base.recipe import MAX_FIELD_CHARS, MAX_FIELDS, Rate
from p2pavg.optim.coordination.progress import MAX_EPOCH
from p2pavg.optim.coordination.word import MAX_RATES, MAX_WORD_BYTES, RecipeRecord, differences, encode_word

WORD = RecipeRecord(
    recipe=b"r" * 32,
    origin=b"o" * 32,
    tensors=97,
    elements=1000,
    fields=(("inner", "AdamW"), ("target_batch_size", "16"), ("max_grad_norm", "none"), ("lr", "0.1")),
    rates=(Rate(1, b"1" * 8, "lr 0.1"), Rate(4, b"4" * 8, "lr 0.05")),
    until=20,
    epoch=20,
    state=b"s" * 32,
    digests=b"d" * 24,
)


def with_field(name: str, text: str) -> RecipeRecord:
    fields = tuple((n, text if n == name else t) for n, t in WORD.fields)
    return replace(WORD, recipe=b"x" * 32, fields=fields)


class TestReading:
    def test_word_survives_encoding(self) -> None:
        assert RecipeRecord.decode(encode_word(WORD)) == WORD

    def test_the_bytes_never_change(self) -> None:
        first = replace(WORD, rates=(), until=0, epoch=0, state=b"", digests=b"", fields=())
        expected = pack(2, b"r" * 32, b"o" * 32, 97, 1000, (), (), 0, 0, b"", b"")
        assert encode_word(first) == expected

    @pytest.mark.parametrize(
        "change",
        [
            {"recipe": b""},
            {"origin": b"o" * 31},
            {"tensors": 0},
            {"tensors": 10**9},
            {"elements": -1},
            {"elements": 2**40},
            {"fields": (("inner", "x" * (MAX_FIELD_CHARS + 1)),)},
            {"fields": (("inner", "\x1b[31m"),)},
            {"fields": (("", "x"),)},
            {"fields": (("n" * 33, "x"),)},
            {"fields": (("a", "b"),) * (MAX_FIELDS + 1)},
            {"rates": ((1, b"1" * 8, ""),) * (MAX_RATES + 1)},
            {"rates": ((-1, b"1" * 8, ""),)},
            {"rates": ((1, b"1" * 7, ""),)},
            {"rates": ((1, b"1" * 8, "\n"),)},
            {"until": MAX_EPOCH + 1},
            {"epoch": -1},
            {"epoch": 0},
            {"state": b""},
            {"digests": b""},
            {"digests": b"d" * 25},
            {"digests": b"d" * (8 * 65)},
        ],
    )
    def test_out_of_range_values_are_refused(self, change: dict[str, Any]) -> None:
        fields = {name: getattr(WORD, name) for name in WORD.__struct_fields__} | change
        with pytest.raises(RemoteProtocolError):
            RecipeRecord.decode(pack(2, *fields.values()))

    def test_longest_word_is_cut_to_fit_a_record(self) -> None:
        fields = tuple((f"{index:032}", "\U0001f40e" * MAX_FIELD_CHARS) for index in range(MAX_FIELDS))
        rates = tuple(Rate(index, b"1" * 8, "x" * MAX_FIELD_CHARS) for index in range(MAX_RATES))
        longest = replace(WORD, fields=fields, rates=rates, digests=b"d" * 512)
        packed = encode_word(longest)
        assert len(packed) <= MAX_WORD_BYTES
        assert RecipeRecord.decode(packed).digests == longest.digests


class TestDifferences:
    def test_no_sentence_for_equal_peers(self) -> None:
        later = replace(WORD, until=30, epoch=30, rates=(*WORD.rates, Rate(25, b"2" * 8, "lr 0.01")))
        assert differences(WORD, [WORD, later]) == ()

    def test_differing_field_is_named(self) -> None:
        others = [with_field("target_batch_size", "4096")] * 2
        expected = "2 peers of this run train with target_batch_size 4096, this one with 16"
        assert differences(WORD, others) == (expected,)

    def test_most_common_difference_comes_first(self) -> None:
        others = [with_field("lr", "0.2"), *[with_field("max_grad_norm", "1")] * 2]
        assert differences(WORD, others) == (
            "2 peers of this run train with max_grad_norm 1, this one with none",
            "1 peer of this run trains with lr 0.2, this one with 0.1",
        )

    def test_other_first_parameters_are_reported(self) -> None:
        expected = "1 peer of this run began with other parameters than this one (another seed?)"
        assert differences(WORD, [replace(WORD, origin=b"x" * 32)]) == (expected,)

    def test_other_architecture_is_reported(self) -> None:
        [sentence] = differences(WORD, [replace(WORD, tensors=98, elements=2000, origin=b"x" * 32)])
        assert sentence == (
            "1 peer of this run trains another architecture: 98 tensors of 2000 elements, this one 97 of 1000"
        )

    def test_difference_without_a_field_is_reported(self) -> None:
        [sentence] = differences(WORD, [replace(WORD, recipe=b"x" * 32)])
        assert "other settings" in sentence

    def test_rate_set_by_hand_is_reported(self) -> None:
        other = replace(WORD, rates=(Rate(1, b"1" * 8, "lr 0.1"), Rate(3, b"9" * 8, "lr 0.9")))
        assert differences(WORD, [other]) == (
            "1 peer of this run took update 3 with lr 0.9, this one with lr 0.1",
        )
        assert differences(WORD, [replace(other, until=2)]) == (), "it may be about to say another one"

    def test_many_invented_differences_give_few_sentences(self) -> None:
        liars = [with_field("lr", str(index)) for index in range(1000)]
        told = differences(WORD, liars)
        assert len(told) == 3
        assert all(len(sentence) < 300 for sentence in told)
