"""Simulated rounds with faults, on virtual time, and checks of their results.

scripts/faults simulate --rounds 10000       this many rounds of 3 to 16 peers with 1 to 3 faults each
scripts/faults simulate --seed 1234 --log    one of them again, with every line of its log

A round uses the real matchmaker, exchange and record node over a network in memory. The checks are:

* two members of one group that return ``Success`` name the same peers, and hold the same bits;
* ``averaged`` is the weighted mean of exactly the samples that ``peers`` had accumulated;
* a sample is either in exactly one committed result, or still in its accumulator;
* every exchange ends within its time, and soon if its faults were crashes and short stops only;
* no member is taken for a liar, since none is one.
"""

from __future__ import annotations

import argparse
import hashlib
import logging
import multiprocessing
import random
import sys
import time
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from functools import partial, partialmethod
from unittest.mock import patch

import torch
import trio

import p2pavg
from p2pavg.allreduce import reduction
from p2pavg.peer.peer import Peer
from p2pavg.round.losses import Losses
from p2pavg.testing import Crash, FaultPlan, MemoryNetwork, Milestone, Stop, run_peers, simulate
from p2pavg.testing.faults import Happening
from p2pavg.testing.simulation import simulated_signer

EXCHANGE_TIMEOUT = 20.0
MATCH_TIMEOUT = 5.0
FOUND_OUT_SECONDS = 700.0
SLACK = 1.0  # ending at a deadline takes a few more moments
SHORT_STOP = 1.0  # less than the silence that gives up a member
SOON = 10.0  # the longest of 947 such exchanges took 5.4 s; each silence takes 1.5 to 4.5 s to be noticed
ROUNDS = 2
PART_ELEMENTS = 64


@dataclass
class Sample:
    """One call of accumulate."""

    peer: str
    weight: float
    values: torch.Tensor
    left: bool = True
    """True while it is in its peer's accumulator."""


@dataclass
class Record:
    """Everything that happened in one run."""

    samples: dict[str, list[Sample]] = field(default_factory=dict)
    taken: dict[tuple[str, float], list[Sample]] = field(default_factory=dict)
    """Contributions of peers, by their unique weights."""
    successes: list[tuple[str, p2pavg.Success]] = field(default_factory=list)
    tally: Counter[str] = field(default_factory=Counter)
    formed: dict[str, float] = field(default_factory=dict)
    longest: float = 0.0
    crashed: set[str] = field(default_factory=set)
    stopped: set[str] = field(default_factory=set)
    """Peers that never resumed; they count as crashed, although their tasks run here."""
    accused: list[str] = field(default_factory=list)
    """Reasons for which members were taken for liars."""


@dataclass(frozen=True)
class Setting:
    """The parameters that a seed stands for."""

    seed: int
    peers: int
    elements: int
    group_size: int
    codec: str | None
    plan: FaultPlan
    sites: int
    """Number of sites that exchange sums; 1: a butterfly."""


