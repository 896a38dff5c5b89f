"""Codecs by name, as configurations and rosters refer to them."""

import re
from collections.abc import Mapping
from types import MappingProxyType

from .blockwise8 import Blockwise8
from .casts import Bf16, Fp16, Fp32
from .codec import Codec
from .int8 import Int8

__all__ = ["KNOWN_CODECS", "resolve_codec"]

_CASTS: dict[str, type[Fp32 | Fp16 | Bf16]] = {"fp32": Fp32, "fp16": Fp16, "bf16": Bf16}
_WITH_BLOCKS: dict[str, type[Int8 | Blockwise8]] = {"int8": Int8, "blockwise8": Blockwise8}

KNOWN_CODECS: Mapping[str, type[Codec]] = MappingProxyType({**_CASTS, **_WITH_BLOCKS})
"""The class for each name. Codecs with blocks also take a block size, as in "int8:128"."""

_SPEC = re.compile(r"(?P<name>[a-z0-9]+)(:(?P<block_size>[1-9][0-9]{0,9}))?")


def resolve_codec(spec: str | Codec | None) -> Codec:
    """Return the codec of `spec`: a codec itself, a name with or without a block size, or None for fp32.

    `resolve_codec(codec.name) == codec` for every codec of this package.
    Raises ValueError, listing the known names, for anything else.
    """
    if isinstance(spec, Codec):
        return spec
    if spec is None:
        return Fp32()
    match = _SPEC.fullmatch(spec) if isinstance(spec, str) else None
    name, block_size = (match["name"], match["block_size"]) if match else ("", None)
    if name in _WITH_BLOCKS:
        codec = _WITH_BLOCKS[name]
        return codec() if block_size is None else codec(block_size=int(block_size))
    if name in _CASTS and block_size is None:
        return _CASTS[name]()
    known = ", ".join((*_CASTS, *(f"{name}[:block_size]" for name in _WITH_BLOCKS)))
    raise ValueError(f"unknown codec {spec!r}; known are {known}")
