"""The levels of the dynamic data type and the tables made from them."""

import hashlib

import numpy as np
import torch

from p2pavg_compression.kernels import CODE_OF_HALF, LEVEL_PAIRS, LEVELS, dynamic_levels


def test_levels_are_frozen() -> None:
    """If the last bit of a level changed, peers of different versions would decode different bits."""
    digest = "e732639a65f497b4ad684bb166a4467708255edd5207757de8b8f0c7e1fda89c"
    assert hashlib.sha256(dynamic_levels().tobytes()).hexdigest() == digest
    assert hashlib.sha256(LEVELS.numpy().tobytes()).hexdigest() == digest


def test_levels_are_those_of_bitsandbytes() -> None:
    """With AVX2 or better, equal bit for bit; without, bitsandbytes differs by two units in the last place."""
    from bitsandbytes.functional import create_dynamic_map

    theirs = create_dynamic_map()  # type: ignore[no-untyped-call]
    units_apart = (theirs.view(torch.int32) - LEVELS.view(torch.int32)).abs().max().item()
    assert units_apart <= (0 if torch.backends.cpu.get_cpu_capability().startswith("AVX") else 2)


def test_every_half_precision_number_gets_its_nearest_level() -> None:
    halves = np.arange(65_536, dtype=np.uint16).view(np.float16)
    finite = np.isfinite(halves)
    values = halves[finite].astype(np.float64)
    levels = dynamic_levels().astype(np.float64)
    chosen = levels[CODE_OF_HALF.numpy()[finite]]
    nearest = np.abs(values[:, None] - levels).min(axis=1)
    np.testing.assert_array_equal(np.abs(values - chosen), nearest)
    assert np.all(chosen[values == 0] == 0)


def test_pairs_decode_as_two_codes() -> None:
    # The bytes of an int64 range: all pairs of its low bytes.
    codes = torch.arange(65_536 * 2).view(torch.uint8)
    pairs = LEVEL_PAIRS[codes.view(torch.uint16).to(torch.int64)].view(torch.float32)
    assert torch.equal(pairs, LEVELS[codes.to(torch.int64)])
    assert torch.equal(LEVEL_PAIRS.view(torch.float32)[::2].view(256, 256), LEVELS.expand(256, 256))
