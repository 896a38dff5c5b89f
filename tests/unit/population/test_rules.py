"""Decisions follow from the published words, and from nothing else."""

from __future__ import annotations

import math
from collections import Counter
from dataclasses import replace
from itertools import pairwise
from typing import Any

import pytest
from msgspec import structs

from p2pavg.population import Decision, PopulationSettings, Standing, Word, check_decision, decide
from p2pavg.population.rules import counted, quantile_size, ranked, worst
from p2pavg.population.settings import Value
from p2pavg.population.words import MAX_BASIS, MAX_SCORE
from tests.unit.population.samples import SETTINGS, population, standing

Pair = tuple[dict[str, Value], dict[str, Value]]
LOSSES = [0.1, 0.2, 0.3, 0.4, 0.5, 0.6, 0.7, 0.8]


def others(words: dict[str, Standing], me: str) -> dict[str, Standing]:
    return {peer: word for peer, word in words.items() if peer != me}


def decided(
    words: dict[str, Standing], me: str, settings: PopulationSettings = SETTINGS, **options: Any
) -> tuple[Decision, str]:
    """Return the decision of one of the members, and its cause."""
    return decide(me, words[me], others(words, me), settings, **options)


def known(words: dict[str, Standing]) -> dict[bytes, tuple[str, Standing]]:
    return {word.digest: (peer, word) for peer, word in words.items()}


class TestTruncation:
    """Ray Tune's semantics of the quantiles."""

    @pytest.mark.parametrize(
        ("members", "quantile", "size"),
        [(1, 0.25, 0), (2, 0.25, 1), (4, 0.25, 1), (5, 0.25, 2), (8, 0.25, 2), (9, 0.5, 4), (10, 0.5, 5)],
    )
    def test_a_quantile_is_rounded_up_and_at_most_half(
        self, members: int, quantile: float, size: int
    ) -> None:
        assert quantile_size(members, quantile) == size

    def test_only_the_lowest_quantile_copies_and_only_the_highest_is_copied(self) -> None:
        words = population(LOSSES)
        best = {words[f"peer {number}"].digest for number in (0, 1)}
        for number in range(8):
            made, reason = decided(words, f"peer {number}")
            if number < 6:
                assert made.donor == b""
                assert made.hyperparameters == words[f"peer {number}"].hyperparameters
                assert "above the lowest 2" in reason
            else:
                assert made.donor in best
                assert "among the lowest 2" in reason

    def test_a_higher_score_is_better_with_max(self) -> None:
        settings = replace(SETTINGS, mode="max")
        words = population(LOSSES, settings=settings)
        made, _ = decided(words, "peer 0", settings)
        assert made.donor in {words["peer 6"].digest, words["peer 7"].digest}
        assert ranked(words, settings)[-1] == "peer 7"

    def test_no_member_copies_one_that_is_not_better(self) -> None:
        words = population([0.5, 0.5, 0.5, 0.5])
        for peer in words:
            assert decided(words, peer)[0].donor == b""

    def test_alone_there_is_nothing_to_copy(self) -> None:
        made, reason = decide("peer 0", standing(0, 0.5), {}, SETTINGS)
        assert made.donor == b""
        assert reason == "no word of another member counts"

    def test_a_donor_that_failed_is_not_drawn_again(self) -> None:
        words = population(LOSSES)
        first, _ = decided(words, "peer 7")
        second, _ = decided(words, "peer 7", failed={first.donor})
        assert second.donor not in (b"", first.donor)
        third, _ = decided(words, "peer 7", failed={first.donor, second.donor})
        assert third.donor == b""
        assert third.failed == tuple(sorted((first.donor, second.donor)))


