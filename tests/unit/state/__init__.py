"""Snapshots, checkpoint files, and how peers hand states to each other."""
