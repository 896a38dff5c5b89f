"""Histories of runs: entries, files, checks, receipts and commands."""
