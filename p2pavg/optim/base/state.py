"""Checks of arguments and saved states. No I/O, no clock."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from p2pavg.optim.base.lineage import DIGEST_BYTES, Lineage
from p2pavg.optim.coordination.progress import MAX_EPOCH
from p2pavg.state.nested import plain_number

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


def pack_origin(origin: Origin) -> dict[str, Any]:
    """Return plain values for a saved state."""
    digests = {name: getattr(origin, name).hex() for name in ("parameters", "recipe", "rules")}
    return {**digests, "fields": [list(field) for field in origin.fields]}


def origin_of(saved: Mapping[str, Any]) -> Origin:
    """Return the origin of a saved state; raise ValueError if it has none."""
    try:
        kept = saved["origin"]
        fields = tuple((str(name), str(text)) for name, text in kept["fields"])
        digests = {name: digest_in(kept, name) for name in ("parameters", "recipe", "rules")}
    except (KeyError, TypeError, ValueError, IndexError) as error:
        raise ValueError(f"state: it holds no origin: {error!r}") from None
    return Origin(**digests, fields=fields)


def digest_in(saved: Mapping[str, Any], name: str) -> bytes:
    """Return a digest that is saved as text; raise ValueError or TypeError if it is not 32 bytes."""
    digest = bytes.fromhex(saved[name])
    if len(digest) != DIGEST_BYTES:
        raise ValueError(f"state: {name} is a digest of {len(digest)} bytes")
    return digest
