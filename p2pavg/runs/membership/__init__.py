"""Admission to a run: authority, certificates, revocations, links and tokens. No I/O, no clock."""
