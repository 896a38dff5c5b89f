"""Histories of runs of real processes."""
