"""The commands that show, verify and export checkpoints."""

from __future__ import annotations

import os
import time
from pathlib import Path

import pytest
import safetensors.torch
import torch

from p2pavg.state.checkpoint import read, write_checkpoint
from p2pavg.state.snapshot import Content
from tests.unit.tools.cli.commands import Commands

FILE = "update-000000000012.safetensors"
EXPORT = ("checkpoint", "export", FILE)
OWN = Content({"inner/m": torch.ones(3)}, {"extras": {"sampler": 3, "\x1b[2J": None}, "rng": b"\x00"})


def model() -> torch.nn.Module:
    """Return a small model with parameters, and with buffers that are averaged and that are not."""
    torch.manual_seed(1)
    return torch.nn.Sequential(torch.nn.Linear(4, 3), torch.nn.BatchNorm1d(3))


def floats() -> dict[str, torch.Tensor]:
    """Return what is exported of the model, by its own names."""
    return {name: tensor for name, tensor in model().state_dict().items() if tensor.is_floating_point()}


def common_of(module: torch.nn.Module, prefix: str = "parameter") -> Content:
    tensors = {f"{prefix}/{name}": tensor.detach() for name, tensor in module.named_parameters()}
    tensors |= {
        f"buffer/{name}": tensor for name, tensor in module.named_buffers() if tensor.is_floating_point()
    }
    tensors |= {"optimizer/state/0/exp_avg": torch.zeros(3, 4)}
    return Content(tensors, {"lineage": {"epoch": 7, "state": bytes(range(32)).hex()}})


@pytest.fixture
def lab(p2pavg: Commands, monkeypatch: pytest.MonkeyPatch) -> Commands:
    """Return the command line in a folder with a checkpoint."""
    monkeypatch.setattr(time, "time", lambda: 1.8e9)
    write_checkpoint(Path(FILE), 12, common_of(model()), OWN)
    return p2pavg


def damage(name: str = FILE) -> None:
    data = bytearray(Path(name).read_bytes())
    data[-1] ^= 1
    Path(name).write_bytes(data)


class TestShow:
    def test_a_checkpoint_is_described(self, lab: Commands) -> None:
        checkpoint = read(Path(FILE))
        lines = lab.succeeds("checkpoint", "show", FILE).splitlines()
        assert lines[:7] == [
            "update 12, written 2027-01-15 08:00:00 UTC",
            f"lineage {bytes(range(32)).hex()}",
            f"root {checkpoint.root.hex()}",
            f"size {Path(FILE).stat().st_size:,} bytes",
            "common to all peers: 7 tensors of 156 bytes; values: lineage",
            "of this peer alone: 1 tensors of 12 bytes; values: extras, rng",
            "extras: '\\x1b[2J', sampler",
        ]
        table = [line.split(maxsplit=2) for line in lines[7:]]
        assert table[0] == ["tensor", "dtype", "shape"]
        assert ["common/parameter/0.weight", "float32", "(3, 4)"] in table
        assert ["own/inner/m", "float32", "(3,)"] in table
        assert len(table) == 9

    def test_a_checkpoint_of_strange_values_is_described(self, p2pavg: Commands) -> None:
        content = Content({}, {"lineage": 3, "extras": 4})
        write_checkpoint(Path(FILE), 0, content, content)
        assert "lineage unknown\n" in p2pavg.succeeds("checkpoint", "show", FILE)

    def test_other_files_are_refused(self, p2pavg: Commands) -> None:
        safetensors.torch.save_file({"x": torch.ones(1)}, "other.safetensors")
        assert "other.safetensors is damaged or no checkpoint" in p2pavg.fails(
            "checkpoint", "show", "other.safetensors"
        )
        assert "cannot read the checkpoint missing: No such file" in p2pavg.fails(
            "checkpoint", "show", "missing"
        )


