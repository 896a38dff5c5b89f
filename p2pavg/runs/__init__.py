"""A run: its configuration, its members, and the records that they publish."""
