"""The settings of a peer's state: what is refused, and one object for one optimizer."""

from __future__ import annotations

from pathlib import Path
from typing import Any, cast

import pytest
from torch.optim import SGD

from p2pavg.optim import RunState
from p2pavg.optim.catching_up.checkpoints import Checkpoints
from p2pavg.optim.catching_up.run_state import model_of, run_state_of
from tests.unit.optim.fakes import Alone, local
from tests.unit.optim.loops import small


@pytest.mark.parametrize(
    ("name", "value"),
    [
        *[(name, value) for name in ("every", "keep", "log_bytes") for value in (0, -1, 1.5, True, "1")],
        *[
            (name, value)
            for name in ("upload_mbps", "download_mbps")
            for value in (0.0, -1.0, float("nan"), True, "1")
        ],
    ],
)
def test_argument_out_of_range_is_named(name: str, value: Any, tmp_path: Path) -> None:
    with pytest.raises((ValueError, TypeError), match=name):
        RunState(small(), tmp_path, **{name: value})


@pytest.mark.parametrize(
    ("arguments", "error", "text"),
    [
        ({"model": small(), "every": 10}, ValueError, "every needs a directory"),
        ({"directory": "here"}, ValueError, "directory needs the model"),
        ({"model": [small()]}, TypeError, "model must be a torch"),
    ],
)
def test_what_an_argument_needs_is_named(
    arguments: dict[str, Any], error: type[Exception], text: str
) -> None:
    with pytest.raises(error, match=text):
        RunState(**arguments)


def test_one_object_serves_one_optimizer() -> None:
    model = small()
    inner, state = SGD(model.parameters(), lr=0.1), RunState(model)
    with pytest.raises(ValueError, match="the model of the RunState"):
        local(Alone(), inner, state=state, model=small())
    local(Alone(), inner, state=state)
    with pytest.raises(ValueError, match="belongs to another optimizer"):
        local(Alone(), inner, state=state)


def test_the_model_of_an_optimizer_is_that_of_its_state() -> None:
    model = small()
    state = RunState(model)
    assert model_of(None, state) is model_of(model, state) is model_of(model, None) is model


def test_a_model_stands_for_its_run_state() -> None:
    model = small()
    found = run_state_of(model)
    assert isinstance(found, RunState)
    assert found.model is model
    assert found.directory is None
    assert run_state_of(found) is found
    with pytest.raises(TypeError, match="or False to share no states, got str"):
        run_state_of(cast(RunState, "run-state"))


def test_states_are_shared_unless_the_caller_says_false() -> None:
    found = run_state_of(None)
    assert isinstance(found, RunState)
    assert found.model is None
    assert run_state_of(False) is None
    model = small()
    assert model_of(model, found) is model
    assert model_of(None, found) is None


def test_nothing_is_made_before_it_is_needed(tmp_path: Path) -> None:
    RunState(small(), tmp_path / "run-state", every=1)
    assert not (tmp_path / "run-state").exists()


def test_a_copy_in_a_folder_shares_the_extras_also_new_ones(tmp_path: Path) -> None:
    state = RunState(small(), tmp_path)
    inside = state.inside("cell-1")
    state.extras = {"position": 1}
    assert inside.extras == {"position": 1}
    inside.extras = {"position": 2}  # those of a checkpoint
    assert state.extras is inside.extras
    assert RunState(small()).extras == {}


@pytest.mark.parametrize("continues", [True, False])
def test_a_checkpoint_is_left_alone_if_the_peer_does_not_continue_from_it(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, continues: bool
) -> None:
    """A damaged one is named when it is read."""
    folder = tmp_path / "cell-1"
    folder.mkdir()
    (folder / "update-000000000007.safetensors").write_bytes(b"damaged")
    settings = RunState(small(), tmp_path).inside("cell-1", continues=continues)
    Checkpoints(settings, *cast(Any, (None, None, None, None))).load_newest()
    assert ("this checkpoint is not used" in caplog.text) == continues
