"""Places at which the peers of a run look for their next group."""
