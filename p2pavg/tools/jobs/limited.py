"""Starts a command within limits that it cannot undo: ``python -I limited.py FILE_BYTES COMMAND...``.

It runs outside of the fence, before it, by its path and with the standard library alone, so no line of a job's runs
before the limits hold. The command and all that it starts

* write no file larger than FILE_BYTES, and no core;
* have a keyring of their own, not the one of the user's session, and reach no other one;
* may not trace or read one another, which could unhook the fence's first process from its parent; hold no memory
  outside of processes and files, where it is not measured; and make none of some calls that programs do not need.

On a processor whose calls it does not know, it filters none, and :func:`.fence.missing_fence` says so.
"""

from __future__ import annotations

import ctypes
import os
import platform
import resource
import struct
import sys

# Numbers of system calls: of x86-64, and of all systems with the kernel's common list, such as arm64.
DENIED = {
    "ptrace": (101, 117),
    "process_vm_readv": (310, 270),
    "process_vm_writev": (311, 271),
    "pidfd_getfd": (438, 438),
    "kcmp": (312, 272),
    "memfd_create": (319, 279),
    "memfd_secret": (447, 447),
    "shmget": (29, 194),
    "msgget": (68, 186),
    "keyctl": (250, 219),
    "add_key": (248, 217),
    "request_key": (249, 218),
    "bpf": (321, 280),
    "perf_event_open": (298, 241),
    "userfaultfd": (323, 282),
    "io_uring_setup": (425, 425),
    "open_by_handle_at": (304, 265),
    "kexec_load": (246, 104),
}
_ARCHITECTURES = {"x86_64": (0xC000003E, 0), "aarch64": (0xC00000B7, 1)}
_PRCTL = (157, 167)
_X32 = 0x40000000  # of x86-64: the same calls under other numbers

_LOAD, _EQUAL, _AT_LEAST, _RETURN = 0x20, 0x15, 0x35, 0x06
_ALLOW, _DENY = 0x7FFF0000, 0x00050000 | 1  # EPERM
_NUMBER, _ARCHITECTURE, _FIRST_ARGUMENT, _SECOND_ARGUMENT = 0, 4, 16, 24  # offsets in struct seccomp_data
_SET_DUMPABLE, _SET_SECCOMP, _NO_NEW_PRIVILEGES, _FILTER = 4, 22, 38, 2
_JOIN_SESSION_KEYRING = 1


def seccomp_filter(machine: str) -> bytes:
    """Return the filter of system calls as a program for the kernel; empty for a machine that is not known."""
    if machine not in _ARCHITECTURES:
        return b""
    architecture, column = _ARCHITECTURES[machine]
    denied = [numbers[column] for numbers in DENIED.values()]
    # Each line jumps forward: to the last one, which denies, or past the next ones.
    lines: list[tuple[int, int, int, int]] = [(_LOAD, 0, 0, _ARCHITECTURE)]
    left = len(denied) + 8
    lines.append((_EQUAL, 0, left, architecture))  # programs of another architecture have other numbers
    lines.append((_LOAD, 0, 0, _NUMBER))
    lines.append((_AT_LEAST, left - 2, 0, _X32))
    for index, number in enumerate(denied):
        lines.append((_EQUAL, left - 3 - index, 0, number))
    # A program that makes itself unreadable could not be measured. (bubblewrap makes itself readable.)
    lines.append((_EQUAL, 0, 4, _PRCTL[column]))
    lines.append((_LOAD, 0, 0, _FIRST_ARGUMENT))
    lines.append((_EQUAL, 0, 2, _SET_DUMPABLE))
    lines.append((_LOAD, 0, 0, _SECOND_ARGUMENT))
    lines.append((_EQUAL, 1, 0, 0))
    lines.append((_RETURN, 0, 0, _ALLOW))
    lines.append((_RETURN, 0, 0, _DENY))
    return b"".join(struct.pack("=HBBI", *line) for line in lines)


class _Program(ctypes.Structure):
    _fields_ = (("length", ctypes.c_ushort), ("lines", ctypes.c_char_p))


def main() -> None:
    """Set the limits, and become the command."""
    file_bytes = int(sys.argv[1])
    for what, wanted in ((resource.RLIMIT_CORE, 0), (resource.RLIMIT_FSIZE, file_bytes)):
        _, most = resource.getrlimit(what)
        limit = wanted if most == resource.RLIM_INFINITY else min(wanted, most)
        resource.setrlimit(what, (limit, limit))
    os.nice(10)
    machine = platform.machine()
    lines = seccomp_filter(machine)
    if lines:
        libc = ctypes.CDLL(None, use_errno=True)
        keyctl = DENIED["keyctl"][_ARCHITECTURES[machine][1]]
        libc.syscall(ctypes.c_long(keyctl), ctypes.c_long(_JOIN_SESSION_KEYRING), None)
        program = _Program(len(lines) // 8, lines)
        for words in ((_NO_NEW_PRIVILEGES, 1, 0, 0, 0), (_SET_SECCOMP, _FILTER, ctypes.byref(program), 0, 0)):
            if libc.prctl(*words) != 0:
                sys.exit(f"the filter of system calls was refused: {os.strerror(ctypes.get_errno())}")
    os.execvp(sys.argv[2], sys.argv[2:])


if __name__ == "__main__":
    main()
