"""Bounds of the structs of all protocols, and their one encoding."""

from __future__ import annotations

import importlib
import tracemalloc
from collections.abc import Iterator
from pathlib import Path
from typing import Annotated, Any

import msgspec
import pytest
from msgspec import Meta, inspect

import p2pavg
from p2pavg.base.errors import RemoteProtocolError
from p2pavg.base.formats import PeerText
from p2pavg.base.messages import Count, Message, Seconds, cut, decoded, pack


class Sample(Message, frozen=True, tag="sample"):
    """A message with a field of each kind."""

    count: Count
    seconds: Seconds = 0.0
    members: Annotated[frozenset[Count], Meta(max_length=4)] = frozenset()
    names: Annotated[tuple[str, ...], Meta(max_length=4)] = ()
    reason: str = ""

    def __post_init__(self) -> None:
        cut(self, reason=5)
        if self.count == 13:
            raise ValueError("an unlucky count")


class Other(Message, frozen=True, tag="other"):
    """Another message of the same protocol."""


def classes() -> list[type[Message]]:
    root = Path(p2pavg.__file__).parent
    for path in root.rglob("*.py"):
        if "Message, frozen=True" in path.read_text(encoding="utf-8"):
            importlib.import_module(".".join(("p2pavg", *path.relative_to(root).with_suffix("").parts)))

    def below(kind: type[Message]) -> Iterator[type[Message]]:
        for each in kind.__subclasses__():
            yield each
            yield from below(each)

    return sorted(
        {each for each in below(Message) if each.__module__.startswith("p2pavg.")}, key=lambda each: str(each)
    )


def parts(kind: inspect.Type) -> Iterator[inspect.Type]:
    """Yield a type, and all types inside it."""
    yield kind
    match kind:
        case inspect.CollectionType(item_type=item):
            yield from parts(item)
        case inspect.TupleType(item_types=items) | inspect.UnionType(types=items):
            for item in items:
                yield from parts(item)
        case inspect.StructType() | inspect.NamedTupleType():
            for field in kind.fields:
                yield from parts(field.type)


@pytest.mark.parametrize("kind", classes(), ids=lambda kind: f"{kind.__module__}.{kind.__name__}")
def test_every_list_and_number_of_a_message_is_bounded(kind: type[Message]) -> None:
    for each in parts(inspect.type_info(kind)):
        assert not isinstance(each, inspect.AnyType | inspect.DictType | inspect.RawType | inspect.CustomType)
        if isinstance(each, inspect.CollectionType):
            assert each.max_length is not None, "a list without a bound is allocated as long as it says it is"
        if isinstance(each, inspect.FloatType):
            assert each.ge is not None, "without a bound, a number may be none"
            assert each.le is not None, "without a bound, a number may be infinite"


def test_messages_of_all_protocols_are_here() -> None:
    assert len(classes()) > 40


@pytest.mark.parametrize(
    "message",
    [Sample(7), Sample(0, 1.5, frozenset([300, 1, 70_000]), ("a", "b"), "cut short"), Other()],
    ids=repr,
)
def test_a_message_is_read_as_it_was_written(message: Sample | Other) -> None:
    assert decoded(message.encode(), Sample | Other) == message
    assert type(message).decode(message.encode()) == message


