"""The settings with which a peer trains: as a digest that peers agree on, and as short texts that they can compare.

No I/O, no clock. A digest is the same in every process, on every machine and for every supported version of torch: it
depends on names and values alone, never on the order of a dict, on an object's address or on how a number is printed.
"""

from __future__ import annotations

import functools
import numbers
from collections.abc import Iterable, Mapping, Sequence, Set
from dataclasses import dataclass
from typing import Any, TypeAlias

import torch
from blake3 import blake3

from p2pavg.encoding import pack
from p2pavg.optim.digest import SHORT_BYTES, tensor_digest

MAX_FIELDS = 40  # with a name and a text of up to 96 bytes each, they fit into a record beside the rest
MAX_FIELD_CHARS = 64
MAX_SHOWN_GROUPS = 3  # parameter groups whose numbers peers show each other; the digest has all of them
_MAX_DEPTH = 8

_RECIPE = "p2pavg/recipe/1"
_HYPERPARAMETERS = "p2pavg/hyperparameters/1"

# `foreach`, `fused`, `capturable` and `differentiable` choose an implementation of the same arithmetic: a GPU and a
# CPU choose differently. `initial_lr` is a schedule's note of the rate that the recipe has already.
_NOT_SETTINGS = frozenset(
    {"params", "param_names", "foreach", "fused", "capturable", "differentiable", "initial_lr"}
)
# Said by the class itself; versions of torch before 2.7 do not write it down.
_IMPLIED = {"AdamW": frozenset({"decoupled_weight_decay"})}

Settings: TypeAlias = tuple[tuple[str, Any], ...]
"""Names and values, in a fixed order."""


def canonical(value: Any, depth: int = 0) -> tuple[Any, ...]:
    """Return a value as tuples of plain text and bytes, alike in every process.

    A number is its value: 1, 1.0 and a tensor that holds 1 are the same. A callable is its qualified name (and, of a
    ``functools.partial``, its arguments); any other object is the name of its class.
    """
    if depth > _MAX_DEPTH:
        return ("deep", type(value).__qualname__)
    if value is None:
        return ("none",)
    if isinstance(value, bool):
        return ("bool", str(value))
    if isinstance(value, torch.Tensor):
        return canonical(value.item()) if value.numel() == 1 else ("tensor", tensor_digest(value))
    if isinstance(value, numbers.Integral):
        return ("number", float(value).hex() if abs(int(value)) <= 2**53 else str(int(value)))
    if isinstance(value, numbers.Real):
        return ("number", float(value).hex())
    if isinstance(value, str):
        return ("text", value.encode("utf-8", "surrogatepass"))
    if isinstance(value, bytes):
        return ("bytes", value)
    return _canonical_of_several(value, depth + 1)


def _canonical_of_several(value: Any, depth: int) -> tuple[Any, ...]:
    if isinstance(value, Mapping):
        pairs = [(pack(canonical(key, depth)), canonical(kept, depth)) for key, kept in value.items()]
        return ("mapping", *sorted(pairs, key=lambda pair: pair[0]))
    if isinstance(value, Set):
        return ("set", *sorted(pack(canonical(kept, depth)) for kept in value))
    if isinstance(value, list | tuple):
        return ("list", *(canonical(kept, depth) for kept in value))
    if isinstance(value, functools.partial):
        parts = (value.func, value.args, value.keywords)
        return ("partial", *(canonical(part, depth) for part in parts))
    if isinstance(value, torch.dtype | torch.device):
        return ("name", str(value))
    name = getattr(value, "__qualname__", None) if callable(value) else None
    return ("name", name) if isinstance(name, str) else ("object", type(value).__qualname__)


def text_of(value: Any) -> str:
    """Return a value as a short text for people; empty if there is none that fits."""
    if value is None:
        text = "none"
    elif isinstance(value, torch.Tensor):
        text = text_of(value.item()) if value.numel() == 1 else ""
    elif isinstance(value, bool | str):
        text = str(value)
    elif isinstance(value, numbers.Real):
        number = float(value)
        text = str(int(number)) if number.is_integer() and abs(number) < 1e15 else repr(number)
    elif isinstance(value, list | tuple):
        parts = [text_of(part) for part in value]
        text = f"({', '.join(parts)})" if all(parts) else ""
    else:
        text = ""
    return text if len(text) <= MAX_FIELD_CHARS and text.isprintable() else ""


