"""Robust combination of one part's contributions: trimmed mean, median and centred clipping, by weight.

No I/O, no clock. :mod:`p2pavg.group.aggregation` defines the rules.

**The same bits on every machine.** Values are only compared, added, subtracted, multiplied and divided element by
element, and each of these is rounded as IEEE 754 says. No operation sums along an axis, where the order would depend on
the machine's vector unit, and none fuses a product with a sum.

**Weights** are rounded to whole units of about a four-millionth of the total (:mod:`p2pavg.base.numbers`). Sums of
units are exact in float32, so a trim ends at exactly the same place in whatever order the contributions come.

**Time.** With equal weights, the values of each coordinate are sorted by a sorting network: comparisons in a fixed
order, each of which is one minimum and one maximum of whole chunks (Batcher 1968; Knuth, The Art of Computer
Programming, volume 3, section 5.2.2, algorithm M). With other weights, each pair of contributions is compared once.
Both work on chunks that fit into a core's cache.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from functools import lru_cache
from typing import TypeAlias

import numpy as np
import torch
from numpy.typing import NDArray

from p2pavg.base.numbers import lower_median, units_of
from p2pavg.group.aggregation import CenteredClip, Median, RobustRule, TrimmedMean

Floats: TypeAlias = NDArray[np.float32]

CHUNK_ELEMENTS = 32_768  # 128 KiB of each contribution
PAIRED_ELEMENTS = 65_536  # the same for pairs, where a call costs more than the cache saves
_SUMS = 64  # sums of squares that are left for math.fsum, which adds them without any rounding between


def combine(
    rule: RobustRule, rows: Sequence[torch.Tensor], weights: Sequence[float], out: torch.Tensor
) -> None:
    """Write the rule's result into ``out``.

    Every value of ``rows`` must be finite and at most :data:`p2pavg_compression.MAX_MAGNITUDE`. A single row is the
    result, bit by bit. With two rows, a rule is what its formula gives.

    Args:
        rows: of all contributors, in the roster's order: float32 (n,), on the CPU. They are not changed.
        weights: of the rows, above 0.
        out: float32 (n,), on the CPU, apart from the rows in memory.
    """
    arrays, result = [row.numpy() for row in rows], out.numpy()
    if len(arrays) == 1:
        np.copyto(result, arrays[0])
        return
    units = units_of(weights)
    match rule:
        case TrimmedMean(fraction):
            _kept_mean(arrays, units, trim_window(units, fraction), result)
        case Median():
            _kept_mean(arrays, units, middle_window(units), result)
        case CenteredClip(radius, iterations):
            _kept_mean(arrays, units, middle_window(units), result)
            # The center begins as the median, and moves as the rule says.
            for shares in _clipped_shares(arrays, units, radius, iterations, result):
                _move(result, arrays, shares)


def largest_kept(rule: RobustRule, rows: Sequence[torch.Tensor], weights: Sequence[float]) -> torch.Tensor:
    """Return the largest magnitude of what a rule keeps of the contributions to each value, float32 (n,).

    The rounding error of :func:`combine` is in proportion to it. What is cut off has no part in it, however large it
    is; of a contribution that is clipped, the rest counts. The arguments are those of :func:`combine`.
    """
    arrays, units = [row.numpy() for row in rows], units_of(weights)
    if len(arrays) == 1:
        return rows[0].abs()
    if isinstance(rule, TrimmedMean):
        return torch.from_numpy(_largest_in(arrays, units, trim_window(units, rule.fraction)))
    largest = _largest_in(arrays, units, middle_window(units))
    if isinstance(rule, CenteredClip):
        center = np.empty_like(largest)
        _kept_mean(arrays, units, middle_window(units), center)
        total = sum(units)
        for shares in _clipped_shares(arrays, units, rule.radius, rule.iterations, center):
            for row, count, share in zip(arrays, units, shares, strict=True):
                if count:
                    rest = np.abs(row - center) * np.float32(share * total / count)
                    np.maximum(largest, np.abs(center) + rest, out=largest)
            _move(center, arrays, shares)
    return torch.from_numpy(largest)


# ---------------------------------------------------------------------- weights


def trim_window(units: Sequence[int], fraction: float) -> tuple[int, int]:
    """Return where the units begin and end that a trimmed mean keeps. At least those of the median are kept."""
    total = sum(units)
    cut = min(round(fraction * total), total // 2 - 1)
    return cut, total - cut


def middle_window(units: Sequence[int]) -> tuple[int, int]:
    """Return where the two units around the middle begin and end.

    Contributions end at even units. So both units are of one contribution, or the middle is between two contributions
    and one unit is of each.
    """
    middle = sum(units) // 2
    return middle - 1, middle + 1


# ---------------------------------------------------------------------- the mean of what is kept


def _kept_mean(rows: Sequence[Floats], units: Sequence[int], kept: tuple[int, int], out: Floats) -> None:
    """Write the mean of the units ``kept``, where each coordinate's units lie in the order of its values."""
    if len(set(units)) == 1:
        _kept_of_equal(rows, units[0], kept, out)
    else:
        _kept_of_unequal(rows, units, kept, out)


