"""Codecs by name, as configurations and rosters refer to them."""

import re
from collections.abc import Callable, Mapping
from dataclasses import fields
from types import MappingProxyType

from .blockwise8 import Blockwise8
from .casts import Bf16, Fp16, Fp32
from .codec import CheckedCodec, Codec
from .four_bits import NF4, Int4
from .int8 import Int8
from .ternary import Ternary
from .topk import TopK

KNOWN_CODECS: Mapping[str, type[CheckedCodec]] = MappingProxyType(
    {codec.kind: codec for codec in (Fp32, Fp16, Bf16, Int8, Blockwise8, Int4, NF4, Ternary, TopK)}
)
"""The class for each name. Codecs with blocks also take a block size, as in "int8:128", and "topk" its sizes."""

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
    if name in KNOWN_CODECS and len(numbers) <= len(_parameters(name)):
        make: Callable[..., Codec] = KNOWN_CODECS[name]
        return make(**dict(zip(_parameters(name), numbers, strict=False)))
    known = ", ".join(f"{each}{_form(_parameters(each))}" for each in KNOWN_CODECS)
    raise ValueError(f"unknown codec {spec!r}; known are {known}")


def _parameters(name: str) -> list[str]:
    """Return what the numbers after a name mean, in order. The last ones may be missing."""
    return [field.name for field in fields(KNOWN_CODECS[name])]


def _form(parameters: list[str]) -> str:
    return f"[:{parameters[0]}{_form(parameters[1:])}]" if parameters else ""
