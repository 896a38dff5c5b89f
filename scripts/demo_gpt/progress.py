"""The launcher's knowledge of each training process, built from its events."""

import signal
import time
from dataclasses import dataclass, field
from enum import StrEnum

from .events import Done, Event, Failed, HeldOutLoss, Ready, Retry, Round, TrainLoss
from .settings import Settings


class State(StrEnum):
    STARTING = "starting"
    READY = "ready"
    TRAINING = "training"
    RETRYING = "retrying"
    DONE = "done"
    FAILED = "failed"
    STOPPED = "stopped"  # by the launcher, without a failure of the process


@dataclass(kw_only=True)
class Progress:
    """Progress of one process. `reason` is the cause of a retry or failure; `log_tail` is the end of its stderr."""

    name: str
    state: State = State.STARTING
    reason: str = ""
    log_tail: str = ""
    parameters: int = 0
    peer_id: str = ""
    address: str = ""
    digest: str = ""
    train: list[TrainLoss] = field(default_factory=list)
    held_out: list[HeldOutLoss] = field(default_factory=list)
    rounds: list[Round] = field(default_factory=list)

    @property
    def ended(self) -> bool:
        return self.state in (State.DONE, State.FAILED, State.STOPPED)

    @property
    def step(self) -> int:
        return self.train[-1].step if self.train else 0

    @property
    def bytes_sent(self) -> int:
        return sum(entry.bytes_sent for entry in self.rounds)

    @property
    def bytes_received(self) -> int:
        return sum(entry.bytes_received for entry in self.rounds)

    def apply(self, event: Event) -> None:
        match event:
            case Ready():
                self.state = State.READY
                self.parameters = event.parameters
                self.peer_id = event.peer_id
                self.address = event.address
            case TrainLoss():
                self.state, self.reason = State.TRAINING, ""
                self.train.append(event)
            case Round():
                self.state, self.reason = State.TRAINING, ""
                self.rounds.append(event)
            case Retry():
                self.state, self.reason = State.RETRYING, f"{event.result}: {event.reason}"
            case HeldOutLoss():
                self.held_out.append(event)
            case Failed():
                self.fail(event.reason)
            case Done():
                self.state, self.digest = State.DONE, event.digest

    def exited(self, code: int, log_tail: str) -> None:
        """Note the process's exit, which is a failure unless it was done or told to stop."""
        if self.state is State.STOPPED or (code == 0 and self.state is State.DONE):
            return
        self.log_tail = log_tail
        self.fail(exit_reason(code, log_tail))

    def stop(self) -> None:
        if not self.ended:
            self.state, self.reason = State.STOPPED, ""

    def fail(self, reason: str) -> None:
        """Note a failure; the first reason is kept, because later ones are its consequences."""
        if self.state is not State.FAILED:
            self.state, self.reason = State.FAILED, reason


def exit_reason(code: int, log_tail: str) -> str:
    if code < 0:
        return f"killed by {signal.Signals(-code).name}"
    if lines := log_tail.strip().splitlines():
        return lines[-1].strip()
    return f"ended early with exit code {code}"


@dataclass(kw_only=True)
class Run:
    """The whole demo: its settings and every process's progress. Times are those of time.monotonic, in seconds."""

    settings: Settings
    peers: list[Progress]
    reference: Progress
    started: float = field(default_factory=time.monotonic)
    finished: float | None = None

    @classmethod
    def planned(cls, settings: Settings) -> "Run":
        peers = [Progress(name=f"peer {index}") for index in range(settings.peers)]
        return cls(settings=settings, peers=peers, reference=Progress(name="reference"))

    @property
    def processes(self) -> list[Progress]:
        return [*self.peers, self.reference]

    @property
    def seconds(self) -> float:
        return (self.finished or time.monotonic()) - self.started
