"""Training frameworks: each module needs its framework, and no other part of this library imports it."""
