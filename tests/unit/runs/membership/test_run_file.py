"""Run files: what is written is read back, and everything else is refused by the name of its key."""

from __future__ import annotations

import contextlib
from typing import Any

import numpy as np
import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from p2pavg.base.errors import ConfigError
from p2pavg.runs.membership.run_file import (
    MAX_BOOTSTRAP,
    MAX_EDITED_BYTES,
    MAX_RUN_FILE_BYTES,
    RunFile,
    parse_run_file,
)
from tests.unit.runs.membership.runs import SECRET, Authority, signer

RUN = Authority()
ADDRESS = f"/ip4/203.0.113.7/tcp/4001/p2p/{signer(1).peer_id}"


def run_file(**changed: Any) -> RunFile:
    fields: dict[str, Any] = {"run_id": "lab", "authority": RUN.public, "secret": SECRET}
    return RunFile(**(fields | changed))


def text_with(line: str) -> str:
    """Return the text of a run file in which a line replaces the one of its key."""
    key = line.partition(" ")[0]
    lines = [each for each in run_file().text.splitlines() if not each.startswith(f"{key} =")]
    return "\n".join([*lines, line, ""])


texts = st.text(st.characters(exclude_categories=["C", "Z"]) | st.just(" "), min_size=1, max_size=128)
starts = st.text(st.characters(min_codepoint=32, max_codepoint=126), max_size=190)
addresses = st.builds(
    lambda start, number: f"/{start}/p2p/{signer(number).peer_id}", starts, st.integers(1, 9)
)
rules = st.sampled_from(
    ["median", "trimmed_mean", "trimmed_mean:0.25", "centered_clip:1.0:3", "trimmed_mean:0." + "1" * 49]
)
seconds = st.floats(min_value=0.0, max_value=1800.0, exclude_min=True) | st.integers(1, 1800)


@given(
    st.builds(
        run_file,
        run_id=texts,
        secret=st.binary(min_size=32, max_size=32),
        group_size=st.integers(3, 64),
        min_group_size=st.integers(2, 3),
        match_timeout=seconds,
        exchange_timeout=seconds,
        compression=st.sampled_from(["fp32", "fp16", "blockwise8", "int8:256"]),
        max_weight=st.none() | st.floats(min_value=0.0, max_value=1e15, exclude_min=True),
        robust=st.none() | rules,
        max_norm=st.none() | st.floats(min_value=1.0, max_value=1e6) | st.integers(1, 10**6),
        audit=st.sampled_from(["after", "before", "off", "after:0.25", "before:1.0"]),
        topology=st.sampled_from(["butterfly", "star"]),
        bootstrap=st.lists(addresses, max_size=MAX_BOOTSTRAP).map(tuple),
    )
)
@example(run_file(run_id='"\\ \U0001f600', bootstrap=(ADDRESS,)))
@example(run_file(topology="gossip"))
@example(run_file(max_weight=np.float64(3.0)))
@example(run_file(topology="gossip:63:grid", group_size=64, min_group_size=60))
@example(
    run_file(
        run_id="\U0001f600" * 128,
        max_weight=1.2345678901234567e-300,
        robust="trimmed_mean:0." + "1" * 49,
        max_norm=123456.78901234567,
        bootstrap=('/"' * 95 + ADDRESS[-57:],) * MAX_BOOTSTRAP,
    )
)
def test_what_is_written_is_read_back(given_file: RunFile) -> None:
    text = given_file.text
    assert parse_run_file(text) == given_file
    assert len(text.encode()) <= MAX_RUN_FILE_BYTES


def test_the_text_of_a_run_file() -> None:
    text = run_file(max_weight=100, robust="median", max_norm=2.5, bootstrap=(ADDRESS, ADDRESS)).text
    assert text.splitlines()[1:] == [
        "version = 1",
        'run_id = "lab"',
        f'authority = "{RUN.public.hex()}"',
        f'secret = "{SECRET.hex()}"',
        "group_size = 4",
        "min_group_size = 2",
        "match_timeout = 30.0",
        "exchange_timeout = 60.0",
        'compression = "blockwise8"',
        "max_weight = 100",
        'robust = "median"',
        "max_norm = 2.5",
        'audit = "after"',
        f'bootstrap = ["{ADDRESS}", "{ADDRESS}"]',
    ]


def test_a_run_file_names_its_topology_unless_it_is_the_usual_one() -> None:
    assert "topology" not in run_file().text
    assert 'topology = "star"' in run_file(topology="star").text.splitlines()
    assert run_file(topology="star").settings["topology"] == "star"
    pairs = run_file(topology="gossip")
    assert pairs.settings["group_size"] == 2
    assert "group_size = 2" in pairs.text.splitlines()
    with pytest.raises(
        ConfigError, match="group_size is 8, and groups of the topology 'gossip:1:grid' have 2"
    ):
        run_file(topology="gossip", group_size=8)
    with pytest.raises(ConfigError, match="min_group_size must be a whole number from 2 to 2, got 3"):
        run_file(topology="gossip", min_group_size=3)
    sited = run_file(topology="hierarchical", audit="off")
    assert parse_run_file(sited.text).settings["topology"] == "hierarchical"


def test_settings_that_are_left_out_have_their_defaults() -> None:
    lines = run_file().text.splitlines()
    assert parse_run_file("\n".join(lines[:5])) == run_file()


def test_the_secret_is_in_no_repr() -> None:
    assert SECRET.hex() not in repr(run_file())
    assert repr(SECRET) not in repr(run_file())


