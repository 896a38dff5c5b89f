"""The example of LoRA: all peers hold the same adapters, the base does not travel, and plain transformers loads it."""

from __future__ import annotations

import copy
import re
import shutil
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from p2pavg.tools.jobs.folder import read_folder
from p2pavg.tools.jobs.manifest import problems, read_packages
from tests.programs import run_python

pytestmark = pytest.mark.processes

ROOT = Path(__file__).resolve().parents[3]
WATCHDOG_SECONDS = 300.0
UPDATES = 10
RANK, WIDTH, LAYERS = 4, 64, 2


def test_the_example_is_a_job_with_its_packages() -> None:
    files = read_folder(ROOT / "docs" / "examples" / "lora")
    assert problems(files) == []
    names = {line.partition("==")[0] for line in read_packages(files["packages.lock"])}
    assert {"peft", "transformers"} <= names
    # Those are the volunteer's: a second torch would be gigabytes, and another one than p2pavg was installed with.
    assert not names & {"torch", "numpy", "p2pavg"}


@pytest.mark.long
# Of peft, which uses what transformers will remove.
@pytest.mark.filterwarnings("ignore::FutureWarning")
def test_only_adapters_travel_and_the_model_loads_without_p2pavg(tmp_path: Path) -> None:
    job = tmp_path / "lora"
    shutil.copytree(ROOT / "docs" / "examples" / "lora", job, ignore=shutil.ignore_patterns(".scratch"))
    done = run_python(
        "-m", "p2pavg", "launch", "-n", "3", "--job", job, str(UPDATES), timeout=WATCHDOG_SECONDS
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

    # The checkpoint of the last update gives the same folder as the program has saved.
    scratch = job / ".scratch" / "0"
    last, like = scratch / "checkpoints" / f"update-{UPDATES:012}.safetensors", scratch / "adapters"
    command = ("-m", "p2pavg", "checkpoint", "export", last, tmp_path / "adapters", "--like", like)
    exported = run_python(*command)
    assert not exported.returncode, exported.stderr
    ours = load_file(tmp_path / "adapters" / "adapter_model.safetensors")
    theirs = load_file(scratch / "adapters" / "adapter_model.safetensors")
    assert ours.keys() == theirs.keys()
    assert all(torch.equal(ours[name], theirs[name]) for name in ours)

    from peft import PeftModel
    from transformers import GPT2Config, GPT2LMHeadModel

    model = GPT2LMHeadModel.from_pretrained(job / ".scratch" / "0" / "model")
    torch.manual_seed(0)
    base = GPT2LMHeadModel(GPT2Config(vocab_size=128, n_positions=32, n_embd=WIDTH, n_layer=LAYERS, n_head=2))
    trained, untrained = model.state_dict(), base.state_dict()
    merged = PeftModel.from_pretrained(copy.deepcopy(base), tmp_path / "adapters").merge_and_unload()
    assert all(torch.equal(tensor, trained[name]) for name, tensor in merged.state_dict().items())
    assert trained.keys() == untrained.keys()
    changed = {name for name in trained if not torch.equal(trained[name], untrained[name])}
    assert changed == {f"transformer.h.{layer}.attn.c_attn.weight" for layer in range(LAYERS)}
