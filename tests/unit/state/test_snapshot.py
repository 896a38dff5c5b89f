"""Snapshots: canonical bytes, the safetensors library, and bytes of strangers."""

from __future__ import annotations

import json
import mmap
import tracemalloc
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest
import safetensors.torch
import torch
from blake3 import blake3
from hypothesis import example, given
from hypothesis import strategies as st
from safetensors import safe_open

from p2pavg.base.errors import StateError
from p2pavg.state.layout import MAX_NAME_BYTES, MAX_TENSORS
from p2pavg.state.snapshot import FORMER_VALUES_KEY, VALUES_KEY, Content, copy_of, read, values_text
from tests.unit.state import contents
from tests.unit.state.contents import of_every_dtype, same_content, same_tensor

SMALL = Content(
    {
        "parameter/b": torch.tensor([1.0, -2.5]),
        "parameter/a": torch.tensor([[1, 2], [3, 4]], dtype=torch.bfloat16),
        "buffer/n": torch.tensor(7),
        "buffer/none": torch.empty(0, 3),
    },
    {"lineage": b"\x01\x02", "epoch": 12, "schedule": {"last": (1, 2.5, None), 0: [True]}},
)
GOLDEN = "f56c593b2012a7ee8b8a23777365eda3307526a15700df742224d4ec45b31e1d"


def file_of(header: Any, data: bytes = b"") -> bytes:
    """Return a file with this header: text, or what is written as compact JSON."""
    text = header if isinstance(header, bytes) else json.dumps(header, separators=(",", ":")).encode()
    text += b" " * (-len(text) % 8)
    return len(text).to_bytes(8, "little") + text + data


def entry(dtype: str, shape: list[int], begin: int, end: int) -> dict[str, Any]:
    return {"dtype": dtype, "shape": shape, "data_offsets": [begin, end]}


METADATA = {"__metadata__": {VALUES_KEY: values_text({})}}
TWO = METADATA | {"a": entry("F32", [1], 0, 4), "b": entry("F32", [1], 4, 8)}


