"""Configurations and tensors as an attached process describes them to its peer. No I/O, no clock."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

import msgpack
import torch

from p2pavg.allreduce.vector.accumulation import MAX_TENSORS, Schema
from p2pavg.base.errors import ConfigError, RemoteProtocolError
from p2pavg.group.audits import resolve_audits
from p2pavg.group.topology import Gossip, Hierarchical, site_of
from p2pavg.runs.config import AveragingConfig
from p2pavg.runs.membership.access import RunAccess
from p2pavg_compression import CodecError, resolve_codec

MAX_ELEMENTS = 2**40
_MAX_DIMENSIONS = 64
_DTYPES = {str(dtype): dtype for dtype in (torch.float32, torch.float16, torch.bfloat16)}

_PLAIN = (
    "run_id",
    "group_size",
    "min_group_size",
    "match_timeout",
    "exchange_timeout",
    "bandwidth",
    "max_upload_mbps",
    "max_download_mbps",
    "max_weight",
    "max_norm",
    "strategy",
)
"""Settings whose values are plain numbers or text."""
_SHARED = (*_PLAIN, "compression", "tags", "robust", "audit", "topology")
"""Settings that all processes of a run have in common."""
_FIELDS = (*_SHARED, "name")


def check_shareable(config: AveragingConfig) -> None:
    """Raise ConfigError if processes that share a peer cannot average by this configuration."""
    if site_of(config.aggregation.topology):
        raise ConfigError(
            "a process that is attached to a peer cannot name a site, which is the peer's: start the peer with --site,"
            " and give the process topology='hierarchical'"
        )
    if isinstance(config.aggregation.topology, Gossip):
        raise ConfigError(
            "a process that is attached to a peer cannot use the topology gossip: its peer would look for one group of"
            " all of its processes; open an averager of its own with p2pavg.blocking.open_averager"
        )
    if config.participation is not None:
        raise ConfigError(
            "a process that is attached to a peer cannot use participation: it selects peers, and this process is a"
            " part of one; open an averager of its own with p2pavg.blocking.open_averager"
        )
    try:
        known = resolve_codec(config.codec.name).name == config.codec.name
    except (ValueError, TypeError, CodecError):
        known = False
    if config.codec.is_sparse:
        raise ConfigError(
            f"a process that is attached to a peer cannot use the codec {config.codec.name}: its error feedback has to"
            " know what the codec leaves out, and the codec encodes the mean of all processes of the peer. Open an"
            " averager of its own with p2pavg.blocking.open_averager"
        )
    if not known:
        raise ConfigError(
            f"a process that is attached to a peer can use only the codecs that p2pavg has, got {config.codec.name!r}"
        )


def at_site(config: AveragingConfig, site: str) -> AveragingConfig:
    """Return the configuration of a peer in a site; unchanged if its topology has no sites."""
    if isinstance(config.aggregation.topology, Hierarchical):
        return replace(config, topology=Hierarchical(site))
    return config


def plain_settings(config: AveragingConfig) -> dict[str, Any]:
    """Return the settings that all processes of a run share with their peer, as plain values."""
    robust, audits = config.aggregation.robust, resolve_audits(config.audit)
    return {name: getattr(config, name) for name in _PLAIN} | {
        "compression": config.codec.name,
        "tags": config.tags,
        "name": config.name,
        "robust": None if robust is None else robust.text,
        "audit": "off" if audits is None else audits.text,
        "topology": config.aggregation.topology.text,
    }


def encode_config(config: AveragingConfig) -> bytes:
    """Return a configuration as bytes. Of ``access`` only the authority is in it: the certificate is the peer's own."""
    settings = plain_settings(config)
    authority = None if config.access is None else config.access.authority
    packed: bytes = msgpack.packb([authority, *(settings[name] for name in _FIELDS)])
    return packed


