"""Averaging of DDP's gradient buckets across peers: each peer is several processes under ``torch.distributed``.

Within a peer, the ranks reduce each bucket of gradients as usual. This library then averages the bucket across peers,
while the backward pass goes on with the next one. Rank 0 of each peer talks to the other peers. A hook sees one bucket
of gradients at a time, and the step that the program takes with them is not known here. So a peer that missed an update
cannot replay it: see :class:`p2pavg.optim.ReplicatedOptimizer` for peers that come back. :mod:`p2pavg.optim`
does not import this module, since it needs a torch that was built with ``torch.distributed``.
"""

# No `from __future__ import annotations` here: DDP compares the hook's annotations with the types themselves.
import hashlib
import logging
import math
import queue
import threading
from collections.abc import Iterable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, replace

import torch
import torch.distributed as dist
from torch._C._distributed_c10d import GradBucket

from p2pavg.base.errors import AccumulateError, BehindError, ClosedError, P2PAvgError
from p2pavg.base.limits import LOOK_SECONDS, STOP_SECONDS
from p2pavg.base.messages import pack
from p2pavg.base.result import InProgress, Success
from p2pavg.blocking import Averager
from p2pavg.optim.base.arguments import check_averager, check_meets_all
from p2pavg.optim.base.state import Lineage, checked_amount, digest_of
from p2pavg.optim.coordination.progress import Average, LeftBehind
from p2pavg.optim.coordination.together import RoundCoordinator

logger = logging.getLogger(__name__)

_FAILED, _OK, _ENDED, _BEHIND = 0, 1, 2, 3
_STATE_DOMAIN = "p2pavg/ddp/1"


@dataclass(slots=True)
class _Bucket:
    """One bucket of one backward pass that is being averaged."""

    index: int
    number: int
    """Number of the backward pass."""
    is_last: bool
    values: torch.Tensor
    reduced: torch.futures.Future[list[torch.Tensor]]
    result: torch.futures.Future[torch.Tensor]


class _Speaker:
    """Rank 0's rounds with the other peers: one for each bucket, in the buckets' order."""

    def __init__(
        self, averager: Averager, together: RoundCoordinator, weight: float, stack: ExitStack
    ) -> None:
        self.together = together
        self._averager = averager
        self._weight = weight
        self._stack = stack
        self._averagers: dict[tuple[int, int], Averager] = {}
        self._groups: list[str] = []
        self._peers = 0  # in the rounds of this backward pass; 0 if there is no round
        self._failed = ""
        self.behind = ""
        """The reason why the present pass cannot be averaged any more: the run went on without this peer."""
        self._last: Success | None = None

    def average(self, index: int, values: torch.Tensor) -> None:
        """Replace this peer's values by the peers' mean, in place; leave them unchanged if that fails."""
        if index == 0:
            self._begin()
        # One bucket that failed spoils the whole pass, so the later ones need no round.
        if self._failed or self._peers == 1:
            return
        averager = self._averager_of(index, values)
        if self._still_averages(averager):
            self._failed = f"bucket {index}: the round of an earlier backward pass still runs"
            return
        averager.clear()
        try:
            averager.accumulate([values], weight=self._weight)
        except AccumulateError as error:  # e.g. an overflow of mixed precision
            self._failed = f"bucket {index}: {error}"
            return
        result = self.together.average(self._peers, averager, self._state())
        if not isinstance(result, Success):
            self._failed = f"bucket {index}: {result.reason}"
            return
        assert isinstance(result.averaged, list)
        values.copy_(result.averaged[0])
        self._groups.append(f"{result.group_id} {digest_of(result.averaged).hex()}")
        self._last = result

    def end(self) -> int:
        """End the backward pass; return what became of it.

        Its gradients may be used if every bucket is the peers' mean, or if this peer is alone.
        """
        ok, alone = not self._failed, self._peers == 1
        if alone:
            self.together.took_alone()
        elif ok:
            assert self._last is not None
            self.together.took(replace(self._last, group_id=self._state().hex()))
        else:
            logger.warning("the gradients of this step were not averaged: %s", self._failed)
        self.together.run.publish(0.0, waiting=False)
        return _OK if ok else _BEHIND if self.behind else _FAILED

    def _begin(self) -> None:
        self._groups, self._failed, self.behind = [], "", ""  # also those of an incomplete pass
        self.together.computed(self._weight)
        self.together.run.publish(self._weight, waiting=True)
        decision = self.together.decide_when_all_are_ready()
        self._peers = decision.peers if isinstance(decision, Average) else 0
        if not isinstance(decision, Average):
            self._failed = decision.reason
        if isinstance(decision, LeftBehind):
            self.behind = decision.reason

    def _state(self) -> bytes:
        """Return the state for the next bucket: peers with different results of an earlier bucket must not meet."""
        lineage = self.together.run.lineage
        return hashlib.sha256(pack(_STATE_DOMAIN, lineage.state, tuple(self._groups))).digest()

    @staticmethod
    def _still_averages(averager: Averager) -> bool:
        """Return whether a round of an earlier pass runs; the result of one that has ended meanwhile is dropped."""
        if (state := averager.round_state) is None:
            return False
        # A search ends at once when it is cancelled, and says so a moment later. An exchange cannot be cancelled.
        wait = 1.0 if averager.cancel_matchmaking("its backward pass has ended") else 0.0
        # Collected here: the step of the present pass would return it as its own average.
        return isinstance(averager.step(wait=wait, state=state), InProgress)

    def _averager_of(self, index: int, values: torch.Tensor) -> Averager:
        key = (index, values.numel())  # DDP changes its buckets after the first pass
        if key not in self._averagers:
            run_id = f"{self._averager.config.run_id}/bucket {index} of {values.numel()}"
            config = replace(self._averager.config, run_id=run_id)
            self._averagers[key] = self._stack.enter_context(self._averager.sibling(config))
        return self._averagers[key]


