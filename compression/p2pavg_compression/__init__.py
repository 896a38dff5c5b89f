"""Tensors to bytes and back: the codecs with which peers send each other flat float32 vectors.

`codec.py` says what a codec promises, `conformance.py` checks it. No codec imports anything but torch and
numpy until a CUDA tensor is encoded.
"""

from .blockwise8 import Blockwise8
from .casts import Bf16, Fp16, Fp32
from .codec import MAX_MAGNITUDE, BytesLike, Codec, CodecError
from .conformance import check_codec
from .int8 import Int8
from .registry import KNOWN_CODECS, resolve_codec

__all__ = [
    "KNOWN_CODECS",
    "MAX_MAGNITUDE",
    "Bf16",
    "Blockwise8",
    "BytesLike",
    "Codec",
    "CodecError",
    "Fp16",
    "Fp32",
    "Int8",
    "check_codec",
    "resolve_codec",
]
