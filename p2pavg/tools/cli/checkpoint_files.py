"""The work of the commands ``p2pavg checkpoint …``."""

from __future__ import annotations

import re
import shutil
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from typing import BinaryIO

import torch

from p2pavg.base.errors import ConfigError, StateError
from p2pavg.base.files import PUBLIC, creating, naming_errors, replacing
from p2pavg.runs.membership.certificate import date_of
from p2pavg.state.checkpoint import COMMON, OWN, Checkpoint, pieces_of, read
from p2pavg.state.layout import read_header, write_header
from p2pavg.state.snapshot import Content, specs_of, tensors_in

TORCH, SAFETENSORS = "torch", "safetensors"
_TORCH_SUFFIXES = (".pt", ".pth")
_DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}
_WEIGHTS = (".safetensors", ".bin", ".pt", ".pth", ".h5", ".msgpack")  # of a model, in files of any library
_LINEAGE = "lineage"
_EXTRAS = "extras"
# Of an AveragedOptimizer, of LocalUpdates, and of both.
_PREFIXES = ("parameter/", "anchor/", "buffer/")


def describe(file: Path) -> list[str]:
    """Return what a checkpoint holds, line by line.

    Raises:
        StateError: the file is no checkpoint; the message says why.
    """
    checkpoint = read(file, verified=True)
    # A lineage is as :mod:`p2pavg.optim.base.state` packs it; a file may hold anything in its place.
    lineage = checkpoint.common.values.get(_LINEAGE)
    state = lineage.get("state") if isinstance(lineage, dict) else None
    extras = checkpoint.own.values.get(_EXTRAS)
    try:
        when = date_of(checkpoint.written)
    except (ValueError, OverflowError, OSError):
        when = "at an unknown time"
    return [
        f"update {checkpoint.epoch}, written {when}",
        f"lineage {state if isinstance(state, str) and state.isalnum() else 'unknown'}",
        f"root {checkpoint.root.hex()}",
        f"size {checkpoint.size:,} bytes",
        f"common to all peers: {_summary(checkpoint.common)}",
        f"of this peer alone: {_summary(checkpoint.own)}",
        f"extras: {_listed(extras if isinstance(extras, dict) else ())}",
        *_table(checkpoint),
    ]


def verify(file: Path) -> str:
    """Return one line about a checkpoint without damage.

    Raises:
        StateError: the file is damaged or no checkpoint; the message says why.
    """
    checkpoint = read(file)
    return f"{file}: update {checkpoint.epoch}, {checkpoint.size:,} bytes, no damage"


def export(file: Path, output: Path, *, form: str | None, force: bool, dtype: str | None = None) -> str:
    """Write the model of a checkpoint, and return one line about it.

    Args:
        form: ``torch``, ``safetensors``, or None for what the output's suffix says.
        force: true if an existing output is overwritten.
        dtype: of all floating point tensors, by its name in torch; ``None``: as they are.

    Raises:
        StateError: the checkpoint is damaged.
        ConfigError: the output exists or cannot be written, or the checkpoint has no model.
    """
    if form is None:
        form = TORCH if output.suffix in _TORCH_SUFFIXES else SAFETENSORS
    if form not in (TORCH, SAFETENSORS):
        raise ConfigError(f"--format must be {SAFETENSORS} or {TORCH}, got {form!r}")
    if output.exists() and output.samefile(file):
        raise ConfigError(f"{output} is the checkpoint itself; choose another name")
    exists = ConfigError(f"{output} exists; --force overwrites it")
    if output.exists() and not force:
        raise exists
    tensors = _tensors_in(file, dtype)
    with naming_errors(f"cannot write {output}", output):
        try:
            with (replacing if force else creating)(output, mode=PUBLIC) as opened:
                if form == TORCH:
                    # torch saves the whole memory of a view, here that of the file, so each tensor gets its own.
                    torch.save({name: tensor.clone() for name, tensor in tensors.items()}, opened)
                else:
                    _write_safetensors(opened, tensors)
        except FileExistsError:
            raise exists from None
    return f"made {output}: {len(tensors)} tensors of update {read(file, verified=True).epoch}"


