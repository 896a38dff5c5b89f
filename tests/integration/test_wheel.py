"""The wheel and the sdist hold what a user needs: the quickstart and the command run from the wheel alone."""

from __future__ import annotations

import re
import subprocess
import sys
import tarfile
import venv
import zipfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from tests.integration.test_readme import check_that_both_train, snippets
from tests.programs import run_python

ROOT = Path(__file__).parents[2]
NAMES = ("p2pavg", "p2pavg_dht", "p2pavg_compression")


def build(target: str, source: Path, folder: Path) -> Path:
    """Build the wheel or the sdist of a folder with the build backend, which takes no network."""
    run_python("-m", "hatchling", "build", "-t", target, "-d", folder, cwd=source, check=True, timeout=300)
    (built,) = folder.iterdir()
    return built


@pytest.fixture(scope="module")
def wheel(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return build("wheel", ROOT, tmp_path_factory.mktemp("wheel"))


@pytest.fixture(scope="module")
def installed(wheel: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return the folder of an environment with the wheel; its dependencies are those of this one, without p2pavg."""
    folder = tmp_path_factory.mktemp("environment")
    venv.create(folder, with_pip=False, symlinks=True)
    python = f"python{sys.version_info.major}.{sys.version_info.minor}"
    pip = ("-m", "pip", "--python", folder / "bin/python", "install", "--no-deps", wheel)
    run_python(*pip, check=True, timeout=300)
    # Python reads no further .pth files in a folder that one names, so the checkout's own is left out.
    packages = folder / f"lib/{python}/site-packages"
    others = [path for path in sys.path if Path(path).name == "site-packages"]
    (packages / "dependencies.pth").write_text("\n".join(others), encoding="utf-8")
    return folder


@pytest.fixture
def alone(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Return an empty working folder; nothing of this checkout is on the path."""
    monkeypatch.delenv("PYTHONPATH", raising=False)
    monkeypatch.setenv("XDG_DATA_HOME", str(tmp_path / "home"))
    monkeypatch.chdir(tmp_path)
    return tmp_path


def test_the_wheel_has_the_modules_of_the_checkout_and_the_licence(wheel: Path) -> None:
    inside = {
        name
        for name in zipfile.ZipFile(wheel).namelist()
        if ".dist-info/" not in name and ".data/" not in name
    }
    assert {name.partition("/")[0] for name in inside} == set(NAMES)
    folders = (ROOT / "p2pavg", ROOT / "dht/p2pavg_dht", ROOT / "compression/p2pavg_compression")
    modules = {str(path.relative_to(folder.parent)) for folder in folders for path in folder.rglob("*.py")}
    assert modules <= inside
    assert {f"{name}/py.typed" for name in NAMES} <= inside
    assert any(name.endswith("LICENSE") for name in zipfile.ZipFile(wheel).namelist())


def test_the_sdist_builds_the_same_wheel(wheel: Path, tmp_path: Path) -> None:
    sdist = build("sdist", ROOT, tmp_path / "sdist")
    with tarfile.open(sdist) as archive:
        archive.extractall(tmp_path / "source", filter="data")
    (source,) = (tmp_path / "source").iterdir()
    rebuilt = build("wheel", source, tmp_path / "wheel")
    before, after = zipfile.ZipFile(wheel), zipfile.ZipFile(rebuilt)
    assert {each.filename: each.CRC for each in before.infolist()} == {
        each.filename: each.CRC for each in after.infolist()
    }


def test_the_command_writes_the_files_around_a_peer(installed: Path, alone: Path) -> None:
    command = [str(installed / "bin/p2pavg"), "files", "machine"]
    subprocess.run(command, check=True, capture_output=True, timeout=600)
    source = ROOT / "p2pavg/tools/cli/machine_files"
    assert {each.name: each.read_bytes() for each in (alone / "machine").iterdir()} == {
        each.name: each.read_bytes() for each in source.iterdir()
    }
    (alone / "machine/Containerfile").unlink()
    again = subprocess.run(command, capture_output=True, text=True, timeout=600)
    assert again.returncode == 1
    assert "has p2pavg@.service, grafana.json already" in again.stderr
    assert not (alone / "machine/Containerfile").exists()


@contextmanager
def started(*command: Path | str) -> Iterator[subprocess.Popen[str]]:
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as process:
        try:
            yield process
        finally:
            process.kill()


def test_two_processes_train_from_the_wheel_with_the_line_for_two_machines(
    installed: Path, alone: Path
) -> None:
    """The command's own output says what to start; the second process has a folder as on another machine."""
    program, line = snippets("README.md")[:2]
    assert snippets("docs/tutorial/quickstart.md")[:2] == [program, line]
    [before] = re.findall(r"with p2pavg.blocking.open_averager.*\n", program)
    program = program.replace(before, line) + '\nopen("from", "a").write(p2pavg.__file__)\n'
    (alone / "train.py").write_text(program, encoding="utf-8")
    command = [str(installed / "bin/p2pavg"), "run", "create", "lab", "--address", "127.0.0.1"]
    made = subprocess.run(command, capture_output=True, text=True, check=True, timeout=600).stdout
    folder, link = re.findall(r"^  python train.py (.*)$", made, flags=re.MULTILINE)
    assert folder == "lab"
    # Both at once: the link waits for the program that answers it.
    python = installed / "bin/python"
    with started(python, "train.py", link) as second, started(python, "train.py", folder) as first:
        check_that_both_train([each.communicate(timeout=600)[0].splitlines() for each in (first, second)])
        assert (first.returncode, second.returncode) == (0, 0)
    assert (alone / "home/p2pavg/lab/lab.cert").exists()
    assert (alone / "from").read_text().count(f"{installed}/lib/") == 2
