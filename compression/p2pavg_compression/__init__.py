"""Codecs that turn flat float32 vectors into bytes and back.

`codec.py` defines the interface, and `conformance.py` checks an implementation. No codec imports anything but
torch and numpy until a CUDA tensor is encoded, or until enough was encoded for numba to pay (`kernels.py`).

No I/O, no clock.
"""

from .blockwise8 import Blockwise8
from .casts import Bf16, Fp16, Fp32
from .codec import MAX_MAGNITUDE, BytesLike, Codec, CodecError
from .conformance import check_codec
from .four_bits import NF4, Int4
from .int8 import Int8
from .registry import KNOWN_CODECS, resolve_codec
from .ternary import Ternary
from .topk import TopK

__all__ = [
    "KNOWN_CODECS",
    "MAX_MAGNITUDE",
    "NF4",
    "Bf16",
    "Blockwise8",
    "BytesLike",
    "Codec",
    "CodecError",
    "Fp16",
    "Fp32",
    "Int4",
    "Int8",
    "Ternary",
    "TopK",
    "check_codec",
    "resolve_codec",
]
