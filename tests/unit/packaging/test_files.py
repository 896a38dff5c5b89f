"""The unit file and the container file: facts that an installation depends on."""

from __future__ import annotations

import re
import shutil
import subprocess
from pathlib import Path

import pytest

from p2pavg.tools.daemon.life import FINISH_SECONDS
from p2pavg.tools.daemon.words import ExitCode

ROOT = Path(__file__).parents[3]
FILES = ROOT / "p2pavg" / "tools" / "cli" / "machine_files"
UNIT = FILES / "p2pavg@.service"
CONTAINERFILE = FILES / "Containerfile"
WATCHDOG_SECONDS = 60.0
MOST_EXPOSURE = 20
"""Tenths of systemd's own measure, from 0 (safe) to 100."""


def settings() -> dict[str, list[str]]:
    """Return the values of each setting of the unit."""
    found: dict[str, list[str]] = {}
    for line in UNIT.read_text().splitlines():
        if "=" in line and not line.startswith("#"):
            name, _, value = line.partition("=")
            found.setdefault(name, []).append(value)
    return found


def instructions() -> list[tuple[str, str]]:
    """Return the instructions of the container file with their arguments, continued lines joined."""
    text = re.sub(r"\\\n", " ", CONTAINERFILE.read_text())
    lines = [line for line in text.splitlines() if line.strip() and not line.startswith("#")]
    return [(line.split()[0], line.split(maxsplit=1)[1]) for line in lines]


class TestUnit:
    def test_codes_that_need_a_person_end_the_service(self) -> None:
        (codes,) = settings()["RestartPreventExitStatus"]
        assert [int(code) for code in codes.split()] == [ExitCode.MISTAKE, ExitCode.USAGE]
        assert settings()["Restart"] == ["on-failure"]

    def test_the_last_round_has_its_time(self) -> None:
        assert float(settings()["TimeoutStopSec"][0]) > FINISH_SECONDS + 5.0

    def test_every_credential_that_the_command_names_is_loaded(self) -> None:
        (command,) = settings()["ExecStart"]
        named = set(re.findall(r"\$\{CREDENTIALS_DIRECTORY\}/([\w.]+)", command))
        assert named == {each.partition(":")[0] for each in settings()["LoadCredential"]}

    @pytest.fixture
    def checkable(self, tmp_path: Path) -> Path:
        """Return an instance of the unit whose program exists on this machine."""
        if shutil.which("systemd-analyze") is None:
            pytest.skip("systemd-analyze is not installed")
        file = tmp_path / "p2pavg@lab.service"
        file.write_text(UNIT.read_text().replace("/opt/p2pavg/bin/p2pavg", "/bin/true"))
        return file

    def test_systemd_accepts_the_unit(self, checkable: Path) -> None:
        done = analyze("verify", str(checkable))
        assert (done.returncode, done.stderr) == (0, "")

    def test_systemd_finds_the_service_well_confined(self, checkable: Path) -> None:
        done = analyze("security", "--offline=true", f"--threshold={MOST_EXPOSURE}", str(checkable))
        assert done.returncode == 0, done.stdout


def analyze(*arguments: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        ["systemd-analyze", "--no-pager", *arguments],
        capture_output=True,
        text=True,
        timeout=WATCHDOG_SECONDS,
        check=False,
    )


class TestContainer:
    def test_every_file_that_is_copied_exists_and_is_not_ignored(self) -> None:
        ignored = (ROOT / ".containerignore").read_text().splitlines()
        assert "*" in ignored, "what is not named could be a key"
        sources = [
            source
            for name, arguments in instructions()
            if name == "COPY" and "--from" not in arguments
            for source in arguments.split()[:-1]
        ]
        assert "p2pavg" in sources
        for source in sources:
            assert (ROOT / source).exists(), source
            assert f"!{source}" in ignored, source

    def test_the_program_is_not_root_and_is_started_without_a_shell(self) -> None:
        names = [name for name, _ in instructions()]
        last = len(names) - names[::-1].index("FROM")
        final = dict(instructions()[last:])
        assert re.fullmatch(r"[1-9]\d*", final["USER"])
        assert names.index("USER") > max(i for i, name in enumerate(names) if name == "RUN")
        assert final["ENTRYPOINT"] == '["p2pavg"]'
        assert final["STOPSIGNAL"] == "SIGTERM"

    def test_the_base_has_a_version_and_no_compiler_is_in_the_result(self) -> None:
        bases = [arguments for name, arguments in instructions() if name == "FROM"]
        assert len(bases) == 2
        for base in bases:
            assert re.match(r"python:3\.1[123]-slim-\w+", base), base
        assert not any(name == "ADD" for name, _ in instructions())
