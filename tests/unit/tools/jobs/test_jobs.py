"""Jobs: a folder and one file say the same, and a stranger's file writes nothing outside of its folder."""

from __future__ import annotations

import os
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from p2pavg.base.errors import ConfigError
from p2pavg.base.messages import pack
from p2pavg.tools.jobs import archive, manifest
from p2pavg.tools.jobs.archive import job_root, pack_job, unpack_job
from p2pavg.tools.jobs.folder import read_folder, write_folder, wrong_copies
from p2pavg.tools.jobs.manifest import problems, read_manifest, what_is_wrong_with

MANIFEST = b"""
name = "small-gpt"
author = "Ada"
about = "Trains a small GPT."
program = "train.py"
packages = "packages.lock"
[needs]
memory_gb = 2.0
disk_gb = 1.0
"""
HASH = "--hash=sha256:" + "0f" * 32
FILES = {
    "job.toml": MANIFEST,
    "train.py": b"print('training')\n",
    "packages.lock": "\n".join(
        [f"numpy==2.4.0 \\\n    {HASH} \\\n    {HASH}", f"torch==2.13.0 ; python_version > '3.10' {HASH}", ""]
    ).encode(),
    "model/layers.py": b"",
}


def with_file(*names: str, urls: str = "https://models.example/base", digest: str = "0f") -> bytes:
    """Return a manifest that names larger files."""
    files = [
        f"[[files]]\nname = '{name}'\nbytes = 10\nsha256 = '{digest * 32}'\nurls = ['{urls}']"
        for name in names
    ]
    return MANIFEST + "\n".join(files).encode()


def without(name: str) -> dict[str, bytes]:
    return {each: content for each, content in FILES.items() if each != name}


def test_the_same_files_give_the_same_bytes_and_root() -> None:
    data = pack_job(FILES)
    assert pack_job(dict(reversed(FILES.items()))) == data
    found, files = unpack_job(data)
    assert (found.name, found.needs.memory_gb, files) == ("small-gpt", 2.0, FILES)
    assert job_root(data).hex() == "ad425d357f4e16fda51021731055878a1b1963acae39f2b7076dabb5b9acea0f"
    assert job_root(pack_job(FILES | {"train.py": b"print('other')\n"})) != job_root(data)


def test_a_folder_is_read_and_written(tmp_path: Path) -> None:
    write_folder(tmp_path / "job", FILES)
    (tmp_path / "job" / "__pycache__").mkdir()
    (tmp_path / "job" / "__pycache__" / "train.pyc").write_bytes(b"x")
    (tmp_path / "job" / ".git").write_text("gitdir", encoding="utf-8")
    assert read_folder(tmp_path / "job") == FILES
    with pytest.raises(ConfigError, match="exists"):
        write_folder(tmp_path / "job", FILES)


def test_the_remedy_is_for_the_file_that_cannot_be_read(tmp_path: Path) -> None:
    (tmp_path / "job.toml").mkdir()
    with pytest.raises(ConfigError, match=r"job\.toml") as error:
        read_folder(tmp_path)
    assert error.value.remedy == f"name a file: {tmp_path / 'job.toml'} is a folder"


def test_members_do_not_carry_a_larger_file(tmp_path: Path) -> None:
    files = FILES | {"job.toml": with_file("model/base")}
    write_folder(tmp_path / "job", files | {"model/base": b"0123456789"})
    assert read_folder(tmp_path / "job") == files
    assert [file.name for file in unpack_job(pack_job(files))[0].files] == ["model/base"]
    (wrong,) = wrong_copies(tmp_path / "job")
    assert "bytes = 10, sha256 = '84d89877f0d4041efb6bf91a16f0248f2fd573e6af05c19f96bedb9f882f7882'" in wrong
    (tmp_path / "job" / "model" / "base").unlink()
    assert not wrong_copies(tmp_path / "job")


@pytest.mark.parametrize(
    "make", [os.mkfifo, lambda path: path.symlink_to("/etc/passwd")], ids=["pipe", "link"]
)
def test_a_folder_with_a_link_or_a_pipe_is_no_job(tmp_path: Path, make: object) -> None:
    write_folder(tmp_path / "job", FILES)
    make(tmp_path / "job" / "more")  # type: ignore[operator]
    with pytest.raises(ConfigError, match="plain files only"):
        read_folder(tmp_path / "job")


