"""Spot checks of contributions: honest ones that must pass, and cheats that must be found.

scripts/faults rechecks                    10,000 honest rechecks, 2,000 of each cheat
scripts/faults rechecks --count 500        fewer

The gradient of a small transformer is computed by one process with one thread, encoded, and computed again with two
threads, with the batch in other pieces, and with bfloat16 in the matrix products in turn: as other hardware would. The
cheats send the gradient of half of their samples, of another peer's, and noise of the right length. Then it is drawn
how many updates it takes until one of eight peers is found, and found for the second time, when it is met no more.
"""

from __future__ import annotations

import argparse
import random
import statistics
import sys
from collections import Counter
from collections.abc import Callable

import torch

from p2pavg.base.result import DrawnContribution
from p2pavg.group.candidate import sign_candidate
from p2pavg.group.recheck import Recheck, compare, drawn_targets
from p2pavg.group.roster import Roster
from p2pavg.testing.simulation import simulated_signer
from p2pavg_compression import resolve_codec

SAMPLES, TOKENS, WORDS = 16, 16, 64
CODECS = ("fp32", "fp16", "blockwise8", "int8", "int4")
PEERS = 8
Gradients = list[torch.Tensor]


class Model(torch.nn.Module):
    """A transformer of one layer, of 55,000 parameters."""

    def __init__(self) -> None:
        super().__init__()
        self.words = torch.nn.Embedding(WORDS, 64)
        self.layer = torch.nn.TransformerEncoderLayer(64, 4, 128, dropout=0.0, batch_first=True)
        self.head = torch.nn.Linear(64, WORDS)

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        """Return the mean loss of the next tokens; ``tokens`` is (batch, length) of int64."""
        inputs, targets = tokens[:, :-1], tokens[:, 1:]
        mask = torch.nn.Transformer.generate_square_subsequent_mask(inputs.shape[1])
        scores = self.head(self.layer(self.words(inputs), src_mask=mask, is_causal=True))
        return torch.nn.functional.cross_entropy(scores.flatten(0, 1), targets.flatten())


def batch_of(seed: int) -> torch.Tensor:
    """Return the samples of one peer."""
    generator = torch.Generator().manual_seed(seed)
    starts = torch.randint(0, WORDS, (SAMPLES, 1), generator=generator)
    steps = torch.randint(1, 4, (SAMPLES, TOKENS), generator=generator)
    return (starts + steps.cumsum(1)) % WORDS


def gradients_of(model: Model, tokens: torch.Tensor, pieces: int = 1) -> Gradients:
    """Return the gradients of the mean loss, computed in pieces of the batch."""
    total: Gradients = []
    for piece in tokens.chunk(pieces):
        found = torch.autograd.grad(model(piece), list(model.parameters()))
        scaled = [gradient * (len(piece) / len(tokens)) for gradient in found]
        total = scaled if not total else [a + b for a, b in zip(total, scaled, strict=True)]
    return total


def sent(gradients: Gradients, codec: str) -> DrawnContribution:
    """Return a contribution as another member holds its third quarter."""
    vector = torch.cat([gradient.reshape(-1) for gradient in gradients])
    start, stop = len(vector) // 2 // 64 * 64, 3 * len(vector) // 4 // 64 * 64
    payload = bytes(resolve_codec(codec).encode(vector[start:stop]))
    return DrawnContribution("peer", float(SAMPLES), ((start, stop, payload),))


def again(model: Model, tokens: torch.Tensor, way: int) -> Gradients:
    """Compute gradients as another machine might."""
    if way == 0:
        torch.set_num_threads(2)
        return gradients_of(model, tokens)
    torch.set_num_threads(1)
    if way == 1:
        return gradients_of(model, tokens, pieces=4)
    with torch.autocast("cpu", torch.bfloat16):
        return gradients_of(model, tokens)


def _noise_like(gradients: Gradients) -> Gradients:
    return [torch.randn_like(gradient) * gradient.std() for gradient in gradients]


