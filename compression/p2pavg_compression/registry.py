"""Codecs by name, as configurations and rosters refer to them."""

import re
from collections.abc import Callable, Mapping
from types import MappingProxyType

from .blockwise8 import Blockwise8
from .casts import Bf16, Fp16, Fp32
from .codec import Codec
from .four_bits import NF4, Int4
from .int8 import Int8
from .ternary import Ternary
from .topk import TopK

KNOWN_CODECS: Mapping[str, type[Codec]] = MappingProxyType(
    {
        "fp32": Fp32,
        "fp16": Fp16,
        "bf16": Bf16,
        "int8": Int8,
        "blockwise8": Blockwise8,
        "int4": Int4,
        "nf4": NF4,
        "ternary": Ternary,
        "topk": TopK,
    }
)
"""The class for each name. Codecs with blocks also take a block size, as in "int8:128", and "topk" its sizes."""

_PARAMETERS: Mapping[str, tuple[str, ...]] = MappingProxyType(
    {
        "fp32": (),
        "fp16": (),
        "bf16": (),
        "int8": ("block_size",),
        "blockwise8": ("block_size",),
        "int4": ("block_size",),
        "nf4": ("block_size",),
        "ternary": ("block_size",),
        "topk": ("chunk", "k", "bits"),
    }
)
"""What the numbers after a name mean, in order. The last ones may be missing."""

_SPEC = re.compile(r"(?P<name>[a-z0-9]+)(?P<numbers>(:[1-9][0-9]{0,9})*)")


def resolve_codec(spec: str | Codec | None) -> Codec:
    """Return the codec of `spec`: a codec itself, a name with or without its numbers, or None for fp32.

    `resolve_codec(codec.name) == codec` for every codec of this package.
    Raises ValueError, listing the known names, for anything else.
    """
    if isinstance(spec, Codec):
        return spec
    if spec is None:
        return Fp32()
    match = _SPEC.fullmatch(spec) if isinstance(spec, str) else None
    name = match["name"] if match else ""
    numbers = [int(number) for number in match["numbers"].split(":")[1:]] if match else []
    if name in KNOWN_CODECS and len(numbers) <= len(_PARAMETERS[name]):
        make: Callable[..., Codec] = KNOWN_CODECS[name]
        return make(**dict(zip(_PARAMETERS[name], numbers, strict=False)))
    known = ", ".join(f"{each}{_form(_PARAMETERS[each])}" for each in KNOWN_CODECS)
    raise ValueError(f"unknown codec {spec!r}; known are {known}")


def _form(parameters: tuple[str, ...]) -> str:
    return f"[:{parameters[0]}{_form(parameters[1:])}]" if parameters else ""
