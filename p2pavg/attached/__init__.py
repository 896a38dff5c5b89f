"""Several training processes of one machine share one peer, over a Unix socket.

One process, usually the daemon, has the peer: its identity, its port, its lanes. :func:`p2pavg.attach` connects a
training process to it, and :func:`share_peer` is the other end.
"""

from p2pavg.attached.attaching import AttachedPeer, attach
from p2pavg.attached.averager import AttachedAverager
from p2pavg.attached.serving import SharedPeer, share_peer

__all__ = ["AttachedAverager", "AttachedPeer", "SharedPeer", "attach", "share_peer"]
