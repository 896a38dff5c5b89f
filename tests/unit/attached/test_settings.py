"""Configurations and tensors that a process describes to its peer."""

from __future__ import annotations

import msgpack
import pytest
import torch

import p2pavg
from p2pavg.allreduce.vector.accumulation import schema_of
from p2pavg.attached.settings import (
    at_site,
    check_shareable,
    difference,
    encode_config,
    encode_schema,
    on_cpu,
    plain_settings,
    read_config,
    read_schema,
)
from p2pavg.base.errors import RemoteProtocolError
from p2pavg.group.topology import site_of

FULL = p2pavg.AveragingConfig(
    run_id="run ü",
    group_size=8,
    min_group_size=3,
    match_timeout=5.0,
    compression="int8:256",
    bandwidth=100.0,
    max_upload_mbps=50.0,
    tags=("gpu",),
    max_weight=512.0,
    robust="trimmed_mean:0.25",
    max_norm=3.0,
    audit="before:0.5",
    topology="star",
    name="garage",
)


@pytest.mark.parametrize("config", [p2pavg.AveragingConfig(run_id="x"), FULL], ids=["plain", "full"])
def test_a_configuration_comes_back(config: p2pavg.AveragingConfig) -> None:
    found = read_config(encode_config(config), {})
    assert plain_settings(found) == plain_settings(config)
    assert found.codec.name == config.codec.name
    assert found.aggregation == config.aggregation


def test_every_setting_is_sent_or_belongs_to_the_peer() -> None:
    settings = set(p2pavg.AveragingConfig.__dataclass_fields__)
    assert settings - plain_settings(FULL).keys() == {"participation", "access"}


def test_the_site_is_the_peers_own() -> None:
    config = p2pavg.AveragingConfig(run_id="x", topology="hierarchical", audit="off")
    found = read_config(encode_config(config), {})
    assert site_of(at_site(found, "lab-a").aggregation.topology) == "lab-a"
    assert at_site(FULL, "lab-a") is FULL
    with pytest.raises(p2pavg.ConfigError, match="start the peer with --site"):
        check_shareable(at_site(config, "lab-a"))
    check_shareable(config)


@pytest.mark.parametrize(
    ("change", "named"),
    [
        ({"group_size": 16}, "group_size"),
        ({"compression": "fp16"}, "compression"),
        ({"audit": "off"}, "audit"),
        ({"topology": p2pavg.Star()}, "topology"),
    ],
)
def test_a_difference_names_the_setting(change: dict[str, object], named: str) -> None:
    base = {"run_id": "x", "group_size": 8}
    other = p2pavg.AveragingConfig(**{**base, **change})  # type: ignore[arg-type]
    found = difference(p2pavg.AveragingConfig(**base), other)  # type: ignore[arg-type]
    assert f"with {named}=" in found
    assert found.endswith("give all of them the same")


def test_processes_may_have_names_of_their_own() -> None:
    first, second = (p2pavg.AveragingConfig(run_id="x", name=name) for name in ("one", "two"))
    assert difference(first, second) == ""


def test_a_participation_rule_is_refused_with_a_remedy() -> None:
    config = p2pavg.AveragingConfig(run_id="x", participation=p2pavg.RandomFraction(0.5))
    with pytest.raises(p2pavg.ConfigError, match="open an averager of its own"):
        check_shareable(config)


def test_gossip_is_refused_with_a_remedy() -> None:
    config = p2pavg.AveragingConfig(run_id="x", topology="gossip")
    with pytest.raises(
        p2pavg.ConfigError, match=r"cannot use the topology gossip: .* open an averager of its own"
    ):
        check_shareable(config)


def test_a_sparse_codec_is_refused_with_a_remedy() -> None:
    config = p2pavg.AveragingConfig(run_id="x", compression="topk")
    with pytest.raises(
        p2pavg.ConfigError, match=r"cannot use the codec topk:4096:64:2.* averager of its own"
    ):
        check_shareable(config)


@pytest.mark.parametrize(
    "data", [b"", b"\xc1", msgpack.packb([1]), msgpack.packb({}), msgpack.packb([None] * 15)]
)
def test_malformed_configurations_are_refused(data: bytes) -> None:
    with pytest.raises((RemoteProtocolError, p2pavg.ConfigError)):
        read_config(data, {})


@pytest.mark.parametrize("position", range(16))
def test_settings_of_other_types_are_refused(position: int) -> None:
    values = msgpack.unpackb(encode_config(FULL))
    values[position] = [[b"\xff"]]
    with pytest.raises((RemoteProtocolError, p2pavg.ConfigError)):
        read_config(msgpack.packb(values), {})


TENSORS = [torch.zeros(3, 4), torch.zeros((), dtype=torch.bfloat16), torch.zeros(0, dtype=torch.float16)]


@pytest.mark.parametrize("given", [TENSORS, {"a": TENSORS[0], "\ud800": TENSORS[1]}], ids=["list", "mapping"])
def test_a_description_of_tensors_comes_back(given: object) -> None:
    schema = on_cpu(schema_of(given)[0])  # type: ignore[arg-type]
    found = read_schema(encode_schema(schema))
    assert found == schema
    assert found.hash == schema.hash, "other peers see the same tensors"


@pytest.mark.parametrize(
    "fields",
    [
        [None, [], []],
        [None, [[1]], []],
        [None, [[1]], ["torch.int64"]],
        [None, [[-1]], ["torch.float32"]],
        [None, [[2**41]], ["torch.float32"]],
        [None, [[2**30, 2**30]], ["torch.float32"]],
        [None, [[1.5]], ["torch.float32"]],
        [None, [[True]], ["torch.float32"]],
        [None, [[1] * 65], ["torch.float32"]],
        [[], [[1]], ["torch.float32"]],
        [["text"], [[1]], ["torch.float32"]],
        [[b"\xff"], [[1]], ["torch.float32"]],
        [None, 5, ["torch.float32"]],
        [None, [[1]]],
    ],
)
def test_malformed_descriptions_are_refused(fields: object) -> None:
    with pytest.raises(RemoteProtocolError):
        read_schema(msgpack.packb(fields))
