"""The code in README and docs runs as it stands, and the files that they name exist."""

from __future__ import annotations

import ast
import inspect
import re
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from queue import Queue
from types import ModuleType

import pytest
import torch

import p2pavg
import p2pavg.data
import p2pavg.optim
import p2pavg.population
import p2pavg.strategies
import p2pavg.testing
from p2pavg.blocking import open_averager
from p2pavg.optim import StepReport
from scripts.benchmarks.population import draw_rates
from tests.programs import run_python

pytestmark = pytest.mark.processes

ROOT = Path(__file__).parents[2]
PAGES = sorted((ROOT / "docs").rglob("*.md"))
DOCUMENTS = [
    ROOT / "README.md",
    ROOT / "CONTRIBUTING.md",
    ROOT / "SECURITY.md",
    ROOT / "tests/README.md",
    *PAGES,
]

DRIVER = """
import sys
train([(torch.randn(8, 32), torch.randn(8, 1)) for _ in range(3)], bootstrap=sys.argv[1:])
"""


def snippets(name: str) -> list[str]:
    text = (ROOT / name).read_text(encoding="utf-8")
    return re.findall(r"```python\n(.*?)```", text, flags=re.DOTALL)


def lines_of_two(program: str, monkeypatch: pytest.MonkeyPatch) -> list[list[str]]:
    """Run a program twice in this process, the second with the address that the first prints; return their lines."""
    said: list[Queue[str]] = [Queue(), Queue()]

    def run(index: int) -> None:
        names = {
            "__name__": "__main__",
            "print": lambda *words, **_: said[index].put(" ".join(map(str, words))),
        }
        exec(program, names)

    with torch.random.fork_rng(), ThreadPoolExecutor(2) as threads:
        monkeypatch.setattr(sys, "argv", ["program.py"])
        first = threads.submit(run, 0)
        monkeypatch.setattr(sys, "argv", ["program.py", said[0].get(timeout=600).split()[-1]])
        for each in (first, threads.submit(run, 1)):
            each.result(timeout=600)
    return [list(each.queue) for each in said]


def test_two_peers_average_with_the_documented_loop(monkeypatch: pytest.MonkeyPatch) -> None:
    program = snippets("docs/how-to/average-tensors.md")[0]
    given = "group_size=4, min_group_size=2, match_timeout=30.0"
    assert given in program
    # All rounds are of two, also on a machine where the second program starts a minute after the first.
    program = program.replace(given, "group_size=2, match_timeout=300.0")
    for lines in lines_of_two(program + DRIVER, monkeypatch):
        assert lines.count("averaged with 2 peers") == 3, lines


def test_two_peers_train_with_the_quickstart(monkeypatch: pytest.MonkeyPatch) -> None:
    check_that_both_train(lines_of_two(snippets("docs/tutorial/quickstart.md")[0], monkeypatch))


def test_the_quickstarts_optimizers_train() -> None:
    model = torch.nn.Linear(4, 1)
    inputs = torch.randn(8, 4)
    loss = model(inputs).square().mean()
    torch.autograd.backward(loss)
    before = model.weight.detach().clone()
    with open_averager(p2pavg.AveragingConfig(run_id="readme")) as averager:
        names = {"torch": torch, "model": model, "averager": averager, "inputs": inputs, "loss": loss}
        exec(snippets("docs/tutorial/quickstart.md")[2], names)
    assert isinstance(names["report"], StepReport)
    assert not torch.equal(model.weight, before), "the inner optimizer took a step"


def check_that_both_train(printed: list[list[str]]) -> None:
    updates = [[line for line in lines if line.startswith("update")] for lines in printed]
    assert updates[0] == updates[1], "the same means of the same peers' losses"
    assert [line.partition(",")[0] for line in updates[0]] == [
        f"update {epoch} of 2 peers" for epoch in range(1, 21)
    ]


