"""The environment of a job: its packages by hash, from wheels only, above those of p2pavg."""

from __future__ import annotations

import hashlib
import subprocess
import sys
import zipfile
from pathlib import Path

import pytest

from p2pavg.base.errors import ConfigError
from p2pavg.tools.jobs.environment import make_environment


def wheel(folder: Path, name: str = "oddpackage", version: str = "1.0") -> bytes:
    """Make a wheel; return the line of a list of packages that names it."""
    file = folder / f"{name}-{version}-py3-none-any.whl"
    info = f"{name}-{version}.dist-info"
    with zipfile.ZipFile(file, "w") as opened:
        opened.writestr(f"{name}.py", "said = 'from the wheel'\n")
        opened.writestr(f"{info}/METADATA", f"Metadata-Version: 2.1\nName: {name}\nVersion: {version}\n")
        opened.writestr(f"{info}/WHEEL", "Wheel-Version: 1.0\nRoot-Is-Purelib: true\nTag: py3-none-any\n")
        opened.writestr(f"{info}/RECORD", "")
    return f"{name}=={version} --hash=sha256:{hashlib.sha256(file.read_bytes()).hexdigest()}\n".encode()


@pytest.fixture
def wheels(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A folder of wheels that stands for the package index."""
    folder = tmp_path / "wheels"
    folder.mkdir()
    for installer in ("PIP", "UV"):
        monkeypatch.setenv(f"{installer}_NO_INDEX", "1")
        monkeypatch.setenv(f"{installer}_FIND_LINKS", str(folder))
    return folder


def test_packages_are_installed_beside_those_of_p2pavg(wheels: Path, tmp_path: Path) -> None:
    listed = wheel(wheels)
    python = make_environment(listed, tmp_path / "kept")
    code = "import oddpackage, p2pavg, torch; print(oddpackage.said, p2pavg.__file__)"
    said = subprocess.run([python, "-c", code], capture_output=True, text=True, check=True, env={})
    import p2pavg

    assert said.stdout.split() == ["from", "the", "wheel", str(p2pavg.__file__)]
    # The second start finds it, without an index.
    for file in wheels.iterdir():
        file.unlink()
    assert make_environment(listed, tmp_path / "kept") == python
    assert [each.name for each in (tmp_path / "kept").iterdir()] == [python.parent.parent.name]


def test_a_package_with_another_hash_is_not_installed(wheels: Path, tmp_path: Path) -> None:
    listed = wheel(wheels).replace(b"sha256:", b"sha256:0")[:-2] + b"\n"
    with pytest.raises(ConfigError, match="cannot be installed"):
        make_environment(listed, tmp_path / "kept")
    assert not list((tmp_path / "kept").iterdir())


def test_no_package_runs_code_while_it_is_installed(wheels: Path, tmp_path: Path) -> None:
    """A source package's setup.py would run outside of the fence."""
    import tarfile

    (tmp_path / "setup.py").write_text(f"open({str(tmp_path / 'ran')!r}, 'w')\n")
    file = wheels / "evil-1.0.tar.gz"
    with tarfile.open(file, "w:gz") as opened:
        opened.add(tmp_path / "setup.py", "evil-1.0/setup.py")
    digest = hashlib.sha256(file.read_bytes()).hexdigest()
    with pytest.raises(ConfigError, match="cannot be installed"):
        make_environment(f"evil==1.0 --hash=sha256:{digest}\n".encode(), tmp_path / "kept")
    assert not (tmp_path / "ran").exists()


def test_a_job_without_packages_has_the_interpreter_of_p2pavg() -> None:
    assert make_environment(None) == Path(sys.executable)


def test_a_folder_that_cannot_be_made_is_named(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(ConfigError, match=r"cannot make an environment in .*file"):
        make_environment(b"x==1 --hash=sha256:00", tmp_path / "file" / "kept")
