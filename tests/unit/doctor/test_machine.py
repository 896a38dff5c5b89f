"""Open files, memory and GPU: the level and the cause for each state of a machine."""

from __future__ import annotations

import pytest

from p2pavg.doctor.rules.machine import (
    FEW_FILES,
    LITTLE_MEMORY,
    Gpu,
    judge_gpu,
    judge_memory,
    judge_open_files,
)
from p2pavg.tools.doctor.findings import Finding, Level


def one(findings: list[Finding]) -> Finding:
    (found,) = findings
    return found


@pytest.mark.parametrize(
    ("hard", "level"),
    [
        (None, Level.OK),
        (2048, Level.OK),
        (2047, Level.WARNING),
        (FEW_FILES, Level.WARNING),
        (FEW_FILES - 1, Level.FAULT),
    ],
)
def test_open_files(hard: int | None, level: Level) -> None:
    found = one(judge_open_files(hard, 2048))
    assert found.level is level
    if level is not Level.OK:
        assert f"{hard} files" in found.what
        assert "2048" in found.remedy


def test_memory_of_a_round_counts() -> None:
    elements = 10**9  # three vectors of fp32: 12 GB
    assert one(judge_memory(LITTLE_MEMORY + 12 * 10**9, elements)).level is Level.OK
    found = one(judge_memory(LITTLE_MEMORY + 12 * 10**9 - 1, elements))
    assert found.level is Level.FAULT
    assert "a round of 1000000000 elements needs about 11.7 GiB" in found.cause
    assert one(judge_memory(LITTLE_MEMORY, 0)).level is Level.OK
    assert "before its first round" in one(judge_memory(LITTLE_MEMORY - 1, 0)).cause


def gpu(**changes: object) -> Gpu:
    state: dict[str, object] = {
        "torch": "2.6.0",
        "built_for": "12.4",
        "available": True,
        "names": ("H200",) * 2,
    }
    return Gpu(**(state | changes))  # type: ignore[arg-type]


def test_gpu_that_works() -> None:
    found = one(judge_gpu(gpu()))
    assert (found.level, found.what) == (Level.OK, "H200; bitsandbytes can be used")


def test_no_gpu_is_no_fault() -> None:
    assert one(judge_gpu(gpu(available=False, built_for=None))).level is Level.NOTE


def test_gpu_for_which_torch_was_not_built() -> None:
    found = one(judge_gpu(gpu(available=False, driver=True, built_for=None, torch="2.6.0+cpu")))
    assert (found.level, found.cause) == (Level.WARNING, "torch 2.6.0+cpu was built without CUDA")


def test_driver_that_is_too_old() -> None:
    found = one(judge_gpu(gpu(available=False, driver=True)))
    assert found.level is Level.WARNING
    assert "built for CUDA 12.4 and finds no device: the driver is too old" in found.cause


def test_bitsandbytes_that_cannot_be_imported() -> None:
    found = one(judge_gpu(gpu(bitsandbytes="OSError: libcudart.so.11 is missing")))
    assert found.level is Level.FAULT
    assert "libcudart.so.11" in found.cause