class TestTournament:
    settings = replace(SETTINGS, exploit="tournament")

    def test_a_member_copies_the_one_that_it_draws_if_that_is_better(self) -> None:
        outcomes: Counter[bool] = Counter()
        for number in range(200):
            words = population([0.1, 0.2, 0.3], settings=self.settings, root=number.to_bytes(32, "big"))
            made, _ = decided(words, "peer 1", self.settings)
            assert made.donor in (b"", words["peer 0"].digest)
            outcomes[bool(made.donor)] += 1
            assert decided(words, "peer 0", self.settings)[0].donor == b""
        assert 70 < outcomes[True] < 130

    def test_no_other_member_is_no_decision(self) -> None:
        word = standing(0, 0.5, settings=self.settings)
        assert decide("peer 0", word, {}, self.settings)[1] == "no word of another member counts"


class TestExploring:
    def copies(self, settings: PopulationSettings, times: int = 300) -> list[Pair]:
        """Return the donor's hyperparameters and those that were made of them."""
        found = []
        for number in range(times):
            words = population([0.1, 0.9], settings=settings, root=number.to_bytes(32, "big"))
            made, _ = decided(words, "peer 1", settings)
            assert made.donor == words["peer 0"].digest
            found.append((dict(words["peer 0"].hyperparameters), dict(made.hyperparameters)))
        return found

    def test_a_perturbation_multiplies_by_one_of_the_factors_inside_the_range(self) -> None:
        found = self.copies(replace(SETTINGS, resample_probability=0.0))
        for before, after in found:
            for name, (low, high) in {"lr": (1e-4, 1.0), "momentum": (0.0, 0.99)}.items():
                value = before[name]
                assert isinstance(value, float)
                expected = [min(max(value * factor, low), high) for factor in (0.8, 1.2)]
                new = float(after[name])
                assert any(math.isclose(new, each, rel_tol=1e-5) for each in expected)
        ups = sum(after["lr"] > before["lr"] for before, after in found)  # type: ignore[operator]
        assert 110 < ups < 190

    def test_a_choice_goes_to_a_neighbour(self) -> None:
        found = self.copies(replace(SETTINGS, resample_probability=0.0))
        steps = Counter(
            "abc".index(str(after["kind"])) - "abc".index(str(before["kind"])) for before, after in found
        )
        assert set(steps) <= {-1, 0, 1}
        assert len(steps) == 2, "it goes to both sides, or stays at an end"

    def test_hyperparameters_are_drawn_anew_with_the_probability(self) -> None:
        found = self.copies(replace(SETTINGS, factors=(1.0,)), times=600)
        drawn = sum(after["lr"] != before["lr"] for before, after in found)
        assert 110 < drawn < 190, "a quarter of 600"

    def test_resampling_draws_all_anew(self) -> None:
        found = self.copies(replace(SETTINGS, explore="resample", resample_probability=0.0))
        assert all(after["lr"] != before["lr"] for before, after in found)
        logs = sorted(math.log10(float(after["lr"])) for _, after in found)
        assert -2.4 < logs[150] < -1.6, "the middle of 1e-4 to 1, by its logarithm"
        assert all(1e-4 <= float(after["lr"]) <= 1.0 for _, after in found)


