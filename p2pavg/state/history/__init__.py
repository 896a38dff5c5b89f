"""The history of a run: every update with its proof, in files that anyone can check."""
