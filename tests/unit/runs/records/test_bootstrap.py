"""Dials of bootstrap addresses: each dead one is named with its reason, and the wait is explained while it lasts."""

from __future__ import annotations

import logging
from collections.abc import Sequence
from unittest.mock import Mock

import pytest
import trio
from trio.testing import MockClock

from p2pavg.base.errors import BootstrapError, UnreachableError
from p2pavg.net.transport import Transport
from p2pavg.runs.records.bootstrap import BootstrapDials, reason_at
from p2pavg_dht import Ed25519Signer

ONE, TWO = (Ed25519Signer(bytes([seed]) * 32).peer_id for seed in (1, 2))
FIRST, SECOND, NAMED = (
    f"/ip4/203.0.113.7/tcp/4001/p2p/{ONE}",
    f"/ip4/203.0.113.8/tcp/4001/p2p/{TWO}",
    f"/dns4/peer.example/tcp/4001/p2p/{TWO}",
)


async def dial(addresses: Sequence[str], answers: dict[str, float]) -> list[str]:
    """Dial bootstrap addresses until one of them answers; return what was dialled, in that order.

    Args:
        answers: the seconds after which some addresses answer; infinity never does. The others refuse.
    """
    dialled = []

    async def one(address: str, *, timeout: float) -> None:
        dialled.append(address)
        if address not in answers:
            raise UnreachableError(f"no connection to {address.rpartition('/')[2]}: {address}: refused")
        await trio.sleep(answers[address])

    dials = BootstrapDials(Mock(Transport, dial=one), addresses, each=5.0, seconds=15.0)
    await dials.until_one_answers()
    return dialled


def warnings(caplog: pytest.LogCaptureFixture) -> list[str]:
    return [record.getMessage() for record in caplog.records if record.levelno == logging.WARNING]


async def test_each_dead_address_is_named_with_its_reason(
    autojump_clock: MockClock, caplog: pytest.LogCaptureFixture
) -> None:
    await dial([FIRST, SECOND], {SECOND: 0.1})
    assert warnings(caplog) == [f"the bootstrap address {FIRST} is dead: refused"]


async def test_an_address_that_is_given_twice_is_dialled_once(autojump_clock: MockClock) -> None:
    assert await dial([FIRST, FIRST], {FIRST: 0.1}) == [FIRST]


async def test_the_error_names_each_address_once_with_its_reason(autojump_clock: MockClock) -> None:
    with pytest.raises(BootstrapError) as caught:
        await dial([FIRST, SECOND], {SECOND: float("inf")})
    assert str(caught.value) == (
        f"no bootstrap peer could be reached within 15 s: {FIRST} (refused); {SECOND} (no answer)"
    )


async def test_the_wait_is_explained_while_it_lasts(
    autojump_clock: MockClock, caplog: pytest.LogCaptureFixture
) -> None:
    with pytest.raises(BootstrapError):
        await dial([FIRST, NAMED], {NAMED: float("inf")})
    assert warnings(caplog) == [
        f"dialling 2 bootstrap addresses for {seconds} s, at most 15 s: {FIRST} (refused); {NAMED} (no answer)"
        for seconds in (3, 9)
    ]


async def test_a_peer_that_answers_soon_is_no_reason_for_words(
    autojump_clock: MockClock, caplog: pytest.LogCaptureFixture
) -> None:
    await dial([FIRST], {FIRST: 2.0})
    assert warnings(caplog) == []


@pytest.mark.parametrize(
    ("text", "reason"),
    [
        (f"no connection to {ONE}: {FIRST}: Connection refused", "Connection refused"),
        (f"no connection to {FIRST} within 5.0 s", "no answer within 5.0 s"),
    ],
)
def test_a_reason_repeats_neither_address_nor_peer(text: str, reason: str) -> None:
    assert reason_at(FIRST, text) == reason
