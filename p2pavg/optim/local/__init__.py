"""Local updates: peers train apart, and take an outer step together."""
