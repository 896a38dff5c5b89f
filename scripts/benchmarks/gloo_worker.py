"""One process of torch.distributed's all-reduce over gloo: fp32, unencrypted, without tolerance of lost members."""

from __future__ import annotations

import os

import torch
import torch.distributed as dist
from torch.distributed import TCPStore  # type: ignore[attr-defined]

from scripts.benchmarks.worker import Line, serve


class Member:
    """A :class:`~scripts.benchmarks.worker.System`."""

    def __init__(self, elements: int, count: int) -> None:
        self._values = torch.zeros(elements)
        self._count = count

    def prepare(self, values: torch.Tensor) -> None:
        self._values.copy_(values)

    def run(self) -> dict[str, float]:
        dist.all_reduce(self._values)
        self._values /= self._count
        return {}

    def result(self) -> torch.Tensor:
        return self._values


def main() -> None:
    """Run the worker."""
    torch.set_num_threads(1)
    line = Line()
    setup = line.told()
    os.environ["GLOO_SOCKET_IFNAME"] = setup["interface"]
    index, count = setup["index"], setup["count"]
    if index == 0:
        store = TCPStore(setup["host"], 0, count, True, wait_for_workers=False)
        line.report(address=f"{setup['host']}:{store.port}")
    else:
        host, _, port = setup["bootstrap"][0].rpartition(":")
        store = TCPStore(host, int(port), count, False)
        line.report(address="")
    dist.init_process_group("gloo", store=store, rank=index, world_size=count)
    serve(line, Member(setup["elements"], count), setup)


if __name__ == "__main__":
    main()
