"""Messages between a peer and its processes: both ends check each other."""

from __future__ import annotations

from dataclasses import replace

import msgpack
import pytest

from p2pavg.attached.group import Begin
from p2pavg.attached.messages import (
    LENGTH_BYTES,
    MAX_MESSAGE_BYTES,
    TO_PEER,
    TO_PROCESS,
    Frames,
    Step,
    check_topic,
    frame,
    is_process_name,
    read,
    read_step,
)
from p2pavg.attached.results import alone_success, encode_success, joint_success, read_success
from p2pavg.base.errors import RemoteProtocolError
from p2pavg.base.result import Success

STEP = Step(
    number=1, weight=4.0, metrics=(("loss", 2.0),), state=bytes(32), target=2, hinted=True, expected=("P/b",)
)
PLAN = Begin(
    members=("a", "b", "c"), contributors=("a", "b"), state=b"", remote=0, remote_contributors=0, target=3
)


def content(data: bytes) -> bytes:
    [message] = Frames().feed(data)
    return message


def test_a_request_comes_back() -> None:
    kind, fields = read(content(frame("step", 0, *STEP.fields())), TO_PEER)
    assert (kind, fields[0], read_step(fields[1:])) == ("step", 0, STEP)


@pytest.mark.parametrize("pieces", [1, 3, 1000])
def test_messages_come_in_any_pieces(pieces: int) -> None:
    data, frames, found = frame("close", 1) + frame("close", 2), Frames(), []
    for start in range(0, len(data), pieces):
        found += frames.feed(data[start : start + pieces])
    assert [read(message, TO_PEER) for message in found] == [("close", (1,)), ("close", (2,))]


@pytest.mark.parametrize("length", [0, MAX_MESSAGE_BYTES + 1, 2**32 - 1])
def test_a_length_out_of_range_ends_the_connection_before_anything_is_kept(length: int) -> None:
    with pytest.raises(RemoteProtocolError):
        Frames().feed(length.to_bytes(LENGTH_BYTES, "big"))


@pytest.mark.parametrize(
    "message",
    [
        b"",
        b"\xc1",
        msgpack.packb([]),
        msgpack.packb({"a": 1}),
        msgpack.packb([1]),
        msgpack.packb(["attached", 1, "P", []]),  # of the other direction
        msgpack.packb(["close", True]),
        msgpack.packb(["close", 1.0]),
        msgpack.packb(["close"]),
        msgpack.packb(["close", 1, 2]),
        msgpack.packb(["board", 0, "progress", float("nan")]),
        msgpack.packb(["say", 0, "progress", "text", False]),
        msgpack.packb(["attach", 1, "x" * 5000]),
        b"\x91" * 5000,
    ],
)
def test_messages_that_are_malformed_are_refused(message: bytes) -> None:
    with pytest.raises(RemoteProtocolError):
        read(message, TO_PEER)


@pytest.mark.parametrize(
    "change",
    [
        {"number": 0},
        {"number": 2**63},
        {"weight": 0.0},
        {"weight": -1.0},
        {"weight": 1e16},
        {"state": bytes(33)},
        {"target": -1},
        {"target": 65},
        {"contributors": 65},
        {"metrics": (("", 1.0),)},
        {"metrics": (("loss", 1e101),)},
        {"metrics": tuple((str(n), 1.0) for n in range(17))},
        {"expected": ("x" * 3000,)},
    ],
)
def test_a_request_out_of_range_cannot_exist(change: dict[str, object]) -> None:
    with pytest.raises(RemoteProtocolError):
        replace(STEP, **change)  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("position", "value"), [(2, (("loss", 1),)), (2, ("loss",)), (8, (1,)), (8, (b"P",))]
)
def test_a_request_with_other_types_is_refused(position: int, value: object) -> None:
    fields = list(STEP.fields())
    fields[position] = value
    with pytest.raises(RemoteProtocolError):
        read_step(tuple(fields))


@pytest.mark.parametrize("name", ["a", "gpu-0", "4711-a0b1c2", "x" * 32])
def test_names_of_processes(name: str) -> None:
    assert is_process_name(name)