@pytest.mark.parametrize(
    ("line", "reason"),
    [
        ("version = 2", "version must be 1, got 2"),
        ("version = true", "version must be 1, got True"),
        ("topology = 'hierarchical'", "audit must be 'off' with topology 'hierarchical'"),
        (
            "topology = 'ring'",
            "topology: a topology is 'butterfly', 'star', 'hierarchical', 'gossip' or 'gossip:DEGREE', got 'ring'",
        ),
        ("topology = 5", "topology must be text"),
        ("topology = 'gossip:0'", "topology: degree must be a whole number from 1 to 63, got 0"),
        ("run_id = ''", "run_id must be text of 1 to 128 printable characters, got ''"),
        ("run_id = 5", "run_id must be text .*, got 5"),
        ('run_id = "clears\\u001b[2J"', "run_id must be text of 1 to 128 printable characters"),
        (f"run_id = '{'a' * 129}'", "run_id must be text of 1 to 128 printable characters"),
        (f"authority = '{'a' * 63}'", "authority must be 64 hexadecimal digits"),
        (f"authority = '{'g' * 64}'", "authority must be 64 hexadecimal digits"),
        (f"authority = '{'٣' * 64}'", "authority must be 64 hexadecimal digits"),
        ("secret = 5", "secret must be 64 hexadecimal digits"),
        ("group_size = 1", "group_size must be a whole number from 2 to 64, got 1"),
        ("group_size = 4.0", r"group_size must be a whole number .* got 4\.0"),
        ("group_size = true", "group_size must be a whole number .* got True"),
        (f"group_size = {'9' * 4000}", "group_size must be a whole number .* got int"),
        ("min_group_size = 5", "min_group_size must be a whole number from 2 to 4, got 5"),
        ("match_timeout = nan", "match_timeout must be a number above 0 and at most 1800, got nan"),
        ("match_timeout = inf", "match_timeout must be a number .* got inf"),
        ("exchange_timeout = '60'", "exchange_timeout must be a number .* got '60'"),
        ("max_weight = 0", "max_weight must be a number above 0 and at most 1e.15, got 0"),
        ("max_weight = [1]", "max_weight must be a number .* got list"),
        ("compression = 'zip'", "compression: .*zip"),
        ("compression = 8", "compression must be text"),
        ("bootstrap = '/ip4'", "bootstrap must be a list of at most 8 addresses"),
        (f"bootstrap = {[ADDRESS] * 9}", "bootstrap must be a list of at most 8 addresses"),
        ("bootstrap = [5]", "each address of bootstrap must be text"),
        ("bootstrap = ['/ip4/203.0.113.7/tcp/4001']", "each address of bootstrap must be like"),
        (f"bootstrap = ['{ADDRESS[1:]}']", "each address of bootstrap must be like"),
        ("robust = 1", "robust must be text of 1 to 64 printable characters, got 1"),
        ("robust = ''", "robust must be text of 1 to 64 printable characters, got ''"),
        (f"robust = '{'a' * 65}'", "robust must be text of 1 to 64 printable characters"),
        ("robust = 'mean'", "^robust: a rule is 'trimmed_mean:FRACTION', .* got 'mean'"),
        ("robust = 'trimmed_mean:0.5'", "^robust: fraction of a trimmed mean must be a number .* got 0.5"),
        ("max_norm = 0.999", r"max_norm must be a number from 1 to 1e\+06, got 0\.999"),
        ("max_norm = 1000001", r"max_norm must be a number from 1 to 1e\+06, got 1000001"),
        ("max_norm = nan", "max_norm must be a number .* got nan"),
        ("max_norm = true", "max_norm must be a number .* got True"),
        ("max_norm = '2'", "max_norm must be a number .* got '2'"),
        ("participation = 1", "unknown key 'participation'; a run file has version, run_id, authority"),
        ("group_size = ", "it is not TOML"),
    ],
)
def test_a_wrong_value_is_refused_by_the_name_of_its_key(line: str, reason: str) -> None:
    with pytest.raises(ConfigError, match=reason):
        parse_run_file(text_with(line))


@pytest.mark.parametrize("key", ["version", "run_id", "authority", "secret"])
def test_a_missing_key_is_named(key: str) -> None:
    lines = [line for line in run_file().text.splitlines() if not line.startswith(f"{key} =")]
    with pytest.raises(ConfigError, match=f"^{key} is missing"):
        parse_run_file("\n".join(lines))


def test_a_text_that_is_too_long_is_not_parsed() -> None:
    with pytest.raises(ConfigError, match="at most"):
        parse_run_file(run_file().text + "#" * MAX_EDITED_BYTES)


values = st.one_of(
    st.text(max_size=20),
    st.sampled_from(
        ["nan", "-inf", "1e999", "1979-05-27T07:32:00Z", "{}", "{a = 1}", "[[]]", "true", "'\\uD800'"]
    ),
    st.integers().map(str),
    st.floats().map(repr),
)


@given(st.sampled_from(["version", *RunFile.__slots__, "other"]), values)
def test_no_value_raises_another_error(key: str, value: str) -> None:
    with contextlib.suppress(ConfigError):
        parse_run_file(text_with(f"{key} = {value}"))


@given(st.text(max_size=300))
@example("a = " + "[" * 5000)
@example("a = " + "9" * 5000)
@example("a = 1979-13-99")
def test_no_text_raises_another_error(text: str) -> None:
    with pytest.raises(ConfigError):
        parse_run_file(text)


def test_a_robust_rule_is_refused_with_a_sparse_codec() -> None:
    assert run_file(compression="topk", max_norm=2.0).compression == "topk"
    with pytest.raises(ConfigError, match=r"^robust cannot be combined with the codec topk:4096:64:2"):
        run_file(compression="topk", robust="median")
