"""Computations that all members of a group make alike: members, shares, places, kinds of averages. No I/O, no clock."""
