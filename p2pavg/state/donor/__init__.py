"""The side of a peer that offers its states: it keeps them on a shelf, and serves joiners."""
