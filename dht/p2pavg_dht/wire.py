"""A reader of untrusted msgpack that is driven by the schema.

Only the expected types are decoded. The declared length of an array is checked before any element is read, and
that of a text before it is allocated. The decoder itself refuses a container in the place of a scalar. So
neither nesting nor a false length costs memory.

No I/O, no clock.
"""

from typing import Final

import msgpack

MAX_MESSAGE_BYTES: Final = 1 << 20
# The rest of an answer is for contacts and outcomes, which take at most 48 KiB.
MAX_RECORD_BYTES_PER_ANSWER: Final = MAX_MESSAGE_BYTES - 64 * 1024
# The longest scalars in use: an address and a record's value.
MAX_TEXT_BYTES: Final = 256
MAX_BINARY_BYTES: Final = 4864


class WireError(ValueError):
    """Bytes do not match the schema; the text says what is wrong."""


def packed(parts: tuple[object, ...]) -> bytes:
    """Encode `parts`, nested tuples of scalars, as msgpack."""
    encoded: bytes = msgpack.packb(parts)
    return encoded


class Reader:
    """A reader of one message, from its beginning to its end. Every method may raise WireError."""

    def __init__(self, message: bytes) -> None:
        if len(message) > MAX_MESSAGE_BYTES:
            raise WireError(f"a message has at most {MAX_MESSAGE_BYTES} bytes, not {len(message)}")
        self._length = len(message)
        self._unpacker = msgpack.Unpacker(
            raw=False,
            max_buffer_size=MAX_MESSAGE_BYTES,
            max_str_len=MAX_TEXT_BYTES,
            max_bin_len=MAX_BINARY_BYTES,
            max_array_len=0,
            max_map_len=0,
            max_ext_len=0,
        )
        self._unpacker.feed(message)

    def array(self, most: int) -> int:
        """Return the length of the array that begins here, at most `most`."""
        try:
            length = self._unpacker.read_array_header()
        except (ValueError, msgpack.UnpackException) as error:
            raise WireError(f"an array was expected: {error!r}") from error
        if length > most:
            raise WireError(f"an array of at most {most} was expected, not {length}")
        return int(length)

    def scalar(self) -> object:
        """Return the next value, which is no array."""
        try:
            value: object = self._unpacker.unpack()
        except (ValueError, msgpack.UnpackException) as error:
            raise WireError(f"a value was expected: {error!r}") from error
        return value

    def scalars(self, count: int) -> tuple[object, ...]:
        """Return the values of an array of exactly `count` scalars."""
        if self.array(count) != count:
            raise WireError(f"an array of {count} values was expected")
        return tuple(self.scalar() for _ in range(count))

    def text(self) -> str:
        """Return the next value, a text of at most 256 bytes."""
        value = self.scalar()
        if type(value) is not str:
            raise WireError("a text was expected")
        return value

    def binary(self, length: int) -> bytes:
        """Return the next value, exactly `length` bytes."""
        value = self.scalar()
        if type(value) is not bytes or len(value) != length:
            raise WireError(f"{length} bytes were expected")
        return value

    def multiple(self, of: int, most: int) -> bytes:
        """Return the next value, bytes whose number is a multiple of `of` and at most `most`."""
        value = self.scalar()
        if type(value) is not bytes or len(value) > most or len(value) % of:
            raise WireError(f"at most {most} bytes were expected, a multiple of {of}")
        return value

    def integer(self, most: int) -> int:
        """Return the next value, an integer from 0 to `most`."""
        value = self.scalar()
        if type(value) is not int or not 0 <= value <= most:
            raise WireError(f"an integer from 0 to {most} was expected")
        return value

    def end(self) -> None:
        """Raise WireError if bytes follow."""
        if self._unpacker.tell() != self._length:
            raise WireError("bytes follow after the message's end")