CHEATS: dict[str, Callable[[Model, int, Gradients], Gradients]] = {
    "half of its samples": lambda model, seed, _: gradients_of(model, batch_of(seed)[: SAMPLES // 2]),
    "another's samples": lambda model, seed, _: gradients_of(model, batch_of(seed + 10**6)),
    "noise": lambda _model, _seed, gradients: _noise_like(gradients),
}


def trained(model: Model, steps: int) -> None:
    """Train it a little: gradients of a trained model have more noise than direction."""
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3)
    for step in range(steps):
        optimizer.zero_grad()
        model(batch_of(10**9 + step)).backward()
        optimizer.step()


def compared(count: int, cheats: int) -> int:
    """Compare honest contributions, and cheats; return what was wrong."""
    torch.manual_seed(0)
    model, wrong = Model(), 0
    worst, found = dict.fromkeys(("threads", "pieces", "bfloat16"), 0.0), Counter[str]()
    least: dict[str, float] = {}
    for number in range(count):
        if number == count // 2:
            trained(model, 200)
        torch.set_num_threads(1)
        codec, way = CODECS[number % len(CODECS)], number % 3
        gradients = gradients_of(model, batch_of(number))
        recheck = compare(sent(gradients, codec), again(model, batch_of(number), way), resolve_codec(codec))
        name = list(worst)[way]
        worst[name] = max(worst[name], recheck.difference / recheck.allowed)
        if recheck.differs:
            wrong += 1
            print(f"WRONG: an honest contribution differs ({codec}, {name}): {recheck.why}")
        if number >= count - cheats:
            for name, cheat in CHEATS.items():
                torch.set_num_threads(1)
                lie: Recheck = compare(
                    sent(cheat(model, number, gradients), codec), gradients, resolve_codec(codec)
                )
                found[name] += lie.differs
                least[name] = min(least.get(name, 1e9), lie.difference / lie.allowed)
    told = ", ".join(f"{name} {value:.2f}" for name, value in worst.items())
    print(
        f"{count} honest rechecks: {wrong} differ; the largest difference, in multiples of what is allowed: {told}"
    )
    for name in CHEATS:
        print(f"{name}: {found[name]} of {cheats} found, by {least[name]:.1f} times what is allowed at least")
    return wrong + sum(cheats - found[name] for name in CHEATS)


def updates_until_found(fraction: float, runs: int, rng: random.Random) -> tuple[list[int], list[int]]:
    """Return how many updates one of eight cheats until it is checked, and until it is for the second time."""
    members = tuple(
        sign_candidate(
            simulated_signer(number),
            key=b"k" * 32,
            deadline=100.0 + number,
            expiration_time=1000.0,
            weight=16.0,
            bandwidth=100.0,
            codec="fp32",
            auxiliary=False,
            addresses=("/ip4/203.0.113.7/tcp/40001",),
        )
        for number in range(PEERS)
    )
    roster = Roster(members=members, shares=(10,) * PEERS, proposal=1)
    cheat, others = members[0].peer_id, [member.peer_id for member in members[1:]]
    first, second = [], []
    for _ in range(runs):
        seen: list[int] = []
        # A peer counts what it has found itself: the same member has to find the cheat twice before it bans it.
        strikes = Counter[str]()
        update = 0
        while not strikes or max(strikes.values()) < 2:
            update += 1
            for each in others:
                if cheat in drawn_targets(each, rng.randbytes(64), roster, fraction):
                    seen.append(update)
                    strikes[each] += 1
        first.append(seen[0])
        second.append(update)
    return first, second


def main() -> int:
    """See the top of this file."""
    parser = argparse.ArgumentParser(
        prog="scripts/faults rechecks",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
        usage=argparse.SUPPRESS,
    )
    parser.add_argument("--count", type=int, default=10_000)
    parser.add_argument("--runs", type=int, default=100, help="of the draw")
    arguments = parser.parse_args()
    wrong = compared(arguments.count, arguments.count // 5)
    rng = random.Random(0)
    for fraction in (0.02, 0.1):
        first, second = updates_until_found(fraction, arguments.runs, rng)
        deciles = [statistics.quantiles(each, n=10) for each in (first, second)]
        print(
            f"recheck={fraction}: one of {PEERS} is found after {statistics.median(first):g} updates (90 %:"
            f" {deciles[0][-1]:.0f}), and left out by a first member after {statistics.median(second):g} (90 %:"
            f" {deciles[1][-1]:.0f})"
        )
    return 1 if wrong else 0


if __name__ == "__main__":
    sys.exit(main())
