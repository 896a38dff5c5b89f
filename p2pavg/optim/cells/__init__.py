"""Cells: runs of more peers than one group holds."""
