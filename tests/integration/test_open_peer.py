"""The addresses that ``open_peer`` accepts, over real sockets."""

from __future__ import annotations

import logging
from typing import Any

import pytest
import trio

import p2pavg

LOOPBACK = ["/ip4/127.0.0.1/tcp/0"]


async def test_a_bootstrap_peer_may_be_given_by_name() -> None:
    with trio.fail_after(30.0):
        async with p2pavg.open_peer(listen=LOOPBACK) as first:
            named = first.addresses[0].replace("/ip4/127.0.0.1/", "/dns4/localhost/")
            async with p2pavg.open_peer(listen=LOOPBACK, bootstrap=[named]) as second:
                assert [contact.peer_id for contact in second.records.contacts] == [first.id]


async def test_an_unknown_host_name_is_reported(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("p2pavg.peer.peer.BOOTSTRAP_SECONDS", 0.5)
    async with p2pavg.open_peer(listen=LOOPBACK) as first:
        address = f"/dns4/nobody.invalid/tcp/1/p2p/{first.id}"
    with pytest.raises(p2pavg.BootstrapError, match=r"the name nobody\.invalid is not known"):
        async with p2pavg.open_peer(listen=LOOPBACK, bootstrap=[address]):
            pass


@pytest.mark.parametrize("given", ["/ip4/127.0.0.1/tcp/1", None])
@pytest.mark.parametrize("name", ["listen", "bootstrap"])
async def test_a_single_address_instead_of_a_list_is_refused(name: str, given: Any) -> None:
    arguments: dict[str, Any] = {name: given}
    with pytest.raises(p2pavg.AddressError, match=f"{name} is a list of addresses"):
        async with p2pavg.open_peer(**arguments):
            pass


async def test_an_identity_in_use_by_another_process_causes_a_warning(
    caplog: pytest.LogCaptureFixture,
) -> None:
    async with p2pavg.open_peer(listen=LOOPBACK) as peer:
        elsewhere = f"/ip4/203.0.113.7/tcp/4001/p2p/{peer.id}"
        with caplog.at_level(logging.WARNING):
            await peer.join([elsewhere])
    assert "share one identity file" in caplog.text