class TestVerify:
    def test_a_checkpoint_without_damage(self, lab: Commands) -> None:
        assert lab.succeeds("checkpoint", "verify", FILE) == (
            f"{FILE}: update 12, {Path(FILE).stat().st_size:,} bytes, no damage\n"
        )

    def test_a_damaged_checkpoint_is_reported(self, lab: Commands) -> None:
        damage()
        assert "its bytes have changed since it was written" in lab.fails("checkpoint", "verify", FILE)


class TestExport:
    @pytest.mark.parametrize(
        ("prefix", "arguments"),
        [
            ("parameter", ["model.pt"]),
            ("anchor", ["model.pth"]),
            ("parameter", ["model.x", "--format", "torch"]),
        ],
    )
    def test_torch_loads_the_model(self, lab: Commands, prefix: str, arguments: list[str]) -> None:
        trained, other = model(), torch.nn.Sequential(torch.nn.Linear(4, 3), torch.nn.BatchNorm1d(3))
        write_checkpoint(Path(FILE), 12, common_of(trained, prefix), OWN)
        out = lab.succeeds(*EXPORT, *arguments)
        assert out == f"made {arguments[0]}: 6 tensors of update 12\n"
        missing, unexpected = other.load_state_dict(torch.load(arguments[0], weights_only=True), strict=False)
        assert (missing, unexpected) == ([], [])
        assert all(map(torch.equal, other.state_dict().values(), trained.state_dict().values()))

    @pytest.mark.parametrize("arguments", [["model.safetensors"], ["model.pt", "--format", "safetensors"]])
    def test_safetensors_loads_the_model(self, lab: Commands, arguments: list[str]) -> None:
        lab.succeeds(*EXPORT, *arguments)
        loaded = safetensors.torch.load_file(arguments[0])
        expected = floats()
        assert loaded.keys() == expected.keys()
        assert all(torch.equal(loaded[name], expected[name]) for name in expected)

    def test_a_torch_file_holds_no_more_than_the_model(self, lab: Commands) -> None:
        write_checkpoint(Path(FILE), 12, common_of(model()), Content({"large": torch.zeros(2**18)}))
        lab.succeeds(*EXPORT, "model.pt")
        assert Path("model.pt").stat().st_size < 2**16

    def test_an_existing_file_is_overwritten_only_by_force(self, lab: Commands) -> None:
        Path("model.pt").write_bytes(b"precious")
        assert "model.pt exists; --force overwrites it" in lab.fails(*EXPORT, "model.pt")
        assert Path("model.pt").read_bytes() == b"precious"
        lab.succeeds(*EXPORT, "model.pt", "--force")
        assert torch.load("model.pt", weights_only=True).keys() == floats().keys()

    def test_the_checkpoint_itself_is_never_overwritten(self, lab: Commands) -> None:
        os.link(FILE, "same")
        for name in (FILE, "same"):
            assert "is the checkpoint itself" in lab.fails(*EXPORT, name, "--force")
        lab.succeeds("checkpoint", "verify", FILE)

    def test_a_damaged_checkpoint_is_not_exported(self, lab: Commands) -> None:
        damage()
        assert "is damaged" in lab.fails(*EXPORT, "model.pt")
        assert os.listdir() == [FILE]

    def test_mistakes_leave_no_file(self, lab: Commands) -> None:
        assert "--format must be safetensors or torch, got 'onnx'" in lab.fails(
            *EXPORT, "model", "--format", "onnx"
        )
        assert "cannot write missing/model.pt: No such file" in lab.fails(*EXPORT, "missing/model.pt")
        write_checkpoint(Path(FILE), 12, Content(), OWN)
        assert "has no parameters and no buffers" in lab.fails(*EXPORT, "model.pt")
        assert os.listdir() == [FILE]


