"""Names of codecs and rules in the run entries of strangers: an auxiliary reads each once, and tells of them once."""

import hashlib

import pytest

from p2pavg.peer import auxiliary
from p2pavg.peer.auxiliary import MAX_SCHEMAS, is_known, most_common
from p2pavg.runs.records.run_entry import RunEntry
from p2pavg_compression import Codec, resolve_codec

LOOKS = 5
STRANGERS = 256
"""As many as a key has publishers."""


def entry(index: int, codec: str, aggregation: str = "") -> RunEntry:
    return RunEntry(
        schema_hash=hashlib.sha256(bytes([index % 256, index // 256])).digest(),
        tensors=1,
        elements=1000,
        codec=codec,
        group_size=4,
        rule="",
        aggregation=aggregation,
    )


@pytest.fixture
def reads(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """The codecs' names that were read since the test began, each as often as it was read."""
    names: list[str] = []

    def noted(name: str) -> Codec:
        names.append(name)
        return resolve_codec(name)

    is_known.cache_clear()
    monkeypatch.setattr(auxiliary, "resolve_codec", noted)
    return names


def test_names_that_are_refused_are_read_once(reads: list[str]) -> None:
    entries = {str(index): entry(index, f"topk:4096:{300 + index}:2") for index in range(STRANGERS)}
    for _ in range(LOOKS):
        chosen, unknown = most_common(entries)
        assert not chosen
        assert "the codec 'topk:4096:" in unknown
    assert len(reads) == STRANGERS


def test_rules_that_are_refused_are_read_once(reads: list[str]) -> None:
    entries = {str(index): entry(index, "fp32", f"centered_clip:{index}:99999") for index in range(STRANGERS)}
    for _ in range(LOOKS):
        assert not most_common(entries)[0]
    assert len(reads) == STRANGERS


def test_entries_that_are_known_are_found_among_those_that_are_not() -> None:
    entries = {str(index): entry(index, "unheard:of") for index in range(STRANGERS - 8)}
    good = {f"good {index}": entry(1000 + index, "blockwise8", "median") for index in range(2)}
    chosen, unknown = most_common(entries | good)
    assert set(chosen.values()) == set(good.values())
    assert "'unheard:of'" in unknown


def test_no_more_schemas_are_chosen_than_are_helped() -> None:
    entries = {str(index): entry(index, "fp32") for index in range(STRANGERS)}
    chosen, unknown = most_common(entries)
    assert len(chosen) == MAX_SCHEMAS
    assert not unknown
