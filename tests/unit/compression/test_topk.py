"""The sparse codec: which values it sends, and which payloads it refuses."""

import math
import struct

import pytest
import torch

from p2pavg_compression import MAX_MAGNITUDE, CodecError, TopK
from p2pavg_compression.combinations import count_of_sets

PLACES, LARGE, SIGNS = 59, 6, 8  # bytes of a record of the default codec
SCALE = PLACES + LARGE + SIGNS
ELEMENTS = 3 * 4096


def there_and_back(codec: TopK, values: torch.Tensor) -> torch.Tensor:
    return codec.decode(codec.encode(values), len(values))


def normal(elements: int = ELEMENTS, seed: int = 0) -> torch.Tensor:
    return torch.randn(elements, generator=torch.Generator().manual_seed(seed))


class TestChoice:
    @pytest.mark.parametrize("codec", [TopK(), TopK(bits=1), TopK(chunk=256, k=3), TopK(k=164)])
    def test_the_largest_of_each_chunk_are_sent_with_their_signs(self, codec: TopK) -> None:
        values = normal()
        decoded = there_and_back(codec, values)
        for chunk, found in zip(
            torch.split(values, codec.chunk), torch.split(decoded, codec.chunk), strict=True
        ):
            assert set(found.nonzero().flatten().tolist()) == set(chunk.abs().topk(codec.k).indices.tolist())
            assert torch.equal(found.sign(), torch.where(found == 0, 0.0, chunk.sign()))

    def test_magnitudes_are_the_means_of_the_largest_fifth_and_of_the_others(self) -> None:
        values = normal(4096)
        largest = values.abs().topk(64).values
        decoded = there_and_back(TopK(), values)
        found = decoded[decoded != 0].abs().sort(descending=True).values
        assert len(torch.unique(found)) == 2
        assert found[:12].tolist() == pytest.approx([largest[:12].mean().item()] * 12, rel=2e-2)
        assert found[12:].tolist() == pytest.approx([largest[12:].mean().item()] * 52, rel=2e-3)

    def test_one_bit_sends_the_mean_of_all(self) -> None:
        values = normal(4096)
        decoded = there_and_back(TopK(bits=1), values)
        assert decoded.abs().max().item() == pytest.approx(
            values.abs().topk(64).values.mean().item(), rel=2e-3
        )
        assert len(torch.unique(decoded.abs())) == 2  # and zero

    @pytest.mark.parametrize("value", [1.0, -3.0, 2.0**100])
    def test_of_equal_magnitudes_the_first_are_sent(self, value: float) -> None:
        values = torch.full((4096,), value)
        values[1::2] *= -1
        values[10] *= 0.5
        decoded = there_and_back(TopK(k=8), values)
        assert decoded.nonzero().flatten().tolist() == list(range(8))
        values[3000] *= 1.0 if abs(value) > 1e30 else 2.0
        places = there_and_back(TopK(k=8), values).nonzero().flatten().tolist()
        assert places == (list(range(8)) if abs(value) > 1e30 else [*range(7), 3000])

    def test_zeros_are_not_sent(self) -> None:
        values = torch.zeros(2 * 4096)
        values[[5, 17, 4000]] = torch.tensor([3.0, -3.0, 3.0])
        assert torch.equal(there_and_back(TopK(), values), values)

    def test_a_short_chunk_sends_its_part(self) -> None:
        for elements, count in ((1, 1), (64, 1), (65, 2), (4095, 64), (4096 + 640, 64 + 10)):
            decoded = there_and_back(TopK(), normal(elements))
            assert decoded.count_nonzero() == count

    def test_averages_have_twice_as_many_values_where_a_chunk_may_have_so_many(self) -> None:
        assert TopK().averages == TopK(k=128)
        assert TopK(chunk=64, k=8, bits=1).averages == TopK(chunk=64, k=16, bits=1)
        for largest in (TopK(k=100), TopK(chunk=64, k=9), TopK(k=164)):
            assert largest.averages == largest

    def test_ratio_beyond_the_largest_is_limited(self) -> None:
        values = torch.full((4096,), 1e-3)
        values[:12] = 1e6
        decoded = there_and_back(TopK(), values)
        assert decoded.max().item() == pytest.approx(1e-3 * (1 + 255 / 32), rel=2e-3)

    def test_largest_magnitudes_stay_within_bounds(self) -> None:
        values = torch.full((4096,), MAX_MAGNITUDE * 0.9999)
        values[:12] = MAX_MAGNITUDE
        assert there_and_back(TopK(), values).max().item() <= MAX_MAGNITUDE

    def test_sum_of_sparse_vectors_is_exact(self) -> None:
        codec, total = TopK(), torch.zeros(ELEMENTS)
        vectors = [normal(seed=seed) for seed in range(5)]
        for vector in vectors:
            codec.accumulate(codec.encode(vector), total, 0.25)
        expected = torch.zeros(ELEMENTS)
        for vector in vectors:
            expected += there_and_back(codec, vector) * 0.25
        assert torch.equal(total, expected)


