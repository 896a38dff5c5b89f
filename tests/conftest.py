"""Profiles of hypothesis.

The suite tries the same examples in every run, so that a failure is caused by the tested change. ``scripts/test
--hypothesis-profile=explore tests/properties`` draws new ones.
"""

from __future__ import annotations

from hypothesis import settings

settings.register_profile("repeatable", derandomize=True, deadline=None, print_blob=True)
settings.register_profile("explore", deadline=None, print_blob=True)
settings.load_profile("repeatable")
