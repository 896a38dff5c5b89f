"""A peer's place in a run that has an authority: its folder, its files, and the links by which others join."""
