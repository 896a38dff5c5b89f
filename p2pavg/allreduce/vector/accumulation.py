"""Conversion of tensors to one flat float32 vector and back, and the weighted mean of accumulated tensors.

The vector is the concatenation of the tensors in the order in which they were given. It lives where the tensors live
(on the CPU when they are spread over devices) and is filled in place: nothing is allocated from step to step.
"""

from __future__ import annotations

import hashlib
import math
import numbers
import threading
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from types import MappingProxyType
from typing import cast

import torch

from p2pavg.allreduce.vector.metrics import MetricMeans, checked_metrics
from p2pavg.base.errors import AccumulateError
from p2pavg.base.limits import MAX_WEIGHT
from p2pavg.base.messages import pack
from p2pavg.base.result import Tensors
from p2pavg_compression import MAX_MAGNITUDE

MAX_TENSORS = 100_000

AVERAGED_DTYPES = (torch.float32, torch.float16, torch.bfloat16)
_SCHEMA_DOMAIN = "p2pavg/schema/1"
# Half of the codecs' maximum, so that a rounded mean of such values still fits.
LIMIT = MAX_MAGNITUDE / 2

Given = Sequence[torch.Tensor] | Mapping[str, torch.Tensor]


@dataclass(frozen=True)
class Schema:
    """Names, shapes and dtypes of a vector's tensors. Peers average only with peers of the same schema hash."""

    names: tuple[str, ...] | None
    """The keys of a mapping, or ``None`` for a sequence."""
    shapes: tuple[tuple[int, ...], ...]
    dtypes: tuple[torch.dtype, ...]
    devices: tuple[torch.device, ...]

    @cached_property
    def sizes(self) -> list[int]:
        """Elements of each tensor."""
        return [math.prod(shape) for shape in self.shapes]

    @cached_property
    def elements(self) -> int:
        """Length of the vector."""
        return sum(self.sizes)

    @cached_property
    def device(self) -> torch.device:
        """The device on which the vector lives."""
        # A vector has to be in one place. Tensors on several devices meet on the CPU.
        devices = set(self.devices)
        return devices.pop() if len(devices) == 1 else torch.device("cpu")

    @cached_property
    def is_plain(self) -> bool:
        """True if the tensors are views of a float32 vector on the CPU."""
        return self.device.type == "cpu" and set(self.dtypes) == {torch.float32}

    @cached_property
    def hash(self) -> bytes:
        """SHA-256 over names, shapes and dtypes. Devices are left out: they may differ between peers."""
        # One text per tensor, joined: msgpack's arrays are limited where they are read, not here.
        lines = [f"{shape}:{dtype}" for shape, dtype in zip(self.shapes, self.dtypes, strict=True)]
        # Names are chosen by the program and may hold lone surrogates, which plain UTF-8 cannot encode.
        names = (
            [] if self.names is None else [name.encode("utf-8", "surrogatepass").hex() for name in self.names]
        )
        text = "\n".join([*lines, "names", *names])
        return hashlib.sha256(pack(_SCHEMA_DOMAIN, text)).digest()

    def label(self, position: int) -> str:
        """Return a tensor's name for messages to the user."""
        return f"tensor {position}" if self.names is None else f"tensor {self.names[position]!r}"

    def unflatten(self, vector: torch.Tensor) -> Tensors:
        """Return the tensors that a float32 vector on the CPU stands for, with their shapes, dtypes and devices."""
        pieces = torch.split(vector.to(self.device), self.sizes)
        tensors = [
            piece.view(shape).to(device=device, dtype=dtype)
            for piece, shape, dtype, device in zip(
                pieces, self.shapes, self.dtypes, self.devices, strict=True
            )
        ]
        return tensors if self.names is None else dict(zip(self.names, tensors, strict=True))


def schema_of(given: Given) -> tuple[Schema, list[torch.Tensor]]:
    """Return the schema of a caller's tensors, and the tensors in order.

    Raises:
        AccumulateError: something cannot be averaged; the message names it.
    """
    if isinstance(given, torch.Tensor) or not isinstance(given, Mapping | Sequence):
        raise AccumulateError(
            f"tensors must be a sequence or a mapping of tensors, got {type(given).__name__}"
        )
    names = tuple(given) if isinstance(given, Mapping) else None
    tensors = list(given.values()) if isinstance(given, Mapping) else list(given)
    if names is not None and not all(isinstance(name, str) for name in names):
        raise AccumulateError("the keys of a mapping of tensors must be text")
    if not 0 < len(tensors) <= MAX_TENSORS:
        raise AccumulateError(f"1 to {MAX_TENSORS} tensors can be averaged, got {len(tensors)}")
    for position, tensor in enumerate(tensors):
        label = f"tensor {position}" if names is None else f"tensor {names[position]!r}"
        _check_kind(label, tensor)
    schema = Schema(
        names=names,
        shapes=tuple(tuple(tensor.shape) for tensor in tensors),
        dtypes=tuple(tensor.dtype for tensor in tensors),
        devices=tuple(tensor.device for tensor in tensors),
    )
    return schema, tensors


