"""Starts a job's program within its limits: ``python -m p2pavg.tools.jobs.inside PROGRAM FILE_BYTES``.

It runs inside the fence, before the first line of the program. What it sets cannot be undone by the program.
"""

from __future__ import annotations

import contextlib
import os
import resource
import runpy
import sys


def main() -> None:
    """Set the limits, and run the program as ``python PROGRAM`` would."""
    program, file_bytes = sys.argv[1], int(sys.argv[2])
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    _, most = resource.getrlimit(resource.RLIMIT_FSIZE)
    limit = file_bytes if most == resource.RLIM_INFINITY else min(file_bytes, most)
    resource.setrlimit(resource.RLIMIT_FSIZE, (limit, limit))
    # When memory runs out, the kernel takes the job first, and not what the volunteer works with.
    with contextlib.suppress(OSError), open("/proc/self/oom_score_adj", "w") as score:
        score.write("1000")
    os.nice(10)
    sys.argv = [program]
    sys.path[0] = os.path.dirname(os.path.abspath(program))
    runpy.run_path(program, run_name="__main__")


if __name__ == "__main__":
    main()
