"""The command line as a user runs it: its output, its exit codes, and its messages about mistakes."""

from __future__ import annotations

import functools
import json
import re
import signal
import socket
import stat
import subprocess
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from dataclasses import replace
from pathlib import Path
from typing import ParamSpec

import pytest
import torch

import p2pavg
from p2pavg import Success
from p2pavg.base.errors import InvitationError
from p2pavg.blocking import open_averager
from p2pavg.tools.daemon.words import ExitCode
from p2pavg_dht import Ed25519Signer
from tests.integration.daemons import ENVIRONMENT, LOOPBACK, TERMINAL, WATCHDOG_SECONDS, daemon, run, succeed
from tests.programs import run_python
from tests.unit.tools.cli.commands import Commands

pytestmark = pytest.mark.processes

SOME_PEER = Ed25519Signer(b"s" * 32).peer_id
LEAVE_SECONDS = 9.0  # no leaving peer waits for what ends after ten seconds: a handshake, the first message
LEAVE_TRIES = 3  # such a peer would be late each time; another one is late once, on a busy machine
FULL_ADDRESS = re.compile(r"/ip4/127\.0\.0\.1/tcp/[1-9][0-9]*/p2p/12D3KooW[1-9A-HJ-NP-Za-km-z]{44}")


@pytest.fixture
def call(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> Commands:
    """The command in this process, without the seconds that a process takes to import torch."""
    for name, value in TERMINAL.items():
        monkeypatch.setenv(name, value)
    return Commands(monkeypatch, capsys)


WITHOUT_TORCH = """
import json, sys
sys.modules["torch"] = None  # an import of it fails
from p2pavg.tools.cli.main import main
codes = []
for words in json.loads(sys.argv[1]):
    sys.argv = ["p2pavg", *words]
    try:
        main()
        codes.append(0)
    except SystemExit as ended:
        codes.append(int(ended.code or 0))
print(json.dumps(codes))
"""


def without_torch(folder: Path, *commands: str) -> tuple[list[int], str]:
    """Return the exit codes of commands in one process, and what they have written to standard error."""
    words = json.dumps([command.split() for command in commands])
    done = run_python("-c", WITHOUT_TORCH, words, env=ENVIRONMENT, cwd=folder, timeout=WATCHDOG_SECONDS)
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout.splitlines()[-1]), done.stderr


def test_a_command_that_does_not_need_torch_does_not_load_it(tmp_path: Path) -> None:
    """It takes over a second, several times as long as the rest."""
    commands = {
        "--help": ExitCode.DONE,
        "--version": ExitCode.DONE,
        "peer --help": ExitCode.DONE,
        "join --help": ExitCode.DONE,
        "run create --help": ExitCode.DONE,
        "identity key": ExitCode.DONE,
        "status --home none": ExitCode.NOT_RUNNING,
        "stop --home none": ExitCode.NOT_RUNNING,
    }
    assert without_torch(tmp_path, *commands) == (list(commands.values()), "")


def test_a_mistake_in_what_to_join_is_told_before_torch_is_loaded(tmp_path: Path) -> None:
    """Loading it takes seconds of processor, several times as long as the rest."""
    mistakes = {
        "garbage": ("cannot read the run file garbage: No such file", "check the name garbage"),
        "p2pavg:garbage": ("the link is damaged", "copy the whole link"),
        "p2pavg:[/b]": ("the link is damaged", "copy the whole link"),
        "[/b]": ("cannot read the run file [/b]: No such file", "check the name [/b]"),
    }
    codes, said = without_torch(tmp_path, *(f"join {name}" for name in mistakes))
    assert codes == [ExitCode.MISTAKE] * len(mistakes)
    lines = said.splitlines()
    for (wrong, remedy), line, next_line in zip(mistakes.values(), lines[::2], lines[1::2], strict=True):
        assert wrong in line
        assert f"what to do: {remedy}" in next_line


