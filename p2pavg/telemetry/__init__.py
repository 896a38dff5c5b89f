"""Events of a peer, their subscribers, and the status that each peer publishes. No I/O, no clock."""
