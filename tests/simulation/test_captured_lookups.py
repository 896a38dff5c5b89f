"""Peers that answer every record lookup with an attacker's identities, and newcomers that look for an honest record."""

from p2pavg.testing.simulation import simulate
from p2pavg_dht.identity import RPC_TIMEOUT
from p2pavg_dht.lookup import PATHS
from scripts.benchmarks.lookups import BEFORE, GHOSTS, SYBILS, Finds, attacked

PEERS, HOSTILE, NEWCOMERS = 24, 0.3, 4
SEEDS = range(4, 5)


def newcomers(attack: str, paths: int) -> Finds:
    """Return the finds of newcomers in networks with fixed seeds."""
    every = Finds()
    for seed in SEEDS:

        async def main(seed: int = seed) -> dict[str, Finds]:
            return await attacked(PEERS, HOSTILE, NEWCOMERS, attack, paths, seed)

        every.extend(simulate(main, seed=seed)[BEFORE])
    return every


def test_disjoint_paths_find_more_records_than_one_path() -> None:
    one, several = newcomers(SYBILS, 1), newcomers(SYBILS, PATHS)
    assert sum(several.found) > sum(one.found)


def test_invented_peers_that_never_answer_cost_less_than_a_timeout() -> None:
    finds = newcomers(GHOSTS, PATHS)
    assert all(finds.found)
    assert max(finds.seconds) < RPC_TIMEOUT
