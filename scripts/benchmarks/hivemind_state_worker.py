"""One donor or the joiner of hivemind in the benchmark of states, in hivemind's own environment."""

from __future__ import annotations

import importlib
import time
from typing import Any

import torch

from scripts.benchmarks.state_vectors import bytes_of, digest_of, state_of
from scripts.benchmarks.worker import Line

LOAD_SECONDS = 600.0
DECLARE_SECONDS = 30.0


def main() -> None:
    """Run the worker."""
    # hivemind is missing in the environment that checks this file's types.
    hivemind: Any = importlib.import_module("hivemind")
    torch.set_num_threads(1)
    line = Line()
    setup = line.told()
    shares = setup["index"] < setup["donors"]
    dht = hivemind.DHT(start=True, initial_peers=setup["bootstrap"], host_maddrs=["/ip4/127.0.0.1/tcp/0"])
    averager = hivemind.averaging.DecentralizedAverager(
        [state_of(setup["bytes"])] if shares else [torch.zeros(setup["bytes"] // 4)],
        dht,
        start=True,
        prefix="bench",
        target_group_size=2,
        allow_state_sharing=shares,
        declare_state_period=DECLARE_SECONDS,
    )
    line.report(address=str(dht.get_visible_maddrs()[0]))
    if not shares:
        _join(line, averager, setup)
    while True:
        time.sleep(LOAD_SECONDS)


def _join(line: Line, averager: Any, setup: dict[str, Any]) -> None:
    averager.load_state_from_peers(timeout=LOAD_SECONDS)  # until the donors are known
    line.report(ready=True)
    while True:
        line.told()
        began = time.monotonic()
        found = averager.load_state_from_peers(timeout=LOAD_SECONDS)
        seconds = time.monotonic() - began
        if found is None:
            raise RuntimeError("no state was loaded")
        _, tensors = found
        line.report(seconds=seconds)
        line.told()
        expected = digest_of(bytes_of(state_of(setup["bytes"])))
        line.report(right=digest_of(bytes_of(tensors[0])) == expected)


if __name__ == "__main__":
    main()