class TestInformation:
    def test_help_names_the_commands(self, call: Commands) -> None:
        for done in (call("--help"), call()):
            assert "no server" in done.out
            assert re.search(r"peer\b.*Run a peer until Ctrl-C", done.out)
            assert re.search(r"identity\b.*Show the peer id of a key file", done.out)

    def test_the_version(self, call: Commands) -> None:
        assert call.succeeds("--version") == f"p2pavg {p2pavg.__version__}\n"

    def test_an_identity_is_created_once_and_then_shown(self, tmp_path: Path, call: Commands) -> None:
        file = tmp_path / "peer.key"
        first, second = call.succeeds("identity", file), call.succeeds("identity", file)
        assert first == second == Ed25519Signer(file.read_bytes()).peer_id + "\n"
        assert stat.S_IMODE(file.stat().st_mode) == 0o600


P = ParamSpec("P")


def leaves_in_time(test: Callable[P, None]) -> Callable[P, None]:
    """Play a test again if a peer left late, ``LEAVE_TRIES`` times in all."""

    @functools.wraps(test)
    def play(*args: P.args, **kwargs: P.kwargs) -> None:
        for _ in range(LEAVE_TRIES - 1):
            with suppress(subprocess.TimeoutExpired):
                return test(*args, **kwargs)
        return test(*args, **kwargs)

    return play


class TestPeer:
    @pytest.mark.long
    @pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM], ids=lambda number: number.name)
    @leaves_in_time
    def test_a_peer_prints_one_line_and_leaves_quickly(self, tmp_path: Path, number: signal.Signals) -> None:
        file = tmp_path / "peer.key"
        with daemon("--identity", str(file)) as peer:
            address = peer.address()
            assert FULL_ADDRESS.fullmatch(address)
            assert address.endswith("/p2p/" + Ed25519Signer(file.read_bytes()).peer_id)
            assert peer.leave(number, LEAVE_SECONDS) == 0
            assert peer.out == [address]
            assert f"leaving: {number.name}" in peer.log

    @leaves_in_time
    def test_a_peer_can_leave_during_bootstrap(self) -> None:
        """The bootstrap peer accepts the connection and then says nothing."""
        with socket.socket() as silent:
            silent.bind(("127.0.0.1", 0))
            silent.listen()
            silent.settimeout(WATCHDOG_SECONDS)
            address = f"/ip4/127.0.0.1/tcp/{silent.getsockname()[1]}/p2p/{SOME_PEER}"
            with daemon("--bootstrap", address) as peer:
                connection, _ = silent.accept()
                with connection:
                    assert peer.leave(within=LEAVE_SECONDS) == 0
                assert peer.out == []

    @leaves_in_time
    def test_an_auxiliary_peer_helps_a_run_of_two(self) -> None:
        """As an auxiliary, it reduces a share and contributes nothing to the average."""
        config = p2pavg.AveragingConfig(run_id="helped", group_size=2, match_timeout=30.0, compression="fp32")
        with daemon("--run-id", "helped", "--max-upload-mbps", "80", "--max-download-mbps", "90") as helper:
            address = helper.address()
            name = address.rpartition("/")[2]
            with (
                open_averager(config, listen=[LOOPBACK], bootstrap=[address]) as first,
                open_averager(config, listen=[LOOPBACK], bootstrap=[address]) as second,
                ThreadPoolExecutor(2) as threads,
            ):
                give_up = time.monotonic() + WATCHDOG_SECONDS
                helping = False
                while True:
                    first.accumulate([torch.zeros(1000)], weight=1.0)
                    second.accumulate([torch.full((1000,), 4.0)], weight=3.0)
                    steps = [threads.submit(each.step, wait=None) for each in (first, second)]
                    results = [step.result(WATCHDOG_SECONDS) for step in steps]
                    for result in results:
                        assert isinstance(result, Success), result
                        assert set(result.peers) == set(result.weights) == {first.peer_id, second.peer_id}
                        assert result.total_weight == 4.0
                        assert torch.equal(result.averaged[0], torch.full((1000,), 3.0))  # type: ignore[index]
                    if results[0].auxiliaries:  # type: ignore[union-attr]
                        break
                    if not helping:  # the peer looks for new runs every few seconds
                        helper.wait_for(r"helping peers that average 1 tensors of 1000 elements")
                        helping = True
                    assert time.monotonic() < give_up, "the auxiliary never took part"
                assert [result.auxiliaries for result in results] == [(name,), (name,)]  # type: ignore[union-attr]
                helper.wait_for(r"averaged 2 contributions of 3 members")
            assert helper.leave(within=LEAVE_SECONDS) == 0
            assert helper.out == [address]


