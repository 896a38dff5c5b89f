"""The bytes of one chunk of `TopK`, for many chunks at once.

A record is, one after another:

1. the number of the set of places (`combinations`);
2. the number of the set of those of the chosen values, counted from 0, that have the larger magnitude;
3. a bit for each chosen value, the lowest bit of the first byte first: 1 if it is negative. The other bits are 0;
4. the smaller magnitude: the upper bits of a float32 without its sign, 8 of the exponent and 8 of the mantissa;
5. the ratio of the larger magnitude to the smaller one, less 1, in 32nds.
"""

import functools
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from .combinations import Combinations, combinations, number_bytes

_LARGE_PART = 5  # one of five values has the larger magnitude
_RATIO_STEPS = 32
_LARGEST_RATIO = 255
_SCALE_BYTES = 2
_DROPPED_BITS = 15  # of a float32, beside its sign
_LARGEST = 2.0**100


@dataclass(frozen=True, slots=True)
class ChunkForm:
    """The form of the record of a chunk of `chunk` elements, of which `k` are sent at most."""

    chunk: int
    k: int
    large: int
    """Values with the larger magnitude, if `k` are sent."""
    whole: tuple[int, int, int]
    """The same three of a whole chunk, whose tables serve for all."""
    places_end: int
    large_end: int
    signs_end: int

    @property
    def nbytes(self) -> int:
        """Bytes of a record."""
        return self.signs_end + _SCALE_BYTES + 1

    @property
    def places(self) -> Combinations:
        """The sets of places."""
        return combinations(self.chunk, self.k, self.whole[0], self.whole[1])

    @property
    def larger(self) -> Combinations:
        """The sets of values that have the larger magnitude."""
        return combinations(self.k, self.large, self.whole[1], self.whole[2])

    def larger_of(self, sizes: NDArray[np.int64]) -> NDArray[np.int64]:
        """Return how many of so many values have the larger magnitude."""
        return sizes // _LARGE_PART if self.large else np.zeros_like(sizes)