def hyperparameters(optimizer: torch.optim.Optimizer) -> Settings:
    """Return what every parameter group of an optimizer says of how it steps, parameters left out.

    What is ``None`` or ``False`` counts as not there: later versions of torch add such options.
    """
    implied = _IMPLIED.get(type(optimizer).__qualname__, frozenset())
    settings = []
    for index, group in enumerate(optimizer.param_groups):
        where = "" if len(optimizer.param_groups) == 1 else f" of group {index}"
        for name in sorted(map(str, group.keys() - _NOT_SETTINGS - implied)):
            if group[name] is not None and group[name] is not False:
                settings.append((f"{name}{where}", group[name]))
    return tuple(settings)


def settings_digest(domain: str, settings: Settings) -> bytes:
    """Return 32 bytes that depend on every name and value."""
    return blake3(pack(domain, *((name, canonical(value)) for name, value in settings))).digest()


@dataclass(frozen=True, slots=True, kw_only=True)
class Recipe:
    """How a peer trains."""

    rules: Settings
    """What stays as it is for as long as the optimizer is."""
    numbers: Settings
    """Hyperparameters of the optimizers, as they are when the run begins; they may change from update to update."""

    @property
    def digest(self) -> bytes:
        """32 bytes, of both."""
        return settings_digest(_RECIPE, (*self.rules, ("numbers", ""), *self.numbers))

    @property
    def rules_digest(self) -> bytes:
        """32 bytes, of the rules alone."""
        return settings_digest(_RECIPE, self.rules)

    @property
    def fields(self) -> tuple[tuple[str, str], ...]:
        """Those that are short enough to be told, with their values as text."""
        shown = [(name, text_of(value)) for name, value in (*self.rules, *self.numbers) if _is_shown(name)]
        return tuple((name, text) for name, text in shown if text)[:MAX_FIELDS]


def _is_shown(name: str) -> bool:
    _, _, group = name.partition(" of group ")
    return len(name.encode()) <= 32 and (not group or int(group) < MAX_SHOWN_GROUPS)


@dataclass(frozen=True, slots=True)
class Rate:
    """The hyperparameters of one update, and of all after it until the next one that is kept."""

    update: int
    digest: bytes
    """8 bytes."""
    text: str
    """The learning rates, for people."""


def numbers_digest(settings: Settings) -> bytes:
    """Return 32 bytes of the hyperparameters that an update is taken with."""
    return settings_digest(_HYPERPARAMETERS, settings)


def rate_of(update: int, settings: Settings) -> Rate:
    """Return what this peer tells of the hyperparameters of one update."""
    rates = [text_of(value) for name, value in settings if name == "lr" or name.startswith("lr of group")]
    text = f"lr {', '.join(rates[:MAX_SHOWN_GROUPS])}" if rates else ""
    return Rate(update, numbers_digest(settings)[:SHORT_BYTES], text[:MAX_FIELD_CHARS])


def in_force(rates: Iterable[Rate], update: int) -> Rate | None:
    """Return the hyperparameters of an update; ``None`` if they are not known."""
    before = [rate for rate in rates if rate.update <= update]
    return max(before, key=lambda rate: rate.update, default=None)


def named(prefix: str, settings: Settings) -> Settings:
    """Return the settings under other names."""
    return tuple((f"{prefix} {name}", value) for name, value in settings)


def first_difference(mine: Sequence[Rate], others: Sequence[Rate], until: int) -> tuple[Rate, Rate] | None:
    """Return the hyperparameters of the first update that both know and that differ; ``None`` without one."""
    updates = sorted({rate.update for rate in (*mine, *others) if rate.update <= until})
    for update in updates:
        one, other = in_force(mine, update), in_force(others, update)
        if one is not None and other is not None and one.digest != other.digest:
            return Rate(update, one.digest, one.text), Rate(update, other.digest, other.text)
    return None
