"""Sparse codecs among simulated peers: the reducers' second choice, with auxiliaries, audits and bounded norms."""

from __future__ import annotations

import pytest
import torch

import p2pavg
from p2pavg_compression import Ternary, TopK
from tests.simulation.false_averages import Rounds, lie
from tests.simulation.liars import name
from tests.simulation.swarm import config, same_bits, step_all, tensors_of, values

ELEMENTS = 3_000
CODEC = TopK(chunk=64, k=8)
AVERAGES = TopK(chunk=64, k=16)


def turn_around(average: torch.Tensor) -> None:
    """Change the signs of an average."""
    average.neg_()


def expected(success: p2pavg.Success) -> torch.Tensor:
    """Return the largest values of the sum of the largest values, with the operations of a reducer."""
    total = torch.zeros(ELEMENTS)
    for index in sorted(range(4), key=lambda index: success.peers.index(name(index))):
        given = CODEC.decode(CODEC.encode(values(index, ELEMENTS)), ELEMENTS)
        total += given * torch.tensor(success.weights[name(index)] / success.total_weight)
    return AVERAGES.decode(AVERAGES.encode(total), ELEMENTS)


@pytest.mark.parametrize("changes", [{}, {"max_norm": 3.0, "audit": "before:1.0"}, {"audit": "off"}], ids=str)
async def test_members_have_the_largest_values_of_the_sum(changes: dict[str, object]) -> None:
    swarm = await step_all(4, config(group_size=4, compression=CODEC, **changes))
    found = swarm.successes()
    assert len(found) == 4
    assert same_bits(found)
    assert {result.clipped for result in found} == {()}
    wanted = expected(found[0])
    assert torch.equal(tensors_of(found[0])[0], wanted)
    assert 8 * (ELEMENTS // 64) < wanted.count_nonzero() <= 16 * -(-ELEMENTS // 64)
    assert min(result.compression_ratio for result in found) > 8


async def test_an_average_of_two_keeps_all_that_they_sent() -> None:
    swarm = await step_all(2, config(group_size=2, compression=CODEC))
    sent = [CODEC.decode(CODEC.encode(values(index, ELEMENTS)), ELEMENTS) for index in range(2)]
    for result in swarm.successes():
        # Of weights that are alike, two values of one place with opposite signs may be 0 together.
        assert torch.equal(tensors_of(result)[0] != 0, sent[0] + sent[1] != 0)


@pytest.mark.parametrize("robust", [None, p2pavg.Median()], ids=str)
async def test_a_reducer_knows_what_the_averages_of_its_share_lack(robust: p2pavg.Median | None) -> None:
    """Not so with a fine codec, which needs no feedback."""
    codec = Ternary(block_size=64)
    for compression in (codec, "int8"):
        swarm = await step_all(3, config(group_size=3, compression=compression, robust=robust))
        for index, result in enumerate(swarm.successes()):
            if compression != codec:
                assert result.left_out is None
                continue
            start, stop = result.share
            rows = [values(other, ELEMENTS)[start:stop] for other in range(3)]
            seen = [
                row if other == index else codec.decode(codec.encode(row), stop - start)
                for other, row in enumerate(rows)
            ]
            shares = [result.weights[name(other)] / result.total_weight for other in range(3)]
            mean = sum(
                (share * row for share, row in zip(shares, seen, strict=True)), torch.zeros(stop - start)
            )
            exact = mean if robust is None else torch.stack(seen).median(0).values
            assert result.left_out is not None
            found = tensors_of(result)[0][start:stop] + result.left_out
            torch.testing.assert_close(found, exact, rtol=0, atol=1e-5)
            assert float(result.left_out.norm()) > 0.1 * float(exact.norm())


async def test_an_auxiliary_reduces_sparse_values() -> None:
    found = (await step_all(4, config(group_size=4, compression=CODEC), helpers=1)).successes()
    assert [len(result.auxiliaries) for result in found] == [1] * 4
    for result in found:
        assert torch.equal(tensors_of(result)[0], expected(result))


async def test_a_reducer_that_sends_other_values_is_met_no_more(monkeypatch: pytest.MonkeyPatch) -> None:
    lie(monkeypatch, 2, turn_around)
    rounds = Rounds(4, 3, audit="after:1.0", compression=CODEC)
    await rounds.run()
    for index in (0, 1, 3):
        assert [len(peers) for peers in rounds.partners(index)] == [4, 3, 3]
