"""Versions of Python and of packages, for any text that an installation may have recorded."""

from __future__ import annotations

import pytest

from p2pavg.doctor.rules.versions import (
    Installed,
    allows,
    judge_packages,
    judge_python,
    read_requirement,
)
from p2pavg.tools.doctor.findings import Level


@pytest.mark.parametrize(
    ("text", "read"),
    [
        ("trio>=0.26", ("trio", ">=0.26")),
        ("libp2p==0.8.1", ("libp2p", "==0.8.1")),
        ("numpy", ("numpy", "")),
        ("torch (>=2.6,<3)", ("torch", ">=2.6,<3")),
        ("mkdocstrings[python]>=1.0", ("mkdocstrings", ">=1.0")),
        ('outcome>=1.2; python_version >= "3.11"', ("outcome", ">=1.2")),
        ("ruff>=0.8; extra == 'dev'", None),
        ("@", None),
    ],
)
def test_requirements_of_extras_are_left_out(text: str, read: tuple[str, str] | None) -> None:
    assert read_requirement(text) == read


@pytest.mark.parametrize(
    ("wanted", "version", "verdict"),
    [
        (">=2.6", "2.6.0", True),
        (">=2.6", "2.10.1+cpu", True),
        (">=2.6", "2.5.9", False),
        (">=2.6", "2.6.0rc1", False),
        (">=2.6", "2.6.0.dev20260101", False),
        ("==0.8.1", "0.8.1", True),
        ("==0.8.1", "0.8.2", False),
        ("==2.6", "2.6.0", True),
        (">=3.11,<3.14", "3.13.9", True),
        (">=3.11,<3.14", "3.14.0", False),
        (">=3.11, <3.14", "3.10.2", False),
        ("<=2", "2.0.1", False),
        ("!=1.5,>1", "1.5", False),
        ("", "anything", True),
        ("==2.*", "2.1", None),
        ("~=2.1", "2.2", None),
        (">=2", "unknown", None),
    ],
)
def test_versions_are_compared_as_numbers(wanted: str, version: str, verdict: bool | None) -> None:
    assert allows(wanted, version) is verdict


def test_unsupported_python() -> None:
    (found,) = judge_python("3.10.4", ">=3.11,<3.14")
    assert found.level is Level.FAULT
    assert found.cause == "p2pavg needs Python >=3.11,<3.14"
    assert [each.level for each in judge_python("3.12.0", ">=3.11,<3.14")] == [Level.OK]
    assert [each.level for each in judge_python("3.12.0", "")] == [Level.NOTE]


def test_each_package_that_does_not_fit_is_named() -> None:
    installed = [
        Installed("trio", ">=0.26", "0.27.0"),
        Installed("torch", ">=2.6", "2.1.0+cu118"),
        Installed("blake3", ">=1.0", None),
        Installed("odd", "~=1.0", "1.0"),
    ]
    found = judge_packages(installed, "0.1.0")
    assert [(each.level, each.what) for each in found] == [
        (Level.FAULT, "torch 2.1.0+cu118 is not supported"),
        (Level.FAULT, "blake3 is missing"),
        (Level.NOTE, "odd 1.0 was not compared with ~=1.0"),
    ]
    assert found[0].remedy == 'pip install "torch>=2.6"'


def test_packages_that_fit() -> None:
    assert [each.level for each in judge_packages([Installed("trio", ">=0.26", "0.27")], "0.1.0")] == [
        Level.OK
    ]
    assert [each.level for each in judge_packages([], "0.1.0")] == [Level.NOTE]
