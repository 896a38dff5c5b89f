"""A peer as a long-running process: its folder, its status, its ends and restarts."""
