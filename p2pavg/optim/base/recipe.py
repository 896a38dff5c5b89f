"""The recipe: a peer's training settings, as a digest that peers agree on and as short texts to compare.

No I/O, no clock. A digest is the same in every process, on every machine and for every supported version of torch. It
depends on names and values alone, not on the order of a dict, an object's address or the printed form of a number.
"""

from __future__ import annotations

import functools
import numbers
import zlib
from collections.abc import Iterable, Mapping, Sequence, Set
from dataclasses import dataclass
from typing import Annotated, Any, TypeAlias

import msgpack
import torch
from blake3 import blake3
from msgspec import Meta

from p2pavg.base.messages import Message, pack
from p2pavg.optim.base.joined import parts_of
from p2pavg.optim.base.state import SHORT_BYTES, tensor_digest
from p2pavg.optim.coordination.progress import MAX_EPOCH
from p2pavg.state.nested import plain_number

MAX_FIELDS = 40  # fields of up to 96 bytes, name and text together, fit into a record beside the rest
MAX_FIELD_CHARS = 64
MAX_SHOWN_GROUPS = 3  # parameter groups with numbers that peers show each other; the digest covers all groups
_MAX_DEPTH = 8

_NUMBERS = ("numbers", "")  # between the two kinds of settings
MAX_PACKED_BYTES = 2**24  # of a recipe, before compression
VERSION = "version"
"""Name of the setting with the version of the program; see :attr:`p2pavg.AveragingConfig.version`."""
_RECIPE = "p2pavg/recipe/1"
_HYPERPARAMETERS = "p2pavg/hyperparameters/1"

# `foreach`, `fused`, `capturable` and `differentiable` choose an implementation of the same arithmetic, and may differ
# between a GPU and a CPU. `initial_lr` is a scheduler's copy of a rate that the recipe contains already.
_NOT_SETTINGS = frozenset(
    {"params", "param_names", "foreach", "fused", "capturable", "differentiable", "initial_lr"}
)
# Implied by the class; versions of torch before 2.7 do not store it.
_IMPLIED = {"AdamW": frozenset({"decoupled_weight_decay"})}

Settings: TypeAlias = tuple[tuple[str, Any], ...]
"""Names and values, in a fixed order."""


def canonical(value: Any, depth: int = 0) -> tuple[Any, ...]:
    """Return a value as tuples of plain text and bytes, the same in every process.

    A number is represented by its value: 1, 1.0 and a tensor that holds 1 are the same. A callable is represented by
    its qualified name, a ``functools.partial`` also by its arguments, and any other object by the name of its class.
    """
    if depth > _MAX_DEPTH:
        return ("deep", type(value).__qualname__)
    value = plain_number(value)
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
    """Return a value as a short readable text; empty if it would be too long."""
    value = plain_number(value)
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
    """Return the options of every parameter group of an optimizer, without the parameters.

    Options that are ``None`` or ``False`` are left out: later versions of torch add such options.
    """
    settings = []
    groups = [(part, group) for part in parts_of(optimizer) for group in part.param_groups]
    for index, (part, group) in enumerate(groups):
        implied = _IMPLIED.get(type(part).__qualname__, frozenset())
        where = "" if len(groups) == 1 else f" of group {index}"
        for name in sorted(map(str, group.keys() - _NOT_SETTINGS - implied)):
            if group[name] is not None and group[name] is not False:
                settings.append((f"{name}{where}", group[name]))
    return tuple(settings)


def settings_digest(domain: str, settings: Settings) -> bytes:
    """Return 32 bytes that depend on every name and value."""
    return blake3(pack(domain, *((name, canonical(value)) for name, value in settings))).digest()


@dataclass(frozen=True, slots=True, kw_only=True)
class Recipe:
    """The settings with which a peer trains."""

    rules: Settings
    """Settings that never change during the optimizer's life."""
    numbers: Settings
    """Hyperparameters of the optimizers at the beginning of the run; they may change from update to update."""

    @property
    def digest(self) -> bytes:
        """Digest of both, 32 bytes."""
        return settings_digest(_RECIPE, (*self.rules, _NUMBERS, *self.numbers))

    @property
    def packed(self) -> bytes:
        """Both, compressed, for :func:`settings_in`: most of it is the layout of the parameters, which repeats."""
        settings = (*self.rules, _NUMBERS, *self.numbers)
        return zlib.compress(pack(*((name, canonical(value)) for name, value in settings)), 9)

    @property
    def rules_digest(self) -> bytes:
        """Digest of the rules alone, 32 bytes."""
        return settings_digest(_RECIPE, self.rules)

    @property
    def fields(self) -> tuple[tuple[str, str], ...]:
        """The settings that are short enough to be published, with their values as text."""
        shown = [(name, text_of(value)) for name, value in (*self.rules, *self.numbers) if _is_shown(name)]
        return tuple((name, text) for name, text in shown if text)[:MAX_FIELDS]