def read_config(data: bytes, accesses: Mapping[str, RunAccess]) -> AveragingConfig:
    """Return the configuration with which a peer averages for a process.

    Args:
        accesses: keys and certificates of the peer, by the id of the run, for runs that have an authority.

    Raises:
        RemoteProtocolError: ``data`` is not what :func:`encode_config` makes.
        ConfigError: a setting is out of range, or the peer has no certificate for the run.
    """
    authority, *values = checked_fields(_unpacked(data, _MAX_DIMENSIONS), 1 + len(_FIELDS))
    settings = dict(zip(_FIELDS, values, strict=True))
    run_id = settings["run_id"]
    access = accesses.get(run_id) if isinstance(run_id, str) else None
    if authority is not None and (access is None or access.authority != authority):
        raise ConfigError(
            f"the peer has no certificate for the run {run_id!r}; start it with --run, --certificate and --identity"
        )
    if type(settings["tags"]) is not tuple:
        raise RemoteProtocolError("a configuration of other types")
    try:
        return AveragingConfig(**settings, access=access)
    except (TypeError, OverflowError) as error:
        raise RemoteProtocolError(f"a configuration of other types: {error}") from None


def difference(before: AveragingConfig, now: AveragingConfig) -> str:
    """Return the first settings in which two configurations differ, as a sentence; empty if there are none."""
    first, second = plain_settings(before), plain_settings(now)
    for name in _SHARED:
        if first[name] != second[name]:
            return (
                f"the processes that share this peer average with {name}={first[name]!r}, this one with"
                f" {name}={second[name]!r}; give all of them the same"
            )
    return ""


def encode_schema(schema: Schema) -> bytes:
    """Return the description of tensors as bytes; their devices stay out."""
    packed: bytes = msgpack.packb(
        [
            None
            if schema.names is None
            else [name.encode("utf-8", "surrogatepass") for name in schema.names],
            list(schema.shapes),
            [str(dtype) for dtype in schema.dtypes],
        ]
    )
    return packed


def read_schema(data: bytes) -> Schema:
    """Return the schema of a vector on the CPU; raise RemoteProtocolError if the description is malformed."""
    names, shapes, dtypes = checked_fields(_unpacked(data, MAX_TENSORS), 3)
    if type(shapes) is not tuple or type(dtypes) is not tuple or not 0 < len(shapes) <= MAX_TENSORS:
        raise RemoteProtocolError("a description of another number of tensors")
    if len(dtypes) != len(shapes) or not all(type(name) is str and name in _DTYPES for name in dtypes):
        raise RemoteProtocolError("a description with other dtypes")
    if not all(type(shape) is tuple and len(shape) <= _MAX_DIMENSIONS for shape in shapes):
        raise RemoteProtocolError("a description with other shapes")
    if not all(type(size) is int and 0 <= size <= MAX_ELEMENTS for shape in shapes for size in shape):
        raise RemoteProtocolError("a tensor with a size out of range")
    schema = Schema(
        names=None if names is None else _texts(names, len(shapes)),
        shapes=shapes,
        dtypes=tuple(_DTYPES[name] for name in dtypes),
        devices=(torch.device("cpu"),) * len(shapes),
    )
    if schema.elements > MAX_ELEMENTS:
        raise RemoteProtocolError("a vector that is too long")
    return schema


def on_cpu(schema: Schema) -> Schema:
    """Return the same schema with all tensors on the CPU."""
    return replace(schema, devices=(torch.device("cpu"),) * len(schema.shapes))


def checked_fields(fields: tuple[Any, ...], count: int) -> tuple[Any, ...]:
    """Return the fields if there are so many; raise RemoteProtocolError otherwise."""
    if len(fields) != count:
        raise RemoteProtocolError(f"{count} fields were expected, not {len(fields)}")
    return fields


def _texts(names: object, count: int) -> tuple[str, ...]:
    if type(names) is not tuple or len(names) != count or not all(type(name) is bytes for name in names):
        raise RemoteProtocolError("a description with other names")
    try:
        return tuple(name.decode("utf-8", "surrogatepass") for name in names)
    except UnicodeDecodeError:
        raise RemoteProtocolError("a tensor with a name that is no text") from None


def _unpacked(data: bytes, items: int) -> tuple[Any, ...]:
    try:
        values = msgpack.unpackb(data, use_list=False, max_array_len=items, max_map_len=0, max_ext_len=0)
    except (ValueError, TypeError, msgpack.UnpackException, RecursionError) as error:
        raise RemoteProtocolError(f"not a description: {error!r}") from None
    if type(values) is not tuple:
        raise RemoteProtocolError("a description that is no list")
    return values
