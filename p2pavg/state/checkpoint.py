"""Checkpoints: files with the whole state of a peer after an update.

A checkpoint is a safetensors file, which every tool for such files can read. It has what all peers share, under
``common/``, and what is this peer's own, under ``own/``.

**How damage is found.** The file names its own root (:mod:`p2pavg.state.tree`), as 64 hexadecimal digits at a fixed
place: the metadata stand first in a canonical header, and this entry is the first of the metadata. The root is that of
the whole file with zeros in place of these digits. So it covers every byte: header, values, data, and the file's
length. It cannot stand behind the data, because safetensors allows nothing there.

**How files come and go.** A file is written under another name, and gets its own when it is safely on the disk. Only
then are the oldest files removed. A process that is killed leaves a draft, which the next one removes. A file that is
damaged stays where it is, for the user to look at.
"""

from __future__ import annotations

import logging
import mmap
import os
import re
import time
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, BinaryIO

import torch

from p2pavg.base.errors import ConfigError, StateError
from p2pavg.base.files import PUBLIC, naming_errors, remove_drafts, replacing
from p2pavg.state.layout import LENGTH_BYTES, Layout, read_header, write_header
from p2pavg.state.snapshot import VALUES_KEY, Content, specs_of, tensors_in, values_of, values_text
from p2pavg.state.tree import CHUNK_BYTES, ChunkDigester, root_of

logger = logging.getLogger(__name__)

ROOT_KEY = "p2pavg-checkpoint-1"  # sorts before VALUES_KEY
COMMON = "common/"
OWN = "own/"
_ROOT_DIGITS = 64
_PREFIX = f'{{"__metadata__":{{"{ROOT_KEY}":"'.encode()
_ROOT_BEGIN = LENGTH_BYTES + len(_PREFIX)
_ROOT_END = _ROOT_BEGIN + _ROOT_DIGITS
_NO_ROOT = b"0" * _ROOT_DIGITS
_NAME = re.compile(r"update-([0-9]{12,19})\.safetensors")


@dataclass(frozen=True)
class Checkpoint:
    """Content of a checkpoint file. The tensors are read from the disk when they are used."""

    epoch: int
    """Updates since the run began."""
    written: float
    """Seconds since 1970, by the clock of the peer that wrote it."""
    common: Content
    """The part that all peers of the run share."""
    own: Content
    """The part that belongs to this peer alone."""
    root: bytes
    """32 bytes that the file names as its root."""
    size: int
    """Bytes of the file."""


class CheckpointFolder:
    """The checkpoints of one peer, in a directory. Files of other names are left alone."""

    def __init__(self, directory: str | Path, keep: int) -> None:
        """Make the directory if it is missing, and remove drafts that a killed process left there.

        Args:
            keep: number of files that stay; the oldest updates are removed first.

        Raises:
            ConfigError: ``keep`` is not a whole number of at least 1.
            StateError: the directory cannot be used; the message says why.
        """
        if type(keep) is not int or keep < 1:
            raise ConfigError(f"keep must be a whole number of at least 1, got {keep!r}")
        self._directory, self._keep = Path(directory), keep
        self._damaged: set[Path] = set()
        with naming_errors(f"cannot keep checkpoints in {directory}", directory, StateError):
            self._directory.mkdir(parents=True, exist_ok=True)
            remove_drafts(self._directory, _NAME)

    def write(self, epoch: int, common: Content, own: Content) -> Path:
        """Write the checkpoint of an update, and remove the oldest files beyond ``keep``.

        The tensors must not change meanwhile. They are not copied, unless they are on another device or not
        contiguous; then one at a time. A file of the same update is replaced.

        Returns:
            The new file.

        Raises:
            StateError: a tensor or a value cannot be saved, or the file cannot be written, for example because the
                disk is full. The earlier files stay.
        """
        path = self._directory / f"update-{epoch:012}.safetensors"
        try:
            write_checkpoint(path, epoch, common, own)
        except OSError as error:
            raise StateError(
                f"cannot write the checkpoint {path}: {error.strerror}; the earlier checkpoints stay"
            ) from error
        # The file of this update is new now, also if the one before was damaged.
        self._damaged.discard(path)
        self._prune(path)
        return path

    def newest(self) -> Path | None:
        """Return the file of the latest update that is not damaged; None without any.

        A damaged file is named in a warning, and never removed.

        Raises:
            StateError: the directory cannot be read.
        """
        # The newest first, and only until one is good: to verify a file, all of it is read.
        for path in sorted(self._files(), key=_epoch_of, reverse=True):
            try:
                read(path)
            except StateError as error:
                logger.warning("this checkpoint is not used: %s. Remove it when you have looked at it", error)
                self._damaged.add(path)
            else:
                return path
        return None

    def _files(self) -> list[Path]:
        with naming_errors(f"cannot read the directory {self._directory}", self._directory, StateError):
            return [entry for entry in self._directory.iterdir() if _NAME.fullmatch(entry.name)]

    def _prune(self, new: Path) -> None:
        """Remove the oldest files, never the new one. Damaged files take no other's place."""
        others = sorted((path for path in self._files() if path not in {new, *self._damaged}), key=_epoch_of)
        for path in others[: max(0, len(others) + 1 - self._keep)]:
            try:
                path.unlink(missing_ok=True)
            except OSError as error:
                logger.warning("cannot remove the old checkpoint %s: %s", path, error.strerror)


