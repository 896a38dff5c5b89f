"""Arguments and saved states, checked."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from p2pavg.optim.lineage import Lineage
from p2pavg.optim.progress import MAX_EPOCH, STATE_BYTES

MAX_AMOUNT = 1e300


def checked_amount(name: str, value: object) -> float:
    """A number above 0; ValueError that names it for anything else."""
    if isinstance(value, bool) or not isinstance(value, int | float) or not 0 < value <= MAX_AMOUNT:
        raise ValueError(f"{name} must be a number above 0, got {value!r}")
    return float(value)


def checked_count(name: str, value: object) -> int:
    """A whole number above 0; ValueError that names it for anything else."""
    if isinstance(value, bool) or not isinstance(value, int) or value <= 0:
        raise ValueError(f"{name} must be a whole number above 0, got {value!r}")
    return value


def check_holds(saved: Mapping[str, Any], *names: str) -> None:
    """ValueError that names what a saved state lacks."""
    missing = [name for name in names if saved.get(name) is None]
    if missing:
        raise ValueError(f"state: it holds no {missing[0]}")


def check_both(name: str, saved: Mapping[str, Any], mine: object) -> None:
    """ValueError when only one of the saved state and who loads it has such a part."""
    if (saved.get(name) is None) != (mine is None):
        raise ValueError(f"state: saved with a {name} and loaded without one, or the other way round")


def pack_lineage(lineage: Lineage) -> dict[str, int | str]:
    """Plain values, for a state that is saved."""
    return {"epoch": lineage.epoch, "state": lineage.state.hex()}


def lineage_of(saved: Mapping[str, Any]) -> Lineage:
    """The lineage in a saved state. ValueError when there is none."""
    try:
        epoch, state = saved["lineage"]["epoch"], bytes.fromhex(saved["lineage"]["state"])
    except (KeyError, TypeError, ValueError, IndexError) as error:
        raise ValueError(f"state: it holds no lineage: {error!r}") from None
    if type(epoch) is not int or not 0 <= epoch <= MAX_EPOCH or len(state) != STATE_BYTES:
        raise ValueError("state: its lineage is out of range")
    return Lineage(epoch, state)
