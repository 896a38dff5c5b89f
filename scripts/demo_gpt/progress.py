"""The launcher's knowledge of each training process, built from its events."""

import signal
import time
from dataclasses import dataclass, field
from enum import StrEnum

from .events import Done, Event, Failed, HeldOutLoss, Ready, TrainLoss, Update, Waits
from .settings import Settings


class State(StrEnum):
    PLANNED = "not started"
    STARTING = "starting"
    READY = "ready"
    TRAINING = "training"
    WAITING = "waiting"
    KILLED = "killed"
    DONE = "done"
    FAILED = "failed"
    STOPPED = "stopped"  # by the launcher, without a failure of the process


@dataclass(kw_only=True)
class Progress:
    """Progress of one process, over all of its starts.

    `reason` is the cause of a wait or failure; `log_tail` is the end of its stderr.
    """

    name: str
    state: State = State.PLANNED
    reason: str = ""
    log_tail: str = ""
    parameters: int = 0
    peer_id: str = ""
    address: str = ""
    digest: str = ""
    kills: list[int] = field(default_factory=list)
    """The steps at which it was killed; it was started again after each."""
    train: list[TrainLoss] = field(default_factory=list)
    held_out: list[HeldOutLoss] = field(default_factory=list)
    updates: dict[int, Update] = field(default_factory=dict)

    @property
    def ended(self) -> bool:
        return self.state in (State.DONE, State.FAILED, State.STOPPED)

    @property
    def step(self) -> int:
        return max(self.train[-1].step if self.train else 0, max(self.updates, default=0), self._evaluated_at)

    @property
    def _evaluated_at(self) -> int:
        return self.held_out[-1].step if self.held_out else 0

    @property
    def bytes_sent(self) -> int:
        return sum(entry.bytes_sent for entry in self.updates.values())

    @property
    def bytes_received(self) -> int:
        return sum(entry.bytes_received for entry in self.updates.values())

    def apply(self, event: Event) -> None:
        match event:
            case Ready():
                self.state, self.reason = State.READY, ""
                self.parameters = event.parameters
                self.peer_id = event.peer_id
                self.address = event.address
            case TrainLoss():
                self.state, self.reason = State.TRAINING, ""
                self.train.append(event)
            case Update():
                self.state, self.reason = State.TRAINING, ""
                self.updates[event.step] = event
            case Waits():
                self.state, self.reason = State.WAITING, event.reason
            case HeldOutLoss():
                self.held_out.append(event)
            case Failed():
                self.fail(event.reason)
            case Done():
                self.state, self.digest, self.reason = State.DONE, event.digest, ""

    def starts(self) -> None:
        self.state, self.reason = State.STARTING, ""

    def exited(self, code: int, log_tail: str) -> None:
        """Note the process's exit, which is a failure unless it was done, told to stop, or killed."""
        if self.state is State.STOPPED or (code == 0 and self.state is State.DONE):
            return
        if code < 0 and self.state not in (State.DONE, State.FAILED):
            self.kills.append(self.step)
            self.state, self.reason, self.address = State.KILLED, exit_reason(code, log_tail), ""
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
    def step(self) -> int:
        """The number of updates that the run has taken."""
        return max(peer.step for peer in self.peers)

    @property
    def seconds(self) -> float:
        return (self.finished or time.monotonic()) - self.started

    def batches(self) -> list[dict[int, int]] | None:
        """Return, for each update of the run, how many batches of which peers are in it; None if one is unknown.

        All peers that took an update name the same samples, so any of them will do.
        """
        index = {peer.peer_id: number for number, peer in enumerate(self.peers)}
        found = []
        for step in range(1, self.settings.steps + 1):
            update = next((peer.updates[step] for peer in self.peers if step in peer.updates), None)
            if update is None:
                return None
            found.append(
                {
                    index[peer_id]: round(samples / self.settings.batch_size)
                    for peer_id, samples in update.samples.items()
                }
            )
        return found