class TestInvitations:
    def test_a_newcomer_joins_a_run_by_a_link(self, tmp_path: Path, call: Commands) -> None:
        """The delegate runs as a daemon."""
        run_file, certificate, key = (str(tmp_path / name) for name in ("lab.run", "d.cert", "d.key"))
        files = ["--certificate", certificate, "--identity", key]
        peer_id = call.succeeds("identity", key).strip()
        call.succeeds("run", "create", "lab", "--output", str(tmp_path))
        terms = ["--max-weight", "100", "--days", "30"]
        call.succeeds("run", "delegate", run_file, peer_id, *terms, "--output", certificate)
        with daemon("--run", run_file, *files, "--delegate") as delegate:
            address = delegate.address()
            link = call.succeeds("run", "link", run_file, *files, "--address", address).strip()
            newcomer = tmp_path / "newcomer"
            config = p2pavg.join_run(link, home=newcomer)
            with pytest.raises(InvitationError, match="this link was used already by another peer"):
                p2pavg.join_run(link, home=tmp_path / "other")
            (newcomer / "lab.cert").unlink()
            assert p2pavg.join_run(link, home=newcomer) == config, "the same peer may use it again"
            assert delegate.leave() == 0
            assert "serving invitation links of the run 'lab'" in delegate.log
        assert config.access is not None
        assert config.access.peer_id == Ed25519Signer((newcomer / "identity.key").read_bytes()).peer_id
        assert p2pavg.join_run(link, home=newcomer) == config, "the next start asks no delegate"
        brought = p2pavg.read_run_file(newcomer / "lab.run")
        assert brought == replace(p2pavg.read_run_file(run_file), bootstrap=(address,))


class TestRevoking:
    @pytest.mark.long
    def test_a_revoked_list_is_handed_to_a_daemon_that_helps_the_run(self, tmp_path: Path) -> None:
        run_file, certificate, key = (str(tmp_path / name) for name in ("lab.run", "a.cert", "a.key"))
        peer_id = succeed("identity", key).strip()
        succeed("run", "create", "lab", "--output", str(tmp_path))
        terms = ["--max-weight", "100", "--days", "30"]
        succeed("run", "invite", run_file, peer_id, *terms, "--role", "auxiliary", "--output", certificate)
        with daemon("--run", run_file, "--certificate", certificate, "--identity", key) as helper:
            named = ["--bootstrap", helper.address()]
            out = succeed("run", "revoke", run_file, "ab" * 16, *named)
            assert "list 1 is published by 1 member" in out
            out = succeed("run", "revoke", run_file, "cd" * 16, *named)
            assert "list 2 is published by 1 member" in out
            assert helper.leave() == 0
            log = helper.log
        for number in (1, 2):
            assert f"this run's authority has signed list of revoked certificates number {number}" in log


