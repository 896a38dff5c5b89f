"""Evidence that a member lied: what proves it, who is excluded by it, and how it spreads among the peers of a run."""