class TestArguments:
    @pytest.mark.parametrize("chunk", [0, 32, 100, 8192, 64.0, None])
    def test_chunk(self, chunk: int) -> None:
        with pytest.raises(ValueError, match="chunk must be a power of two from 64 to 4096"):
            TopK(chunk=chunk, k=1)

    @pytest.mark.parametrize("k", [0, -1, 257, 2.0, True])
    def test_k(self, k: int) -> None:
        with pytest.raises(ValueError, match="k must be a whole number from 1 to a quarter of chunk, 256"):
            TopK(chunk=1024, k=k)

    @pytest.mark.parametrize("bits", [0, 3, 8, 2.0, True])
    def test_bits(self, bits: int) -> None:
        with pytest.raises(ValueError, match="bits must be 1 or 2"):
            TopK(bits=bits)

    def test_places_with_too_many_bits(self) -> None:
        with pytest.raises(ValueError, match="need more than 1000 bits; the most are 166 of 4096"):
            TopK(k=200)


class TestHostile:
    def refuses(self, payload: bytes | bytearray, reason: str, codec: TopK | None = None) -> None:
        codec = codec or TopK()
        elements = ELEMENTS
        accumulator = torch.arange(elements, dtype=torch.float32)
        with pytest.raises(CodecError, match=reason):
            codec.decode(payload, elements, accumulator)
        with pytest.raises(CodecError, match=reason):
            codec.accumulate(payload, accumulator, 1.0)
        assert torch.equal(accumulator, torch.arange(elements, dtype=torch.float32))

    @pytest.fixture
    def payload(self) -> bytearray:
        return bytearray(TopK().encode(normal()))

    @pytest.mark.parametrize("record", [0, 1, 2])
    @pytest.mark.parametrize("number", [count_of_sets(4096, 64), 256**PLACES - 1], ids=["next", "last"])
    def test_places_that_are_no_set(self, payload: bytearray, record: int, number: int) -> None:
        payload[76 * record : 76 * record + PLACES] = number.to_bytes(PLACES, "little")
        self.refuses(payload, "places that are no set")

    def test_any_number_of_places_is_a_set_in_range_without_duplicates(self, payload: bytearray) -> None:
        for number in (0, 1, math.comb(4096, 64) - 1):
            payload[:PLACES] = number.to_bytes(PLACES, "little")
            assert TopK().decode(payload, ELEMENTS)[:4096].count_nonzero() == 64

    @pytest.mark.parametrize("number", [math.comb(64, 12), 256**LARGE - 1])
    def test_larger_values_that_are_no_set(self, payload: bytearray, number: int) -> None:
        payload[76 + PLACES : 76 + PLACES + LARGE] = number.to_bytes(LARGE, "little")
        self.refuses(payload, "larger values that are no set")

    def test_larger_values_beyond_the_last_one(self) -> None:
        """Of ten values, two are larger ones; the number of another two of the 64 places is refused."""
        values = torch.zeros(ELEMENTS)
        values[:10] = 1.0
        payload = bytearray(TopK().encode(values))
        first = sum(math.comb(64, size) for size in range(3, 13))
        assert int.from_bytes(payload[PLACES : PLACES + LARGE], "little") == first  # places 0 and 1
        payload[PLACES : PLACES + LARGE] = (first + math.comb(10, 2) - 1).to_bytes(LARGE, "little")  # 8 and 9
        TopK().decode(payload, ELEMENTS)
        payload[PLACES : PLACES + LARGE] = (first + math.comb(10, 2)).to_bytes(LARGE, "little")  # 0 and 10
        self.refuses(payload, "larger values that are no set")

    def test_sign_of_a_value_that_is_not_there(self) -> None:
        values = torch.zeros(ELEMENTS)
        values[:10] = 1.0
        payload = bytearray(TopK().encode(values))
        payload[PLACES + LARGE + 1] = 1 << 2
        self.refuses(payload, "signs of values that it does not have")

    # Infinity, NaN, NaN, the first magnitude beyond 2**100.
    @pytest.mark.parametrize("bits", [0xFF00, 0xFF80, 0xFFFF, 0xE301])
    def test_scale(self, payload: bytearray, bits: int) -> None:
        for record in range(3):
            hostile = bytearray(payload)
            struct.pack_into("<H", hostile, 76 * record + SCALE, bits)
            self.refuses(hostile, "a scale that is not finite or too large")

    def test_ratio_that_makes_a_scale_too_large(self, payload: bytearray) -> None:
        struct.pack_into("<HB", payload, SCALE, 0xE300, 0)
        assert TopK().decode(payload, ELEMENTS).abs().max().item() == MAX_MAGNITUDE
        payload[SCALE + 2] = 1
        self.refuses(payload, "a scale that is not finite or too large")

    def test_scales_of_values_that_are_not_there(self) -> None:
        payload = bytearray(TopK().encode(torch.zeros(ELEMENTS)))
        payload[SCALE] = 1
        self.refuses(payload, "a scale of values that it does not have")
        values = torch.zeros(ELEMENTS)
        values[:4] = 1.0  # too few for a larger one
        payload = bytearray(TopK().encode(values))
        payload[SCALE + 2] = 1
        self.refuses(payload, "a scale of values that it does not have")
        payload = bytearray(TopK(bits=1).encode(normal()))
        payload[-1] = 1
        self.refuses(payload, "a scale of values that it does not have", TopK(bits=1))
