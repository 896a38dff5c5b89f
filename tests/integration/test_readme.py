"""The README's code runs unchanged, and the files that it names exist."""

from __future__ import annotations

import re
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import torch

import p2pavg
from p2pavg.blocking import open_averager
from p2pavg.optim import StepReport

ROOT = Path(__file__).parents[2]
TRAINING = (ROOT / "docs/training.md").read_text(encoding="utf-8")
README = (ROOT / "README.md").read_text(encoding="utf-8")

DRIVER = """
import sys
torch.manual_seed(0)
torch.set_num_threads(1)
train([(torch.randn(8, 32), torch.randn(8, 1)) for _ in range(3)], bootstrap=sys.argv[1:])
"""


def snippets(text: str) -> list[str]:
    return re.findall(r"```python\n(.*?)```", text, flags=re.DOTALL)


def snippet(position: int = 0) -> str:
    codes = snippets(README)
    assert len(codes) == 2
    return codes[position]


@contextmanager
def started(path: Path, bootstrap: list[str]) -> Iterator[subprocess.Popen[str]]:
    with subprocess.Popen([sys.executable, path, *bootstrap], stdout=subprocess.PIPE, text=True) as process:
        try:
            yield process
        finally:
            process.kill()


def test_four_processes_average_with_the_readmes_code(tmp_path: Path) -> None:
    path = tmp_path / "readme.py"
    path.write_text(snippet() + DRIVER, encoding="utf-8")
    with started(path, []) as first:
        assert first.stdout is not None
        address = first.stdout.readline().split()[-1]
        with (
            started(path, [address]) as second,
            started(path, [address]) as third,
            started(path, [address]) as fourth,
        ):
            printed = [process.communicate(timeout=120)[0] for process in (first, second, third, fourth)]
    for lines in printed:
        assert lines.count("averaged with 4 peers") == 3, printed


def test_the_readmes_optimizers_train() -> None:
    model = torch.nn.Linear(4, 1)
    inputs = torch.randn(8, 4)
    loss = model(inputs).square().mean()
    torch.autograd.backward(loss)
    before = model.weight.detach().clone()
    with open_averager(p2pavg.AveragingConfig(run_id="readme"), listen=["/ip4/127.0.0.1/tcp/0"]) as averager:
        names = {"torch": torch, "model": model, "averager": averager, "inputs": inputs, "loss": loss}
        exec(snippet(1), names)
    assert isinstance(names["report"], StepReport)
    assert not torch.equal(model.weight, before), "the inner optimizer must take a step"


def test_two_processes_train_with_the_documented_program(tmp_path: Path) -> None:
    path = tmp_path / "train.py"
    path.write_text(snippets(TRAINING)[0], encoding="utf-8")
    with started(path, []) as first:
        assert first.stdout is not None
        address = first.stdout.readline().split()[-1]
        with started(path, [address]) as second:
            printed = [process.communicate(timeout=120)[0].splitlines() for process in (first, second)]
            assert [process.returncode for process in (first, second)] == [0, 0]
    updates = [[line for line in lines if line.startswith("update")] for lines in printed]
    assert updates[0] == updates[1], "both peers must have the same means of the losses"
    assert [line.partition(",")[0] for line in updates[0]] == [
        f"update {epoch} of 2 peers" for epoch in range(1, 21)
    ]


def test_every_file_named_in_the_documents_exists() -> None:
    for document in (
        "README.md",
        "CONTRIBUTING.md",
        "docs/architecture.md",
        "docs/training.md",
        "tests/README.md",
    ):
        text = (ROOT / document).read_text(encoding="utf-8")
        for name in re.findall(r"`((?:scripts|docs|tests|p2pavg|dht|compression)/[\w/.]*\w)`", text):
            assert (ROOT / name).exists(), f"{document} names {name}"
