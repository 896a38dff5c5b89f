"""One peer in its runs: the averager, and what the peer offers to others."""