class TestMistakes:
    @pytest.mark.parametrize(
        ("arguments", "pattern"),
        [
            (["--listen", "127.0.0.1:4001"], r"'127\.0\.0\.1:4001' is not an address"),
            (["--listen", "/ip4/127.0.0.1/udp/4001"], r"listen address .* is not of the form"),
            (
                ["--bootstrap", "/ip4/127.0.0.1/tcp/4001"],
                r"peer address .* is not of the form .*/p2p/PEER_ID",
            ),
            (["--bootstrap", "nonsense"], r"'nonsense' is not an address"),
            (["--run-id", ""], r"run_id must be text of 1 to 128 printable characters"),
            (["--bandwidth", "0"], r"bandwidth must be a number from 0\.1 to 100000, got 0\.0"),
            (["--bandwidth", "nan", "--run-id", "run"], r"bandwidth must be a number from 0\.1 .*, got nan"),
            (["--max-upload-mbps", "-1"], r"max_upload_mbps must be a number above 0 .*, got -1\.0"),
            (["--max-download-mbps", "1e7"], r"max_download_mbps must be a number .* most 1e\+06, got 1"),
        ],
        ids=lambda value: " ".join(value) if isinstance(value, list) else "",
    )
    def test_malformed_addresses_runs_and_rates_are_refused(
        self, call: Commands, arguments: list[str], pattern: str
    ) -> None:
        if "--listen" not in arguments:
            arguments = ["--listen", LOOPBACK, *arguments]
        assert re.search(pattern, call.fails("peer", *arguments))

    def test_a_mistake_ends_the_process_without_a_traceback(self) -> None:
        done = run("peer", "--listen", "127.0.0.1:4001")
        assert (done.returncode, done.stdout) == (ExitCode.MISTAKE, "")
        assert done.stderr.startswith("p2pavg: '127.0.0.1:4001' is not an address")
        assert len(done.stderr.splitlines()) == 2

    def test_a_port_that_is_taken(self, call: Commands) -> None:
        with socket.create_server(("127.0.0.1", 0)) as taken:
            address = f"/ip4/127.0.0.1/tcp/{taken.getsockname()[1]}"
            said = call.fails("peer", "--listen", address, code=ExitCode.TRY_AGAIN)
        assert f"cannot listen on {address}: Address already in use" in said

    @pytest.mark.parametrize(
        "command", [["identity"], ["peer", "--listen", LOOPBACK, "--identity"]], ids=" ".join
    )
    def test_a_key_that_other_users_can_read(
        self, tmp_path: Path, call: Commands, command: list[str]
    ) -> None:
        file = tmp_path / "peer.key"
        file.write_bytes(b"k" * 32)
        file.chmod(0o640)
        assert re.search(r"others can read the identity .*chmod 600 it", call.fails(*command, file))

    @pytest.mark.parametrize(
        "arguments",
        [
            "nonsense",
            "peer --nonsense",
            "peer --bandwidth fast",
            "peer --max-upload-mbps none",
            "peer --listen",
            "identity",
            "identity one two",
        ],
    )
    def test_every_usage_error_exits_with_2(self, call: Commands, arguments: str) -> None:
        done = call(*arguments.split())
        assert (done.code, done.out, "Error" in done.err) == (ExitCode.USAGE, "", True)
        assert "Traceback" not in done.err

    def test_no_bootstrap_peer_answers(self, call: Commands, monkeypatch: pytest.MonkeyPatch) -> None:
        """The test shortens the timeout of the bootstrap, and waits for all of it."""
        monkeypatch.setattr("p2pavg.peer.peer.BOOTSTRAP_SECONDS", 0.3)
        with socket.socket() as silent:
            silent.bind(("127.0.0.1", 0))
            address = f"/ip4/127.0.0.1/tcp/{silent.getsockname()[1]}/p2p/{SOME_PEER}"
            done = call("peer", "--listen", LOOPBACK, "--bootstrap", address)
        assert (done.code, done.out) == (ExitCode.TRY_AGAIN, "")
        assert "Traceback" not in done.err
        last = done.err.splitlines()[-2]
        assert last.startswith("p2pavg: no bootstrap peer could be reached")
        assert address in last
