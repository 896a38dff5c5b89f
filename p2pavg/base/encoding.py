"""Control messages: msgpack arrays, decoded against a schema of plain types. No I/O, no clock."""

from __future__ import annotations

import math
from typing import Any

import msgpack

from p2pavg.base.errors import RemoteProtocolError

_MAX_ITEMS = 256  # no message holds a longer list; a roster has at most 128 members
_MAX_TEXT = 4096
_MAX_BINARY = 8192
_MAX_KIND = 64  # bytes of the name with which a message begins


def pack(*fields: Any) -> bytes:
    """Encode a message of these fields."""
    packed: bytes = msgpack.packb(fields)
    return packed


def unpack(message: bytes, *types: type) -> tuple[Any, ...]:
    """Decode a message into its fields, each exactly of the given type (``tuple`` for any list).

    Nothing is allocated that the schema does not allow.

    Raises:
        RemoteProtocolError: the message does not match the types, or is not msgpack.
    """
    try:
        fields = msgpack.unpackb(
            message,
            use_list=False,
            max_str_len=_MAX_TEXT,
            max_bin_len=_MAX_BINARY,
            max_array_len=_MAX_ITEMS,
            max_map_len=0,
            max_ext_len=0,
        )
    except (ValueError, TypeError, msgpack.UnpackException, RecursionError) as error:
        raise RemoteProtocolError(f"not a message: {error!r}") from None
    if type(fields) is not tuple or len(fields) != len(types):
        raise RemoteProtocolError(f"a message of {len(types)} fields was expected")
    return checked(fields, types)


def first_text(message: bytes) -> str:
    """Return the first field of a message, a text of at most 64 bytes. The rest of the message is not read.

    Raises:
        RemoteProtocolError: the message is no array, or its first field is no such text.
    """
    reader = msgpack.Unpacker(
        use_list=False, max_str_len=_MAX_KIND, max_bin_len=0, max_array_len=0, max_map_len=0, max_ext_len=0
    )
    reader.feed(message[: _MAX_KIND + 16])
    try:
        if reader.read_array_header() < 1:
            raise RemoteProtocolError("a message without fields")
        first = reader.unpack()
    except (ValueError, TypeError, msgpack.UnpackException, RecursionError) as error:
        raise RemoteProtocolError(f"a message that begins with no short text: {error!r}") from None
    if type(first) is not str:
        raise RemoteProtocolError(f"a message that begins with {type(first).__name__}")
    return first


def checked(fields: tuple[Any, ...], types: tuple[type, ...]) -> tuple[Any, ...]:
    """Return ``fields`` if each has exactly its type and every float is finite.

    Raises:
        RemoteProtocolError: a field does not match.
    """
    if len(fields) != len(types):
        raise RemoteProtocolError(f"{len(types)} fields were expected, not {len(fields)}")
    for position, (field, wanted) in enumerate(zip(fields, types, strict=True)):
        if type(field) is not wanted:
            raise RemoteProtocolError(f"field {position} is {type(field).__name__}, not {wanted.__name__}")
        if isinstance(field, float) and not math.isfinite(field):
            raise RemoteProtocolError(f"field {position} is not finite")
    return fields
