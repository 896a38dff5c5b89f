"""Only companions make a peer take another state: strangers can publish any digests."""

from __future__ import annotations

from typing import cast

import pytest
import torch
from msgspec.structs import replace

from p2pavg.blocking import Averager
from p2pavg.optim.base.state import Lineage, short_digests, tensor_digest
from p2pavg.optim.coordination.watch import DriftMonitor
from p2pavg.optim.coordination.word import TOPIC, RecipeRecord, encode_word
from tests.unit.optim.fakes import Alone
from tests.unit.optim.loops import Talk

LINEAGE = Lineage(10, b"s" * 32)
WORD = RecipeRecord(recipe=b"r" * 32, origin=b"o" * 32, tensors=1, elements=3, fields=())
TOLD = replace(WORD, epoch=LINEAGE.epoch, state=LINEAGE.state, digests=bytes(8))


@pytest.mark.parametrize(
    ("companions", "expected"), [((), False), (("a",), False), (("a", "b"), True), (("a", "honest"), False)]
)
def test_only_companions_outnumber_a_peer(
    companions: tuple[str, ...], expected: bool, caplog: pytest.LogCaptureFixture
) -> None:
    averager, talk = Alone(), Talk()
    averager.boards[TOPIC] = talk
    watch = DriftMonitor(cast(Averager, averager), every=10, labels=["weight"])
    watch.begins(WORD, LINEAGE)
    watch.updated(LINEAGE, (), [torch.zeros(3)])
    mine = encode_word(replace(TOLD, digests=_digest(0.0)))
    false = encode_word(replace(TOLD, digests=_digest(1.0)))
    talk.others = {"honest": mine} | dict.fromkeys(["a", "b", *(f"sybil{n}" for n in range(50))], false)
    for _ in range(3):
        talk.version += 1
        watch.poll(companions, forked=False)
    assert watch.drifted is not None
    assert len(caplog.records) == 1, "one line a minute"
    assert watch.outnumbered is expected


def _digest(value: float) -> bytes:
    return short_digests([tensor_digest(torch.full((3,), value))])
