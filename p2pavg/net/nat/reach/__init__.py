"""The ways in which others reach this peer: its own addresses, its router, and the ports that it maps there."""
