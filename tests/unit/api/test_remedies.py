"""Every error and every code says what to do about it."""

from __future__ import annotations

import inspect
import pickle
import re
import traceback
from pathlib import Path

import pytest

from p2pavg import FailedCode, NoPeersCode
from p2pavg.base import errors
from p2pavg.base.errors import BootstrapError, ConfigError, P2PAvgError

ERRORS = [
    found
    for _, found in inspect.getmembers(errors, inspect.isclass)
    if issubclass(found, P2PAvgError) and found is not P2PAvgError
]
ROW = re.compile(r"^\| `([a-z_]+)` \| .* \| (.*) \|$", re.MULTILINE)


@pytest.mark.parametrize("kind", ERRORS, ids=lambda kind: kind.__name__)
def test_each_error_says_what_to_do(kind: type[P2PAvgError]) -> None:
    error = kind("it went wrong")
    assert error.remedy
    assert str(error) == "it went wrong", "its text is one sentence, for logs and results"
    assert f"what to do: {error.remedy}" in "".join(traceback.format_exception(error))


def test_an_error_may_have_a_remedy_of_its_own() -> None:
    assert ConfigError("wrong", remedy="do that").remedy == "do that"
    error = ConfigError("wrong", remedy="")
    assert (error.remedy, getattr(error, "__notes__", [])) == ("", [])


def test_an_error_keeps_its_remedy_between_processes() -> None:
    error = pickle.loads(pickle.dumps(BootstrapError("no peer", remedy="start one")))
    assert (str(error), error.remedy) == ("no peer", "start one")
    assert error.__notes__ == ["what to do: start one"]


def test_the_reference_lists_all_codes_with_their_remedies() -> None:
    """A code that the page lacks, or that it describes in other words, fails here."""
    listed = {
        value: text.replace("`", "") for value, text in ROW.findall(Path("docs/reference/api.md").read_text())
    }
    codes: list[NoPeersCode | FailedCode] = [*NoPeersCode, *FailedCode]
    assert listed == {code.value: code.remedy.replace("`", "") for code in codes}
