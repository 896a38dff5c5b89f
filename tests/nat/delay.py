"""A delay of all packets between the sites of a lab, for kernels without ``netem``.

The internet's router sends what comes from a site through a TUN device, whose packets this program reads, keeps for the
time of the delay, and writes back. It runs in the router's namespace, and handles about 30,000 packets per second.
"""

from __future__ import annotations

import fcntl
import os
import select
import struct
import subprocess
import sys
import time
from collections import deque

from tests.nat.namespaces import COMMAND_SECONDS, LabError, inside, ip, settings

DEVICE = "delay"
_TABLE = 100
_TUNSETIFF = 0x400454CA
_IFF_TUN_NO_HEADER = 0x0001 | 0x1000
_MOST_WAITING = 20_000  # packets; as in a real network, what comes beyond is lost
_MOST_BYTES = 65536


class DelayLine:
    """The process that delays packets in a namespace. The caller stops it.

    Args:
        seconds: one way; a round trip takes twice as long.
    """

    def __init__(self, namespace: str, seconds: float) -> None:
        self._namespace = namespace
        command = ["ip", "netns", "exec", namespace, sys.executable, __file__, str(seconds)]
        self._process = subprocess.Popen(
            command,
            stdin=subprocess.PIPE,  # it ends with this process
            stdout=subprocess.PIPE,
            env={**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)},
            process_group=0,
        )
        assert self._process.stdout is not None
        if not select.select([self._process.stdout], [], [], COMMAND_SECONDS)[0]:
            self.stop()
            raise LabError("the delay line does not start")
        if self._process.stdout.readline() != b"ready\n":
            self.stop()
            raise LabError("the delay line cannot make its device")
        settings(namespace, ipv4__conf__all__rp_filter=0, ipv4__conf__delay__rp_filter=0)
        ip(namespace, f"link set {DEVICE} up", f"route add default dev {DEVICE} table {_TABLE}")

    def delay(self, interface: str) -> None:
        """Delay what comes from an interface from now on."""
        inside(self._namespace, "ip", "rule", "add", "iif", interface, "lookup", str(_TABLE))

    def stop(self) -> None:
        """End the process."""
        self._process.kill()
        self._process.wait()
        for pipe in (self._process.stdin, self._process.stdout):
            assert pipe is not None
            pipe.close()


def main() -> None:
    """Delay packets until the standard input ends."""
    seconds = float(sys.argv[1])
    device = os.open("/dev/net/tun", os.O_RDWR | os.O_NONBLOCK)
    fcntl.ioctl(device, _TUNSETIFF, struct.pack("16sH", DEVICE.encode(), _IFF_TUN_NO_HEADER))
    print("ready", flush=True)
    waiting: deque[tuple[float, bytes]] = deque()
    while True:
        left = max(waiting[0][0] - time.monotonic(), 0.0) if waiting else None
        readable, _, _ = select.select([device, 0], [], [], left)
        if 0 in readable:
            return
        if device in readable:
            _read(device, waiting, seconds)
        now = time.monotonic()
        while waiting and waiting[0][0] <= now:
            try:
                os.write(device, waiting.popleft()[1])
            except OSError:
                continue  # the kernel refuses a packet whose addresses it does not route: it is lost


def _read(device: int, waiting: deque[tuple[float, bytes]], seconds: float) -> None:
    try:
        while len(waiting) < _MOST_WAITING:
            packet = os.read(device, _MOST_BYTES)
            waiting.append((time.monotonic() + seconds, packet))
    except BlockingIOError:
        return


if __name__ == "__main__":
    main()
