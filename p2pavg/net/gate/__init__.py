"""The network of a peer, handed through one Unix socket to a program that may open no connection itself."""
