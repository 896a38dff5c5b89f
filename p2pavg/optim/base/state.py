"""Checks of arguments and saved states. No I/O, no clock."""

from __future__ import annotations

import hashlib
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from blake3 import blake3

from p2pavg.base.messages import pack
from p2pavg.optim.coordination.progress import MAX_EPOCH
from p2pavg.state.nested import plain_number

# Digests of tensors: their shapes, dtypes and bytes, wherever they are.

# Lineage: a name of a peer's parameters, made of its beginning, its recipe and every update.
#
# Two peers of one lineage began with the same parameters and the same recipe. They took the same averages, bit for
# bit, in the same order and with the same hyperparameters. On machines of one kind their parameters are then
# identical. Different processors and versions of torch may round an optimizer's arithmetic differently. A lineage
# does not show that; the digests that peers compare every few updates do (p2pavg.optim.coordination.watch).

DIGEST_BYTES = 32
SHORT_BYTES = 8
"""Of a digest that peers compare to locate differences; the chance of a false match is 1 in 2^64."""
MANY_BYTES = 2**22  # from which on several threads hash; with less, waking them costs more than it saves
MAX_CHUNKS = 64  # 512 bytes of a record's 4096


@torch.no_grad()
def tensor_digest(tensor: torch.Tensor) -> bytes:
    """Return 32 bytes that depend on the shape, the dtype and every bit.

    Memory layout and device do not count. A tensor on a GPU is copied to the CPU.
    """
    values = tensor.detach().contiguous().cpu()
    threads = blake3.AUTO if values.nbytes >= MANY_BYTES else 1
    digest = blake3(f"{tuple(values.shape)}:{values.dtype};".encode(), max_threads=threads)
    digest.update(values.reshape(-1).view(torch.uint8).numpy().data)
    return digest.digest()


def joint_digest(digests: Iterable[bytes]) -> bytes:
    """Return one digest of several, each of 32 bytes; their order and number count."""
    return blake3(b"".join(digests)).digest()


def digest_of(tensors: Iterable[torch.Tensor]) -> bytes:
    """Return one digest of several tensors; their order and number count."""
    return joint_digest(tensor_digest(tensor) for tensor in tensors)


