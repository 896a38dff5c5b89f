"""Messages to an attached process, with descriptors whose files are closed meanwhile."""

from __future__ import annotations

import array
import os
import socket
from contextlib import suppress

import pytest
import trio

from p2pavg.attached.guest import Guest


def copies_of(inode: int) -> int:
    """Return the number of this process's descriptors of a file."""
    found = 0
    for name in os.listdir("/proc/self/fd"):
        with suppress(OSError):  # the one that listed them is closed
            found += os.fstat(int(name)).st_ino == inode
    return found


async def test_a_descriptor_that_was_closed_and_given_again_is_not_sent() -> None:
    near, far = trio.socket.socketpair()
    guest = Guest(near, "one")
    meant = os.memfd_create("meant")
    meant_file = os.fstat(meant).st_ino
    guest.send("declared", 0, descriptors=(meant,))
    os.close(meant)
    other = os.memfd_create("other")
    async with trio.open_nursery() as nursery:
        nursery.start_soon(guest.write)
        with trio.fail_after(30.0):
            _, ancillary, _, _ = await far.recvmsg(1000, socket.CMSG_SPACE(4))
        nursery.cancel_scope.cancel()
    [(_, _, content)] = ancillary
    [received] = array.array("i", content)
    assert os.fstat(received).st_ino == meant_file
    guest.close()
    for descriptor in (received, other):
        os.close(descriptor)
    assert not copies_of(meant_file)
    near.close()
    far.close()


@pytest.mark.parametrize("writes", [False, True])
async def test_descriptors_that_were_not_sent_are_closed(writes: bool) -> None:
    near, far = trio.socket.socketpair()
    guest = Guest(near, "one")
    with os.fdopen(os.memfd_create("file"), "rb") as file:
        inode = os.fstat(file.fileno()).st_ino
        guest.send("x", bytes(2**24), descriptors=(file.fileno(),))
        guest.send("x", bytes(2**20), descriptors=(file.fileno(), file.fileno()))
    if writes:
        far.close()
        await guest.write()
        assert guest.scope.cancel_called
    guest.close()
    assert not copies_of(inode)
    near.close()
    far.close()
