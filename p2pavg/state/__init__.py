"""States of a run: snapshots, checkpoint files, and how peers hand them to each other."""
