"""Audits: members check a reducer's averages by their own contributions. No I/O, no clock."""
