"""Untrusted bytes in the place of each message: it is read as what was written, or refused; nothing else happens."""

from __future__ import annotations

from typing import Any

import msgspec
from hypothesis import given, settings
from hypothesis import strategies as st
from msgspec import inspect

from p2pavg.base.errors import RemoteProtocolError
from p2pavg.base.messages import Message
from tests.unit.base.encoding.test_message_structs import classes

MOST = 4  # elements of a generated list, and characters of a text

anything = st.recursive(
    st.none()
    | st.booleans()
    | st.integers(-(2**63), 2**64 - 1)
    | st.integers(-2, 300)
    | st.floats()
    | st.text(max_size=20)
    | st.binary(max_size=70),
    lambda inner: st.lists(inner, max_size=5),
    max_leaves=10,
)


def values_of(kind: inspect.Type) -> st.SearchStrategy[Any]:
    """Return plain values that a field of this type may have."""
    match kind:
        case inspect.IntType(ge=ge, gt=gt, le=le, lt=lt):
            least = ge if ge is not None else (gt + 1 if gt is not None else -5)
            most = le if le is not None else (lt - 1 if lt is not None else 2**40)
            return st.integers(least, most)
        case inspect.FloatType(ge=ge, le=le):
            return st.floats(ge, le)
        case inspect.BytesType(min_length=least, max_length=most):
            return st.binary(min_size=least or 0, max_size=most if most is not None else 40)
        case inspect.StrType():
            return st.text(max_size=MOST) | st.sampled_from(["/ip4/203.0.113.1/tcp/4001", "203.0.113.1"])
        case inspect.BoolType():
            return st.booleans()
        case inspect.NoneType():
            return st.none()
        case inspect.EnumType(cls=cls):
            return st.sampled_from([each.value for each in cls])
        case inspect.UnionType(types=types):
            return st.one_of(*map(values_of, types))
        case inspect.CollectionType(item_type=item, min_length=least, max_length=most):
            most = MOST if most is None else min(most, MOST)
            return st.lists(values_of(item), min_size=least or 0, max_size=max(most, least or 0))
        case inspect.TupleType(item_types=items):
            return st.tuples(*map(values_of, items))
        case inspect.NamedTupleType(fields=fields):
            return st.tuples(*(values_of(each.type) for each in fields))
        case inspect.StructType(fields=fields, tag=tag):
            tagged = [] if tag is None else [st.just(tag)]
            return st.tuples(*tagged, *(values_of(each.type) for each in fields)).map(list)
    raise NotImplementedError(f"a message has a field of the type {kind}")


ALL = classes()
FIELDS = {kind: values_of(inspect.type_info(kind)) for kind in ALL}
kinds = st.sampled_from(ALL)


def read(kind: type[Message], data: bytes) -> bool:
    """Return whether the bytes are a message of this kind."""
    try:
        message = kind.decode(data)
    except RemoteProtocolError:
        return False
    assert type(message) is kind
    assert message.encode() == data
    return True


@settings(max_examples=300)
@given(kinds, st.binary(max_size=200))
def test_any_bytes(kind: type[Message], data: bytes) -> None:
    read(kind, data)


def reads_some(kind: type[Message]) -> bool:
    """Read values that a message of this kind may have; return whether one is such a message."""
    seen: list[bool] = []

    @settings(max_examples=10)
    @given(FIELDS[kind])
    def look(fields: Any) -> None:
        seen.append(read(kind, msgspec.msgpack.encode(fields)))

    look()
    return any(seen)


def test_fields_of_the_right_types() -> None:
    """Most kinds have values that are read: without these, the tests below could see nothing but refusals."""
    refused = [kind.__name__ for kind in ALL if not reads_some(kind)]
    assert len(refused) < 0.3 * len(ALL), refused


@settings(max_examples=1000)
@given(st.data(), kinds, anything)
def test_one_field_of_another_type(data: st.DataObject, kind: type[Message], other: object) -> None:
    fields = data.draw(FIELDS[kind])
    if fields:
        fields[data.draw(st.integers(0, len(fields) - 1))] = other
    read(kind, msgspec.msgpack.encode(fields))


@settings(max_examples=1000)
@given(st.data(), kinds)
def test_changed_bytes(data: st.DataObject, kind: type[Message]) -> None:
    """Bytes that are changed are another message, or none: none has two encodings."""
    written = bytearray(msgspec.msgpack.encode(data.draw(FIELDS[kind])))
    written[data.draw(st.integers(0, len(written) - 1))] = data.draw(st.integers(0, 255))
    read(kind, bytes(written[: data.draw(st.integers(0, len(written)))]))
