"""Mixing: peers without a common anchor average in small groups."""