class TestExportLike:
    """Folders of Hugging Face's kind. ``tests/integration/jobs/test_lora.py`` loads one with peft."""

    def test_settings_go_along_and_weights_do_not(self, lab: Commands) -> None:
        like = Path("base")
        like.mkdir()
        for name in ("config.json", "tokenizer.json", "model.safetensors.index.json", "pytorch_model.bin"):
            (like / name).write_text(name)
        # A tensor that was not trained is there, too.
        frozen = {"frozen": torch.ones(2), "0.weight": torch.zeros(3, 4), "0.bias": torch.zeros(3)}
        rest = {name: torch.zeros(3) for name in ("1.weight", "1.bias", "1.running_mean", "1.running_var")}
        safetensors.torch.save_file(frozen, like / "model-1.safetensors")
        safetensors.torch.save_file(rest, like / "model-2.safetensors")
        said = lab.succeeds(*EXPORT, "out", "--like", "base", "--dtype", "bfloat16")
        assert said.startswith("made out: 7 tensors, of update 12")
        assert sorted(each.name for each in Path("out").iterdir()) == [
            "config.json",
            "model.safetensors",
            "tokenizer.json",
        ]
        found = safetensors.torch.load_file("out/model.safetensors")
        wanted = {**floats(), "frozen": torch.ones(2)}
        assert found.keys() == wanted.keys()
        for name, tensor in found.items():
            assert torch.equal(tensor, wanted[name].bfloat16())

    def test_adapters_lose_the_name_that_they_have_in_their_model(self, lab: Commands) -> None:
        inside = {
            "base.q.lora_A.default.weight": "base.q.lora_A.weight",
            "base.e.lora_embedding_A.default": "base.e.lora_embedding_A",
            "base.q.lora_magnitude_vector.default.weight": "base.q.lora_magnitude_vector",
            "base.ln.modules_to_save.default.weight": "base.ln.weight",
        }
        adapters = Content({f"parameter/{name}": torch.ones(2, 2) for name in inside}, {})
        write_checkpoint(Path(FILE), 12, adapters, OWN)
        Path("like").mkdir()
        Path("like/adapter_config.json").write_text("{}")
        saved = {name: torch.zeros(2, 2) for name in inside.values()}
        safetensors.torch.save_file(saved, "like/adapter_model.safetensors")
        lab.succeeds(*EXPORT, "out", "--like", "like")
        found = safetensors.torch.load_file("out/adapter_model.safetensors")
        assert found.keys() == saved.keys()
        assert all(torch.equal(tensor, torch.ones(2, 2)) for tensor in found.values())

    @pytest.mark.parametrize(
        ("weights", "options", "named"),
        [
            ({}, [], "has no weights in safetensors"),
            ({"0.bias": torch.zeros(3)}, [], "of shape (3, 4), and like no such tensor"),
            ({"0.bias": torch.zeros(3), "0.weight": torch.zeros(4, 4)}, [], "and like one of shape (4, 4)"),
            (floats(), ["--like", "nothing"], "--like nothing has no config.json"),
            (floats(), ["--dtype", "int8"], "--dtype must be one of float32, bfloat16, float16"),
            (floats(), ["--force"], "leave out --format and --force"),
        ],
        ids=["none", "another", "shape", "nothing", "dtype", "force"],
    )
    def test_what_cannot_be_is_refused(
        self, lab: Commands, weights: dict[str, torch.Tensor], options: list[str], named: str
    ) -> None:
        Path("like").mkdir()
        Path("like/config.json").write_text("{}")
        if weights:
            safetensors.torch.save_file(weights, "like/model.safetensors")
        assert named in lab.fails(*EXPORT, "out", "--like", "like", *options)
        assert not Path("out").exists()

    def test_a_folder_is_never_overwritten(self, lab: Commands) -> None:
        for name in ("like", "out"):
            Path(name).mkdir()
        Path("like/config.json").write_text("{}")
        safetensors.torch.save_file(floats(), "like/model.safetensors")
        assert "out exists" in lab.fails(*EXPORT, "out", "--like", "like")
        assert not list(Path("out").iterdir())
