"""Shared memory: its size is sealed, its result is read-only, and a commit is one store."""

from __future__ import annotations

import fcntl
import mmap
import os

import pytest
import torch

from p2pavg.attached.segments import ContributionSegment, ResultReader, ResultWriter, result_size
from p2pavg.base.errors import RemoteProtocolError

ELEMENTS = 1000


def reader_of(writer: ResultWriter, elements: int = ELEMENTS) -> ResultReader:
    return ResultReader(elements, os.dup(writer.descriptor))


def test_both_ends_see_a_contribution() -> None:
    peer = ContributionSegment(ELEMENTS)
    process = ContributionSegment(ELEMENTS, os.dup(peer.descriptor))
    process.values.copy_(torch.arange(ELEMENTS, dtype=torch.float32))
    assert torch.equal(peer.values, torch.arange(ELEMENTS, dtype=torch.float32))
    for segment in (peer, process):
        segment.close()


@pytest.mark.parametrize("size", [0, 4 * ELEMENTS - 1, 8 * ELEMENTS])
def test_no_process_changes_the_size_of_a_segment(size: int) -> None:
    """A peer that reads memory behind a file's end dies of a bus error."""
    peer, writer = ContributionSegment(ELEMENTS), ResultWriter(ELEMENTS)
    for descriptor in (peer.descriptor, writer.descriptor):
        with pytest.raises(PermissionError):
            os.ftruncate(descriptor, size)
        with pytest.raises(PermissionError):
            fcntl.fcntl(descriptor, fcntl.F_ADD_SEALS, fcntl.F_SEAL_WRITE)
    peer.close()
    writer.close()


def test_no_process_writes_a_result() -> None:
    writer = ResultWriter(ELEMENTS)
    with pytest.raises(PermissionError):
        mmap.mmap(writer.descriptor, result_size(ELEMENTS))
    with pytest.raises(PermissionError):
        os.pwrite(writer.descriptor, b"x", 0)
    writer.close()


def test_a_result_is_there_from_its_commit_on() -> None:
    writer = ResultWriter(ELEMENTS)
    reader = reader_of(writer)
    writer.open()
    writer.values.fill_(3.0)
    assert reader.read(7) is None, "the peer may be killed here"
    writer.commit(7, b"description")
    assert reader.read(8) is None
    found = reader.read(7)
    assert found is not None
    assert found[0] == b"description"
    assert torch.equal(found[1], torch.full((ELEMENTS,), 3.0))
    writer.values.fill_(4.0)
    assert torch.equal(found[1], torch.full((ELEMENTS,), 3.0)), "a copy"
    writer.open()
    assert reader.read(7) is None, "the next result is being written"
    writer.close()


def test_a_result_is_readable_after_the_peer_has_closed_it() -> None:
    writer = ResultWriter(ELEMENTS)
    reader = reader_of(writer)
    writer.values.fill_(1.0)
    writer.commit(1, b"")
    writer.close()
    del writer
    assert reader.read(1) is not None


def test_a_segment_of_another_size_is_refused() -> None:
    writer, segment = ResultWriter(ELEMENTS), ContributionSegment(ELEMENTS)
    with pytest.raises(RemoteProtocolError):
        reader_of(writer, ELEMENTS + 1)
    with pytest.raises(RemoteProtocolError):
        ContributionSegment(ELEMENTS + 1, segment.descriptor)
    writer.close()
    segment.close()


def test_a_vector_without_elements() -> None:
    writer, segment = ResultWriter(0), ContributionSegment(0)
    reader = reader_of(writer, 0)
    writer.commit(1, b"x")
    found = reader.read(1)
    assert found is not None
    assert found[1].numel() == segment.values.numel() == 0
    writer.close()
    segment.close()