def chunk_bounds(tensors: int) -> list[tuple[int, int]]:
    """Return each chunk's range of tensors as (first, end): at most 64 chunks, none empty."""
    chunks = min(tensors, MAX_CHUNKS)
    return [(tensors * i // chunks, tensors * (i + 1) // chunks) for i in range(chunks)]


def short_digests(digests: Sequence[bytes]) -> bytes:
    """Return 8 bytes for each chunk of some tensors' digests, one after the other."""
    return b"".join(
        joint_digest(digests[first:end])[:SHORT_BYTES] for first, end in chunk_bounds(len(digests))
    )


_FIRST = "p2pavg/lineage/first/2"
_NEXT = "p2pavg/lineage/next/2"
_OTHER_RULES = "p2pavg/lineage/rules/1"


@dataclass(frozen=True, slots=True)
class Lineage:
    """Position of a peer in its run."""

    epoch: int
    """Updates since the run began."""
    state: bytes
    """32 bytes: the same for two peers only if they began alike and took the same updates in the same way."""

    def after(self, group_id: str, result: bytes = b"", numbers: bytes = b"") -> Lineage:
        """Return the lineage after an update with a group's average.

        Args:
            group_id: :attr:`p2pavg.Success.group_id`.
            result: digest of the averaged tensors; all of a group that succeeded hold the same bits.
            numbers: digest of the hyperparameters that the update was taken with.
        """
        epoch = self.epoch + 1
        packed = pack(_NEXT, self.state, epoch, group_id, result, numbers)
        return Lineage(epoch, hashlib.sha256(packed).digest())

    def with_rules(self, rules: bytes) -> Lineage:
        """Return the lineage of a peer that continues from here with other rules than the run had so far.

        Args:
            rules: digest of the new rules. Peers that continue with the same ones stay together.
        """
        return Lineage(self.epoch, hashlib.sha256(pack(_OTHER_RULES, self.state, rules)).digest())


def first_lineage(parameters: Iterable[torch.Tensor], recipe: bytes = b"") -> Lineage:
    """Return the lineage of a peer that begins.

    Args:
        parameters: the first parameters; shapes, dtypes, bytes and order count.
        recipe: digest of the peer's recipe.
    """
    return lineage_from(digest_of(parameters), recipe)


def lineage_from(parameters: bytes, recipe: bytes = b"") -> Lineage:
    """Return the same as :func:`first_lineage`, from the parameters' digest."""
    return Lineage(0, hashlib.sha256(pack(_FIRST, parameters, recipe)).digest())


MAX_AMOUNT = 1e300


def checked_amount(name: str, value: object) -> float:
    """Return a number above 0; raise ValueError with its name for anything else."""
    value = plain_number(value)
    if isinstance(value, bool) or not isinstance(value, int | float) or not 0 < value <= MAX_AMOUNT:
        raise ValueError(f"{name} must be a number above 0, got {value!r}")
    return float(value)


def checked_count(name: str, value: object) -> int:
    """Return a whole number above 0; raise ValueError with its name for anything else."""
    value = plain_number(value)
    if isinstance(value, bool) or not isinstance(value, int) or value <= 0:
        raise ValueError(f"{name} must be a whole number above 0, got {value!r}")
    return value


def checked_period(name: str, value: object) -> int:
    """Return a number of updates, 0 for ``None``; raise ValueError with its name for anything below 0."""
    if value is None:
        return 0
    value = plain_number(value)
    if isinstance(value, bool) or not isinstance(value, int) or value < 0:
        raise ValueError(f"{name} must be a whole number, 0 or more, or None, got {value!r}")
    return value


def check_holds(saved: Mapping[str, Any], *names: str) -> None:
    """Raise ValueError with the entries that a saved state lacks."""
    missing = [name for name in names if saved.get(name) is None]
    if missing:
        raise ValueError(f"state: it holds no {missing[0]}")


def check_both(name: str, saved: Mapping[str, Any], mine: object) -> None:
    """Raise ValueError if the saved state has such a part and the loading optimizer has not, or the reverse."""
    if (saved.get(name) is None) != (mine is None):
        raise ValueError(f"state: only one of the state and this optimizer has a {name}")


def pack_lineage(lineage: Lineage) -> dict[str, int | str]:
    """Return plain values for a saved state."""
    return {"epoch": lineage.epoch, "state": lineage.state.hex()}


def lineage_of(saved: Mapping[str, Any]) -> Lineage:
    """Return the lineage in a saved state; raise ValueError if there is none."""
    try:
        epoch, state = saved["lineage"]["epoch"], bytes.fromhex(saved["lineage"]["state"])
    except (KeyError, TypeError, ValueError, IndexError) as error:
        raise ValueError(f"state: it holds no lineage: {error!r}") from None
    if type(epoch) is not int or not 0 <= epoch <= MAX_EPOCH or len(state) != DIGEST_BYTES:
        raise ValueError("state: its lineage is out of range")
    return Lineage(epoch, state)


@dataclass(frozen=True, slots=True, kw_only=True)
class Origin:
    """Origin of a saved state; its digests have 32 bytes."""

    parameters: bytes
    """Digest of the parameters with which its run began."""
    recipe: bytes
    """Digest of the recipe with which it began."""
    rules: bytes
    """Digest of the recipe's rules, which never change."""
    fields: tuple[tuple[str, str], ...]
    """The recipe as readable text."""
    settings: bytes = b""
    """The whole recipe, of which the digests are, compressed; empty in states of earlier versions."""


def pack_origin(origin: Origin) -> dict[str, Any]:
    """Return plain values for a saved state."""
    digests = {name: getattr(origin, name).hex() for name in ("parameters", "recipe", "rules")}
    return {**digests, "fields": [list(field) for field in origin.fields], "settings": origin.settings}


def origin_of(saved: Mapping[str, Any]) -> Origin:
    """Return the origin of a saved state; raise ValueError if it has none."""
    try:
        kept = saved["origin"]
        fields = tuple((str(name), str(text)) for name, text in kept["fields"])
        digests = {name: digest_in(kept, name) for name in ("parameters", "recipe", "rules")}
        settings = kept.get("settings", b"")
        if type(settings) is not bytes:
            raise ValueError("state: its recipe is no bytes")  # noqa: TRY301
    except (KeyError, TypeError, ValueError, IndexError) as error:
        raise ValueError(f"state: it holds no origin: {error!r}") from None
    return Origin(**digests, fields=fields, settings=settings)


def digest_in(saved: Mapping[str, Any], name: str) -> bytes:
    """Return a digest that is saved as text; raise ValueError or TypeError if it is not 32 bytes."""
    digest = bytes.fromhex(saved[name])
    if len(digest) != DIGEST_BYTES:
        raise ValueError(f"state: {name} is a digest of {len(digest)} bytes")
    return digest
