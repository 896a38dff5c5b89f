"""The conformance suite of :class:`~p2pavg.net.transport.Transport`: plain async functions with asserts.

    @pytest.mark.parametrize("check", CHECKS, ids=lambda check: check.__name__)
    async def test_conformance(check): await check(my_surroundings)

Each check makes its own peers and ends them. Its timeouts are watchdogs and measure nothing.
"""

from tests.transport_conformance import abuse, connections, one_stream
from tests.transport_conformance.tools import CHECKS, ECHO, Check, Surroundings, echo

__all__ = ["CHECKS", "ECHO", "Check", "Surroundings", "abuse", "connections", "echo", "one_stream"]
