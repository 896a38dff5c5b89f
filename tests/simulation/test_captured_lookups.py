"""Peers that answer every record lookup with an attacker's identities, and newcomers that look for an honest record."""

from p2pavg.testing.simulation import simulate
from p2pavg_dht.identity import RPC_TIMEOUT
from p2pavg_dht.lookup import PATHS
from scripts.benchmarks.lookups import BEFORE, GHOSTS, Finds, attacked

PEERS, HOSTILE, NEWCOMERS, SEED = 30, 0.3, 4, 4


def test_invented_peers_that_never_answer_cost_less_than_a_timeout() -> None:
    async def main() -> dict[str, Finds]:
        return await attacked(PEERS, HOSTILE, NEWCOMERS, GHOSTS, PATHS, SEED)

    finds = simulate(main, seed=SEED)[BEFORE]
    assert all(finds.found)
    assert max(finds.seconds) < RPC_TIMEOUT
