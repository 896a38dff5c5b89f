"""The filter of system calls, run as the kernel runs it."""

from __future__ import annotations

import struct

import pytest

from p2pavg.tools.jobs.fence import missing_fence
from p2pavg.tools.jobs.limited import DENIED, seccomp_filter

ALLOW, DENY = 0x7FFF0000, 0x00050001
PRCTL = {"x86_64": 157, "aarch64": 167}
ARCHITECTURES = {"x86_64": 0xC000003E, "aarch64": 0xC00000B7}


def decide(program: bytes, architecture: int, number: int, *arguments: int) -> int:
    """Run a filter as the kernel does; return its decision."""
    lines = [struct.unpack("=HBBI", program[start : start + 8]) for start in range(0, len(program), 8)]
    data = {0: number, 4: architecture} | {16 + 8 * index: value for index, value in enumerate(arguments)}
    at = value = 0
    while True:
        code, yes, no, operand = lines[at]
        at += 1
        match code:
            case 0x20:
                value = data.get(operand, 0)
            case 0x15:
                at += yes if value == operand else no
            case 0x35:
                at += yes if value >= operand else no
            case 0x06:
                return int(operand)
            case _:
                raise AssertionError(f"a line of the unknown kind {code:#x}")


@pytest.mark.parametrize(("machine", "column"), [("x86_64", 0), ("aarch64", 1)])
def test_the_named_calls_are_denied_and_no_other(machine: str, column: int) -> None:
    program, architecture = seccomp_filter(machine), ARCHITECTURES[machine]
    denied = {numbers[column] for numbers in DENIED.values()}
    assert len(denied) == len(DENIED)
    for number in range(600):
        for arguments in ((0, 0), (4, 1), (38, 1)):
            wanted = DENY if number in denied else ALLOW
            assert decide(program, architecture, number, *arguments) == wanted
        # PR_SET_DUMPABLE to 0
        wanted = DENY if number in denied or number == PRCTL[machine] else ALLOW
        assert decide(program, architecture, number, 4, 0) == wanted


def test_programs_of_another_architecture_make_no_call() -> None:
    program = seccomp_filter("x86_64")
    assert decide(program, 0x40000003, 1) == DENY  # 32 bits
    assert decide(program, ARCHITECTURES["x86_64"], 0x40000001) == DENY  # x32


def test_an_unknown_machine_has_no_filter() -> None:
    assert seccomp_filter("riscv64") == b""


def test_a_machine_without_a_filter_has_no_fence(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("platform.machine", lambda: "riscv64")
    assert missing_fence() == "there is no filter of system calls for this processor, riscv64"
