"""The header of a safetensors file: names, dtypes, shapes and places of tensors. No I/O, no clock.

A file is 8 bytes with the length of the header, the header as JSON, and the data. The format is that of
https://github.com/huggingface/safetensors. Headers are written in one canonical form, byte for byte that of the
library's version 0.8. They are read with a strict grammar, which every file of the library follows:

* The keys of a tensor have the library's order, and no whitespace stands between them.
* The data of all tensors follow each other in the header's order, and fill the file exactly.
* Nothing is nested, so a header of a stranger costs memory in proportion to its length only.
"""

from __future__ import annotations

import json
import math
import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass

import torch

from p2pavg.base.errors import StateError
from p2pavg.net.transport import Buffer

LENGTH_BYTES = 8
ALIGNMENT = 8  # of the data's begin, so that every number is aligned
MAX_HEADER_BYTES = 2**25  # 32 MiB; a tensor takes about 120 bytes
MAX_TENSORS = 2**17
MAX_NAME_BYTES = 1024
MAX_DIMENSIONS = 64  # torch's own limit in most operations
MAX_DATA_BYTES = 2**62

DTYPES: dict[str, torch.dtype] = {
    "U64": torch.uint64,
    "I64": torch.int64,
    "F64": torch.float64,
    "F32": torch.float32,
    "U32": torch.uint32,
    "I32": torch.int32,
    "BF16": torch.bfloat16,
    "F16": torch.float16,
    "U16": torch.uint16,
    "I16": torch.int16,
    "F8_E5M2FNUZ": torch.float8_e5m2fnuz,
    "F8_E4M3FNUZ": torch.float8_e4m3fnuz,
    "F8_E4M3": torch.float8_e4m3fn,
    "F8_E5M2": torch.float8_e5m2,
    "I8": torch.int8,
    "U8": torch.uint8,
    "BOOL": torch.bool,
}
"""Dtypes by their names in files, in the order in which their tensors stand in a file: the largest elements first."""
_NAMES = {dtype: name for name, dtype in DTYPES.items()}
_RANKS = {dtype: rank for rank, dtype in enumerate(_NAMES)}

# The quantifiers are possessive, so a match never goes back: a hostile header costs time in proportion to its length.
_PLAIN = rb'[^"\\\x00-\x1f]*+'
_TEXT = rb'"(%(p)s(?:\\.%(p)s)*+)"' % {b"p": _PLAIN}
_METADATA = re.compile(rb'\{"__metadata__":\{')
_ENTRY = re.compile(_TEXT + rb":" + _TEXT)
# 19 digits are enough for every size that is allowed, and keep the conversion of each number cheap.
_NUMBERS = rb"(?:0|[1-9][0-9]{0,18}+)"
_TENSOR = re.compile(
    _TEXT + rb':\{"dtype":"([A-Z0-9_]{1,16})",'
    rb'"shape":\[((?:%(n)s(?:,%(n)s){0,63}+)?)\],"data_offsets":\[(%(n)s),(%(n)s)\]\}' % {b"n": _NUMBERS}
)
_PADDING = re.compile(rb" *+\Z")


@dataclass(frozen=True, slots=True)
class Spec:
    """Dtype and shape of a tensor."""

    dtype: torch.dtype
    shape: tuple[int, ...]

    @classmethod
    def of(cls, tensor: torch.Tensor) -> Spec:
        """Return the dtype and the shape of this tensor."""
        return cls(tensor.dtype, tuple(tensor.shape))

    @property
    def elements(self) -> int:
        """Number of elements."""
        return math.prod(self.shape)

    @property
    def nbytes(self) -> int:
        """Bytes of the elements."""
        return self.elements * self.dtype.itemsize


