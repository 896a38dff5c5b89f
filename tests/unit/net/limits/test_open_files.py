"""The limit of open files: raised where the system allows it, respected where it does not."""

import sys

import pytest

from p2pavg.net.limits.entrance import RESERVED_FILES, share_of_files
from tests.programs import run_python

pytestmark = pytest.mark.skipif(sys.platform == "win32", reason="no such limit here")

SCRIPT = """
import logging, resource, sys, trio
logging.basicConfig(level=logging.WARNING)
resource.setrlimit(resource.RLIMIT_NOFILE, (int(sys.argv[1]), int(sys.argv[2])))
from p2pavg.net.libp2p.transport import open_libp2p_transport
async def main():
    async with open_libp2p_transport(seed=bytes(32), listen=["/ip4/127.0.0.1/tcp/0"]) as host:
        limits = host._connections.entrance.admission.limits
        print(resource.getrlimit(resource.RLIMIT_NOFILE)[0], limits.connections, limits.unfinished)
trio.run(main)
"""


def opened_with(soft: int, hard: int) -> tuple[list[int], str]:
    finished = run_python("-c", SCRIPT, str(soft), str(hard), timeout=60, check=True)
    return [int(word) for word in finished.stdout.split()], finished.stderr


def test_a_low_soft_limit_is_raised() -> None:
    (soft, connections, _), log = opened_with(256, 4096)
    assert (soft, connections, log) == (4096, 512, "")


def test_a_fixed_low_limit_reduces_connections_and_warns() -> None:
    (soft, connections, unfinished), log = opened_with(1024, 1024)
    assert soft == 1024
    assert connections + unfinished < 1024 - RESERVED_FILES
    assert "only 1024 files" in log


@pytest.mark.parametrize("limit", [64, 256, 512, 1024, 4096])
def test_a_share_is_left_to_the_program(limit: int) -> None:
    assert limit / 4 <= 2000 * share_of_files(limit, 2000) <= limit - min(RESERVED_FILES, limit // 2)


def test_without_a_limit_the_share_is_one() -> None:
    assert share_of_files(None, 2000) == 1.0
