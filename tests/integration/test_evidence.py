"""Evidence on the real transport: some MiB of it reach another peer of the run."""

from __future__ import annotations

import pytest
import trio

import p2pavg
from p2pavg.peer.peer import open_peer
from tests.unit.verification.evidence.large import admit_large, large_evidence
from tests.unit.verification.evidence.samples import LIAR

LOOPBACK = ["/ip4/127.0.0.1/tcp/0"]
PATIENCE = 60.0


async def test_evidence_reaches_another_peer_over_libp2p(monkeypatch: pytest.MonkeyPatch) -> None:
    admit_large(monkeypatch)
    config = p2pavg.AveragingConfig(run_id="evidence")
    async with (
        open_peer(listen=LOOPBACK) as one,
        open_peer(listen=LOOPBACK, bootstrap=one.addresses) as other,
        one.averager(config) as accuser,
        other.averager(config) as hearer,
    ):
        accuser._run.accuse(large_evidence())
        with trio.fail_after(PATIENCE):
            while not hearer.excluded:
                await trio.sleep(0.05)
        assert accuser.excluded == hearer.excluded
        assert hearer.excluded.keys() == {LIAR.peer_id}