class TestCanonical:
    def test_golden_bytes(self) -> None:
        assert blake3(copy_of(SMALL)).hexdigest() == GOLDEN

    @given(contents.contents)
    def test_any_content_comes_back_bit_for_bit(self, content: Content) -> None:
        written = copy_of(content)
        back = read(bytes(written))
        assert same_content(back, content)
        assert copy_of(back) == written

    def test_a_snapshot_of_version_0_2_is_read(self) -> None:
        written = bytes(copy_of(SMALL)).replace(VALUES_KEY.encode(), FORMER_VALUES_KEY.encode(), 1)
        assert same_content(read(written), SMALL)

    def test_the_copy_does_not_change_with_the_tensors(self) -> None:
        live = torch.ones(5)
        buffer = copy_of(Content({"x": live}))
        live.zero_()
        assert torch.equal(read(buffer).tensors["x"], torch.ones(5))

    @pytest.mark.parametrize(
        ("tensors", "pattern"),
        [
            ({"z": torch.ones(1, dtype=torch.complex64)}, "'z' is complex64, which cannot be saved"),
            ({"z": torch.ones(2).to_sparse()}, "'z' is sparse"),
            ({"z": torch.empty(2, device="meta")}, "'z' is on the device 'meta'"),
            ({"z": 1.0}, "'z' must be a tensor, got float"),
            ({1: torch.ones(1)}, "must be text, got 1"),
            ({"": torch.ones(1)}, "printable text, got ''"),
            ({"\x1b[2J": torch.ones(1)}, "printable text"),
            ({"\ud800": torch.ones(1)}, "printable text"),
            ({"__metadata__": torch.ones(1)}, "got '__metadata__'"),
            ({"ä" * (MAX_NAME_BYTES // 2 + 1): torch.ones(1)}, "1 to 1024 bytes"),
            ({"z": torch.ones((1,) * 65)}, "65 dimensions"),
        ],
    )
    def test_what_cannot_be_saved_is_refused_by_name(self, tensors: dict[str, Any], pattern: str) -> None:
        with pytest.raises(StateError, match=pattern):
            copy_of(Content(tensors))

    def test_too_many_tensors_are_refused(self) -> None:
        one = torch.ones(1)
        with pytest.raises(StateError, match=f"{MAX_TENSORS} is the most"):
            copy_of(Content({str(number): one for number in range(MAX_TENSORS + 1)}))


class TestSafetensors:
    def test_the_library_reads_what_is_written_here(self, tmp_path: Path) -> None:
        content = Content(of_every_dtype(), {"x": 1})
        data = bytes(copy_of(content))
        loaded = safetensors.torch.load(data)
        assert loaded.keys() == content.tensors.keys()
        assert all(same_tensor(loaded[name], tensor) for name, tensor in content.tensors.items())
        (tmp_path / "file").write_bytes(data)
        with safe_open(tmp_path / "file", "pt") as opened:
            assert same_tensor(opened.get_tensor("BF16"), content.tensors["BF16"])
            assert opened.metadata() == {VALUES_KEY: values_text({"x": 1})}

    def test_what_the_library_writes_is_read_here_and_has_the_same_bytes(self) -> None:
        tensors = {name: tensor.contiguous() for name, tensor in of_every_dtype().items()}
        tensors |= {'quote " and \\ and / and ä': torch.ones(1)}
        data = safetensors.torch.save(tensors, metadata={VALUES_KEY: values_text({"x": 1})})
        assert same_content(read(data), Content(tensors, {"x": 1}))
        assert data == copy_of(Content(tensors, {"x": 1}))


class TestStrangers:
    def test_tensors_are_views_of_a_buffer_that_may_be_read_only(self, tmp_path: Path) -> None:
        data = bytes(copy_of(SMALL))
        (tmp_path / "file").write_bytes(data)
        with (tmp_path / "file").open("rb") as opened:
            mapped = mmap.mmap(opened.fileno(), 0, access=mmap.ACCESS_READ)
        assert same_content(read(data), SMALL)
        assert same_content(read(memoryview(mapped)), SMALL)

        writable = bytearray(data)
        content = read(writable)
        writable[-4:] = bytes(4)
        assert not same_content(content, SMALL), "it is a copy"

    def test_a_strangers_header_costs_memory_in_proportion_to_the_file(self) -> None:
        tensors = {str(number): entry("U8", [0], 0, 0) for number in range(20_000)}
        for data in (file_of(METADATA | tensors), file_of(b'{"a":"' + b"\\" * 2**20), file_of(b"[" * 2**20)):
            tracemalloc.start()
            try:
                with suppress(StateError):
                    read(data)
                _, peak = tracemalloc.get_traced_memory()
            finally:
                tracemalloc.stop()
            assert peak < 20 * len(data)

    @pytest.mark.parametrize(
        ("data", "pattern"),
        [
            (b"", "ends within its header"),
            (b"\x08\0\0\0\0\0\0", "ends within its header"),
            ((2**63).to_bytes(8, "little"), "ends within its header"),
            ((2**25 + 8).to_bytes(8, "little") + bytes(2**25 + 8), "which is too long"),
            ((9).to_bytes(8, "little") + b"{}       ", "not a multiple of 8"),
            (file_of({}), "no snapshot"),
            (file_of({"__metadata__": {"other": "x"}}), "no snapshot"),
            (file_of({"__metadata__": {"other": "x"} | METADATA["__metadata__"]}), "no snapshot"),
            (file_of({"__metadata__": {str(number): "x" for number in range(17)}}), "more than 16 keys"),
            (file_of(b'{"__metadata__":{"a":"x","a":"x"}}'), "a key twice"),
            (file_of(b'{"__metadata__":{}}'), "breaks the format"),
            (file_of({"__metadata__": {VALUES_KEY: "x"}}), "no base64"),
            (file_of({"__metadata__": {VALUES_KEY: "ä"}}), "breaks the format|no base64"),
            (file_of({"__metadata__": {VALUES_KEY: "kQJ="}}), "canonical"),
            (file_of({"__metadata__": {VALUES_KEY: "k" * 2**23}}), "too long"),
            (file_of(TWO, bytes(7)), "has 167 bytes, and its header describes 168"),
            (file_of(TWO, bytes(9)), "has 169 bytes, and its header describes 168"),
            (file_of(TWO | {"b": entry("F32", [1], 0, 4)}, bytes(4)), "'b' is not in its place"),
            (file_of(TWO | {"b": entry("F32", [1], 5, 9)}, bytes(9)), "'b' is not in its place"),
            (file_of(TWO | {"b": entry("F32", [1], 3, 8)}, bytes(8)), "'b' is not in its place"),
            (file_of(TWO | {"b": entry("F32", [2], 4, 8)}, bytes(8)), "'b' is not in its place"),
            (file_of(TWO | {"b": entry("F64", [1], 4, 12)}, bytes(12)), "'b' is not in its place"),
            (
                file_of(TWO | {"b": entry("C64", [1], 4, 12)}, bytes(12)),
                "'b' has the dtype 'C64', which is not",
            ),
            (file_of(TWO | {"b": entry("F32", [-1], 4, 8)}, bytes(8)), "breaks the format"),
            (file_of(TWO | {"b": entry("F32", [1] * 65, 4, 8)}, bytes(8)), "breaks the format"),
            (file_of(TWO | {"b": entry("F32", [10**19], 4, 8)}, bytes(8)), "breaks the format"),
            (file_of(TWO | {"b": entry("F32", [0, 2**61], 4, 4)}, bytes(4)), "too large"),
            (file_of(TWO | {"b": entry("F32", [0, 2**31, 2**31], 4, 4)}, bytes(4)), "too large"),
            (
                file_of(TWO | {"b": entry("BOOL", [4], 4, 8)}, bytes(4) + b"\0\1\2\1"),
                "'b' has bytes that are",
            ),
            (file_of(TWO | {"b\n": entry("F32", [0], 8, 8)}, bytes(8)), "printable text"),
            (file_of(TWO | {"": entry("F32", [0], 8, 8)}, bytes(8)), "printable text"),
            (file_of(json.dumps(TWO).encode(), bytes(8)), "breaks the format"),
            (file_of(json.dumps(TWO, separators=(",", ":")).encode() + b"x", bytes(8)), "something follows"),
            (
                file_of(json.dumps(TWO, separators=(",", ":")).replace('"b"', '"a"').encode(), bytes(8)),
                "'a' twice",
            ),
            (file_of(b"[" * 4096), "breaks the format"),
            (file_of(b'{"a":' * 4096), "breaks the format"),
            (file_of(b'{"\\ud800":{"dtype":"U8","shape":[],"data_offsets":[0,1]}}', b"x"), "no Unicode"),
            (file_of(b'{"\xff":{"dtype":"U8","shape":[],"data_offsets":[0,1]}}', b"x"), "no Unicode"),
            (file_of(b'{"\\x":{"dtype":"U8","shape":[],"data_offsets":[0,1]}}', b"x"), "no Unicode"),
            (file_of(b'{"a":{"dtype":"U8","shape":[01],"data_offsets":[0,1]}}', b"x"), "breaks the format"),
        ],
    )
    def test_a_broken_file_is_refused_with_the_reason(self, data: bytes, pattern: str) -> None:
        with pytest.raises(StateError, match=pattern):
            read(data)

    def test_a_caller_bounds_the_number_of_tensors(self) -> None:
        data = copy_of(SMALL)
        assert same_content(read(data, max_tensors=4), SMALL)
        with pytest.raises(StateError, match="more than 3 tensors"):
            read(data, max_tensors=3)

    @given(st.binary(max_size=200))
    def test_any_bytes_are_refused(self, data: bytes) -> None:
        with pytest.raises(StateError):
            read(data)

    @given(st.binary(max_size=200))
    def test_any_header_is_refused_or_read(self, header: bytes) -> None:
        refused_or_read(file_of(header))

    @given(
        contents.contents,
        st.lists(
            st.tuples(
                st.sampled_from(["set", "cut", "insert", "swap"]), st.floats(0, 1), st.binary(max_size=9)
            )
        ),
    )
    @example(SMALL, [])
    def test_a_changed_snapshot_is_refused_or_read(
        self, content: Content, changes: list[tuple[str, float, bytes]]
    ) -> None:
        refused_or_read(changed(bytearray(copy_of(content)), changes))


def changed(data: bytearray, changes: list[tuple[str, float, bytes]]) -> bytearray:
    """Return the data after some changes, each at a fraction of its length."""
    act: dict[str, Callable[[int, bytes], None]] = {
        "set": lambda at, new: data.__setitem__(slice(at, at + len(new)), new),
        "cut": lambda at, new: data.__delitem__(slice(at, at + len(new))),
        "insert": lambda at, new: data.__setitem__(slice(at, at), new),
        "swap": lambda at, new: data.__setitem__(slice(at, at + len(new)), data[at : at + len(new)][::-1]),
    }
    for name, fraction, new in changes:
        act[name](int(fraction * len(data)), new)
    return data


def refused_or_read(data: bytes | bytearray) -> None:
    """Check that these bytes are refused with a StateError, or are a snapshot whose tensors lie within them."""
    try:
        content = read(data)
    except StateError:
        return
    assert sum(tensor.nbytes for tensor in content.tensors.values()) <= len(data)
    assert same_content(read(copy_of(content)), content)
