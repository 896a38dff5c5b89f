"""Numbers for sets of integers: the combinatorial number system, for many sets at once.

A set c_1 < c_2 < ... < c_m of integers from 0 to n - 1 has the number C(c_1, 1) + C(c_2, 2) + ... + C(c_m, m), which
is below C(n, m) (Knuth, "The Art of Computer Programming", volume 4A, section 7.2.1.3, theorem L). So the number takes
log2 C(n, m) bits: no code of equally likely sets is shorter. Every number below C(n, m) stands for one set, and every
set for one number: a received number needs one comparison, and no duplicate, no wrong order and no index out of range
can be written at all.

The numbers have hundreds of bits. Here they are rows of *limbs* of 48 bits in int64, the lowest first: sums of up to
2**15 limbs fit, and six bytes of each are the bytes of the number.
"""

import functools
import math
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

Limbs = NDArray[np.int64]

LIMB_BITS = 48
_LIMB_BYTES = LIMB_BITS // 8
_MASK = (1 << LIMB_BITS) - 1
MOST_BITS = 1000
"""Bits of the largest number. float64, in which sets are looked for, ends at 1024."""
_UPWARDS = 1 + 2.0**-40
"""Above the rounding errors of a number as float64, and far below the step from one binomial to the next."""


@dataclass(frozen=True, slots=True, eq=False)
class Binomials:
    """C(c, m) for all c up to the size of a universe, and all m up to the size of the largest sets."""

    limbs: tuple[Limbs, ...]
    """For each m, (universe + 1, as many limbs as the largest has, with room for a sign)."""
    floats: tuple[NDArray[np.float64], ...]
    """The same as float64, (universe + 1,)."""


@dataclass(frozen=True, slots=True, eq=False)
class Combinations:
    """Sets of at most `most` of the integers below a universe.

    The sets of `most` integers have the lowest numbers, then follow those of `most - 1`, down to the empty set.
    """

    most: int
    nbytes: int
    """Bytes of a number."""
    _table: tuple[int, int]
    """Of the arguments of `binomials_of`. The table itself is large, and only the last ones are kept."""
    _firsts: Limbs
    """The first number of the sets of m integers, (most + 1, limbs)."""
    _ends: Limbs
    """The number after the last one of these sets."""

    def numbers(self, sets: NDArray[np.int64], sizes: NDArray[np.int64]) -> NDArray[np.uint8]:
        """Return the numbers of sets, little-endian bytes (R, nbytes).

        `sets`: (R, most), ascending; 0 after the first `sizes` (R,) integers of each row.
        """
        total, table = self._firsts[sizes], binomials_of(*self._table)
        for position in range(self.most):
            terms = table.limbs[position + 1]
            width = min(terms.shape[1], total.shape[1])
            total[:, :width] += terms[sets[:, position], :width]
        return _to_bytes(_carried(total), self.nbytes)

    def are_numbers(self, raw: NDArray[np.uint8], size: NDArray[np.int64] | None = None) -> bool:
        """Return whether each row of bytes (R, nbytes) is the number of a set, or of one of `size` (R,) integers."""
        limbs = self._from_bytes(raw)
        if size is None:
            return not _is_at_least(limbs, self._ends[0]).any()
        return bool((_is_at_least(limbs, self._firsts[size]) & ~_is_at_least(limbs, self._ends[size])).all())

    def sets(self, raw: NDArray[np.uint8]) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
        """Return the sets of numbers (R, nbytes), which are valid, and their sizes: see :meth:`numbers`."""
        rest = self._from_bytes(raw)
        sizes = self._sizes_of(rest)
        rest = _carried(rest - self._firsts[sizes])
        table = binomials_of(*self._table)
        found = np.zeros((len(rest), self.most), dtype=np.int64)
        for size in range(self.most, 0, -1):
            rest = rest[:, : table.limbs[size].shape[1]]  # it is below C(universe, size)
            rows = slice(None) if (sizes >= size).all() else np.flatnonzero(sizes >= size)
            found[rows, size - 1], rest[rows] = _largest(table, rest[rows], size)
        return found, sizes

    def sizes(self, raw: NDArray[np.uint8]) -> NDArray[np.int64]:
        """Return the sizes (R,) of the sets of numbers (R, nbytes), which are valid."""
        return self._sizes_of(self._from_bytes(raw))

    def _sizes_of(self, limbs: Limbs) -> NDArray[np.int64]:
        sizes = np.full(len(limbs), self.most)
        smaller = np.flatnonzero(_is_at_least(limbs, self._ends[self.most]))
        for size in range(self.most - 1, -1, -1):
            if not smaller.size:
                break
            sizes[smaller] = size
            smaller = smaller[_is_at_least(limbs[smaller], self._ends[size])]
        return sizes

    def _from_bytes(self, raw: NDArray[np.uint8]) -> Limbs:
        limbs = self._firsts.shape[1]
        wide = np.zeros((len(raw), limbs * _LIMB_BYTES), dtype=np.uint8)
        wide[:, : self.nbytes] = raw
        words = np.zeros((len(raw), limbs, 8), dtype=np.uint8)
        words[:, :, :_LIMB_BYTES] = wide.reshape(len(raw), limbs, _LIMB_BYTES)
        return words.view("<i8").reshape(len(raw), limbs).astype(np.int64, copy=False)


