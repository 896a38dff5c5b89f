"""Results of a peer's rounds as its processes get them. No I/O, no clock."""

from __future__ import annotations

import hashlib
from collections.abc import Collection, Mapping
from dataclasses import fields, replace
from typing import Any

import msgpack

from p2pavg.allreduce.vector.metrics import MetricMeans
from p2pavg.attached.group import Begin
from p2pavg.attached.messages import process_id, short
from p2pavg.base.encoding import checked, pack
from p2pavg.base.errors import RemoteProtocolError
from p2pavg.base.result import Failed, NoPeers, Success, Tensors
from p2pavg.telemetry.events import RoundEnded, RoundKind

_DOMAIN = "p2pavg/attached/1"
_NAMES = tuple(field.name for field in fields(Success) if field.name != "averaged")
_PAIRS = ("weights", "metrics", "paths", "lost")
_TUPLES = ("peers", "observers", "auxiliaries", "clipped")
_TYPES: dict[str, type] = {
    "total_weight": float,
    "compression_ratio": float,
    "bytes_sent": int,
    "bytes_received": int,
    "duration": float,
    "exchange_duration": float,
    "group_id": str,
    "certificate": bytes,
}
_MAX_ITEMS = 1024
_MAX_CERTIFICATE_BYTES = 2**19


def alone_success(
    peer_id: str,
    plan: Begin,
    weights: Mapping[str, float],
    metrics: Mapping[str, Mapping[str, float]],
    *,
    serial: int,
    elements: int,
    seconds: float,
) -> Success:
    """Return the result of a round among the processes of one peer; ``averaged`` is empty.

    Args:
        weights: weight of each contributor, by name.
        metrics: metrics of each contributor, by name.
        serial: of the round.
    """
    means = MetricMeans()
    for name in plan.contributors:
        means.add(metrics[name], weights[name])
    counted = {process_id(peer_id, name): weights[name] for name in plan.contributors}
    group = pack(_DOMAIN, peer_id, serial, plan.state, tuple(sorted(counted.items())))
    return Success(
        averaged=[],
        peers=tuple(counted),
        weights=counted,
        total_weight=sum(weights[name] for name in plan.contributors),
        compression_ratio=1.0,
        bytes_sent=0,
        bytes_received=0,
        duration=seconds,
        exchange_duration=0.0,
        group_id=hashlib.sha256(group).hexdigest(),
        share=(0, elements),
        metrics=means.means,
        observers=tuple(process_id(peer_id, n) for n in plan.members if n not in plan.contributors),
    )


def joint_success(success: Success, peer_id: str, plan: Begin, weights: Mapping[str, float]) -> Success:
    """Return the result of a round with other peers, with this peer's processes in its place.

    The group counted this peer's weight, which ``max_weight`` may have reduced. Each process gets its part of it.
    """
    counted = success.weights.get(peer_id)
    names = [process_id(peer_id, name) for name in plan.members]
    if counted is None:  # it only observed
        observers = [one for peer in success.observers for one in (names if peer == peer_id else [peer])]
        return replace(success, observers=tuple(observers))
    total = sum(weights[name] for name in plan.contributors)
    own = {process_id(peer_id, n): weights[n] * (counted / total) for n in plan.contributors}
    spread = [
        pair
        for peer, w in success.weights.items()
        for pair in (own.items() if peer == peer_id else [(peer, w)])
    ]
    observing = tuple(process_id(peer_id, n) for n in plan.members if n not in plan.contributors)
    return replace(
        success,
        peers=tuple(name for name, _ in spread),
        weights=dict(spread),
        observers=(*success.observers, *observing),
    )


def round_ended(
    result: Success | NoPeers | Failed,
    *,
    time: float,
    duration: float,
    run_id: str,
    process: str,
    excluded: Collection[str],
) -> RoundEnded:
    """Return the event of the end of a process's round. Bytes and ways are the peer's, and stay out.

    Args:
        time: wall clock, seconds.
        duration: seconds from the ``step`` that began the round to its result.
        process: id of this process.
        excluded: ids of the excluded peers.
    """
    if isinstance(result, Success):
        return RoundEnded(
            time=time,
            run_id=run_id,
            result=RoundKind.SUCCESS,
            duration=duration,
            group_id=result.group_id,
            members=tuple(
                dict.fromkeys((*result.peers, *result.observers, *result.auxiliaries, *result.lost))
            ),
            contributors=result.peers,
            observers=result.observers,
            auxiliaries=result.auxiliaries,
            lost=result.lost,
            clipped=result.clipped,
            excluded=tuple(excluded),
            exchange_duration=result.exchange_duration,
            samples=result.total_weight,
            own_samples=result.weights.get(process, 0.0),
            metrics=result.metrics,
        )
    failed = isinstance(result, Failed)
    return RoundEnded(
        time=time,
        run_id=run_id,
        result=RoundKind.FAILED if failed else RoundKind.NO_PEERS,
        duration=duration,
        reason=result.reason,
        code=result.code.value,
        peer=result.peer if isinstance(result, Failed) else None,
        excluded=tuple(excluded),
    )


def encode_success(success: Success) -> bytes:
    """Return everything but the tensors as bytes."""
    success = replace(success, lost={peer: short(reason)[:200] for peer, reason in success.lost.items()})
    values = [getattr(success, name) for name in _NAMES]
    packed: bytes = msgpack.packb([tuple(v.items()) if isinstance(v, Mapping) else v for v in values])
    return packed


def read_success(data: bytes, averaged: Tensors) -> Success:
    """Return a result from its description and tensors.

    Raises:
        RemoteProtocolError: the description is not what :func:`encode_success` makes.
    """
    try:
        values = msgpack.unpackb(
            data, use_list=False, max_array_len=_MAX_ITEMS, max_bin_len=_MAX_CERTIFICATE_BYTES, max_map_len=0
        )
    except (ValueError, TypeError, msgpack.UnpackException, RecursionError) as error:
        raise RemoteProtocolError(f"not a result: {error!r}") from None
    if type(values) is not tuple or len(values) != len(_NAMES):
        raise RemoteProtocolError("a result with another number of fields")
    found: dict[str, Any] = dict(zip(_NAMES, values, strict=True))
    for name in _PAIRS:
        kinds = (str, float) if name in ("weights", "metrics") else (str, str)
        found[name] = dict(checked(pair if type(pair) is tuple else (), kinds) for pair in found[name])
    for name in _TUPLES:
        found[name] = checked(found[name], (str,) * len(found[name]))
    found["share"] = checked(found["share"], (int, int))
    found["taken_over"] = tuple(
        checked(each if type(each) is tuple else (), (int, int))
        for each in checked(found["taken_over"], (tuple,) * len(found["taken_over"]))
    )
    checked(tuple(found[name] for name in _TYPES), tuple(_TYPES.values()))
    return Success(averaged=averaged, **found)
