"""One part's average: the weighted mean of all contributions, and the same bits for every member."""

from __future__ import annotations

import math

import numpy as np
import pytest
import torch

from p2pavg.allreduce.events import BadContributionError
from p2pavg.allreduce.reduction import NormCheck, PartContribution, average_part, reduce_part, vector_norm
from p2pavg.base.errors import RemoteProtocolError
from p2pavg_compression import MAX_MAGNITUDE, NF4, Bf16, Blockwise8, Codec, Fp16, Fp32, Int4, Int8, TopK
from p2pavg_dht import Signer
from tests.unit.group.samples import SIGNERS, candidate, roster

CODECS: list[Codec] = [Fp32(), Fp16(), Bf16(), Int8(block_size=64), Blockwise8(block_size=64), Int4(), NF4()]
# Twice (in and out) half a step of the coarsest level near a block's maximum, as a fraction of that maximum.
TOLERANCES = {
    "fp32": 1e-6,
    "fp16": 2e-3,
    "bf16": 1e-2,
    "int8:64": 1.5e-2,
    "blockwise8:64": 5e-2,
    "int4:64": 0.15,
    "nf4:64": 0.31,
}

codecs = pytest.mark.parametrize("codec", CODECS, ids=lambda codec: codec.name)


def vectors(count: int, elements: int = 300) -> list[torch.Tensor]:
    generator = torch.Generator().manual_seed(count)
    return [torch.randn(elements, generator=generator) for _ in range(count)]


def encoded(codec: Codec, peer_id: str, weight: float, values: torch.Tensor) -> PartContribution:
    return PartContribution(peer_id, weight, bytearray(codec.encode(values)))


def mean(values: list[torch.Tensor], weights: list[float]) -> torch.Tensor:
    total = sum(weights)
    return sum(
        (weight / total * each.double() for weight, each in zip(weights, values, strict=True)),
        torch.zeros(values[0].numel()).double(),
    )


@codecs
@pytest.mark.parametrize(
    "weights", [[1.0, 1.0], [1.0, 1000.0, 3.0], [1e-6, 1e6, 1.0, 8.0], [1e15] * 3, [1e-300, 3e-300]], ids=str
)
@pytest.mark.parametrize("own", [None, 0, 1])
def test_the_average_is_the_weighted_mean(codec: Codec, weights: list[float], own: int | None) -> None:
    """``own``: index of the contribution that the reducer holds unencoded, if any."""
    values = vectors(len(weights))
    contributions = [
        PartContribution(str(index), weight, each)
        if index == own
        else encoded(codec, str(index), weight, each)
        for index, (weight, each) in enumerate(zip(weights, values, strict=True))
    ]
    out = torch.full((300,), math.nan)
    average_part(codec, contributions, math.fsum(weights), out)
    wanted, scale = mean(values, weights), max(each.abs().max().item() for each in values)
    torch.testing.assert_close(out.double(), wanted, rtol=0, atol=TOLERANCES[codec.name] * scale)


@codecs
def test_the_reducer_holds_the_same_bits_as_every_decoder(codec: Codec) -> None:
    values = vectors(3)
    out = torch.empty(300)
    contributions = [encoded(codec, str(index), 1.0 + index, each) for index, each in enumerate(values)]
    payload = average_part(codec, contributions, 6.0, out)
    assert len(payload) == codec.encoded_nbytes(300)
    assert torch.equal(codec.decode(bytes(payload), 300).view(torch.int32), out.view(torch.int32))


def test_the_inputs_are_not_changed() -> None:
    values = vectors(2)
    copies = [each.clone() for each in values]
    contributions = [PartContribution("0", 1.0, values[0]), encoded(Fp32(), "1", 3.0, values[1])]
    assert isinstance(contributions[1].values, bytearray)
    payload = bytes(contributions[1].values)
    average_part(Fp32(), contributions, 4.0, torch.empty(300))
    assert all(torch.equal(one, other) for one, other in zip(values, copies, strict=True))
    assert contributions[1].values == payload


@codecs
def test_an_empty_part(codec: Codec) -> None:
    contributions = [encoded(codec, str(index), 1.0, torch.empty(0)) for index in range(2)]
    assert len(average_part(codec, contributions, 2.0, torch.empty(0))) == 0


def with_value(codec: Codec, bits: int) -> bytearray:
    """Return a payload whose first scale or number has these bits."""
    payload = bytearray(codec.encode(torch.ones(64)))
    width = 2 if codec.name in ("fp16", "bf16") else 4
    payload[:width] = bits.to_bytes(width, "little")
    return payload