def _kept_of_equal(rows: Sequence[Floats], each: int, kept: tuple[int, int], out: Floats) -> None:
    """Do so for members that have ``each`` as many units: those of one rank are the same in all coordinates."""
    first, last = kept
    ends = [(rank * each, (rank + 1) * each) for rank in range(len(rows))]
    counts = {
        rank: min(end, last) - max(start, first)
        for rank, (start, end) in enumerate(ends)
        if end > first and start < last
    }
    network = _network(len(rows), tuple(counts))
    rooms = _rooms(len(rows) + 2, out.size, CHUNK_ELEMENTS)
    for start, stop in _chunks(out.size, CHUNK_ELEMENTS):
        values, free = _sort(
            network, [row[start:stop] for row in rows], [room[: stop - start] for room in rooms]
        )
        total, work = out[start:stop], free.pop()
        total.fill(0.0)
        for rank, count in counts.items():
            np.multiply(values[rank], np.float32(count), out=work)
            np.add(total, work, out=total)
        np.divide(total, np.float32(last - first), out=total)


def _sort(
    network: Sequence[_Comparison], values: list[Floats], free: list[Floats]
) -> tuple[list[Floats], list[Floats]]:
    """Sort each coordinate; return the values by rank, those that are wanted, and the rooms that hold none.

    Args:
        values: chunks of the rows. They are not changed.
        free: rooms for as many chunks and two more.
    """
    own = [False] * len(values)
    for low, high, wants_low, wants_high in network:
        lower, higher = values[low], values[high]
        if wants_low:
            values[low] = np.minimum(lower, higher, out=free.pop())
        if wants_high:
            values[high] = np.maximum(lower, higher, out=free.pop())
        free += [before for at, before in ((low, lower), (high, higher)) if own[at]]
        own[low], own[high] = wants_low, wants_high
    return values, free


_Comparison: TypeAlias = tuple[int, int, bool, bool]
"""Two places, and whether the lower and the higher value of the two are wanted later."""


@lru_cache(maxsize=256)
def _network(size: int, ranks: tuple[int, ...]) -> tuple[_Comparison, ...]:
    """Return the comparisons that put some ranks of ``size`` values into place."""
    wanted, found = set(ranks), list[_Comparison]()
    for low, high in reversed(list(merge_exchange(size))):
        if low in wanted or high in wanted:
            found.append((low, high, low in wanted, high in wanted))
            wanted |= {low, high}
    return tuple(reversed(found))


def merge_exchange(size: int) -> Iterator[tuple[int, int]]:
    """Yield the comparisons of Batcher's merge exchange, which sorts ``size`` values (Knuth 5.2.2, algorithm M)."""
    top = 1 << max(size - 1, 1).bit_length() >> 1
    p = top
    while p:
        q, r, d = top, 0, p
        while True:
            yield from ((i, i + d) for i in range(size - d) if i & p == r)
            if q == p:
                break
            d, q, r = q - p, q >> 1, p
        p >>= 1


