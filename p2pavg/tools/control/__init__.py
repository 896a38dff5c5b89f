"""The Unix socket of a daemon: local processes of the same user ask it for its status, and tell it to stop."""
