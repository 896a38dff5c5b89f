"""One peer that trains, or one that only fetches states, in the benchmark of donors."""

from __future__ import annotations

import os
import time
from contextlib import suppress
from typing import Any

import torch

import p2pavg
from p2pavg.blocking import Averager
from p2pavg.optim import AveragedOptimizer, RunState
from p2pavg.peer.shared_states import ShareSettings
from p2pavg.state.sharing import StateSharing
from scripts.benchmarks.meter import Meter
from scripts.benchmarks.worker import Line

WIDTH = 1024
"""Of each layer. A layer has 4 MiB of parameters, and with their momentum 8 MiB of state."""
LAYER_STATE_BYTES = 8 * 2**20
BATCH = 64
BATCHES = 4  # of each peer for one update
LOOK_SECONDS = 0.1
WANT_SECONDS = 0.5


def model_of(state_bytes: int, seed: int) -> torch.nn.Module:
    """Return a model whose state has about so many bytes."""
    torch.manual_seed(seed)
    layers = max(state_bytes // LAYER_STATE_BYTES, 1)
    return torch.nn.Sequential(*(torch.nn.Linear(WIDTH, WIDTH, bias=False) for _ in range(layers)))


def main() -> None:
    """Run the worker."""
    line = Line()
    setup = line.told()
    torch.set_num_threads(1)
    with suppress(AttributeError):  # of Linux only
        os.sched_setaffinity(0, setup["cores"])
    config = p2pavg.AveragingConfig(run_id="bench", match_timeout=30.0, exchange_timeout=60.0)
    model = model_of(setup["state_bytes"], seed=setup["index"] if setup["role"] == "joins" else 0)
    with p2pavg.blocking.open_averager(
        config, listen=["/ip4/127.0.0.1/tcp/0"], bootstrap=setup["bootstrap"]
    ) as averager:
        line.report(address=averager.addresses[0])
        if setup["role"] == "fetches":
            averager.declare([p.detach() for p in model.parameters()])
            _Fetcher(line, averager).run()
        else:
            _Trainer(line, averager, model, setup).run()


class _Trainer:
    """A loop of batches that keep the processor busy. It measures since it was made, or since the last ``mark``."""

    def __init__(self, line: Line, averager: Averager, model: torch.nn.Module, setup: dict[str, Any]) -> None:
        self._line = line
        self._model = model
        self._meter = Meter()
        self._meter.start()
        state = RunState(model, log_bytes=setup.get("log_bytes"), upload_mbps=setup.get("mbps"))
        self._optimizer = AveragedOptimizer(
            torch.optim.SGD(model.parameters(), lr=1e-4, momentum=0.9),
            averager,
            target_batch_size=BATCH * BATCHES * setup["donors"],
            peers_to_start=setup["donors"],
            state=state,
        )
        self._began, self._batches = time.monotonic(), 0

    def run(self) -> None:
        """Train until the parent ends this process."""
        inputs = torch.randn(BATCH, WIDTH, generator=torch.Generator().manual_seed(1))
        while True:
            while self._line.hears():
                self._hear(self._line.told())
            self._optimizer.zero_grad()
            torch.autograd.backward((self._model(inputs) - inputs).square().mean())
            report = self._optimizer.step(samples=BATCH)
            self._batches += report.catching_up is None

    def _hear(self, told: dict[str, Any]) -> None:
        now = time.monotonic()
        if "mark" in told:
            self._began, self._batches = now, 0
            self._meter.start()
            return
        self._line.report(
            seconds=now - self._began,
            batches=self._batches,
            epoch=self._optimizer.epoch,
            resident=self._meter.read()["resident"],
        )


class _Fetcher:
    """Fetches the run's state again and again while it is told to, and takes no part in the run.

    It is no peer of the run's rounds. So the donors' time tells what their uploads cost, and nothing else.
    """

    def __init__(self, line: Line, averager: Averager) -> None:
        self._line = line
        self._sharing: StateSharing = averager.share_states(ShareSettings(log_bytes=1))
        self._fetches = False
        self._bytes, self._states = 0, set[int]()

    def run(self) -> None:
        """Obey the parent until it ends this process."""
        while True:
            while self._line.hears() or not self._fetches:
                self._hear()
            self._fetch()

    def _hear(self) -> None:
        told = self._line.told()
        if "read" in told:
            self._line.report(bytes=self._bytes, states=len(self._states))
            return
        self._fetches = told.get("fetch", self._fetches)
        self._bytes, self._states = 0, set()
        self._sharing.publish(wants=self._fetches, epoch=0)

    def _fetch(self) -> None:
        """Fetch the newest snapshot, if one is offered, and forget it."""
        news = self._sharing.news()
        offers = [said.snapshot for said in news.values() if said.snapshot is not None]
        if not offers:
            time.sleep(WANT_SECONDS)
            return
        offer = max(offers, key=lambda found: found.epoch)
        transfer = self._sharing.fetch_snapshot(offer)
        donors = [peer_id for peer_id, said in news.items() if said.snapshot == offer]
        transfer.set_donors(self._sharing.addresses_of(news, donors))
        while not transfer.ended:
            transfer.wait(LOOK_SECONDS)
            while self._line.hears():
                self._hear()
            if not self._fetches:
                transfer.cancel()
        if not transfer.failure:
            with transfer.data() as data:
                self._bytes += len(data)
                self._states.add(offer.epoch)


if __name__ == "__main__":
    main()
