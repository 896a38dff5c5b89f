"""An optimizer and the other peers: whom it expects, when a round is due, how a run begins and ends."""
