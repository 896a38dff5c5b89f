"""Random messages of hostile members: a short run of ``scripts/faults fuzz``, and a test that it finds bugs."""

from __future__ import annotations

from collections.abc import Iterator
from itertools import count

import pytest
import torch

from p2pavg.allreduce import reduction
from p2pavg.group.shares import part_size
from scripts.fault_search import fuzz
from tests.programs import run_python


@pytest.fixture
def as_before(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Put back what the runs set in this process."""
    monkeypatch.setattr(reduction, "part_size", part_size)
    threads = torch.get_num_threads()
    yield
    torch.set_num_threads(threads)


@pytest.mark.usefixtures("as_before")
def test_valid_looking_messages_in_random_order_harm_no_honest_peer() -> None:
    messages, seeds = 0, count()
    while messages < 300:
        seed, sent, _, wrong = fuzz.one(next(seeds))
        assert not wrong, f"{wrong}; again: scripts/faults fuzz --seed {seed} --log"
        messages += sum(sent.values())


@pytest.mark.long
def test_rule_that_raises_on_a_vote_is_found_and_its_seed_printed() -> None:
    """It is a bug although it only excludes the member that sent the vote."""
    broken = (
        "import p2pavg.round.voting as e, scripts.fault_search.fuzz as f, sys\n"
        "real = e.advance\n"
        "def advance(member, event):\n"
        "    if type(getattr(event, 'vote', None)).__name__ == 'StaleBallot': raise KeyError('wrong')\n"
        "    return real(member, event)\n"
        "e.advance = advance\n"
        "f.KINDS = ('votes',)\n"
        "sys.argv[1:] = ['--messages', '300', '--processes', '1']\n"
        "sys.exit(f.main())\n"
    )
    done = run_python("-c", broken)
    assert done.returncode == 1, done.stdout + done.stderr
    assert "scripts/faults fuzz --seed" in done.stdout
    assert "KeyError" in done.stdout