def _check_kind(label: str, tensor: object) -> None:
    if tensor is None:
        raise AccumulateError(f"{label} is None; a parameter that took no part in backward has no .grad")
    if not isinstance(tensor, torch.Tensor):
        raise AccumulateError(f"{label} is a {type(tensor).__name__}, not a tensor")
    if tensor.dtype not in AVERAGED_DTYPES:
        raise AccumulateError(f"{label} is {tensor.dtype}; float32, float16 and bfloat16 can be averaged")
    if tensor.layout != torch.strided:
        raise AccumulateError(f"{label} is {tensor.layout}; only dense tensors can be averaged")
    if tensor.device.type == "meta":
        raise AccumulateError(f"{label} is on the meta device and has no values")


@dataclass(frozen=True, slots=True)
class Contribution:
    """Contribution to a round: the weighted mean of everything accumulated until the round began."""

    schema: Schema
    mean: torch.Tensor
    """float32, the vector's length."""
    weight: float
    metrics: MetricMeans
    """Mean of each metric, by weight, over the calls that gave it."""
    generation: int


class Accumulation:
    """The weighted mean of everything accumulated since the last success. Safe to use from any thread.

    Two buffers take turns: one belongs to the running round, the other collects what is accumulated meanwhile.

    Args:
        max_weight: see :class:`p2pavg.AveragingConfig`.
        own_metrics: names of metrics that the averager adds to each contribution, so that callers cannot.
    """

    def __init__(self, max_weight: float | None = None, own_metrics: Collection[str] = ()) -> None:
        self._max_weight = max_weight
        self._own_metrics = tuple(own_metrics)
        self._lock = threading.Lock()
        self._schema: Schema | None = None
        self._sum: torch.Tensor | None = None
        self._spare: torch.Tensor | None = None
        self._weight = 0.0
        self._metrics = MetricMeans(self._own_metrics)
        self._taken_weight = 0.0  # in rounds that may still give it back
        # The part of it in ended rounds that may have used it: weights, by the contributions' identity.
        self._withheld: dict[int, float] = {}
        self._generation = 0

    @property
    def unresolved_weight(self) -> float:
        """Summed weight of contributions whose rounds have ended, while it is unknown if they were used."""
        with self._lock:
            return sum(self._withheld.values())

    @property
    def schema(self) -> Schema | None:
        """The schema that the first call fixed, or ``None`` before it."""
        return self._schema

    @property
    def weight(self) -> float:
        """Sum of the weights accumulated."""
        return self._weight

    def declare(self, given: Given) -> None:
        """Fix the schema without accumulating anything. Raises AccumulateError like :meth:`add`."""
        schema, _ = schema_of(given)
        with self._lock:
            if self._schema is None:
                self._schema = schema
            _check_same(self._schema, schema)

    @torch.no_grad()
    def add(self, given: Given, weight: float, metrics: Mapping[str, float] = MappingProxyType({})) -> None:
        """Add the tensors with a weight. If one of them is refused, none is added.

        Raises:
            AccumulateError: see :meth:`p2pavg.DecentralizedAverager.accumulate`.
        """
        weight = _checked_weight(weight)
        if self._max_weight is not None and weight > self._max_weight:
            raise AccumulateError(
                f"weight is {weight:g}, and the config's max_weight is {self._max_weight:g}: other peers would refuse "
                "the contribution; pass a smaller weight, or give all peers of the run a larger max_weight"
            )
        measured = checked_metrics(metrics)
        schema, tensors = schema_of(given)
        with self._lock:
            if self._schema is not None:
                _check_same(self._schema, schema)
            self._metrics.check_room(measured)
            # A round that runs may fail and give its weight back, so that counts here too.
            if self._weight + self._taken_weight + weight > MAX_WEIGHT:
                raise AccumulateError(f"the weights accumulated would sum to more than {MAX_WEIGHT:g}")
            # The last check, because it reads all values. From here on nothing is refused.
            _check_values(schema, tensors)
            if self._schema is None:
                self._schema = schema
            if self._sum is None:
                self._sum, self._spare = self._spare, None
            if self._sum is None:
                self._sum = torch.zeros(schema.elements, dtype=torch.float32, device=schema.device)
            # A running mean instead of a sum: it stays within the values' range for any weights.
            share = weight / (self._weight + weight)
            for total, tensor in zip(torch.split(self._sum, schema.sizes), tensors, strict=True):
                flat = tensor.detach().reshape(-1).to(total.device)
                # The first tensors overwrite the buffer, which may hold the values of an earlier round.
                total.lerp_(flat.float(), share) if share < 1.0 else total.copy_(flat)
            self._weight += weight
            self._metrics.add(measured, weight)

    def take(self) -> Contribution | None:
        """Take everything accumulated out for a round; ``None`` when there is nothing."""
        with self._lock:
            if self._weight == 0 or self._sum is None or self._schema is None:
                return None
            taken = Contribution(self._schema, self._sum, self._weight, self._metrics, self._generation)
            # The round owns its buffer until it gives it back. What is accumulated meanwhile goes to the other one.
            self._sum, self._spare, self._weight = self._spare, None, 0.0
            self._metrics = MetricMeans(self._own_metrics)
            self._taken_weight += taken.weight
            return taken

    @torch.no_grad()
    def give_back(self, taken: Contribution) -> None:
        """Accumulate a failed round's contribution again, beside what was added meanwhile."""
        with self._lock:
            self._let_go(taken)
            if taken.generation == self._generation:
                self._metrics.merge(taken.metrics)
            if taken.generation != self._generation:
                self._spare = taken.mean  # :meth:`clear` was called since
            # Nothing came meanwhile, so the buffers change places, and no value is touched.
            elif self._weight == 0:
                self._sum, self._spare, self._weight = taken.mean, self._sum, taken.weight
            else:
                assert self._sum is not None
                total = self._weight + taken.weight
                self._sum.lerp_(taken.mean, taken.weight / total)
                self._spare, self._weight = taken.mean, total

    def release(self, taken: Contribution) -> None:
        """Free the buffer of a contribution whose round succeeded."""
        with self._lock:
            self._let_go(taken)
            self._spare = taken.mean

    def _let_go(self, taken: Contribution) -> None:
        if taken.generation == self._generation:
            self._taken_weight -= taken.weight

    def withhold(self, taken: Contribution) -> None:
        """Keep a contribution aside: its round has ended, and it is not known yet if it was used."""
        with self._lock:
            if taken.generation == self._generation:
                self._withheld[id(taken)] = taken.weight

    def found_out(self, taken: Contribution, *, used: bool) -> None:
        """Settle a withheld contribution: it is used up, or accumulated again."""
        with self._lock:
            self._withheld.pop(id(taken), None)
        if used:
            self.release(taken)
        else:
            self.give_back(taken)

    def clear(self) -> None:
        """Discard everything accumulated, including what a running round would give back."""
        with self._lock:
            self._withheld.clear()
            self._weight = self._taken_weight = 0.0
            self._metrics = MetricMeans(self._own_metrics)
            # A contribution of an older generation gives back its buffer, and neither values nor weight.
            self._generation += 1

    def mean(self) -> Tensors | None:
        """Return a copy of the weighted mean so far, or ``None`` when there is nothing."""
        with self._lock:
            if self._weight == 0 or self._sum is None or self._schema is None:
                return None
            return self._schema.unflatten(self._sum.clone())


