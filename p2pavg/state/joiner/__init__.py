"""The side of a peer that fetches a state: it asks several donors at once, and verifies each piece."""