@pytest.mark.long
@pytest.mark.parametrize("position", [0, 1, 2])
def test_the_programs_for_your_own_tests_run(position: int, tmp_path: Path) -> None:
    path = tmp_path / "program.py"
    path.write_text(snippets("docs/how-to/test-your-code.md")[position], encoding="utf-8")
    run = run_python(path)
    assert run.returncode == 0, run.stdout + run.stderr


@pytest.mark.long
@pytest.mark.parametrize("mode", ["prepend", "importlib"])
def test_the_documented_test_runs_under_pytest(mode: str, tmp_path: Path) -> None:
    """pytest is started in the root, and the test is in a folder that no new process can import from."""
    (tmp_path / "tests").mkdir()
    (tmp_path / "conftest.py").write_text('pytest_plugins = ["p2pavg.testing.fixtures"]\n', encoding="utf-8")
    (tmp_path / "tests/test_mine.py").write_text(
        snippets("docs/how-to/test-your-code.md")[3], encoding="utf-8"
    )
    command = [sys.executable, "-m", "pytest", "-p", "no:cacheprovider", f"--import-mode={mode}"]
    run = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, timeout=180)
    assert run.returncode == 0, run.stdout + run.stderr


def test_the_documented_sampler_runs(capsys: pytest.CaptureFixture[str]) -> None:
    (code,) = (code for code in snippets("docs/how-to/train-with-large-batches.md") if "PeerSampler(" in code)
    exec(code, {"__name__": "__main__"})
    assert capsys.readouterr().out == "the last saved state is after 19984 samples\n"


def test_the_documented_picture_of_a_population_is_that_of_the_benchmark() -> None:
    """``simulation/test_population_bench.py`` draws it."""
    assert any(
        inspect.getsource(draw_rates) in code for code in snippets("docs/how-to/train-a-population.md")
    )


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_every_snippet_is_python_and_imports_what_exists(page: Path) -> None:
    for code in snippets(str(page.relative_to(ROOT))):
        compile(code, page.name, "exec", flags=ast.PyCF_ALLOW_TOP_LEVEL_AWAIT)
        for line in re.findall("^from p2pavg.* import [^(\n]*$", code, flags=re.MULTILINE):
            exec(line, {})


@pytest.mark.parametrize("document", DOCUMENTS, ids=lambda document: document.name)
def test_every_file_that_a_document_names_exists(document: Path) -> None:
    text = document.read_text(encoding="utf-8")
    for name in re.findall(r"`((?:scripts|docs|tests|p2pavg|dht|compression)/[\w/.-]*\w)`", text):
        assert (ROOT / name).exists(), f"{document.name} names {name}"
    for name in re.findall(r"`((?:\w+/)+\w+\.py)`", text):
        places = (ROOT, ROOT / "p2pavg", ROOT / "tests")
        assert any((place / name).exists() for place in places), f"{document.name} names {name}"


@pytest.mark.parametrize("document", ["README.md", "CONTRIBUTING.md", "SECURITY.md"])
def test_every_link_outside_the_site_has_a_target(document: str) -> None:
    """``scripts/docs`` checks the links of the pages in ``docs/``."""
    text = (ROOT / document).read_text(encoding="utf-8")
    for name, _, anchor in re.findall(r"\]\(([\w/.-]+)(#([\w-]+))?\)", text):
        assert (ROOT / name).exists(), f"{document} links to {name}"
        if anchor:
            headings = re.findall(r"^#+ (.*)", (ROOT / name).read_text(encoding="utf-8"), flags=re.MULTILINE)
            assert anchor in {re.sub(r"[^\w]+", "-", heading.lower()) for heading in headings}, anchor


@pytest.mark.parametrize(
    "module",
    [p2pavg, p2pavg.data, p2pavg.optim, p2pavg.population, p2pavg.strategies, p2pavg.testing],
    ids=lambda module: module.__name__,
)
def test_every_public_name_is_in_the_reference(module: ModuleType) -> None:
    reference = (ROOT / "docs/reference/api.md").read_text(encoding="utf-8").splitlines()
    for name in set(module.__all__) - {"blocking"}:
        assert f"::: {module.__name__}.{name}" in reference, name