@pytest.mark.parametrize(
    ("fields", "reason"),
    [
        (("sample",), "at least length 2"),
        (("sample", 1), "another way"),
        (("sample", 1, 0.0, (), (), "", 0), "at most length 5"),
        (("sample", 1, 0, (), (), ""), "another way"),
        (("sample", True, 0.0, (), (), ""), "got `bool`"),
        (("sample", 1.0, 0.0, (), (), ""), "got `float`"),
        (("sample", -1, 0.0, (), (), ""), ">= 0"),
        (("sample", 1 << 63, 0.0, (), (), ""), "<= "),
        (("sample", 13, 0.0, (), (), ""), "an unlucky count"),
        (("sample", 1, float("nan"), (), (), ""), ">= 0.0"),
        (("sample", 1, float("inf"), (), (), ""), "<= "),
        (("sample", 1, 0.0, (2, 1), (), ""), "another way"),
        (("sample", 1, 0.0, (1, 1), (), ""), "another way"),
        (("sample", 1, 0.0, (), ("a",) * 5, ""), "length <= 4"),
        (("sample", 1, 0.0, (), (b"a",), ""), "got `bytes`"),
        (("sample", 1, 0.0, (), (), "too long"), "another way"),
        (("sample", 1, 0.0, (), (), "\x1b"), "another way"),
        (("third", 1), "Invalid value 'third'"),
        ((1,), "got `int`"),
        ((), "length"),
    ],
    ids=str,
)
def test_other_fields_are_refused(fields: tuple[Any, ...], reason: str) -> None:
    with pytest.raises(RemoteProtocolError, match=reason):
        decoded(pack(*fields), Sample | Other)


@pytest.mark.parametrize(
    "data",
    [
        b"",
        b"\xc1",
        b"\x92\xa6sample",  # ends early
        b"\x91\xa5other\xc0",  # goes on
        b"\x91\xd9\x05other",  # a length in more bytes than it needs
        b"\x96\xa6sample\xcc\x01\xcb" + bytes(8) + b"\x90\x90\xa0",  # a number in more bytes than it needs
        b"\x96\xa6sample\x01\xcb" + bytes(8) + b"\xdd\xff\xff\xff\xff",  # claims a list of four billion
        b"\x96\xa6sample\x01\xcb"
        + bytes(8)
        + b"\x90\x90\xdb\xff\xff\xff\xff",  # claims a text of four billion
        b"\x96\xa6sample\x01\xcb" + bytes(8) + b"\x90\x90\xa1\xff",  # no UTF-8
        b"\x91" * 100_000,
    ],
    ids=lambda data: data[:24].hex(),
)
def test_other_bytes_are_refused(data: bytes) -> None:
    with pytest.raises(RemoteProtocolError):
        decoded(data, Sample | Other)


@pytest.mark.parametrize(
    "head", [b"\xdd\xff\xff\xff\xff", b"\x91\xdd\x7f\xff\xff\xff", b"\x91\xc6\x7f\xff\xff\xff"]
)
def test_a_false_length_costs_no_memory(head: bytes) -> None:
    tracemalloc.start()
    try:
        for kind in (
            Sample,
            tuple[Sample],
            tuple[msgspec.Raw],
            tuple[Annotated[tuple[str, ...], Meta(max_length=4)]],
        ):
            with pytest.raises(RemoteProtocolError):
                decoded(head + bytes(1000), kind)
        peak = tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()
    assert peak < 1_000_000


def test_the_bytes_of_fields_never_change() -> None:
    packed = pack(1, -1, "ü", b"\0\xff", 0.5, True, (), (2, ("x",)))
    assert packed.hex() == "9801ffa2c3bcc40200ffcb3fe0000000000000c390920291a178"


@pytest.mark.parametrize("kind", ["\x1b[2J", "a\nb", "\u202e", "x" * 5000])
def test_an_error_quotes_a_peer_in_one_short_printable_line(kind: str) -> None:
    """It ends up in logs, terminals and the reason of a loss."""
    with pytest.raises(RemoteProtocolError) as refused:
        decoded(pack(kind, 1), Sample | Other)
    (said,) = refused.value.args
    assert said.isprintable()
    assert len(said) < 300


def test_a_reason_is_shortened_by_its_sender_and_can_only_be_shown() -> None:
    message = Sample(1, reason="a\x1b[2J and more")
    assert message.reason == "a?[2J"
    assert type(message.reason) is PeerText
    assert type(Sample.decode(message.encode()).reason) is PeerText


def test_a_field_that_is_no_part_of_a_message_is_an_error_of_the_sender() -> None:
    with pytest.raises(TypeError, match="no field of a message"):
        Sample(1, names=(object(),)).encode()  # type: ignore[arg-type]