def export_like(file: Path, output: Path, like: Path, *, dtype: str | None = None) -> str:
    """Make a folder of Hugging Face's kind with the model of a checkpoint, and return one line about it.

    Args:
        like: a folder of the same model, or of the same adapters, as ``save_pretrained`` writes it. All of it is
            copied, with the checkpoint's tensors in place of its own: what was not trained comes from there.
        dtype: see :func:`export`.

    Raises:
        StateError: the checkpoint is damaged.
        ConfigError: ``like`` is no such folder or of another model, or the output exists or cannot be written.
    """
    is_adapter = (like / "adapter_config.json").is_file()
    if not is_adapter and not (like / "config.json").is_file():
        raise ConfigError(
            f"--like {like} has no config.json and no adapter_config.json: save_pretrained writes them"
        )
    found = _weights_in(like)
    for name, tensor in _tensors_in(file, dtype).items():
        place = next((each for each in _names_in_file(name, is_adapter=is_adapter) if each in found), None)
        if place is None or found[place].shape != tensor.shape:
            why = "no such tensor" if place is None else f"one of shape {tuple(found[place].shape)}"
            raise ConfigError(
                f"{file} has the tensor {name} of shape {tuple(tensor.shape)}, and {like} {why}"
            )
        found[place] = tensor
    with naming_errors(f"cannot write {output}", output):
        try:
            output.mkdir(parents=True)
        except FileExistsError:
            raise ConfigError(f"{output} exists; name a folder that does not") from None
        for each in sorted(like.iterdir()):
            if each.is_file() and each.suffix not in _WEIGHTS and not each.name.endswith(".index.json"):
                shutil.copyfile(each, output / each.name)
        name = "adapter_model.safetensors" if is_adapter else "model.safetensors"
        with creating(output / name, mode=PUBLIC) as opened:
            _write_safetensors(opened, _as_dtype(found, dtype))
    return f"made {output}: {len(found)} tensors, of update {read(file, verified=True).epoch}"


def _weights_in(like: Path) -> dict[str, torch.Tensor]:
    found: dict[str, torch.Tensor] = {}
    for weights in sorted(like.glob("*.safetensors")):
        with naming_errors(f"cannot read {weights}", weights):
            data = weights.read_bytes()
        try:
            found |= tensors_in(memoryview(data), read_header(memoryview(data)))
        except StateError as error:
            raise ConfigError(f"{weights} is no file of safetensors: {error}") from None
    if not found:
        raise ConfigError(
            f"--like {like} has no weights in safetensors, with whose names the checkpoint is compared"
        )
    return found


def _names_in_file(name: str, *, is_adapter: bool) -> Iterator[str]:
    """Return the names that a tensor of a model may have in a file of ``save_pretrained``, the likeliest first."""
    yield name
    if is_adapter:
        # Within a model, adapters have a name, by which several can be told apart. In their own file they have none.
        plain = re.sub(r"\.default(?=\.|$)", "", name)
        yield plain
        yield plain.removesuffix(".weight")  # of DoRA's magnitudes
        yield plain.replace(".modules_to_save.", ".")


def _tensors_in(file: Path, dtype: str | None) -> dict[str, torch.Tensor]:
    if dtype is not None and dtype not in _DTYPES:
        raise ConfigError(f"--dtype must be one of {', '.join(_DTYPES)}, got {dtype!r}")
    common = read(file).common.tensors
    # The trained parameters and averaged buffers, by the model's own names.
    tensors = {
        name.removeprefix(prefix): tensor
        for prefix in _PREFIXES
        for name, tensor in common.items()
        if name.startswith(prefix)
    }
    if not tensors:
        raise ConfigError(f"{file} has no parameters and no buffers of a model")
    return _as_dtype(tensors, dtype)


def _as_dtype(tensors: Mapping[str, torch.Tensor], dtype: str | None) -> dict[str, torch.Tensor]:
    if dtype is None:
        return dict(tensors)
    return {
        name: tensor.to(_DTYPES[dtype]) if tensor.is_floating_point() else tensor
        for name, tensor in tensors.items()
    }


def _write_safetensors(opened: BinaryIO, tensors: Mapping[str, torch.Tensor]) -> None:
    header, layout = write_header(specs_of(tensors), {"format": "pt"})
    for piece in pieces_of(tensors, header, layout):
        opened.write(piece)


def _summary(content: Content) -> str:
    size = sum(tensor.nbytes for tensor in content.tensors.values())
    return f"{len(content.tensors)} tensors of {size:,} bytes; values: {_listed(content.values)}"


def _listed(names: Iterable[object]) -> str:
    # A name may hold anything, also what moves a terminal's cursor.
    return (
        ", ".join(name if isinstance(name, str) and name.isprintable() else repr(name) for name in names)
        or "none"
    )


def _table(checkpoint: Checkpoint) -> Iterator[str]:
    rows = [("tensor", "dtype", "shape")]
    for prefix, content in ((COMMON, checkpoint.common), (OWN, checkpoint.own)):
        rows += (
            (f"{prefix}{name}", str(tensor.dtype).removeprefix("torch."), str(tuple(tensor.shape)))
            for name, tensor in sorted(content.tensors.items())
        )
    widths = [max(len(row[column]) for row in rows) for column in range(2)]
    for name, dtype, shape in rows:
        yield f"{name:{widths[0]}}  {dtype:{widths[1]}}  {shape}"