@pytest.mark.parametrize("name", ["", "x" * 33, "a/b", "a b", "ü", "a\n", 1, None])
def test_other_names_are_refused(name: object) -> None:
    assert not is_process_name(name)


@pytest.mark.parametrize(
    ("topic", "seconds"), [("", 1.0), ("x" * 33, 1.0), ("a\n", 1.0), ("a", 0.0), ("a", 1e9)]
)
def test_boards_out_of_range_are_refused(topic: str, seconds: float) -> None:
    with pytest.raises(RemoteProtocolError):
        check_topic(topic, seconds)


class TestResults:
    def alone(self) -> Success:
        weights, metrics = {"a": 4.0, "b": 12.0}, {"a": {"loss": 1.0}, "b": {"loss": 2.0}}
        return alone_success("P", PLAN, weights, metrics, serial=5, elements=10, seconds=0.5)

    def with_others(self, **changes: object) -> Success:
        fields: dict[str, object] = {
            "peers": ("R", "P"),
            "weights": {"R": 4.0, "P": 16.0},
            "total_weight": 20.0,
        }
        return replace(self.alone(), **(fields | changes))  # type: ignore[arg-type]

    def test_processes_are_named_one_by_one(self) -> None:
        success = self.alone()
        assert success.weights == {"P/a": 4.0, "P/b": 12.0}
        assert (success.peers, success.observers, success.total_weight) == (("P/a", "P/b"), ("P/c",), 16.0)
        assert success.metrics == {"loss": 1.75}

    def test_no_two_rounds_have_one_id(self) -> None:
        again = alone_success(
            "P", PLAN, {"a": 4.0, "b": 12.0}, {"a": {}, "b": {}}, serial=6, elements=10, seconds=0.5
        )
        assert again.group_id != self.alone().group_id

    def test_processes_take_the_place_of_their_peer(self) -> None:
        joint = joint_success(self.with_others(), "P", PLAN, {"a": 4.0, "b": 12.0, "c": 0.0})
        assert joint.weights == {"R": 4.0, "P/a": 4.0, "P/b": 12.0}
        assert joint.peers == ("R", "P/a", "P/b")
        assert joint.observers[-1] == "P/c"

    def test_a_reduced_weight_is_shared_out(self) -> None:
        success = self.with_others(weights={"R": 4.0, "P": 8.0}, total_weight=12.0)
        joint = joint_success(success, "P", PLAN, {"a": 4.0, "b": 12.0, "c": 0.0})
        assert joint.weights == {"R": 4.0, "P/a": 2.0, "P/b": 6.0}

    def test_processes_of_an_observing_peer_observe(self) -> None:
        success = self.with_others(peers=("R",), weights={"R": 4.0}, observers=("P", "S"))
        joint = joint_success(success, "P", PLAN, {"a": 4.0, "b": 12.0, "c": 0.0})
        assert joint.peers == ("R",)
        assert joint.observers == ("P/a", "P/b", "P/c", "S")

    def test_a_result_comes_back(self) -> None:
        success = replace(
            self.with_others(),
            lost={"R": "gone"},
            paths={"R": "lane"},
            certificate=b"proof",
            taken_over=((1, 2), (5, 9)),
        )
        found = read_success(encode_success(success), [])
        assert found.__slots__ == success.__slots__
        assert all(getattr(found, name) == getattr(success, name) for name in success.__slots__)

    @pytest.mark.parametrize("position", range(18))
    def test_a_result_with_other_types_is_refused(self, position: int) -> None:
        values = list(msgpack.unpackb(encode_success(self.alone())))
        values[position] = [[1, 2, 3]]
        with pytest.raises(RemoteProtocolError):
            read_success(msgpack.packb(values), [])

    @pytest.mark.parametrize("data", [b"", b"\xc1", msgpack.packb([]), msgpack.packb(5)])
    def test_malformed_results_are_refused(self, data: bytes) -> None:
        with pytest.raises(RemoteProtocolError):
            read_success(data, [])


def test_every_message_to_a_process_names_its_channel_first() -> None:
    assert all(types[0] is int for types in TO_PROCESS.values())