def write_checkpoint(path: Path, epoch: int, common: Content, own: Content) -> None:
    """Write one checkpoint file, in place of an earlier one of this name.

    Raises:
        StateError: a tensor or a value cannot be saved; the message names it.
        OSError: the file cannot be written; an earlier one stays.
    """
    tensors = {f"{COMMON}{name}": tensor for name, tensor in common.tensors.items()}
    tensors |= {f"{OWN}{name}": tensor for name, tensor in own.tensors.items()}
    values = {"epoch": epoch, "written": time.time(), "common": dict(common.values), "own": dict(own.values)}
    metadata = {ROOT_KEY: _NO_ROOT.decode("ascii"), VALUES_KEY: values_text(values)}
    header, layout = write_header(specs_of(tensors), metadata)
    with replacing(path, mode=PUBLIC) as opened:
        digester = ChunkDigester()
        for piece in pieces_of(tensors, header, layout):
            opened.write(piece)
            digester.update(piece)
        # The root is known only now. It goes where the header has zeros, which are what the digest has seen.
        opened.seek(_ROOT_BEGIN)
        opened.write(root_of(digester.finish(), digester.size).hex().encode("ascii"))


def pieces_of(
    tensors: Mapping[str, torch.Tensor], header: bytes, layout: Layout
) -> Iterator[bytes | memoryview]:
    """Yield the bytes of a file one after the other: the header, then each tensor, which is copied only if it must."""
    yield header
    for name in layout.specs:
        # Each step returns the tensor itself if it is in order already, so most tensors are not copied.
        flat = tensors[name].detach().cpu().resolve_neg().contiguous().reshape(-1)
        if flat.numel():
            yield flat.view(torch.uint8).numpy().data


def read(path: Path, *, verified: bool = False) -> Checkpoint:
    """Return the content of a checkpoint.

    The file is mapped into memory, so its tensors take no memory until they are used. Writing to them does not change
    the file. The file is never unpickled.

    Args:
        verified: true if its bytes were verified before; then only its header is read.

    Raises:
        StateError: the file is damaged or no checkpoint; the message names it and says why.
    """
    with naming_errors(f"cannot read the checkpoint {path}", path, StateError):
        try:
            with path.open("rb") as opened:
                # Before the file is mapped: only a read reports a damaged disk as an error.
                root = None if verified else _root_of_file(opened)
                return _read(_mapped(opened), root)
        except StateError as error:
            raise StateError(f"{path} is damaged or no checkpoint: {error}") from None


def _mapped(opened: BinaryIO) -> memoryview:
    size = os.fstat(opened.fileno()).st_size
    # An empty file cannot be mapped, and a shorter one has no root.
    if size < _ROOT_END:
        raise StateError(f"it has only {size} bytes")
    # Private to this process: a write to a tensor must neither change the file nor kill the process.
    return memoryview(mmap.mmap(opened.fileno(), size, access=mmap.ACCESS_COPY))


def _read(data: memoryview, root: bytes | None) -> Checkpoint:
    """Return the content of a file. Its root is computed before, or None to believe it."""
    layout = read_header(data)
    # The digits must be at the place that was taken as zeros. Elsewhere they would be part of what they name.
    if len(layout.metadata) != 2 or data[LENGTH_BYTES:_ROOT_BEGIN] != _PREFIX:
        raise StateError("its metadata are not those of a checkpoint")
    digits = layout.metadata[ROOT_KEY]
    if not re.fullmatch(f"[0-9a-f]{{{_ROOT_DIGITS}}}", digits):
        raise StateError("its root is not 64 hexadecimal digits")
    if root not in (None, bytes.fromhex(digits)):
        raise StateError("its bytes have changed since it was written")
    values = values_of(layout.metadata)
    if {name: type(value) for name, value in values.items()} != _VALUES or values["epoch"] < 0:
        raise StateError("its values are not those of a checkpoint")
    tensors = tensors_in(data, layout)
    contents = {
        prefix: {
            name.removeprefix(prefix): tensor for name, tensor in tensors.items() if name.startswith(prefix)
        }
        for prefix in (COMMON, OWN)
    }
    # A tensor without a place would be ignored without a word.
    if sum(map(len, contents.values())) != len(tensors):
        raise StateError(f"a tensor is neither under {COMMON!r} nor under {OWN!r}")
    return Checkpoint(
        epoch=values["epoch"],
        written=values["written"],
        common=Content(contents[COMMON], _named(values["common"])),
        own=Content(contents[OWN], _named(values["own"])),
        root=bytes.fromhex(digits),
        size=data.nbytes,
    )


_VALUES: dict[str, type] = {"epoch": int, "written": float, "common": dict, "own": dict}


def _named(values: dict[Any, Any]) -> dict[str, Any]:
    if any(type(name) is not str for name in values):
        raise StateError("its values have a name that is no text")
    return values


def _root_of_file(opened: BinaryIO) -> bytes:
    """Return the root of a file, with zeros where it names its own.

    The file is read, not mapped: a mapped page that the disk cannot read kills the process.
    """
    digester = ChunkDigester()
    first = bytearray(opened.read(CHUNK_BYTES))
    first[_ROOT_BEGIN:_ROOT_END] = _NO_ROOT
    digester.update(first)
    buffer = bytearray(CHUNK_BYTES)
    while count := opened.readinto(buffer):  # type: ignore[attr-defined] # every file has it
        digester.update(memoryview(buffer)[:count])
    return root_of(digester.finish(), digester.size)


def _epoch_of(path: Path) -> int:
    found = _NAME.fullmatch(path.name)
    assert found is not None  # it was chosen by its name
    return int(found[1])
