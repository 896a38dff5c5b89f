"""A peer of a lab that averages round after round, and reports each as a line of JSON.

Its only argument is a JSON object:

* ``bootstrap``, ``listen``, ``announce``, and ``peer`` (further settings of ``open_peer``),
* ``config``: the settings of :class:`p2pavg.AveragingConfig`,
* ``value``: the number that this peer contributes in each element; the test computes the mean that it has to find,
* ``elements`` of the vector, ``pause`` in seconds between two rounds,
* ``verbose``: log every decision, as it does unless told otherwise.

It averages until its standard input says "stop" or ends. After "hold" it begins no further round, and stays in the
network. Settings of ``open_peer`` that this version does not know are left out, and reported.
"""

from __future__ import annotations

import inspect
import json
import logging
import os
import sys
import time
from collections.abc import Callable, Mapping
from typing import Any

import torch
import trio

import p2pavg
from p2pavg.net.transport import Transport
from p2pavg.peer.averager import DecentralizedAverager

_LOOK_SECONDS = 0.25
_PAUSE_AFTER_FAILURE = 0.2


def _config(given: Mapping[str, Any]) -> p2pavg.AveragingConfig:
    """Return the configuration of a run that is open to the lab; versions before 0.3 have no other runs."""
    is_known = "open_run" in p2pavg.AveragingConfig.__dataclass_fields__
    settings = {**given, "open_run": True} if is_known else given
    return p2pavg.AveragingConfig(**settings)


class Worker:
    """One peer, from its start to its end."""

    def __init__(self, settings: Mapping[str, Any]) -> None:
        self._settings = settings
        self._began = time.monotonic()
        self._on_hold = False
        self._reachability: dict[str, Any] | None = None

    async def run(self) -> None:
        """Average until told to stop."""
        given = {"announce": self._settings.get("announce") or None, **self._settings.get("peer", {})}
        known = inspect.signature(p2pavg.open_peer).parameters
        options = {name: value for name, value in given.items() if value is not None and name in known}
        unknown = sorted(name for name, value in given.items() if value is not None and name not in known)
        async with (
            p2pavg.open_peer(
                listen=self._settings["listen"], bootstrap=self._settings["bootstrap"], **options
            ) as peer,
            peer.averager(_config(self._settings["config"])) as averager,
            trio.open_nursery() as nursery,
        ):
            self._report("open", peer_id=peer.id, addresses=peer.addresses, unknown=unknown)
            nursery.start_soon(self._listen, nursery.cancel_scope)
            nursery.start_soon(self._watch, averager, peer.context.transport)
            await self._average(averager, getattr(peer.context.transport, "path_to", lambda _: ""))
            await trio.sleep_forever()

    async def _average(self, averager: DecentralizedAverager, path_to: Callable[[str], str]) -> None:
        value = torch.full((self._settings["elements"],), float(self._settings["value"]))
        number = 0
        while not self._on_hold:
            if averager.weight == 0:  # what a failed round gives back is contributed again
                averager.accumulate([value])
            began = time.monotonic()
            result = await averager.step(wait=None)
            if isinstance(result, p2pavg.InProgress):
                continue
            links = {peer: path_to(peer) for peer in getattr(result, "paths", {})}
            took = time.monotonic() - began
            self._report("round", number=number, took=took, links=links, **_described(result))
            number += 1
            pause = self._settings.get("pause", 0.0)
            await trio.sleep(
                pause if isinstance(result, p2pavg.Success) else max(pause, _PAUSE_AFTER_FAILURE)
            )

    async def _watch(self, averager: DecentralizedAverager, transport: Transport) -> None:
        """Report how this peer can be reached, when it changes."""
        while True:
            found = transport.reachability
            now = {"kind": str(found.kind), "sentence": found.sentence, "relays": list(found.relays)}
            if now != self._reachability:
                self._reachability = now
                self._report("reachability", **now, addresses=averager.addresses)
            await trio.sleep(_LOOK_SECONDS)

    async def _listen(self, scope: trio.CancelScope) -> None:
        """Obey the test; stop when it has ended."""
        waiting = b""
        while True:
            await trio.lowlevel.wait_readable(0)
            read = os.read(0, 4096)
            if not read:
                break
            *lines, waiting = (waiting + read).split(b"\n")
            if b"hold" in lines:
                self._on_hold = True
            if b"stop" in lines:
                break
        scope.cancel()

    def _report(self, event: str, **fields: Any) -> None:
        since = time.monotonic() - self._began
        print(json.dumps({"event": event, "since": since, "at": time.monotonic(), **fields}), flush=True)


def _described(result: p2pavg.RoundResult) -> dict[str, Any]:
    if not isinstance(result, p2pavg.Success):
        return {"kind": type(result).__name__, "reason": result.reason}
    assert isinstance(result.averaged, list)
    averaged = result.averaged[0]
    return {
        "kind": "Success",
        "averaged": averaged[0].item(),
        "is_even": bool((averaged == averaged[0]).all()),
        "weights": dict(result.weights),
        "group_id": result.group_id,
        "duration": result.duration,
        "exchange": result.exchange_duration,
        "paths": dict(result.paths),
        "lost": dict(result.lost),
        "sent": result.bytes_sent,
        "received": result.bytes_received,
        "share": list(result.share),
    }


def main() -> None:
    """Run the worker."""
    logging.basicConfig(
        stream=sys.stderr, level=logging.INFO, format="%(asctime)s.%(msecs)03d %(name)s: %(message)s"
    )
    settings = json.loads(sys.argv[1])
    if settings.get("verbose", True):
        for name in ("p2pavg", "p2pavg_dht"):
            logging.getLogger(name).setLevel(logging.DEBUG)
    torch.set_num_threads(1)
    trio.run(Worker(settings).run)


if __name__ == "__main__":
    main()
