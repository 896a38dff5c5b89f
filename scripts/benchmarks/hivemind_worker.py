"""One peer of hivemind, in hivemind's own environment: a DHT, an averager, and ``step()``."""

from __future__ import annotations

import importlib
import time
from typing import Any

import torch

from scripts.benchmarks.worker import Line, serve

POLL_SECONDS = 0.001
STEP_SECONDS = 60.0


class Member:
    """A :class:`~scripts.benchmarks.worker.System`."""

    def __init__(self, averager: Any, count: int) -> None:
        self._averager = averager
        self._count = count

    def prepare(self, values: torch.Tensor) -> None:
        with self._averager.get_tensors() as tensors:
            tensors[0].copy_(values)

    def run(self) -> dict[str, float]:
        began = time.monotonic()
        control = self._averager.step(weight=1.0, timeout=STEP_SECONDS, wait=False)
        # Its own flag marks the beginning of the all-reduce; there is no public notification.
        while not control.began_allreduce and not control.done():
            time.sleep(POLL_SECONDS)
        formed = time.monotonic()
        found = control.result()
        if found is None or len(found) != self._count:
            raise RuntimeError(f"no group of {self._count}: {found and len(found)}")
        return {"exchange": time.monotonic() - formed, "group": formed - began}

    def result(self) -> torch.Tensor:
        with self._averager.get_tensors() as tensors:
            return torch.Tensor(tensors[0].clone())


def main() -> None:
    """Run the worker."""
    # hivemind is missing in the environment that checks this file's types.
    hivemind: Any = importlib.import_module("hivemind")
    compression: Any = importlib.import_module("hivemind.compression")
    codecs = {"NONE": compression.NoCompression, "BLOCKWISE_8BIT": compression.BlockwiseQuantization}

    torch.set_num_threads(1)
    line = Line()
    setup = line.told()
    count = setup["count"]
    dht = hivemind.DHT(
        start=True, initial_peers=setup["bootstrap"], host_maddrs=[f"/ip4/{setup['host']}/tcp/0"]
    )
    line.report(address=str(dht.get_visible_maddrs()[0]))
    averager = hivemind.averaging.DecentralizedAverager(
        [torch.zeros(setup["elements"])],
        dht,
        start=True,
        prefix="bench",
        # Without this setting, every round waits five seconds for more peers.
        target_group_size=count,
        min_group_size=count,
        compression=codecs[setup["codec"]](),
    )
    serve(line, Member(averager, count), setup)


if __name__ == "__main__":
    main()