@dataclass(frozen=True, slots=True)
class Layout:
    """Places of all tensors in a file."""

    specs: Mapping[str, Spec]
    """In the order of the file."""
    metadata: Mapping[str, str]
    data_begin: int
    """Position of the first tensor, in bytes from the file's begin."""

    @property
    def size(self) -> int:
        """Bytes of the whole file."""
        return self.data_begin + sum(spec.nbytes for spec in self.specs.values())

    def places(self) -> Iterable[tuple[str, Spec, int]]:
        """Yield each tensor's name, its dtype and shape, and its position in the file."""
        begin = self.data_begin
        for name, spec in self.specs.items():
            yield name, spec, begin
            begin += spec.nbytes


def write_header(specs: Mapping[str, Spec], metadata: Mapping[str, str]) -> tuple[bytes, Layout]:
    """Return the canonical beginning of a file, up to the data, and the layout of the file.

    Raises:
        StateError: a tensor cannot be in a file, or they are too many; the message names the tensor.
    """
    if len(specs) > MAX_TENSORS:
        raise StateError(f"the state has {len(specs)} tensors, {MAX_TENSORS} is the most")
    for name, spec in specs.items():
        _check_name(name)
        _check_spec(name, spec)
    # The largest elements first, so each tensor is aligned without a gap before it.
    ordered = dict(sorted(specs.items(), key=lambda item: (_RANKS[item[1].dtype], item[0].encode())))
    fields = []
    if metadata:
        entries = (f"{_quoted(key)}:{_quoted(metadata[key])}" for key in sorted(metadata))
        fields.append(f'"__metadata__":{{{",".join(entries)}}}')
    end = 0
    for name, spec in ordered.items():
        begin, end = end, end + spec.nbytes
        shape = ",".join(map(str, spec.shape))
        fields.append(
            f'{_quoted(name)}:{{"dtype":"{_NAMES[spec.dtype]}","shape":[{shape}],"data_offsets":[{begin},{end}]}}'
        )
    header = f"{{{','.join(fields)}}}".encode()
    # Blanks and no zero bytes: the padding is a part of the JSON text.
    header += b" " * (-len(header) % ALIGNMENT)
    if len(header) > MAX_HEADER_BYTES:
        raise StateError(f"the state's header has {len(header)} bytes, {MAX_HEADER_BYTES} is the most")
    begin = LENGTH_BYTES + len(header)
    return len(header).to_bytes(LENGTH_BYTES, "little") + header, Layout(ordered, dict(metadata), begin)


def read_header(data: Buffer, *, max_tensors: int = MAX_TENSORS) -> Layout:
    """Return the layout of a whole file.

    Raises:
        StateError: the header breaks the format, or the file is not as long as it says.
    """
    view = memoryview(data)
    length = int.from_bytes(view[:LENGTH_BYTES], "little")
    begin = LENGTH_BYTES + length
    # The length is the stranger's claim: it is compared with the file before anything of that size is copied.
    if view.nbytes < LENGTH_BYTES or begin > view.nbytes:
        raise StateError(f"it ends within its header: it has {view.nbytes} bytes")
    if length > MAX_HEADER_BYTES or length % ALIGNMENT:
        raise StateError(f"its header has {length} bytes, which is too long or not a multiple of {ALIGNMENT}")
    layout = _HeaderReader(bytes(view[LENGTH_BYTES:begin]), max_tensors).layout(begin)
    # No byte may follow the last tensor: a file has one form, and so one digest.
    if layout.size != view.nbytes:
        raise StateError(f"it has {view.nbytes} bytes, and its header describes {layout.size}")
    return layout


