"""The largest values of each chunk, in four levels, with their places as one number.

Legend: n elements, in chunks of `chunk`; R chunks that are encoded together; k values of a chunk at most.
"""

from dataclasses import dataclass
from typing import ClassVar

import numpy as np
import torch
from numpy.typing import NDArray

from .codec import MAX_MAGNITUDE, CheckedCodec, CodecError, check_encodable
from .records import ChunkForm, Records, record_of
from .scratch import CHUNK_ELEMENTS


@dataclass(frozen=True, slots=True, kw_only=True)
class TopK(CheckedCodec):
    """The `k` largest values by magnitude of each chunk. All others are sent as 0, so it needs error feedback.

    The scheme is that of SparseLoCo (Sarfi et al. 2025, arXiv 2508.15706): few values in few bits, with what was left
    out added to the next vector (:class:`~p2pavg.optim.ErrorFeedback`). Without that, most of a vector is lost.

    * **Places.** The number of the chosen places among all choices of `k` of `chunk`, which is the shortest code of
      fixed length (`combinations`). For 64 of 4096 it has 59 bytes: 7.38 bits a place, 7.36 being the entropy.
    * **Values.** With 2 bits, a sign and one of two magnitudes: the mean of the largest fifth of the `k`, and that of
      the others. A fifth is the best part for magnitudes that fall off exponentially beyond the smallest chosen one;
      that it is fixed saves a quarter of a bit for each value. With 1 bit, a sign and the mean of all `k`.
    * **Scale.** 16 bits for the smaller magnitude, and 8 bits for the ratio to the larger one, in 32nds.

    The defaults take 76 bytes for 4096 elements: 0.148 bits for an element, 215 times fewer than fp32. The length does
    not depend on the values. Values of equal magnitude are chosen in the order of their places. Zeros stay zeros: if a
    chunk has fewer than `k` other values, only these are sent.

    **Averages** have twice as many values, where a chunk may have so many: 134 bytes, 0.262 bits for an element. An
    average of two contributions keeps all that they sent, one of more the largest values: contributors choose different
    ones, and an average with as many values as one of them would drop most of what was sent.

    No operation here depends on a processor's vector units or on a fused multiply-add, so all members choose the same
    values of the same vector.

    `chunk`: a power of two from 64 to 4096. A vector's last chunk may be shorter, and gives so many fewer values.
    `k`: 1 to a quarter of `chunk`; the places of a chunk may take 1000 bits at most, as 164 of 4096 do.
    `bits`: 1 or 2.
    """

    kind: ClassVar[str] = "topk"
    chunk: int = 4096
    k: int = 64
    bits: int = 2

    def __post_init__(self) -> None:
        chunk, k = self.chunk, self.k
        if not (type(chunk) is int and 64 <= chunk <= 4096 and chunk.bit_count() == 1):
            raise ValueError(f"chunk must be a power of two from 64 to 4096, got {chunk!r}")
        if not (type(k) is int and 1 <= k <= chunk // 4):
            raise ValueError(
                f"k must be a whole number from 1 to a quarter of chunk, {chunk // 4}, got {k!r}"
            )
        if type(self.bits) is not int or self.bits not in (1, 2):
            raise ValueError(f"bits must be 1 or 2, got {self.bits!r}")
        record_of(chunk, chunk, k, self.bits)  # refuses too many bits

    @property
    def granularity(self) -> int:
        return self.chunk

    @property
    def is_sparse(self) -> bool:
        return True

    @property
    def averages(self) -> "TopK":
        try:
            return TopK(chunk=self.chunk, k=2 * self.k, bits=self.bits)
        except ValueError:  # so many places have too long a number
            return self

    def _payload_nbytes(self, elements: int) -> int:
        return sum(rows * record.nbytes for record, rows in self._records(elements))

    def _records(self, elements: int) -> list[tuple[ChunkForm, int]]:
        """Return the kinds of chunks of a vector, with their numbers: whole ones, then a shorter one."""
        rows, rest = divmod(elements, self.chunk)
        kinds = [(self.chunk, rows)] if rows else []
        if rest:
            kinds.append((rest, 1))
        return [(record_of(each, self.chunk, self.k, self.bits), count) for each, count in kinds]

    def _sections(self, source: torch.Tensor, elements: int) -> list[tuple[Records, int]]:
        """Return the records of a payload, each with the index of its first element."""
        raw, first, start, found = source.numpy(), 0, 0, []
        for record, rows in self._records(elements):
            end = first + rows * record.nbytes
            found.append((Records(record, raw[first:end].reshape(rows, record.nbytes)), start))
            first, start = end, start + rows * record.chunk
        return found

    def _encode(self, values: torch.Tensor, target: torch.Tensor) -> None:
        for records, start in self._sections(target, values.numel()):
            record, rows = records.record, len(records.raw)
            sets = np.zeros((rows, record.k), dtype=np.int64)
            sizes = np.zeros(rows, dtype=np.int64)
            chosen = np.zeros((rows, record.k), dtype=np.float32)
            step = max(CHUNK_ELEMENTS // record.chunk, 1)
            for row in range(0, rows, step):
                some = slice(row, min(row + step, rows))
                first = start + row * record.chunk
                part = values[first : first + (some.stop - row) * record.chunk].cpu()
                check_encodable(part.abs().amax().view(1), part, first)
                matrix = part.numpy().reshape(-1, record.chunk)
                sets[some], sizes[some], chosen[some] = _largest(matrix, record.k)
            records.write(sets, sizes, chosen)

    def _validate(self, source: torch.Tensor, elements: int) -> None:
        for records, _ in self._sections(source, elements):
            wrong = records.what_is_wrong(MAX_MAGNITUDE)
            if wrong:
                raise CodecError(f"{self.name} payload has {wrong}")

    def _decode(self, source: torch.Tensor, out: torch.Tensor) -> None:
        out.zero_()
        flat = out.detach().numpy()
        for records, start in self._sections(source, out.numel()):
            places, values = records.read()
            flat[places + start] = values

    def _accumulate(self, source: torch.Tensor, accumulator: torch.Tensor, weight: float) -> None:
        flat = accumulator.detach().numpy()
        with np.errstate(over="ignore", invalid="ignore"):
            for records, start in self._sections(source, accumulator.numel()):
                places, values = records.read()
                flat[places + start] += values * np.float32(weight)


def _largest(
    values: NDArray[np.float32], k: int
) -> tuple[NDArray[np.int64], NDArray[np.int64], NDArray[np.float32]]:
    """Return the places, in ascending order, of the k largest values of each row (R, n); their numbers; the values.

    Places and values after the first ones of a row, if it has fewer than k values that are not zero, are 0.
    """
    # The bits of magnitudes, read as integers, have the order of the magnitudes.
    magnitudes = values.view(np.int32) & 0x7FFF_FFFF
    columns = values.shape[1]
    least = np.partition(magnitudes, columns - k, axis=1)[:, columns - k : columns - k + 1]
    least = np.maximum(least, 1)
    mask = magnitudes >= least
    sizes = np.count_nonzero(mask, axis=1)
    for row in np.flatnonzero(
        sizes > k
    ):  # several values are as large as the last one: the first ones are chosen
        equal = np.flatnonzero(magnitudes[row] == least[row])
        mask[row, equal[equal.size - (sizes[row] - k) :]] = False
    sizes = np.minimum(sizes, k)
    rows, places = np.nonzero(mask)
    starts = np.cumsum(sizes) - sizes
    within = np.arange(rows.size) - starts[rows]
    sets = np.zeros((len(values), k), dtype=np.int64)
    chosen = np.zeros((len(values), k), dtype=np.float32)
    sets[rows, within] = places
    chosen[rows, within] = values[rows, places]
    return sets, sizes, chosen
