"""Large batches: gradients are averaged, and all peers take the same step."""
