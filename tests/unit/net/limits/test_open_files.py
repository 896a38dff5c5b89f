"""The limit of open files: raised where the system allows it, respected where it does not."""

import sys

import pytest

from p2pavg.net.limits.entrance import RESERVED_FILES, share_of_files
from tests.programs import run_python

pytestmark = pytest.mark.skipif(sys.platform == "win32", reason="no such limit here")

SCRIPT = """
import logging, resource, trio
logging.basicConfig(level=logging.WARNING)
from p2pavg.net.libp2p.transport import open_libp2p_transport
async def main():
    async with open_libp2p_transport(seed=bytes(32), listen=["/ip4/127.0.0.1/tcp/0"]) as host:
        limits = host._connections.entrance.admission.limits
        print(resource.getrlimit(resource.RLIMIT_NOFILE)[0], limits.connections, limits.unfinished)
for soft, hard in ((256, 4096), (1024, 1024)):
    resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))
    trio.run(main)
"""


def test_a_low_soft_limit_is_raised_and_a_fixed_one_reduces_connections_and_warns() -> None:
    finished = run_python("-c", SCRIPT, timeout=60, check=True)
    raised, fixed = ([int(word) for word in line.split()] for line in finished.stdout.splitlines())
    assert raised[:2] == [4096, 512]
    assert fixed[0] == 1024
    assert fixed[1] + fixed[2] < 1024 - RESERVED_FILES
    assert "only 1024 files" in finished.stderr
    assert "only 4096 files" not in finished.stderr


@pytest.mark.parametrize("limit", [64, 256, 512, 1024, 4096])
def test_a_share_is_left_to_the_program(limit: int) -> None:
    assert limit / 4 <= 2000 * share_of_files(limit, 2000) <= limit - min(RESERVED_FILES, limit // 2)


def test_without_a_limit_the_share_is_one() -> None:
    assert share_of_files(None, 2000) == 1.0