@pytest.mark.parametrize(
    ("codec", "payload"),
    [
        *[(codec, bytearray(codec.encode(torch.ones(62)))) for codec in CODECS],
        *[(codec, bytearray(codec.encode(torch.ones(66)))) for codec in CODECS],
        *[(codec, bytearray()) for codec in CODECS],
        *[(Fp32(), with_value(Fp32(), bits)) for bits in (0x7FC00000, 0x7F800000, 0xFF800000, 0x7F7FFFFF)],
        *[(Fp16(), with_value(Fp16(), bits)) for bits in (0x7C00, 0xFC00, 0x7E00)],
        *[(Bf16(), with_value(Bf16(), bits)) for bits in (0x7F80, 0x7FC0, 0x7F7F)],
    ],
)
def test_a_payload_that_does_not_decode_names_its_sender(codec: Codec, payload: bytearray) -> None:
    contributions = [
        encoded(codec, "honest", 1.0, torch.ones(64)),
        PartContribution("liar", 1.0, payload),
        encoded(codec, "another", 1.0, torch.ones(64)),
    ]
    out = torch.full((64,), 5.0)
    with pytest.raises(BadContributionError, match="liar sent a part that does not decode") as caught:
        average_part(codec, contributions, 3.0, out)
    assert caught.value.peer_id == "liar"
    assert isinstance(caught.value, RemoteProtocolError)
    assert torch.equal(out, torch.full((64,), 5.0)), "a refused part was averaged"


@codecs
@pytest.mark.parametrize("weights", [[1.0] * 3, [1 / 3, 1 / 7, 1e-3, 5.0], [0.1] * 10], ids=str)
@pytest.mark.parametrize("sign", [1.0, -1.0])
def test_values_at_the_limit_can_still_be_sent(codec: Codec, weights: list[float], sign: float) -> None:
    """All members send the largest allowed number, and their weights' fractions sum to a little more than 1."""
    limit = torch.full((64,), sign * MAX_MAGNITUDE)
    contributions = [encoded(codec, str(index), weight, limit) for index, weight in enumerate(weights)]
    out = torch.empty(64)
    average_part(codec, contributions, math.fsum(weights), out)
    assert bool((out.abs() <= MAX_MAGNITUDE).all())
    if codec.name != "fp16":
        torch.testing.assert_close(out, limit, rtol=2 * TOLERANCES[codec.name], atol=0.0)


class TestSparse:
    """A sum that is rounded otherwise could choose other values, and an honest reducer would look like a liar."""

    CODEC = TopK(chunk=64, k=16)

    def contributions(self) -> list[PartContribution]:
        return [
            encoded(self.CODEC, signer.peer_id, 1.0 + index, each) for index, (signer, each) in self.given()
        ]

    def given(self) -> list[tuple[int, tuple[Signer, torch.Tensor]]]:
        return list(enumerate(zip(SIGNERS, vectors(5, 6400), strict=False)))

    @pytest.mark.parametrize("checked", [False, True])
    def test_each_product_and_each_sum_is_rounded_by_itself(self, checked: bool) -> None:
        contributions, total = self.contributions(), torch.zeros(6400)
        for contribution in contributions:
            assert not isinstance(contribution.values, torch.Tensor)
            product = self.CODEC.decode(contribution.values, 6400).numpy() * np.float32(
                contribution.weight / 15
            )
            total += torch.from_numpy(product)
        candidates = [
            candidate(index, norm=vector_norm(each), weight=1.0 + index) for index, (_, each) in self.given()
        ]
        out, exact = torch.empty(6400), torch.empty(6400)
        check = NormCheck(roster(candidates)) if checked else None
        reduce_part(self.CODEC, contributions, 15.0, exact, check=check)
        assert torch.equal(exact, total)
        check = NormCheck(roster(candidates)) if checked else None
        payload = average_part(self.CODEC, contributions, 15.0, out, check=check)
        assert bytes(payload) == bytes(self.CODEC.encode(total))

    def test_a_norm_that_is_too_long_is_found(self) -> None:
        candidates = [candidate(index, norm=1.0, weight=1.0 + index) for index in range(5)]
        with pytest.raises(BadContributionError, match="signed a norm of 1"):
            average_part(
                self.CODEC, self.contributions(), 15.0, torch.empty(6400), check=NormCheck(roster(candidates))
            )
