"""The example of LoRA: all peers hold the same adapters, the base does not travel, and plain transformers loads it."""

from __future__ import annotations

import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from p2pavg.tools.jobs.folder import read_folder
from p2pavg.tools.jobs.manifest import problems
from p2pavg.tools.jobs.packages import read_packages

pytestmark = pytest.mark.processes

ROOT = Path(__file__).resolve().parents[3]
WATCHDOG_SECONDS = 300.0
UPDATES = 4
RANK, WIDTH, LAYERS = 4, 64, 2


def test_the_example_is_a_job_with_its_packages() -> None:
    files = read_folder(ROOT / "docs" / "examples" / "lora")
    assert problems(files) == []
    names = {package.name for package in read_packages(files["packages.lock"])}
    assert {"peft", "transformers"} <= names
    # Those are the volunteer's: a second torch would be gigabytes, and another one than p2pavg was installed with.
    assert not names & {"torch", "numpy", "p2pavg"}


@pytest.mark.long
def test_only_adapters_travel_and_the_model_loads_without_p2pavg(tmp_path: Path) -> None:
    job = tmp_path / "lora"
    shutil.copytree(ROOT / "docs" / "examples" / "lora", job, ignore=shutil.ignore_patterns(".scratch"))
    done = subprocess.run(
        [sys.executable, "-m", "p2pavg", "launch", "-n", "3", "--job", str(job), str(UPDATES)],
        capture_output=True,
        text=True,
        timeout=WATCHDOG_SECONDS,
        check=False,
    )
    assert not done.returncode, done.stdout + done.stderr

    # Of each layer's projection to queries, keys and values: two matrices of low rank.
    adapters = LAYERS * (RANK * WIDTH + RANK * 3 * WIDTH)
    averaged = set(re.findall(r"(\d+) numbers averaged", done.stdout))
    assert averaged == {str(adapters)}
    saved = {
        (job / ".scratch" / str(number) / "adapters" / "adapter_model.safetensors").read_bytes()
        for number in range(3)
    }
    assert len(saved) == 1

    from transformers import GPT2Config, GPT2LMHeadModel

    model = GPT2LMHeadModel.from_pretrained(job / ".scratch" / "0" / "model")
    torch.manual_seed(0)
    base = GPT2LMHeadModel(GPT2Config(vocab_size=128, n_positions=32, n_embd=WIDTH, n_layer=LAYERS, n_head=2))
    trained, untrained = model.state_dict(), base.state_dict()
    assert trained.keys() == untrained.keys()
    changed = {name for name in trained if not torch.equal(trained[name], untrained[name])}
    assert changed == {f"transformer.h.{layer}.attn.c_attn.weight" for layer in range(LAYERS)}