class PeerGradients:
    """The state of :func:`ddp_comm_hook`, of one rank. Made by :func:`peer_gradients`."""

    def __init__(self, speaker: _Speaker | None) -> None:
        self._speaker = speaker
        self._size = dist.get_world_size()
        # A group of its own: the thread's collectives must not mix with those of the backward pass.
        self._beside = dist.new_group()
        self._queue: queue.SimpleQueue[_Bucket | None] = queue.SimpleQueue()
        self._passes: queue.SimpleQueue[tuple[int, int]] = queue.SimpleQueue()
        self._begun = 0  # backward passes
        self._asked = 0  # the newest of them whose result `averaged` has returned
        self._taken = 0  # buckets
        self._averaged = 0  # of these, including the failed ones
        self._error: BaseException | None = None
        self._thread = threading.Thread(target=self._run, name="p2pavg-ddp", daemon=True)
        self._thread.start()

    @property
    def lineage(self) -> Lineage | None:
        """The lineage of this peer's parameters; on rank 0 only."""
        return None if self._speaker is None else self._speaker.together.run.lineage

    def take(self, bucket: GradBucket) -> torch.futures.Future[torch.Tensor]:
        """Reduce a bucket within the peer and average it across peers.

        Returns the future of its values, in the same memory.
        """
        # Before the sum: float16 gradients of many ranks could overflow in it.
        values = bucket.buffer().div_(self._size)
        devices: list[int | str | torch.device] | None = [values.device] if values.is_cuda else None
        result: torch.futures.Future[torch.Tensor] = torch.futures.Future(devices=devices)
        work = dist.all_reduce(values, async_op=True)
        assert work is not None
        if bucket.index() == 0:
            self._begun += 1
        self._taken += 1
        self._queue.put(
            _Bucket(bucket.index(), self._begun, bucket.is_last(), values, work.get_future(), result)
        )
        return result

    def averaged(self) -> bool:
        """Return whether the gradients of the last backward pass are the peers' mean; call it on every rank.

        If not, a peer was lost during the pass, or a gradient was not finite: skip the optimizer's step and go on with
        the next batch. For a peer that is alone in its run the result is true, and its gradients are its own.

        Raises:
            p2pavg.BehindError: the other peers took an update without this one, which cannot take it any more. It is
                raised for every pass, until the other peers have left.
            RuntimeError: there was no backward pass since the last call, or only passes under ``no_sync()``, or an
                error ended the pass.
            p2pavg.ClosedError: the averager is closed. Any other error that ended the averaging is raised as it is.
        """
        if self._asked == self._begun:
            raise RuntimeError("no backward pass has reduced its gradients since the last call")
        found = _FAILED
        while self._asked < self._begun:  # skips earlier passes whose result was not read
            self._asked, found = self._next_pass()
        if self._error is not None:
            raise self._error
        if found == _BEHIND:
            why = "rank 0 knows why" if self._speaker is None else self._speaker.behind
            raise BehindError(f"this peer is behind its run, and a hook of gradients cannot catch up: {why}")
        return found == _OK

    def _next_pass(self) -> tuple[int, int]:
        while True:
            is_idle = self._averaged == self._taken  # read before the queue: no pass is missed
            try:
                return self._passes.get(timeout=0.0 if is_idle else LOOK_SECONDS)
            except queue.Empty:
                if is_idle:
                    raise RuntimeError("the last backward pass is incomplete") from None

    def close(self) -> None:
        """End the thread; wait at most 10 s for running passes."""
        self._queue.put(None)
        self._thread.join(STOP_SECONDS)
        if self._thread.is_alive():
            logger.warning("a backward pass is still running %g s after it should have ended", STOP_SECONDS)
        elif dist.is_initialized():
            dist.destroy_process_group(self._beside)

    # ------------------------------------------------------------------ in the thread

    def _run(self) -> None:
        while (bucket := self._queue.get()) is not None:
            try:
                self._average(bucket)
            except BaseException as error:  # noqa: BLE001 - raised again by `averaged`
                # The backward pass gets the local values, so that it ends; `averaged` then returns False.
                self._error = error
                if not bucket.result.done():
                    bucket.result.set_result(bucket.values)
                if bucket.is_last:
                    self._passes.put((bucket.number, _FAILED))
            self._averaged += 1

    def _average(self, bucket: _Bucket) -> None:
        """Average one bucket and broadcast it to all ranks.

        This goes on after an error: all ranks of a peer take part in the same collectives until all know of the
        error.
        """
        bucket.reduced.wait()
        if self._speaker is not None and self._error is None:
            try:
                self._speaker.average(bucket.index, bucket.values)
            except BaseException as error:  # noqa: BLE001 - as above
                self._error = error
        # Also after a failure: the other ranks wait for it, and all must hold the same values.
        dist.broadcast(bucket.values, src=0, group=self._beside)
        bucket.result.set_result(bucket.values)
        if bucket.is_last:
            end = _ENDED if self._error else _FAILED
            if self._error is None and self._speaker is not None:
                end = self._speaker.end()
            said = torch.tensor([end], device=bucket.values.device, dtype=torch.int64)
            dist.broadcast(said, src=0, group=self._beside)
            if said.item() == _ENDED and self._error is None:
                self._error = ClosedError("rank 0 of this peer has stopped averaging")
            self._passes.put((bucket.number, int(said.item())))


