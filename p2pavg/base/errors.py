"""The exceptions that this library raises on purpose.

There are three kinds, as in trio: *Closed* (this process closed the object), *Broken* (a peer or the network ended it)
and *misuse* (an argument of the caller is wrong). A round that fails because of the network raises no exception. It
returns a :class:`~p2pavg.base.result.Failed`.

No I/O, no clock.
"""

from __future__ import annotations

import errno
from typing import ClassVar


class P2PAvgError(Exception):
    """Base of every exception of this library.

    Its text says what is wrong. :attr:`remedy` says what to do about it, where that is known; the command line prints
    it on a line of its own, and a traceback ends with it.

    Args:
        args: the text.
        remedy: what to do, instead of what is usual for this kind of error.
    """

    usual_remedy: ClassVar[str] = ""

    def __init__(self, *args: object, remedy: str | None = None) -> None:
        super().__init__(*args)
        self.remedy = self.usual_remedy if remedy is None else remedy
        """The thing to do about it; empty where none is known."""
        if self.remedy:
            self.add_note(f"what to do: {self.remedy}")


class ClosedError(P2PAvgError, RuntimeError):
    """The averager, peer or stream was used after this process had closed it."""

    usual_remedy = (
        "open the averager or peer again, and use it only inside its `with` block; each process opens its own"
    )


class BusyError(P2PAvgError, RuntimeError):
    """Two users of one peer conflict, such as two averagers of the same run and tensors."""

    usual_remedy = "close the other averager, or give this one another run_id or other tensors"


class ConfigError(P2PAvgError, ValueError):
    """An argument of :class:`~p2pavg.AveragingConfig`, or a file of a run, is malformed; the message names it."""

    usual_remedy = "correct the named argument or file; the reference lists what each may be"


class AccumulateError(P2PAvgError, ValueError):
    """Tensors or a weight that cannot be averaged; the message names the tensor and what is wrong with it."""

    usual_remedy = (
        "look at the named tensor in the training loop; after a NaN or Inf, skip this batch and go on"
    )

    def __init__(self, *args: object, position: int | None = None, remedy: str | None = None) -> None:
        super().__init__(*args, remedy=remedy)
        self.position = position
        """Index of the tensor that holds a value that cannot be averaged; ``None`` for any other cause."""


class StateError(P2PAvgError, ValueError):
    """A state that cannot be used, such as a damaged checkpoint or one of another model; the message says why."""

    usual_remedy = (
        "use a state of the same model, optimizer and run, or an older checkpoint;"
        " `p2pavg checkpoint verify FILE` checks one"
    )


class RunEndedError(P2PAvgError, RuntimeError):
    """The run has ended without this peer, which has missed its last updates; nothing can give them to it any more.

    An optimizer's ``step`` raises it. The peer's own parameters stay as they are.
    """

    usual_remedy = (
        "take the final parameters from one of the other peers; the parameters here are those of the update that the"
        " message names. To train on from them, start a run with another run_id"
    )

    def __init__(self, *args: object, epoch: int = 0, remedy: str | None = None) -> None:
        super().__init__(*args, remedy=remedy)
        self.epoch = epoch
        """The last update of the run."""


class AddressError(P2PAvgError, ValueError):
    """Text that is not a usable multiaddress."""

    usual_remedy = (
        "write the address as `p2pavg peer` prints it, such as /ip4/203.0.113.7/tcp/4001/p2p/PEER_ID"
    )


class IdentityError(P2PAvgError, ValueError):
    """A key file that cannot be read, has the wrong owner's rights, or holds no Ed25519 key."""

    usual_remedy = "make the key file with `p2pavg identity FILE`, owned and readable by this user only"


class ListenError(P2PAvgError, OSError):
    """A listen address that cannot be listened on, e.g. because its port is taken."""

    usual_remedy = "choose another port (0 takes a free one), or end the program that has this one"


class BootstrapError(P2PAvgError, OSError):
    """None of the bootstrap addresses could be reached."""

    usual_remedy = (
        "check that a bootstrap peer runs and its port is open, then run `p2pavg doctor --bootstrap ADDR`"
    )


class InvitationError(P2PAvgError):
    """A delegate did not admit this peer with an invitation link; the message says why."""

    usual_remedy = "ask the run's owner for a new link"


class ControlError(P2PAvgError):
    """A daemon on this machine could not be asked or told something; the message says why."""

    usual_remedy = "see with `p2pavg status` whether the daemon runs, and ask as the user that runs it"


class CertificateError(P2PAvgError, ValueError):
    """Bytes that are no certificate of a commit, or one that is not genuine; the message says which check failed."""

    usual_remedy = "take the certificate as Success.certificate gave it, and the same version of p2pavg"


class UnreachableError(P2PAvgError):
    """No connection or no stream to a peer could be made in time."""

    usual_remedy = "check that the peer runs; `p2pavg doctor` on both machines finds what lies between them"


class RefusedError(UnreachableError):
    """The connection was refused at a host where this process has met the peer, whose process has probably ended."""

    usual_remedy = "start the peer again: its process has probably ended"


class StreamBrokenError(P2PAvgError):
    """The other side or the network ended the stream before the message was complete."""

    usual_remedy = "try again: the connection was lost"


class RemoteProtocolError(P2PAvgError):
    """A peer sent bytes that break the protocol. That peer loses its stream; no other peer is affected."""

    usual_remedy = (
        "compare the versions of p2pavg; with equal versions, the other peer's program is faulty or hostile"
    )


# Telling a shortage of the machine, which passes, from other failures of the system.

_SHORTAGES = (errno.EMFILE, errno.ENFILE, errno.ENOMEM, errno.ENOBUFS)


def is_shortage(error: OSError) -> bool:
    """Return whether the machine lacked something for the moment: a file to open, memory or buffers.

    Strangers can cause one, for example with many connections, so no task of a peer may end with it.
    """
    return error.errno in _SHORTAGES