def _checked_weight(weight: object) -> float:
    if isinstance(weight, bool) or not isinstance(weight, numbers.Real):
        hint = "; use weight.item()" if isinstance(weight, torch.Tensor) else ""
        raise AccumulateError(f"weight must be a number, got {type(weight).__name__}{hint}")
    # In this form, NaN is refused too.
    if not 0 < cast(float, weight) <= MAX_WEIGHT:
        raise AccumulateError(f"weight must be above 0 and at most {MAX_WEIGHT:g}, got {weight!r}")
    return float(weight)


def _check_same(before: Schema, now: Schema) -> None:
    """Raise AccumulateError if other tensors are given than before, which other peers would not average."""
    if difference := _difference(before, now):
        raise AccumulateError(
            f"{difference}: an averager averages the same tensors for as long as it is open. To average others, such as"
            " after parameters were added or unfrozen, close it and open another one"
        )


def _difference(before: Schema, now: Schema) -> str:
    if len(now.shapes) != len(before.shapes):
        return f"{len(now.shapes)} tensors were given, {len(before.shapes)} before"
    if now.names != before.names:
        return "the tensors' names or their order differ from before"
    for position in range(len(now.shapes)):
        label = now.label(position)
        if now.shapes[position] != before.shapes[position]:
            return f"{label} has shape {now.shapes[position]}, before it had {before.shapes[position]}"
        if now.dtypes[position] != before.dtypes[position]:
            return f"{label} is {now.dtypes[position]}, before it was {before.dtypes[position]}"
        if now.devices[position] != before.devices[position]:
            return f"{label} is on {now.devices[position]}, before it was on {before.devices[position]}"
    return ""


def _check_values(schema: Schema, tensors: Sequence[torch.Tensor]) -> None:
    """Check all values in one pass and, on CUDA, one synchronisation; a maximum propagates NaN."""
    # ``aminmax`` refuses a tensor without elements.
    filled = [(position, tensor) for position, tensor in enumerate(tensors) if tensor.numel()]
    if not filled:
        return
    extremes = [
        torch.stack(torch.aminmax(tensor.detach())).abs().amax().to("cpu", torch.float32)
        for _, tensor in filled
    ]
    largest = torch.stack(extremes)
    # Not ``largest > LIMIT``, which is false for NaN.
    wrong = ~(largest <= LIMIT)
    if wrong.any():
        position, tensor = filled[int(wrong.nonzero()[0])]
        what = "a value of more than " + f"{LIMIT:g}" if torch.isfinite(tensor).all() else "NaN or Inf"
        raise AccumulateError(
            f"{schema.label(position)} holds {what}; nothing was accumulated", position=position
        )
