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
class Update:
    """An update of the run that this peer has taken: in its round, or later, when it caught up.

    `samples` says how many samples of which peers are in it, by peer id. `seconds` and `exchange_seconds` are p2pavg's
    figures.
    """

    step: int
    samples: dict[str, float]
    seconds: float
    exchange_seconds: float
    bytes_sent: int
    bytes_received: int
    compression_ratio: float


@dataclass(frozen=True, kw_only=True)
class Waits:
    """A call of `step` took no update; `reason` says why."""

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


Event = Ready | TrainLoss | Update | Waits | HeldOutLoss | Failed | Done
_KINDS: dict[str, type[Event]] = {
    kind.__name__: kind for kind in (Ready, TrainLoss, Update, Waits, HeldOutLoss, Failed, Done)
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