@contextmanager
def peer_gradients(
    averager: Averager | None,
    parameters: Iterable[torch.Tensor],
    *,
    weight: float | None = None,
    peers_to_start: int | None = None,
    sync_timeout: float = 600.0,
) -> Iterator[PeerGradients]:
    """Provide the state of :func:`ddp_comm_hook` while the block runs; enter it on all ranks of a peer together.

    ::

        model = DistributedDataParallel(network)
        with peer_gradients(averager if rank == 0 else None, network.parameters()) as gradients:
            model.register_comm_hook(gradients, ddp_comm_hook)
            ...
            loss.backward()
            if gradients.averaged():
                optimizer.step()

    Args:
        averager: on rank 0, the averager of a run that averages nothing else; ``None`` on the other ranks.
        parameters: the model's parameters at the start. Peers with different ones never meet;
            :func:`p2pavg.optim.sync_parameters` makes them the same.
        weight: weight of this peer's gradients; its number of ranks if not given, so that all ranks of all peers count
            alike.
        peers_to_start: number of peers that the first round needs; ``config.min_group_size`` if not given.
        sync_timeout: seconds that a backward pass waits at most, for peers or for a round.

    Raises:
        ValueError: an argument is out of range, or ``averager`` is missing on rank 0, given elsewhere, or of a config
            with ``participation``; on all ranks.
        TypeError: ``averager`` is not one of :mod:`p2pavg.blocking`.
        p2pavg.ClosedError: the averager is closed.
    """
    with ExitStack() as stack:
        speaker, wrong = None, None
        try:
            speaker = _speaker_of(averager, parameters, weight, peers_to_start, sync_timeout, stack)
        except (TypeError, ValueError, P2PAvgError) as error:
            wrong = error
        # Before the thread starts: its collectives need every rank.
        _raise_on_all(wrong)
        gradients = PeerGradients(speaker)
        try:
            yield gradients
        finally:
            gradients.close()


def _speaker_of(
    averager: Averager | None,
    parameters: Iterable[torch.Tensor],
    weight: float | None,
    peers_to_start: int | None,
    sync_timeout: float,
    stack: ExitStack,
) -> _Speaker | None:
    if averager is not None:
        check_averager(averager)
        check_meets_all(averager)
    counts = float(dist.get_world_size()) if weight is None else checked_amount("weight", weight)
    if (averager is None) == (dist.get_rank() == 0):
        raise ValueError("averager must be given on rank 0 of the peer, and there alone")
    if averager is None:
        return None
    if averager.config.participation is not None:
        # The participants are drawn for every bucket separately: one update would mix different peers' gradients.
        raise ValueError("averager must be of a config without participation")
    averager.clear()
    together = RoundCoordinator(
        averager,
        list(parameters),
        target=math.inf,
        peers_to_start=peers_to_start,
        sync_timeout=sync_timeout,
        min_peers=1,
        pause_seconds=sync_timeout,  # a peer that takes updates alone cannot rejoin, so a pause must not cause that
    )
    return _Speaker(averager, together, counts, stack)


def _raise_on_all(wrong: TypeError | ValueError | P2PAvgError | None) -> None:
    """Raise a rank's error on all ranks. Otherwise the ranks without an error would wait for ever."""
    found: list[str | None] = [None] * dist.get_world_size()
    dist.all_gather_object(found, None if wrong is None else str(wrong))
    if wrong is not None:
        raise wrong
    for rank, text in enumerate(found):
        if text is not None:
            raise ValueError(f"on rank {rank}: {text}")


def ddp_comm_hook(state: PeerGradients, bucket: GradBucket) -> torch.futures.Future[torch.Tensor]:
    """Average one bucket; a hook for ``DDP.register_comm_hook``, with the state of :func:`peer_gradients`.

    Under ``no_sync()`` nothing is averaged, as usual in DDP; the next pass includes the accumulated gradients.
    """
    return state.take(bucket)
