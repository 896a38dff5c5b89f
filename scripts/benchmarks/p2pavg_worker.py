"""One member of a p2pavg group, set up as in a training loop."""

from __future__ import annotations

import torch

import p2pavg
from p2pavg import blocking
from p2pavg_compression import resolve_codec
from p2pavg_compression.kernels import kernels
from scripts.benchmarks.codecs import compile_now
from scripts.benchmarks.worker import Line, serve


class Member:
    """A :class:`~scripts.benchmarks.worker.System`."""

    def __init__(self, averager: blocking.Averager) -> None:
        self._averager = averager
        self._averaged: torch.Tensor | None = None

    def prepare(self, values: torch.Tensor) -> None:
        self._averaged = None
        self._averager.clear()
        self._averager.accumulate([values])

    def run(self) -> dict[str, float]:
        result = self._averager.step(wait=None)
        while isinstance(result, p2pavg.InProgress):
            result = self._averager.step(wait=None)
        match result:
            case p2pavg.NoPeers(reason=why) | p2pavg.Failed(reason=why):
                raise RuntimeError(f"{type(result).__name__}: {why}")
        if len(result.peers) != self._averager.config.group_size:
            raise RuntimeError(f"a group of {len(result.peers)}")
        self._averaged = result.averaged[0] if isinstance(result.averaged, list) else None
        return {"exchange": result.exchange_duration, "group": result.duration - result.exchange_duration}

    def result(self) -> torch.Tensor:
        assert self._averaged is not None
        return self._averaged


def main() -> None:
    """Run the worker."""
    import p2pavg.net.libp2p.transport  # imported early, while the first process learns its address

    torch.set_num_threads(1)  # several processes share this machine
    line = Line()
    setup = line.told()
    bandwidths = setup.get("bandwidths")  # of all members, if they announce them
    bandwidth = None if bandwidths is None else bandwidths[setup["index"]]
    sites = setup.get("sites")  # of all members, if they are in sites
    topology = {} if sites is None else {"topology": p2pavg.Hierarchical(sites[setup["index"]])}
    config = p2pavg.AveragingConfig(
        run_id="bench", open_run=True, bandwidth=bandwidth, **setup["config"] | topology
    )
    kernels.switch(setup.get("compiled", True))
    # Numba's compiler would disturb the first rounds.
    compile_now(resolve_codec(setup["config"]["compression"]))
    with blocking.open_averager(
        config, bootstrap=setup["bootstrap"], listen=[f"/ip4/{setup['host']}/tcp/0"]
    ) as averager:
        line.report(address=averager.addresses[0])
        serve(line, Member(averager), setup)


if __name__ == "__main__":
    main()