class _HeaderReader:
    """Reads one header from its begin to its end."""

    def __init__(self, header: bytes, max_tensors: int) -> None:
        self._header = header
        self._max_tensors = max_tensors
        self._position = 0

    def layout(self, data_begin: int) -> Layout:
        """Return the layout that the header describes."""
        metadata: dict[str, str] = {}
        specs: dict[str, Spec] = {}
        more = True
        if opened := _METADATA.match(self._header):
            self._position = opened.end()
            self._read_metadata(metadata)
            more = self._comma()
        else:
            self._expect(b"{")
            # A file without tensors and without metadata is an empty object.
            more = self._header[self._position : self._position + 1] != b"}"
        end = 0
        while more:
            # Before the next one is read: a caller that knows the number of its tensors wastes nothing on more.
            if len(specs) == self._max_tensors:
                raise StateError(f"it has more than {self._max_tensors} tensors")
            end = self._read_tensor(specs, end)
            more = self._comma()
        self._expect(b"}")
        if not _PADDING.match(self._header, self._position):
            raise StateError("something follows the header's end")
        return Layout(specs, metadata, data_begin)

    def _read_metadata(self, metadata: dict[str, str]) -> None:
        while True:
            found = self._match(_ENTRY)
            key = _unquoted(found[1])
            # JSON readers differ in which of two equal keys counts, so one file could mean two things.
            if key in metadata or len(metadata) == 16:
                raise StateError("its metadata have a key twice, or more than 16 keys")
            metadata[key] = _unquoted(found[2])
            if not self._comma():
                break
        self._expect(b"}")

    def _read_tensor(self, specs: dict[str, Spec], begin: int) -> int:
        """Read one tensor, whose data begin at ``begin``. Return their end."""
        found = self._match(_TENSOR)
        name = _unquoted(found[1])
        _check_name(name)
        if name in specs:
            raise StateError(f"it has the tensor {name!r} twice")
        dtype = DTYPES.get(found[2].decode("ascii"))
        if dtype is None:
            raise StateError(
                f"the tensor {name!r} has the dtype {found[2].decode('ascii')!r}, which is not supported"
            )
        spec = Spec(dtype, tuple(map(int, found[3].split(b","))) if found[3] else ())
        _check_spec(name, spec)
        end = int(found[5])
        # Tensors follow each other without gaps and overlaps, so no two names can share memory.
        if int(found[4]) != begin or end - begin != spec.nbytes or begin % dtype.itemsize:
            raise StateError(
                f"the tensor {name!r} is not in its place, or its size does not follow from its shape"
            )
        specs[name] = spec
        return end

    def _match(self, pattern: re.Pattern[bytes]) -> re.Match[bytes]:
        found = pattern.match(self._header, self._position)
        if found is None:
            raise StateError(f"its header breaks the format at byte {self._position}")
        self._position = found.end()
        return found

    def _comma(self) -> bool:
        """Step over a comma. Return whether there is one."""
        found = self._header.startswith(b",", self._position)
        self._position += found
        return found

    def _expect(self, token: bytes) -> None:
        if not self._header.startswith(token, self._position):
            raise StateError(f"its header breaks the format at byte {self._position}")
        self._position += len(token)


def _check_name(name: str) -> None:
    # Names are shown to users, so a stranger's may not hold what moves a terminal's cursor.
    if not name.isprintable() or not 0 < len(name.encode()) <= MAX_NAME_BYTES or name == "__metadata__":
        raise StateError(
            f"a tensor's name has 1 to {MAX_NAME_BYTES} bytes of printable text, got {name[:64]!r}"
        )


def _check_spec(name: str, spec: Spec) -> None:
    if spec.dtype not in _NAMES:
        kind = str(spec.dtype).removeprefix("torch.")
        raise StateError(f"the tensor {name!r} is {kind}, which cannot be saved")
    if len(spec.shape) > MAX_DIMENSIONS:
        raise StateError(
            f"the tensor {name!r} has {len(spec.shape)} dimensions, {MAX_DIMENSIONS} is the most"
        )
    # Also with a zero among them: torch computes strides from the others.
    if math.prod(max(length, 1) for length in spec.shape) * spec.dtype.itemsize > MAX_DATA_BYTES:
        raise StateError(f"the tensor {name!r} has the shape {spec.shape}, which is too large")


def _quoted(text: str) -> str:
    return json.dumps(text, ensure_ascii=False)


def _unquoted(text: bytes) -> str:
    try:
        unquoted = json.loads(b'"' + text + b'"')
        # JSON allows half of a surrogate pair, which is no text and fails only where it is shown or written.
        unquoted.encode()
    except (ValueError, UnicodeError):
        raise StateError("its header has text that is no Unicode") from None
    assert type(unquoted) is str  # it was in quotes
    return unquoted