class TestCounted:
    mine = standing(0, 0.5)

    @pytest.mark.parametrize(
        ("word", "why"),
        [
            (standing(1, 0.4), ""),
            (standing(1, 0.4, settings=replace(SETTINGS, seed=1)), "its population has other settings"),
            (standing(0, 0.4), "it belongs to the same member of the population"),
            (standing(1, worst(SETTINGS)), "its training has diverged"),
            (standing(1, -MAX_SCORE), "its training has diverged"),
            *(
                (standing(1, 0.4, hyperparameters=pairs), "its hyperparameters are not in their ranges")
                for pairs in (
                    (("kind", "a"), ("lr", 2.0), ("momentum", 0.5)),
                    (("kind", "d"), ("lr", 0.1), ("momentum", 0.5)),
                    (("kind", "a"), ("lr", 0.1)),
                    (("kind", "a"), ("lr", 0.1), ("momentum", 0.5), ("other", 1.0)),
                    (("kind", "a"), ("lr", 1), ("momentum", 0.5)),
                )
            ),
        ],
    )
    def test_a_word_that_does_not_fit_is_refused(self, word: Standing, why: str) -> None:
        found = counted(self.mine, {"other": word}, SETTINGS)
        assert found.refused.get("other", "") == why
        assert bool(found.words) != bool(why)

    def test_training_that_is_too_far_behind_the_usual(self) -> None:
        words = {f"peer {number}": standing(number, 0.5, steps=1000) for number in range(1, 5)}
        words["late"] = standing(9, 0.5, steps=1000 - 51)
        words["just"] = standing(10, 0.5, steps=1000 - 50)
        found = counted(standing(0, 0.5, steps=1000), words, SETTINGS)
        assert found.refused == {"late": "its training is 5 generations behind, max_lag is 5"}

    def test_a_claim_of_any_number_of_steps_makes_no_other_word_old(self) -> None:
        words = {f"peer {number}": standing(number, 0.5, steps=100) for number in range(1, 4)}
        words["liar"] = standing(9, 0.5, steps=2**50)
        found = counted(standing(0, 0.5, steps=100), words, SETTINGS)
        assert found.refused == {}

    def test_at_most_so_many_words_are_a_basis(self) -> None:
        words = {f"peer {number}": standing(number, 0.5) for number in range(1, 2 * MAX_BASIS)}
        found = counted(self.mine, words, SETTINGS)
        assert len(found.words) == MAX_BASIS
        assert len(found.refused) == MAX_BASIS - 1

    def test_a_word_that_another_peer_has_copied_counts_once(self) -> None:
        word = standing(1, 0.4)
        found = counted(self.mine, {"a": word, "b": word}, SETTINGS)
        assert len(found.words) == 1


class TestChecking:
    """Any observer can reproduce a decision."""

    words = population(LOSSES)

    def made(self, me: str = "peer 7") -> Word:
        mine = self.words[me]
        return Word(standing=mine, decision=decide(me, mine, others(self.words, me), SETTINGS)[0])

    def test_each_decision_follows_from_the_words(self) -> None:
        for peer in self.words:
            assert check_decision(peer, self.made(peer), known(self.words), SETTINGS) == ""

    def test_it_does_not_depend_on_the_order_of_the_words(self) -> None:
        backwards = dict(reversed(list(self.words.items())))
        assert decided(backwards, "peer 7")[0] == self.made().decision

    def test_another_donor_or_other_hyperparameters_do_not_follow(self) -> None:
        word = self.made()
        assert word.decision is not None
        for decision in (
            structs.replace(word.decision, donor=b""),
            structs.replace(word.decision, donor=self.words["peer 4"].digest),
            structs.replace(word.decision, hyperparameters=self.words["peer 3"].hyperparameters),
        ):
            changed = structs.replace(word, decision=decision)
            assert check_decision("peer 7", changed, known(self.words), SETTINGS) != ""

    def test_a_decision_of_another_peer_does_not_follow(self) -> None:
        # A name changes the draws: some of these names make another decision.
        wrong = [check_decision(f"stranger {n}", self.made(), known(self.words), SETTINGS) for n in range(8)]
        assert any(wrong)

    def test_words_that_do_not_count_are_no_basis(self) -> None:
        words = {**self.words, "peer 0": standing(0, 0.1, settings=replace(SETTINGS, seed=9))}
        mine = words["peer 7"]
        word = Word(standing=mine, decision=decide("peer 7", mine, others(words, "peer 7"), SETTINGS)[0])
        assert (
            check_decision("peer 7", word, known(words), SETTINGS) == "it rests on a word that does not count"
        )

    def test_unknown_words_are_no_verdict(self) -> None:
        with pytest.raises(ValueError, match="7 of the 7 words on which it rests are not known"):
            check_decision("peer 7", self.made(), {}, SETTINGS)

    def test_scores_decide_in_their_order_whatever_their_size(self) -> None:
        order = ranked(population([3.0, -1.0, 1e99, 0.0]), SETTINGS)
        assert order == ["peer 2", "peer 0", "peer 3", "peer 1"]
        assert all(one != other for one, other in pairwise(order))
