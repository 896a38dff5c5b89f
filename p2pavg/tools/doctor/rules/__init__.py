"""Rules: each is a plain function from facts to findings. No I/O, no clock, no random source."""
