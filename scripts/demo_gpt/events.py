"""Events from a training process to the launcher, one JSON object per line."""

import json
from dataclasses import asdict, dataclass


@dataclass(frozen=True, kw_only=True)
class Ready:
    """The process is ready to start. A peer has an id and an address, the reference has neither."""

    parameters: int
    peer_id: str = ""
    address: str = ""


@dataclass(frozen=True, kw_only=True)
class TrainLoss:
    """The loss of one step on the process's own batch, in nats per character; steps count from 1."""

    step: int
    loss: float


@dataclass(frozen=True, kw_only=True)
class Round:
    """A round that succeeded.

    `seconds` and `exchange_seconds` are p2pavg's figures. `waited_seconds` is the training loop's total time in `step`,
    earlier attempts included.
    """

    step: int
    peers: list[str]
    seconds: float
    exchange_seconds: float
    waited_seconds: float
    attempts: int
    bytes_sent: int
    bytes_received: int
    compression_ratio: float


@dataclass(frozen=True, kw_only=True)
class Retry:
    """A round that gave no average; the same gradients go into the next attempt."""

    step: int
    result: str
    reason: str


@dataclass(frozen=True, kw_only=True)
class HeldOutLoss:
    """The loss on the held-out text after a number of steps."""

    step: int
    loss: float


@dataclass(frozen=True, kw_only=True)
class Failed:
    reason: str


@dataclass(frozen=True, kw_only=True)
class Done:
    """All steps are taken; `digest` is that of the final parameters."""

    digest: str


Event = Ready | TrainLoss | Round | Retry | HeldOutLoss | Failed | Done
_KINDS: dict[str, type[Event]] = {
    kind.__name__: kind for kind in (Ready, TrainLoss, Round, Retry, HeldOutLoss, Failed, Done)
}


def to_line(event: Event) -> str:
    return json.dumps({"event": type(event).__name__} | asdict(event)) + "\n"


def from_line(line: str) -> Event:
    """Read an event; raise ValueError if the line is not one."""
    fields = json.loads(line)
    try:
        return _KINDS[fields.pop("event")](**fields)
    except (AttributeError, KeyError, TypeError) as error:
        raise ValueError(f"not an event: {line[:80]!r}") from error
