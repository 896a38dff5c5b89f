"""Attachment of a process to a peer of this machine."""

from __future__ import annotations

import os
import secrets
from collections.abc import Iterator
from contextlib import contextmanager

from p2pavg.attached.address import socket_path
from p2pavg.attached.averager import AttachedAverager, open_channel
from p2pavg.attached.link import Link
from p2pavg.attached.messages import is_process_name
from p2pavg.attached.segments import check_platform
from p2pavg.base.errors import ConfigError
from p2pavg.runs.config import AveragingConfig

ATTACH_SECONDS = 15.0


class AttachedPeer:
    """A peer that this process shares with others. Made by :func:`attach`."""

    def __init__(self, link: Link) -> None:
        self._link = link

    @property
    def id(self) -> str:
        """The peer's id."""
        return self._link.peer_id

    @property
    def name(self) -> str:
        """The name of this process."""
        return self._link.name

    @property
    def addresses(self) -> list[str]:
        """Addresses at which others could dial the peer when this process attached."""
        return list(self._link.addresses)

    @contextmanager
    def averager(self, config: AveragingConfig) -> Iterator[AttachedAverager]:
        """Open an averager that lives as long as the block.

        Args:
            config: the same as that of the other processes that take part in the run through this peer. Keys and
                certificate of a run with an authority are the peer's own: ``access`` may be missing.

        Raises:
            ConfigError: the configuration differs from the other processes', the peer has no certificate for the run,
                or the configuration has a participation rule or a codec of its own.
            BusyError: this process has an averager of the run.
            AttachError: the peer has ended.
        """
        with open_channel(self._link, config) as averager:
            yield averager


@contextmanager
def attach(
    address: str | os.PathLike[str], *, name: str | None = None, timeout: float = ATTACH_SECONDS
) -> Iterator[AttachedPeer]:
    """Attach this process to a peer of this machine and user, for as long as the block runs::

        with p2pavg.attach("unix:/run/user/1000/p2pavg.sock") as peer, peer.averager(config) as averager:
            optimizer = AveragedOptimizer(inner, averager, target_batch_size=4096)

    All processes that attach to a peer share its identity, its port and its lanes. Those with the same run average
    together, as one member of a group. If the peer ends, the processes go on as soon as it has been started again.

    Args:
        address: ``unix:PATH``, or a path: as given to ``p2pavg peer --attach``.
        name: of this process among those attached to the peer: 1 to 32 letters, digits, dots, dashes and underscores.
            Without one, it is made of the process's number and some random digits.
        timeout: seconds that the peer may take to answer; it may be starting.

    Raises:
        AttachError: no peer of this user answers there.
        BusyError: another process is attached with this name.
        ConfigError: an argument is malformed, or the peer has another version.
    """
    check_platform()
    if name is not None and not is_process_name(name):
        raise ConfigError(f"name has 1 to 32 letters, digits, dots, dashes and underscores, got {name!r}")
    link = Link(socket_path(address), name or f"{os.getpid()}-{secrets.token_hex(3)}")
    link.start(timeout)
    try:
        yield AttachedPeer(link)
    finally:
        link.stop()