@pytest.mark.parametrize(
    ("files", "wrong"),
    [
        (without("job.toml"), "there is no job.toml"),
        (without("train.py"), "the program 'train.py' is not there"),
        (without("packages.lock"), "'packages.lock' is not there"),
        (FILES | {"packages.lock": b"numpy"}, "packages.lock: 'numpy' must be NAME==VERSION"),
        (FILES | {"Train.py": b""}, "are one place on some systems"),
        (FILES | {"model": b""}, "are one place on some systems"),
        (FILES | {"job.toml": MANIFEST.replace(b"memory_gb = 2.0", b"memory_gb = -1")}, "memory_gb"),
        (FILES | {"job.toml": MANIFEST.replace(b"memory_gb = 2.0", b"memory_gb = nan")}, "memory_gb"),
        (FILES | {"job.toml": MANIFEST.replace(b"train.py", b"../train.py")}, "cannot be a file of a job"),
        (FILES | {"job.toml": MANIFEST.replace(b"Ada", b"A\\u001b[31m")}, "printable"),
        (FILES | {"job.toml": MANIFEST.replace(b"program", b"programme")}, "programme"),
        (FILES | {"job.toml": b"name = "}, "job.toml"),
        (FILES | {"job.toml": b"\xff"}, "job.toml"),
        (FILES | {"job.toml": MANIFEST.replace(b"small-gpt", b"a/b")}, "name must be"),
        (FILES | {"job.toml": with_file("../base")}, "cannot be a file of a job"),
        (FILES | {"job.toml": with_file("train.py")}, "'train.py' is there twice"),
        (FILES | {"job.toml": with_file("base", "base")}, "'base' is there twice"),
        (FILES | {"job.toml": with_file("model")}, "are one place on some systems"),
        (FILES | {"job.toml": with_file("base", urls="file:///etc/passwd")}, "urls"),
        (FILES | {"job.toml": with_file("base", urls="https://")}, "urls"),
        (FILES | {"job.toml": with_file("base", urls="http://[")}, "has no host"),
        (FILES | {"job.toml": with_file("base", urls="http://a..b/")}, "has no host"),
        (FILES | {"job.toml": with_file("base", urls="http://a:99999999999/")}, "has no host"),
        (FILES | {"job.toml": with_file("base", urls=f"http://{'a' * 64}/")}, "has no host"),
        (FILES | {"job.toml": with_file("base", digest="0F")}, "sha256"),
    ],
)
def test_what_is_wrong_is_said(files: dict[str, bytes], wrong: str) -> None:
    assert any(wrong in sentence for sentence in problems(files)), problems(files)
    with pytest.raises(ConfigError):
        pack_job(files)


@pytest.mark.parametrize(
    "name",
    ["", "..", "../up", "a/../../b", "/etc/passwd", "a//b", "a/", "./a", "~/x", "C:\\x", "a\\b", "nul\x00", "a\nb", "é",
     "a.", "a /b", "x" * 201, "/".join("abcdefghijklmnopq")],
)  # fmt: skip
def test_a_name_outside_of_the_folder_is_refused(name: str, tmp_path: Path) -> None:
    assert what_is_wrong_with(name)
    files = sorted((FILES | {name: b"x"}).items())
    with pytest.raises(ConfigError):
        unpack_job(pack("p2pavg-job/1", tuple(files)))


@given(st.text(max_size=30))
def test_an_accepted_name_stays_in_its_folder(name: str) -> None:
    if not what_is_wrong_with(name):
        assert (Path("/job") / name).resolve().is_relative_to("/job")


@given(st.binary(max_size=200))
def test_hostile_bytes_are_refused_in_words(data: bytes) -> None:
    for read in (unpack_job, read_manifest):
        with pytest.raises(ConfigError):
            read(data)


@pytest.mark.parametrize("cut", range(1, 200, 7))
def test_a_job_that_is_cut_or_changed_is_another_or_none(cut: int) -> None:
    data = pack_job(FILES)
    with pytest.raises(ConfigError):
        unpack_job(data[:-cut])
    changed = bytes(data[:-cut]) + bytes([data[-cut] ^ 1]) + data[len(data) - cut + 1 :]
    assert job_root(changed) != job_root(data)


def test_more_than_a_job_may_have_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(manifest, "MAX_FILES", 3)
    monkeypatch.setattr(manifest, "MAX_JOB_BYTES", 100)
    found = " ".join(problems(FILES))
    assert "a job may have 3" in found
    assert "a job may have 100" in found
    monkeypatch.setattr(archive, "MAX_ARCHIVE_BYTES", 10)
    with pytest.raises(ConfigError, match="it may have 10"):
        unpack_job(bytes(11))