def setting(seed: int) -> Setting:
    """Return the parameters of a seed, always the same."""
    dice = random.Random(f"setting/{seed}")
    sizes = range(3, 17)
    # A large group takes quadratic time, and small groups find as many errors.
    peers = dice.choices(sizes, [1 / size**2 for size in sizes])[0]
    elements = dice.choice([1, 100, 1_000, 3_000])
    sites = random.Random(f"sites/{seed}").choice([1, 1, 1, 2])
    return Setting(
        sites=sites,
        seed=seed,
        peers=peers,
        elements=elements,
        group_size=dice.choice([peers, peers, max(2, peers // 2)]),
        codec=dice.choice([None, None, "blockwise8"]),
        plan=FaultPlan.draw(
            seed, peers=peers, faults=dice.randint(1, 3), parts=1 + elements // peers // PART_ELEMENTS
        ),
    )


async def run(how: Setting) -> Record:
    """Run one seed from the first peer to the last."""
    dice = random.Random(f"values/{how.seed}")
    record = Record()
    network = MemoryNetwork(seed=how.seed, latency=(0.001, 0.02), bandwidth=dice.choice([None, 1e6, 1e5]))
    config = p2pavg.AveragingConfig(
        run_id="simulated",
        group_size=how.group_size,
        min_group_size=2,
        match_timeout=MATCH_TIMEOUT,
        exchange_timeout=EXCHANGE_TIMEOUT,
        compression=how.codec,
    )

    async def work(peer: Peer, index: int) -> None:
        generator = torch.Generator().manual_seed(how.seed * 100 + index)
        mine = record.samples.setdefault(peer.id, [])
        own = config
        if how.sites > 1:  # which audits cannot check
            own = replace(config, audit="off", topology=p2pavg.Hierarchical(f"site {index % how.sites}"))
        async with peer.averager(own) as averager:
            for number in range(ROUNDS):
                # Sums of weights are distinct, so that a contribution's weight identifies its samples.
                sample = Sample(peer.id, float(2**number), torch.randn(how.elements, generator=generator))
                averager.accumulate([sample.values], weight=sample.weight)
                mine.append(sample)
                waiting = [sample for sample in mine if sample.left]
                weight = sum(sample.weight for sample in waiting)
                record.taken[peer.id, weight] = waiting
                result = await step(averager)
                record.tally[type(result).__name__] += 1
                if isinstance(result, p2pavg.Success):
                    record.successes.append((peer.id, result))
                used = isinstance(result, p2pavg.Success) or (
                    isinstance(result, p2pavg.Failed) and result.contribution_used
                )
                if used is None:
                    used = await find_out(averager, waiting, mine)
                    record.tally["cut off"] += 1
                for sample in waiting:
                    sample.left = not used
                left = sum(sample.weight for sample in mine if sample.left)
                assert averager.weight == left, f"{peer.id} holds {averager.weight}, not {left}"

    async def find_out(
        averager: p2pavg.DecentralizedAverager, taken: list[Sample], mine: list[Sample]
    ) -> bool:
        """Wait until the peer knows if its contribution was used; note the answer."""
        weight = sum(sample.weight for sample in mine if sample.left)
        with trio.move_on_after(FOUND_OUT_SECONDS):
            while averager.unresolved_weight:  # noqa: ASYNC110 - as a user would
                await trio.sleep(1.0)
        assert averager.weight in (weight, weight - sum(sample.weight for sample in taken))
        return averager.weight != weight

    async def step(averager: p2pavg.DecentralizedAverager) -> p2pavg.RoundResult:
        result = await averager.step(wait=None)
        while isinstance(result, p2pavg.InProgress):
            result = await averager.step(wait=None)
        return result

    network.watchers.append(partial(note, record))
    with patch.object(Losses, "note", partialmethod(note_loss, record, Losses.note)):
        ended = await run_peers(network, how.peers, work, plan=how.plan)
    stops = [fault.what for fault in how.plan.faults if isinstance(fault.what, Stop)]
    record.stopped = {simulated_signer(stop.peer).peer_id for stop in stops if stop.seconds is None}
    record.crashed = {simulated_signer(index).peer_id for index in range(how.peers) if index not in ended}
    return record


def note_loss(
    losses: Losses, record: Record, original: Callable[..., None], position: int, reason: str, **how: bool
) -> None:
    """Note a loss, and whether a member was taken for a liar."""
    if how.get("hostile"):
        record.accused.append(reason)
    original(losses, position, reason, **how)


def note(record: Record, peer_id: str, milestone: Milestone) -> None:
    """Measure an exchange from its group to its end."""
    if milestone is Milestone.FORMED:
        record.formed[peer_id] = trio.current_time()
    elif milestone in (Milestone.COMMITTED, Milestone.FAILED):
        record.longest = max(record.longest, trio.current_time() - record.formed.pop(peer_id))


def check(how: Setting, record: Record) -> None:
    """Check a run; raise AssertionError with the violation."""
    bits: dict[str, tuple[str, tuple[str, ...], str]] = {}
    counted: dict[int, str] = {}
    for peer_id, result in record.successes:
        assert isinstance(result.averaged, list)
        averaged = result.averaged[0]
        digest = hashlib.sha256(averaged.numpy().tobytes()).hexdigest()
        found = bits.setdefault(result.group_id, (digest, result.peers, peer_id))
        assert found[:2] == (digest, result.peers), (
            f"{peer_id} and {found[2]} hold different results of a group"
        )
        assert peer_id in result.peers, f"{peer_id} is not in its own result"
        exact = torch.zeros(how.elements, dtype=torch.float64)
        scale = 0.0
        for member in result.peers:
            weight = result.weights[member]
            contribution = record.taken.get((member, weight))
            assert contribution is not None, f"{peer_id} counts {member} with a weight it never had"
            for sample in contribution:
                exact += sample.weight * sample.values.double()
                scale = max(scale, float(sample.values.double().norm()))
                assert counted.setdefault(id(sample), result.group_id) == result.group_id, (
                    f"a sample of {member} is in two results"
                )
                # Results of a peer that died later count as well: its program may have saved them.
                kept = sample.left and member not in record.crashed | record.stopped
                assert not kept, f"a sample of {member} is in a result and in its accumulator"
        assert result.total_weight == sum(result.weights[member] for member in result.peers)
        exact /= result.total_weight
        error = float((averaged.double() - exact).norm()) / scale
        bound = 1e-5 if how.codec is None else 0.05
        assert error <= bound, f"{peer_id} holds an average that is {error:.1e} from the mean of its peers"
    may_take = EXCHANGE_TIMEOUT + SLACK
    if all(is_short(fault.what) for fault in how.plan.faults):
        may_take = SOON
    assert not record.accused, f"members were taken for liars: {record.accused}"
    assert record.longest <= may_take, f"an exchange took {record.longest:.1f} s"


def is_short(fault: Happening) -> bool:
    """Return whether a fault is over soon, and parts no members that live."""
    match fault:
        case Crash():
            return True
        case Stop(_, seconds):
            return seconds is not None and seconds <= SHORT_STOP
    return False


def one(seed: int) -> tuple[int, Counter[str], str]:
    """Run and check one seed; return the violation, if any."""
    torch.set_num_threads(1)
    how = setting(seed)
    try:
        record = simulate(partial(run, how), seed=seed)
        check(how, record)
    except BaseException as error:
        if isinstance(error, KeyboardInterrupt):
            raise
        return seed, Counter(), f"{describe(error)}\n  {how}"
    return seed, record.tally, ""


def describe(error: BaseException) -> str:
    """Return the innermost errors of an exception group."""
    if isinstance(error, BaseExceptionGroup):
        return "; ".join(map(describe, error.exceptions))
    return f"{type(error).__name__}: {error}"


def main() -> int:
    """Run the simulation."""
    parser = argparse.ArgumentParser(
        prog="scripts/faults simulate",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
        usage=argparse.SUPPRESS,
    )
    parser.add_argument("--rounds", type=int, default=1000, help="how many seeds")
    parser.add_argument("--first", type=int, default=0, help="the first of them")
    parser.add_argument("--seed", type=int, help="only this one")
    parser.add_argument("--log", action="store_true", help="with the peers' log")
    parser.add_argument("--processes", type=int, default=multiprocessing.cpu_count())
    arguments = parser.parse_args()
    vars(reduction)["part_size"] = lambda _elements, _reducers: PART_ELEMENTS
    logging.basicConfig(
        level=logging.DEBUG if arguments.log else logging.CRITICAL,
        format="%(name)s %(message)s",
        stream=sys.stdout,
    )
    if arguments.seed is not None:
        print(setting(arguments.seed))
        _, tally, wrong = one(arguments.seed)
        print(dict(tally), wrong or "nothing is wrong")
        return int(bool(wrong))
    began = time.monotonic()
    total: Counter[str] = Counter()
    failed = 0
    seeds = range(arguments.first, arguments.first + arguments.rounds)
    with multiprocessing.Pool(arguments.processes) as pool:
        for done, (seed, tally, wrong) in enumerate(pool.imap_unordered(one, seeds, chunksize=4), start=1):
            total += tally
            if done % 500 == 0:
                print(f"{done} seeds so far, {failed} wrong", file=sys.stderr, flush=True)
            if wrong:
                failed += 1
                print(
                    f"seed {seed}: {wrong}\n  again: scripts/faults simulate --seed {seed} --log", flush=True
                )
    seconds = time.monotonic() - began
    results = ", ".join(f"{count} {name}" for name, count in sorted(total.items()))
    print(f"{arguments.rounds} seeds in {seconds:.0f} s: {failed} wrong; results: {results}")
    return int(bool(failed))


if __name__ == "__main__":
    sys.exit(main())