def _kept_of_unequal(
    rows: Sequence[Floats], units: Sequence[int], kept: tuple[int, int], out: Floats
) -> None:
    """Do so for any weights: count the units that lie before each contribution, by comparing each with each other.

    Of equal values, those of earlier rows lie before those of later ones.
    """
    tensors, result = [torch.from_numpy(row) for row in rows], torch.from_numpy(out)
    first, last = map(float, kept)
    rooms = [torch.from_numpy(room) for room in _rooms(len(rows) + 1, out.size, PAIRED_ELEMENTS)]
    for start, stop in _chunks(out.size, PAIRED_ELEMENTS):
        values = [tensor[start:stop] for tensor in tensors]
        work, *before = (room[: stop - start] for room in rooms)
        for index, count in enumerate(before):
            count.fill_(float(sum(units[index + 1 :])))
        for later in range(len(rows)):
            for earlier in range(later):
                torch.le(values[earlier], values[later], out=work)
                before[later].add_(work, alpha=units[earlier])
                before[earlier].sub_(work, alpha=units[later])
        total = result[start:stop].zero_()
        for count, value, own in zip(before, values, units, strict=True):
            torch.add(count, float(own), out=work).clamp_(first, last)
            total.add_(work.sub_(count.clamp_(first, last)).mul_(value))
        total.div_(last - first)


def _largest_in(rows: Sequence[Floats], units: Sequence[int], kept: tuple[int, int]) -> Floats:
    """Return the largest magnitude of each coordinate's values of which at least one unit is among those ``kept``."""
    first, last = kept
    largest = np.empty(rows[0].size, np.float32)
    for start, stop in _chunks(largest.size, CHUNK_ELEMENTS):
        values = np.stack([row[start:stop] for row in rows])
        order = values.argsort(axis=0)
        own = np.asarray(units)[order]
        ends = own.cumsum(axis=0)
        counts = np.minimum(ends, last) > np.maximum(ends - own, first)
        magnitudes = np.abs(np.take_along_axis(values, order, axis=0))
        np.max(magnitudes, axis=0, initial=0.0, where=counts, out=largest[start:stop])
    return largest


# ---------------------------------------------------------------------- centred clipping


def _clipped_shares(
    rows: Sequence[Floats], units: Sequence[int], radius: float, iterations: int, center: Floats
) -> Iterator[list[float]]:
    """Yield each row's share of its difference from the center, for each move; the caller makes it before the next."""
    tau, total = 0.0, sum(units)
    for iteration in range(iterations):
        distances = [_distance(row, center) for row in rows]
        if iteration == 0:
            tau = radius * lower_median(distances, units)
        yield [
            count / total * (1.0 if distance <= tau else tau / distance)
            for count, distance in zip(units, distances, strict=True)
        ]


def _distance(row: Floats, center: Floats) -> float:
    """Return the Euclidean distance, of squares that are added in the same order on every machine."""
    width = min(CHUNK_ELEMENTS, 1 << max(row.size - 1, 0).bit_length())
    difference, (square, sums) = np.empty(width, np.float32), np.zeros((2, width))
    for start, stop in _chunks(row.size, CHUNK_ELEMENTS):
        found = square[: stop - start]
        np.subtract(row[start:stop], center[start:stop], out=difference[: stop - start])
        np.copyto(found, difference[: stop - start])  # in float64, where no square overflows
        np.multiply(found, found, out=found)
        sums[: stop - start] += found
    while sums.size > _SUMS:
        sums = sums[: sums.size // 2] + sums[sums.size // 2 :]
    return math.sqrt(math.fsum(sums.tolist()))


def _move(center: Floats, rows: Sequence[Floats], shares: Sequence[float]) -> None:
    """Add ``share * (row - center)`` of each row to the center."""
    rooms = _rooms(2, center.size, CHUNK_ELEMENTS)
    for start, stop in _chunks(center.size, CHUNK_ELEMENTS):
        work, step = (room[: stop - start] for room in rooms)
        step.fill(0.0)
        for row, share in zip(rows, shares, strict=True):
            np.subtract(row[start:stop], center[start:stop], out=work)
            np.multiply(work, np.float32(share), out=work)
            np.add(step, work, out=step)
        center[start:stop] += step


def _rooms(count: int, elements: int, chunk: int) -> list[Floats]:
    """Return memory for ``count`` chunks of a part."""
    return [np.empty(min(chunk, elements), np.float32) for _ in range(count)]


def _chunks(elements: int, chunk: int) -> Iterator[tuple[int, int]]:
    """Yield the bounds of successive chunks."""
    for start in range(0, elements, chunk):
        yield start, min(start + chunk, elements)
