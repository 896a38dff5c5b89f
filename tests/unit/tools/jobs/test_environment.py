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
from p2pavg.tools.jobs.manifest import read_packages


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
    listed = read_packages(wheel(wheels))
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
    listed = [f"{line.partition(' ')[0]} --hash=sha256:{SUM}" for line in read_packages(wheel(wheels))]
    with pytest.raises(ConfigError, match="cannot be installed"):
        make_environment(listed, tmp_path / "kept")
    assert not list((tmp_path / "kept").iterdir())


def test_no_package_runs_code_while_it_is_installed(wheels: Path, tmp_path: Path) -> None:
    """A source package brings its own builder, which would run outside of the fence."""
    import tarfile

    source = tmp_path / "evil-1.0"
    source.mkdir()
    (source / "PKG-INFO").write_text("Metadata-Version: 2.1\nName: evil\nVersion: 1.0\n")
    (source / "pyproject.toml").write_text(
        "[build-system]\nrequires = []\nbuild-backend = 'builder'\nbackend-path = ['.']\n"
    )
    (source / "builder.py").write_text(f"open({str(tmp_path / 'ran')!r}, 'w')\n")
    file = wheels / "evil-1.0.tar.gz"
    with tarfile.open(file, "w:gz") as opened:
        opened.add(source, "evil-1.0")
    digest = hashlib.sha256(file.read_bytes()).hexdigest()
    with pytest.raises(ConfigError, match="cannot be installed"):
        make_environment(read_packages(f"evil==1.0 --hash=sha256:{digest}".encode()), tmp_path / "kept")
    assert not (tmp_path / "ran").exists()


def test_a_job_without_packages_has_the_interpreter_of_p2pavg() -> None:
    assert make_environment(None) == Path(sys.executable)


def test_a_folder_that_cannot_be_made_is_named(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(ConfigError, match=r"file/kept cannot be made: Not a directory"):
        make_environment([], tmp_path / "file" / "kept")


SUM = "0f" * 32


def test_a_list_is_read_and_written_anew() -> None:
    content = (
        "# made by uv \\\n"
        f"a.b-c[x,y]==1.0+cpu ; python_version < '3.12' and sys_platform == \"linux\" \\\n"
        f"    --hash=sha256:{SUM} \\\r\n    --hash=sha256:{SUM}\n"
        "    # via d\n\n"
        f"e==2 --hash=sha256:{SUM}  # a comment --hash=sha256:1\n"
    )
    found = read_packages(content.encode())
    marker = "python_version < '3.12' and sys_platform == \"linux\""
    hash_ = f"--hash=sha256:{SUM}"
    assert found == [f"a.b-c[x,y]==1.0+cpu ; {marker} {hash_} {hash_}", f"e==2 {hash_}"]
    assert read_packages("\n".join(found).encode()) == found


@pytest.mark.parametrize(
    "line",
    [
        "a",
        "a==1",
        f"a>=1 --hash=sha256:{SUM}",
        f"a==1 --hash=md5:{SUM}",
        f"a==1 --hash=sha256:{SUM} --no-binary=:all:",
        f"a==1 ; x --global-option=y --hash=sha256:{SUM}",
        f"a==1 ; x -r other --hash=sha256:{SUM}",
        f"a @ file:///evil.tar.gz --hash=sha256:{SUM}",
        f"a==1 ; python_version < '3' # \\\n--no-binary a --hash=sha256:{SUM}",
        "--no-binary evil",
        "--index-url https://example.com",
        "-e .",
        "-r other.txt",
        "a==2.* --hash=sha256:" + SUM,
        "a==2 --hash=sha256:00",
        "# x \\\n--no-binary evil\n# y \\\n" + f"evil @ file:///evil.tar.gz --hash=sha256:{SUM}",
        "./evil.whl",
        f"a==1\x0b--no-binary evil --hash=sha256:{SUM}",
        f"a==1 --hash=sha256:{SUM}\x0c--no-binary evil",
        "\x1b[2J",
    ],
)
def test_anything_but_names_and_hashes_is_refused(line: str) -> None:
    """Of what an installer also reads: other indexes, options that build packages, URLs, folders, lists."""
    with pytest.raises(ConfigError) as caught:
        read_packages(line.encode())
    assert "\x1b" not in str(caught.value)
