"""Versions of Python and of packages. No I/O, no clock, no random source."""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass

from p2pavg.tools.doctor.findings import Finding, fault, not_known, note, ok

_RELEASE = re.compile(r"\s*v?(\d+(?:\.\d+)*)(.*)")
_BEFORE_RELEASE = re.compile(r"[._-]?(a|b|c|rc|alpha|beta|pre|preview|dev)[._-]?\d*", re.IGNORECASE)
_REQUIREMENT = re.compile(r"\s*([A-Za-z0-9][A-Za-z0-9._-]*)\s*(?:\[[^\]]*\])?\s*\(?([^;)]*)\)?\s*(;.*)?")
_CONDITION = re.compile(r"\s*(===|==|>=|<=|!=|~=|<|>)\s*([^\s,]+)\s*")


@dataclass(frozen=True, slots=True)
class Installed:
    """A package that p2pavg needs, as it is installed here."""

    name: str
    wanted: str
    """The versions that p2pavg allows, such as ``>=2.6``; empty for any."""
    found: str | None
    """The installed version; ``None`` if there is none."""


def read_requirement(text: str) -> tuple[str, str] | None:
    """Return name and allowed versions of a requirement; ``None`` for one of an extra, or one that is not readable."""
    matched = _REQUIREMENT.fullmatch(text)
    if matched is None or "extra" in (matched[3] or ""):
        return None
    return matched[1], matched[2].strip()


def allows(wanted: str, version: str) -> bool | None:
    """Return whether a version meets all conditions of a requirement; ``None`` if one of them is not understood.

    It knows the comparisons of PEP 440 that p2pavg's requirements use, for versions of numbers. A pre-release counts as
    older than its release. What follows a plus sign, such as ``+cpu``, does not count.
    """
    verdicts = [_meets(condition, version) for condition in wanted.split(",") if condition.strip()]
    return None if None in verdicts else all(verdicts)


def _meets(condition: str, version: str) -> bool | None:
    matched = _CONDITION.fullmatch(condition)
    if matched is None or matched[2].endswith("*"):
        return None
    mine, bound = _number_of(version), _number_of(matched[2])
    if mine is None or bound is None:
        return None
    verdicts = {
        "==": mine == bound,
        ">=": mine >= bound,
        "<=": mine <= bound,
        "!=": mine != bound,
        "<": mine < bound,
        ">": mine > bound,
    }
    return verdicts.get(matched[1])


def _number_of(version: str) -> tuple[tuple[int, ...], int] | None:
    matched = _RELEASE.fullmatch(version.partition("+")[0])
    if matched is None:
        return None
    numbers = [int(part) for part in matched[1].split(".")]
    while len(numbers) > 1 and numbers[-1] == 0:  # 2.6 and 2.6.0 are one version
        numbers.pop()
    return tuple(numbers), -1 if _BEFORE_RELEASE.match(matched[2]) else 0


def judge_python(version: str, wanted: str) -> list[Finding]:
    """Judge the version of Python.

    Args:
        wanted: the versions that p2pavg allows; empty if they are not known.
    """
    if not wanted or allows(wanted, version) is None:
        return [
            not_known("python", f"Python {version} runs, and the versions that p2pavg allows are not known")
        ]
    if allows(wanted, version):
        return [ok("python", f"Python {version}")]
    return [
        fault(
            "python",
            f"Python {version} is not supported",
            f"p2pavg needs Python {wanted}",
            "install a supported Python, and make a new virtual environment with it",
        )
    ]


def judge_packages(installed: Sequence[Installed], p2pavg_version: str) -> list[Finding]:
    """Judge the versions of the packages that p2pavg needs.

    Args:
        installed: empty if p2pavg runs from a folder and is not installed.
    """
    if not installed:
        return [
            note(
                "packages",
                f"p2pavg {p2pavg_version}; the versions of its packages are not known",
                "p2pavg is not installed as a package, so its requirements are not recorded",
            )
        ]
    found = [finding for each in installed if (finding := _judge_package(each)) is not None]
    return found or [ok("packages", f"p2pavg {p2pavg_version} and its {len(installed)} packages")]


def _judge_package(each: Installed) -> Finding | None:
    requirement = f"{each.name}{each.wanted}"
    remedy = f'pip install "{requirement}"'
    if each.found is None:
        return fault("packages", f"{each.name} is missing", f"p2pavg needs {requirement}", remedy)
    allowed = allows(each.wanted, each.found)
    if allowed is None:
        return note(
            "packages",
            f"{each.name} {each.found} was not compared with {each.wanted}",
            "one of the two is no version number that the doctor reads",
        )
    if allowed:
        return None
    return fault(
        "packages",
        f"{each.name} {each.found} is not supported",
        f"p2pavg needs {requirement}",
        remedy,
    )
