"""Cost and output of imports, and the distribution's top-level names."""

from __future__ import annotations

import importlib.util
import subprocess
import tomllib
from pathlib import Path

import pytest

from tests.programs import run_python

ROOT = Path(__file__).resolve().parents[3]
HEAVY = {"bitsandbytes", "libp2p", "matplotlib", "torch"}

LAZY = f"""
import gc, sys
import p2pavg

assert not {HEAVY} & sys.modules.keys()
assert p2pavg.__version__
try:
    p2pavg.nothing
except AttributeError as error:
    assert str(error) == "module 'p2pavg' has no attribute 'nothing'"
else:
    raise AssertionError
assert p2pavg.optim.diloco  # modules are there as well
assert {{"Success", "blocking", "optim"}} <= set(dir(p2pavg))
from p2pavg import *
assert Success is p2pavg.Success
assert gc.isenabled(), "as it was"
"""

IMPORT_EVERYTHING = """
import gc, importlib, importlib.util, pkgutil
gc.disable()
import p2pavg, p2pavg_compression, p2pavg_dht
names = [
    module.name
    for package in (p2pavg, p2pavg_compression, p2pavg_dht)
    for module in pkgutil.walk_packages(package.__path__, package.__name__ + ".")
]
assert len(names) > 50, names
packages = {"p2pavg.integrations.lightning": "lightning", "p2pavg.integrations.transformers": "transformers"}
for name in names:
    if name not in {"p2pavg.integrations.lightning", "p2pavg.integrations.transformers"}:  # need a framework
        importlib.import_module(name)
assert not gc.isenabled(), "as it was"
"""


def python(code: str) -> subprocess.CompletedProcess[str]:
    return run_python("-W", "error", "-c", code)


def test_importing_the_package_loads_its_names_and_slow_modules_later() -> None:
    done = python(LAZY)
    assert (done.returncode, done.stdout, done.stderr) == (0, "", "")


NEVER_USED = (
    "aioquic", "dns", "httpx", "prometheus_client", "pytest", "requests", "rich", "trio_websocket", "zeroconf"
)  # fmt: skip


def test_a_peer_loads_nothing_of_libp2p_that_it_never_uses() -> None:
    code = f"""
import sys
import p2pavg
with p2pavg.blocking.open_averager(p2pavg.AveragingConfig(run_id="imports"), listen=["/ip4/127.0.0.1/tcp/0"]):
    print([name for name in {NEVER_USED} if name in sys.modules])
"""
    done = python(code)
    assert (done.returncode, done.stdout, done.stderr) == (0, "[]\n", "")


def test_a_program_that_uses_libp2p_itself_has_all_of_it() -> None:
    """Also if it imports it after p2pavg, and everything if before. What stands in for the rest is of its kind."""
    after = """
from p2pavg.net.libp2p import transport
import libp2p
from concurrent.futures import ThreadPoolExecutor
found = ThreadPoolExecutor(4).map(lambda _: callable(libp2p.new_host), range(4))
import libp2p.transport.quic.transport
print(all(found), libp2p.transport.quic.transport.QUICTransport.__init__ is not object.__init__)
"""
    before = """
import libp2p
from importlib import import_module
from libp2p.network import swarm
from p2pavg.net.libp2p import UNUSED, transport
for module, names in UNUSED.items():
    for name in names:
        real = getattr(import_module(module), name)  # it exists in this version
        is_error = isinstance(real, type) and issubclass(real, Exception)
        assert is_error == name.endswith("Error"), name
print(callable(libp2p.new_host), hasattr(swarm.DNSResolver, "resolve"))
"""
    for code in (after, before):
        done = run_python("-c", code)
        assert (done.returncode, done.stdout) == (0, "True True\n"), done.stderr


def test_commands_that_read_certificates_and_records_load_no_trio() -> None:
    """``p2pavg join garbage`` answers in half a second of processor time; trio alone takes a third of that."""
    modules = "p2pavg_dht.identity, p2pavg.tools.cli.main, p2pavg.runs.membership.tokens"
    code = f"import {modules}, sys; print('trio' in sys.modules)"
    assert (done := python(code)).stdout == "False\n", done.stderr


def test_an_integration_without_its_framework_says_what_to_install() -> None:
    code = """
import importlib, sys
for framework in ("lightning", "transformers"):
    sys.modules[framework] = None
    try:
        importlib.import_module(f"p2pavg.integrations.{framework}")
    except ImportError as error:
        assert str(error).startswith(f"p2pavg.integrations.{framework} needs {framework}: pip install"), error
    else:
        raise AssertionError(framework)
"""
    done = python(code)
    assert done.returncode == 0, done.stderr


def test_importing_a_module_prints_and_warns_nothing() -> None:
    done = python(IMPORT_EVERYTHING)
    assert (done.returncode, done.stdout, done.stderr) == (0, "", "")


@pytest.mark.parametrize("name", ["compression", "dht"])
def test_the_source_roots_are_not_packages(name: str) -> None:
    """A package called ``compression`` would hide the standard library's own (PEP 784)."""
    found = importlib.util.find_spec(name)
    # In a checkout, a folder counts as a namespace package, which hides nothing: any regular package has priority.
    assert found is None or (found.origin is None and found.loader is None)
    assert not (ROOT / name / "__init__.py").exists()


def test_the_distribution_takes_three_names() -> None:
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())
    packages = project["tool"]["hatch"]["build"]["targets"]["wheel"]["packages"]
    assert packages == ["p2pavg", "compression/p2pavg_compression", "dht/p2pavg_dht"]
    assert all((ROOT / package / "__init__.py").exists() for package in packages)