def settings_in(packed: bytes, recipe: bytes, rules: bytes) -> dict[str, str | float | None]:
    """Return the rules of a recipe that are texts, numbers or none, from :attr:`Recipe.packed`.

    Args:
        recipe: digest of the whole recipe.
        rules: digest of its rules.

    Raises:
        ValueError: the bytes are not those of a recipe with these digests.
    """
    unpacker = zlib.decompressobj()
    try:
        # Cut at the limit if it is longer. Then it is no whole array, or has another digest.
        data = unpacker.decompress(packed, MAX_PACKED_BYTES)
        settings = msgpack.unpackb(data, use_list=False, strict_map_key=False)
    except (zlib.error, ValueError, msgpack.UnpackException, RecursionError) as error:
        raise ValueError(f"no recipe: {error}") from None
    if type(settings) is not tuple or any(
        type(each) is not tuple or len(each) != 2 or type(each[0]) is not str for each in settings
    ):
        raise ValueError("no recipe: it has something else than names and values")
    end = next((at for at, (name, _) in enumerate(settings) if name == _NUMBERS[0]), len(settings))
    for domain_of, digest in ((settings, recipe), (settings[:end], rules)):
        if blake3(pack(_RECIPE, *domain_of)).digest() != digest:
            raise ValueError("a recipe with another digest than the run's")
    found: dict[str, str | float | None] = {}
    for name, value in settings[:end]:
        # Each value is a tuple that begins with its kind, see `canonical`. The digests may be a liar's, too.
        match value:
            case ("text", bytes() as text):
                found[name] = text.decode("utf-8", "replace")
            case ("number", str() as text):
                found[name] = float.fromhex(text) if "x" in text else float(text)
            case ("none",):
                found[name] = None
    return found


def _is_shown(name: str) -> bool:
    _, _, group = name.partition(" of group ")
    return len(name.encode()) <= 32 and (not group or int(group) < MAX_SHOWN_GROUPS)


class Rate(Message, frozen=True):
    """The hyperparameters of one update, and of all later ones until the next :class:`Rate`."""

    update: Annotated[int, Meta(ge=0, le=MAX_EPOCH)]
    digest: Annotated[bytes, Meta(min_length=SHORT_BYTES, max_length=SHORT_BYTES)]
    text: Annotated[str, Meta(max_length=MAX_FIELD_CHARS)]
    """The learning rates as readable text."""

    def __post_init__(self) -> None:
        if not self.text.isprintable():
            raise ValueError("hyperparameters whose text is not printable")


def numbers_digest(settings: Settings) -> bytes:
    """Return a digest of the hyperparameters of an update, 32 bytes."""
    return settings_digest(_HYPERPARAMETERS, settings)


def rate_of(update: int, settings: Settings) -> Rate:
    """Return this peer's published description of the hyperparameters of one update."""
    rates = [text_of(value) for name, value in settings if name == "lr" or name.startswith("lr of group")]
    text = f"lr {', '.join(rates[:MAX_SHOWN_GROUPS])}" if rates else ""
    return Rate(update, numbers_digest(settings)[:SHORT_BYTES], text[:MAX_FIELD_CHARS])


def in_force(rates: Iterable[Rate], update: int) -> Rate | None:
    """Return the hyperparameters of an update; ``None`` if they are not known."""
    before = [rate for rate in rates if rate.update <= update]
    return max(before, key=lambda rate: rate.update, default=None)


def named(prefix: str, settings: Settings) -> Settings:
    """Return the settings with a prefix before their names."""
    return tuple((f"{prefix} {name}", value) for name, value in settings)


def first_difference(mine: Sequence[Rate], others: Sequence[Rate], until: int) -> tuple[Rate, Rate] | None:
    """Return both sides' hyperparameters of the first update in which they differ; ``None`` if there is none."""
    updates = sorted({rate.update for rate in (*mine, *others) if rate.update <= until})
    for update in updates:
        one, other = in_force(mine, update), in_force(others, update)
        if one is not None and other is not None and one.digest != other.digest:
            return Rate(update, one.digest, one.text), Rate(update, other.digest, other.text)
    return None