@functools.lru_cache(maxsize=1024)
def record_of(elements: int, chunk: int, k: int, bits: int) -> ChunkForm:
    """Return the form of the record of so many elements of a chunk, of whose elements `k` are sent at most.

    Raises ValueError if the places of a chunk take too many bits.
    """
    whole = (chunk, k, _large_of(k, bits))
    most = -(-k * elements // chunk)
    large = _large_of(most, bits)
    places_end = number_bytes(elements, most)
    large_end = places_end + number_bytes(most, large)
    return ChunkForm(elements, most, large, whole, places_end, large_end, large_end + (most + 7) // 8)


def _large_of(k: int, bits: int) -> int:
    return k // _LARGE_PART if bits > 1 else 0


@dataclass(frozen=True, slots=True, eq=False)
class Records:
    """Records of one form, in memory that they may share with a payload."""

    record: ChunkForm
    raw: NDArray[np.uint8]
    """(R, nbytes)."""

    @property
    def _places(self) -> NDArray[np.uint8]:
        return self.raw[:, : self.record.places_end]

    @property
    def _large(self) -> NDArray[np.uint8]:
        return self.raw[:, self.record.places_end : self.record.large_end]

    @property
    def _signs(self) -> NDArray[np.uint8]:
        return self.raw[:, self.record.large_end : self.record.signs_end]

    @property
    def _ratio(self) -> NDArray[np.uint8]:
        return self.raw[:, -1]

    @property
    def _small(self) -> NDArray[np.float32]:
        """The smaller magnitude of each record, (R,)."""
        words = self.raw[:, -3].astype(np.uint32) | self.raw[:, -2].astype(np.uint32) << 8
        return (words << _DROPPED_BITS).view(np.float32)

    def write(self, sets: NDArray[np.int64], sizes: NDArray[np.int64], values: NDArray[np.float32]) -> None:
        """Write the records of chosen values (R, k), with their places. After the first `sizes` (R,) are zeros."""
        record = self.record
        large_sizes = record.larger_of(sizes)
        # A stable order: of equal magnitudes, the first ones are the larger ones.
        order = np.argsort(-np.abs(values), axis=1, kind="stable")
        small, ratio = _scales(np.take_along_axis(np.abs(values), order, axis=1), sizes, large_sizes)
        large = np.where(np.arange(record.large) < large_sizes[:, None], order[:, : record.large], record.k)
        large.sort(axis=1)
        large[large == record.k] = 0
        self._places[:] = record.places.numbers(sets, sizes)
        if record.large:
            self._large[:] = record.larger.numbers(large, large_sizes)
        self._signs[:] = np.packbits(values < 0, axis=1, bitorder="little")
        self.raw[:, -3], self.raw[:, -2], self.raw[:, -1] = small & 0xFF, small >> 8, ratio

    def what_is_wrong(self, largest: float) -> str:
        """Return what no encoder writes; empty if there is nothing. `largest`: of all magnitudes."""
        record = self.record
        if not record.places.are_numbers(self._places):
            return "places that are no set"
        sizes = record.places.sizes(self._places)
        large_sizes = record.larger_of(sizes)
        if record.large and not self._are_large(sizes, large_sizes):
            return "larger values that are no set of its values"
        bits = np.unpackbits(self._signs, axis=1, bitorder="little")
        if (bits.astype(bool) & (np.arange(bits.shape[1]) >= sizes[:, None])).any():
            return "signs of values that it does not have"
        with np.errstate(over="ignore", invalid="ignore"):
            # A NaN fails the comparison.
            if not (self._magnitudes()[1] <= largest).all():
                return "a scale that is not finite or too large"
        if self._ratio[large_sizes == 0].any() or self._small[sizes == 0].any():
            return "a scale of values that it does not have"
        return ""

    def _are_large(self, sizes: NDArray[np.int64], large_sizes: NDArray[np.int64]) -> bool:
        if not self.record.larger.are_numbers(self._large, large_sizes):
            return False
        few = np.flatnonzero(sizes < self.record.k)
        found, _ = self.record.larger.sets(self._large[few])
        return bool((found.max(axis=1, initial=-1) < np.maximum(sizes[few], 1)).all())

    def read(self) -> tuple[NDArray[np.int64], NDArray[np.float32]]:
        """Return the places of all values, counted over all chunks, and the values. The records are valid."""
        record = self.record
        sets, sizes = record.places.sets(self._places)
        small, larger = self._magnitudes()
        values = np.repeat(small[:, None], record.k, axis=1)
        if record.large:
            found, found_sizes = record.larger.sets(self._large)
            rows, columns = np.nonzero(np.arange(record.large) < found_sizes[:, None])
            values[rows, found[rows, columns]] = larger[rows]
        bits = np.unpackbits(self._signs, axis=1, bitorder="little", count=record.k)
        np.negative(values, out=values, where=bits.astype(bool))
        places = sets + record.chunk * np.arange(len(sets))[:, None]
        if (sizes == record.k).all():
            return places.ravel(), values.ravel()
        there = np.arange(record.k) < sizes[:, None]
        return places[there], values[there]

    def _magnitudes(self) -> tuple[NDArray[np.float32], NDArray[np.float32]]:
        """Return the smaller and the larger magnitude of each record. The product has 18 bits: it is exact."""
        small = self._small
        ratio = (self._ratio.astype(np.float32) + np.float32(_RATIO_STEPS)) / np.float32(_RATIO_STEPS)
        return small, small * ratio


def _scales(
    magnitudes: NDArray[np.float32], sizes: NDArray[np.int64], large_sizes: NDArray[np.int64]
) -> tuple[NDArray[np.uint32], NDArray[np.uint8]]:
    """Return the two bytes of the smaller magnitude, and the ratio, of rows (R, k) in descending order."""
    # A running sum is added up in its order everywhere; other sums depend on the processor's vector units.
    sums = np.zeros((len(magnitudes), magnitudes.shape[1] + 1))
    np.cumsum(magnitudes, axis=1, dtype=np.float64, out=sums[:, 1:])
    rows = np.arange(len(sums))
    of_large = sums[rows, large_sizes]
    rest = (sums[rows, sizes] - of_large) / np.maximum(sizes - large_sizes, 1)
    # To the nearest that can be written.
    small = (rest.astype(np.float32).view(np.uint32) + (1 << (_DROPPED_BITS - 1))) >> _DROPPED_BITS
    written = (small << _DROPPED_BITS).view(np.float32).astype(np.float64)
    known = (written > 0) & (large_sizes > 0)
    safe = np.where(known, written, 1.0)
    ratio = np.rint((of_large / np.maximum(large_sizes, 1) / safe - 1) * _RATIO_STEPS)
    most = np.minimum(np.floor((_LARGEST / safe - 1) * _RATIO_STEPS), _LARGEST_RATIO)
    return small, np.where(known, np.clip(ratio, 0, most), 0).astype(np.uint8)
