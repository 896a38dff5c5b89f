"""The names under which a browser may ask, and tokens."""

from __future__ import annotations

import pytest

from p2pavg.base.errors import ConfigError
from p2pavg.base.hosts import is_loopback, may_ask
from p2pavg.tools.monitor.guard import HEADERS, bearer, is_token
from p2pavg.tools.monitor.serving import MonitorOptions

NAMES = frozenset({"monitor.example"})


def test_addresses_and_given_names_may_be_asked_for_and_others_not() -> None:
    """A stranger can let any other name point to this machine."""
    own = "localhost localhost:8080 127.0.0.1:8080 [::1]:8080 192.0.2.7 MONITOR.example:80 monitor.example."
    for host in own.split():
        assert may_ask(host, NAMES), host
    others = "evil.example evil.example:8080 localhost.evil.example 127.0.0.1.evil.example [ [evil]:80 :80"
    for host in ("", *others.split()):
        assert not may_ask(host, NAMES), host


def test_token_is_compared_whole() -> None:
    assert is_token("secret", "secret")
    assert not is_token("secre", "secret")
    assert not is_token("", "secret")
    assert not is_token(None, "secret")
    assert not is_token("sécret\udcff".encode("utf-8", "replace").decode(), "secret")
    assert bearer("Bearer abc") == "abc"
    assert bearer("Basic abc") is None
    assert bearer(None) is None


def test_page_may_load_nothing_from_elsewhere_and_run_no_inline_script() -> None:
    policy = HEADERS["content-security-policy"]
    assert "default-src 'none'" in policy
    assert "script-src 'self'" in policy
    assert "unsafe" not in policy
    assert "http" not in policy


@pytest.mark.parametrize(
    ("host", "loopback"),
    [(each, True) for each in ("127.0.0.1", "::1", "localhost")]
    + [(each, False) for each in ("0.0.0.0", "192.0.2.7", "host.example")],
)
def test_token_is_needed_where_other_machines_can_ask(host: str, loopback: bool) -> None:
    assert is_loopback(host) is loopback
    token = MonitorOptions(host=host).needed_token
    assert (token is None) is loopback
    assert token is None or len(token) >= 32
    assert MonitorOptions(host=host, token="x" * 16).needed_token == "x" * 16


@pytest.mark.parametrize(
    "wrong",
    [{"port": -1}, {"port": 65536}, {"port": True}, {"token": "short"}, {"token": "with a space in it"}],
    ids=str,
)
def test_options_out_of_range_are_refused(wrong: dict[str, object]) -> None:
    with pytest.raises(ConfigError, match=next(iter(wrong))):
        MonitorOptions(**wrong)  # type: ignore[arg-type]
