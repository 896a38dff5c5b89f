"""Messages between peers: structs that are checked while they are read. No I/O, no clock.

A message is a MessagePack array, written and read by msgspec: the name of its kind, if its protocol has several, then
its fields. Every byte of it may be hostile:

* The struct's annotations bound each field. A text, a list or a number that is too large is refused before anything is
  allocated for it. (A list's own claim of its length is checked against ``max_length`` first, so every list needs one.)
* A struct's ``__post_init__`` checks what fields have to do with one another. It runs for the sender, too, so there is
  no invalid message.
* A message has one encoding. What is read must encode to the same bytes, so that nobody can write a signed statement in
  a second way, an integer as a float, or leave out a field that has a default.
"""

from __future__ import annotations

from collections.abc import Mapping
from functools import cache
from typing import Annotated, Any, Generic, Self, TypeVar

import msgpack
import msgspec
from msgspec import Meta

from p2pavg.base.errors import RemoteProtocolError
from p2pavg.base.formats import PeerText

_MAX_ERROR_CHARS = 200
_MAX_KIND = 64  # bytes of the name with which a message begins
MAX_COUNT = (1 << 63) - 1
Count = Annotated[int, Meta(ge=0, le=MAX_COUNT)]
"""A number of things, which fits into eight bytes."""
Seconds = Annotated[float, Meta(ge=0.0, le=1e15)]
"""Finite, as no comparison holds for a number that is none."""
Port = Annotated[int, Meta(gt=0, lt=1 << 16)]
Hash = Annotated[bytes, Meta(min_length=32, max_length=32)]
"""32 bytes: a digest, a key, an id of a group."""


def _to_plain(value: Any) -> str:
    if isinstance(value, str):  # a `PeerText`: msgspec writes no subclass of `str` itself
        return str(value)
    raise TypeError(f"{type(value).__name__} is no field of a message")


# In deterministic order, a set has one encoding.
_encoder = msgspec.msgpack.Encoder(order="deterministic", enc_hook=_to_plain)


@cache
def _decoder(kinds: Any) -> msgspec.msgpack.Decoder[Any]:
    return msgspec.msgpack.Decoder(kinds)


class Message(msgspec.Struct, frozen=True, array_like=True, forbid_unknown_fields=True):
    """A message, or a part of one. Subclasses name their kind with ``tag``, annotate each field, and bound it."""

    def encode(self) -> bytes:
        """Return the message as bytes."""
        return _encoder.encode(self)

    def normalised(self) -> Self:
        """Return the message as its reader gets it: with whole numbers as floats where the field is one.

        Raises:
            RemoteProtocolError: its reader would refuse it.
        """
        try:
            message: Self = _decoder(type(self)).decode(_encoder.encode(self))
        except msgspec.MsgspecError as error:
            raise RemoteProtocolError(f"no {type(self).__name__}: {error}") from None
        return message

    @classmethod
    def decode(cls, data: bytes) -> Self:
        """Read a message of this kind.

        Raises:
            RemoteProtocolError: ``data`` is no such message.
        """
        message: Self = decoded(data, cls)
        return message


_M = TypeVar("_M", bound=Message)


def decoded(data: bytes, kinds: Any) -> Any:
    """Read a message of one of several kinds.

    Args:
        kinds: a class of messages, a union of such classes, each with a tag, or a tuple of bounded fields.

    Raises:
        RemoteProtocolError: ``data`` is no message of these kinds, or not written as :meth:`Message.encode` writes it.
    """
    try:
        message = _decoder(kinds).decode(data)
    except (msgspec.MsgspecError, UnicodeDecodeError, RecursionError) as error:
        # msgspec quotes the peer as it is, which would end up in logs, terminals and the reason of a loss.
        said = f"no {kinds.__name__ if isinstance(kinds, type) else 'message'}: {error}"
        raise RemoteProtocolError(PeerText(said[:_MAX_ERROR_CHARS])) from None
    if _encoder.encode(message) != data:
        raise RemoteProtocolError(f"a {type(message).__name__} that is written in another way than its own")
    return message


def decoded_all(said: Mapping[str, bytes], kind: type[_M]) -> dict[str, _M]:
    """Return each peer's message, by peer id; leave out malformed ones, which must not hide those of the others."""
    found = {}
    for peer_id, value in said.items():
        try:
            found[peer_id] = kind.decode(value)
        except RemoteProtocolError:
            continue
    return found


class DecodedWords(Generic[_M]):
    """The words of peers as messages, each decoded once: a board may have a thousand, of which few change at a time."""

    def __init__(self, kind: type[_M]) -> None:
        self._kind = kind
        self._read: dict[str, tuple[bytes, _M | None]] = {}

    def of(self, said: Mapping[str, bytes]) -> dict[str, _M]:
        """Return each peer's message, as :func:`decoded_all` does."""
        new = {
            peer_id: value
            for peer_id, value in said.items()
            if (known := self._read.get(peer_id)) is None or known[0] != value
        }
        found = decoded_all(new, self._kind)
        self._read = {
            peer_id: (value, found.get(peer_id)) if peer_id in new else self._read[peer_id]
            for peer_id, value in said.items()
        }
        return {peer_id: word for peer_id, (_, word) in self._read.items() if word is not None}


def cut(message: Message, **most: int) -> None:
    """Shorten fields of a message that is being made: texts, which become printable, and tuples.

    A sender's reason may quote an exception of any length, and its receiver takes a longer one for a breach.
    """
    for name, length in most.items():
        value = getattr(message, name)[:length]
        msgspec.structs.force_setattr(message, name, PeerText(value) if isinstance(value, str) else value)


def pack(*fields: Any) -> bytes:
    """Return fields as the bytes of one array: for digests, signatures and records in messages."""
    return _encoder.encode(fields)


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