@functools.lru_cache(maxsize=4)
def binomials_of(universe: int, most: int) -> Binomials:
    """Return a table of binomials, and keep the last few. That of 64 of 4096 has 13 MB, the largest one 60 MB.

    A codec has two. More are not kept: other peers name the codecs of runs that an auxiliary helps.
    """
    row = np.zeros((universe + 1, 1), dtype=np.int64)
    row[:, 0] = 1
    rows = [row]
    for size in range(1, most + 1):
        # C(c, m) is the sum of all C(b, m - 1) with b < c. Each limb's sum is below 2**61.
        below = np.zeros(
            (universe + 1, math.comb(universe, size).bit_length() // LIMB_BITS + 1), dtype=np.int64
        )
        kept = min(below.shape[1], row.shape[1])  # beyond half of the universe, binomials get smaller
        np.cumsum(row[:-1, :kept], axis=0, out=below[1:, :kept])
        row = _carried(below)
        rows.append(row)
    return Binomials(tuple(rows), tuple(map(_as_floats, rows)))


@functools.lru_cache(maxsize=256)
def combinations(universe: int, most: int, table_universe: int, table_most: int) -> Combinations:
    """Return the sets of at most `most` of the integers below `universe`, which use a table that is as large or larger.

    Raises ValueError if a number has more than MOST_BITS bits.
    """
    nbytes = number_bytes(universe, most)
    table = binomials_of(table_universe, table_most)
    limbs = count_of_sets(universe, most).bit_length() // LIMB_BITS + 1
    counts = np.zeros((most + 1, limbs), dtype=np.int64)
    for size in range(most + 1):
        count = table.limbs[size][universe, :limbs]
        counts[size, : count.size] = count
    firsts = np.zeros((most + 1, limbs), dtype=np.int64)
    for size in range(most - 1, -1, -1):
        firsts[size] = firsts[size + 1] + counts[size + 1]
    firsts = _carried(firsts)
    return Combinations(most, nbytes, (table_universe, table_most), firsts, _carried(firsts + counts))


def count_of_sets(universe: int, most: int) -> int:
    """Return the number of sets of at most `most` of the integers below `universe`.

    Raises ValueError if the number of such a set has more than MOST_BITS bits.
    """
    # The sizes may come from another peer's text. So the sum ends at the first term that is too much: no number here is
    # much longer than MOST_BITS. All terms of 1000 of 4096, added before the limit was checked, took 70 ms.
    total = term = 1
    for size in range(1, most + 1):
        term = term * (universe - size + 1) // size
        total += term
        if (total - 1).bit_length() > MOST_BITS:
            raise ValueError(
                f"sets of {most} of {universe} need more than {MOST_BITS} bits; the most are {size - 1} of {universe}"
            )
    return total


@functools.lru_cache(maxsize=1024)
def number_bytes(universe: int, most: int) -> int:
    """Return the bytes of the number of a set. Raises ValueError if it has more than MOST_BITS bits."""
    return -(-(count_of_sets(universe, most) - 1).bit_length() // 8)


def _largest(table: Binomials, rest: Limbs, size: int) -> tuple[NDArray[np.int64], Limbs]:
    """Return the largest integer c of each row with C(c, size) <= rest, and rest - C(c, size)."""
    binomials, floats = table.limbs[size], table.floats[size]
    # Never too small: rounded upwards. It is one too large only if the number is just below the next binomial.
    guess = np.searchsorted(floats, _as_floats(rest) * _UPWARDS, side="right") - 1
    width = rest.shape[1]
    left = _carried(rest - binomials[guess, :width])
    for row in np.flatnonzero(left[:, -1] < 0):
        guess[row] -= 1
        left[row] = _carried(rest[row : row + 1] - binomials[guess[row], :width])[0]
    return guess, left


def _carried(limbs: Limbs) -> Limbs:
    """Bring all limbs but the last into their range, in place, and return them. A negative number ends negative."""
    for index in range(limbs.shape[1] - 1):
        limbs[:, index + 1] += limbs[:, index] >> LIMB_BITS
        limbs[:, index] &= _MASK
    return limbs


def _is_at_least(limbs: Limbs, least: Limbs) -> NDArray[np.bool_]:
    difference: NDArray[np.bool_] = _carried(limbs - least)[:, -1] >= 0
    return difference


def _as_floats(limbs: Limbs) -> NDArray[np.float64]:
    weights = np.ldexp(1.0, LIMB_BITS * np.arange(limbs.shape[1]))
    total: NDArray[np.float64] = limbs.astype(np.float64) @ weights
    return total


def _to_bytes(limbs: Limbs, nbytes: int) -> NDArray[np.uint8]:
    words = limbs.astype("<i8", copy=False).view(np.uint8).reshape(*limbs.shape, 8)
    return np.ascontiguousarray(words[:, :, :_LIMB_BYTES]).reshape(len(limbs), -1)[:, :nbytes]
