"""The decisions of population based training, from what the members have signed. No I/O, no clock, no random source.

At the end of each generation a member publishes its score and its hyperparameters (its *word*), and decides by itself:

1. :func:`counted` chooses the words of others that count: of the same settings, with hyperparameters in their ranges,
   and not too far behind.
2. :func:`decide` says whether the member copies another one (exploit), and with which hyperparameters it goes on
   (explore). All draws follow from the digests of these words and the member's own, so any peer that has the words
   comes to the same decision.
3. The member publishes the decision, with the digests of the words on which it rests. :func:`check_decision` repeats
   it.

A member can choose on which words it decides. It harms itself only: its decisions change its own weights.

References: Jaderberg et al. 2017 ("Population Based Training of Neural Networks"), section 3 and appendix A. Quantiles
and perturbations are those of Ray Tune.
"""

from __future__ import annotations

import math
import statistics
from collections.abc import Collection, Mapping
from dataclasses import dataclass

from p2pavg.base.messages import pack
from p2pavg.population.settings import Draws, PopulationSettings, Value
from p2pavg.population.words import MAX_BASIS, MAX_SCORE, Decision, Standing, Word, in_order

_DRAWS = "p2pavg/population/decision/1"


@dataclass(frozen=True, slots=True)
class Counted:
    """The words of other peers, as one member takes them."""

    words: Mapping[str, Standing]
    """Those that count, by peer id."""
    refused: Mapping[str, str]
    """The reason for which the others do not, by peer id."""


def counted(mine: Standing, words: Mapping[str, Standing], settings: PopulationSettings) -> Counted:
    """Return the words that count in a decision.

    Args:
        mine: the word of the member that decides.
        words: of other peers, by peer id.
    """
    refused = {peer: why for peer, word in words.items() if (why := _why_not(mine, word, settings))}
    fit = {peer: word for peer, word in words.items() if peer not in refused}
    # Of the median, not of the member that is furthest: one that claims any number of steps changes nothing.
    usual = statistics.median_low([mine.steps, *(word.steps for word in fit.values())])
    for peer, word in list(fit.items()):
        behind = (usual - word.steps) / settings.interval
        if behind > settings.max_lag:
            refused[peer] = f"its training is {behind:.0f} generations behind, max_lag is {settings.max_lag}"
            del fit[peer]
    if len(fit) > MAX_BASIS:  # as good as a random sample
        chosen = sorted(fit, key=lambda peer: fit[peer].digest)
        refused |= dict.fromkeys(chosen[MAX_BASIS:], f"a decision rests on {MAX_BASIS} words")
        fit = {peer: fit[peer] for peer in chosen[:MAX_BASIS]}
    # Two peers with the same word: nothing tells which one is meant.
    unique = {word.digest: peer for peer, word in sorted(fit.items(), reverse=True)}
    refused |= dict.fromkeys(fit.keys() - unique.values(), "another peer has published the same word")
    return Counted({peer: fit[peer] for peer in sorted(unique.values())}, refused)


def _why_not(mine: Standing, word: Standing, settings: PopulationSettings) -> str:
    if word.settings != settings.digest:
        return "its population has other settings"
    if word.member == mine.member:
        return "it belongs to the same member of the population"
    if abs(word.score) >= MAX_SCORE:
        return "its training has diverged"
    return "" if is_of(word, settings) else "its hyperparameters are not in their ranges"


def is_of(word: Standing, settings: PopulationSettings) -> bool:
    """Return whether a word has these settings, and hyperparameters in their ranges."""
    found = dict(word.hyperparameters)
    return (
        word.settings == settings.digest
        and found.keys() == settings.space.keys()
        and all(settings.space[name].holds(value) for name, value in found.items())
    )


def decide(
    me: str,
    mine: Standing,
    others: Mapping[str, Standing],
    settings: PopulationSettings,
    *,
    failed: Collection[bytes] = (),
) -> tuple[Decision, str]:
    """Return the decision of a member at the end of a generation, and its cause as a sentence, which is not published.

    Args:
        me: peer id of the member that decides.
        mine: its word.
        others: the words that count, by peer id, at most 64.
        failed: digests of words whose weights this member could not copy.
    """
    basis = tuple(sorted(word.digest for word in others.values()))
    draws = Draws(pack(_DRAWS, settings.digest, me, mine.digest, basis))
    barred = set(failed)
    choose = _tournament if settings.exploit == "tournament" else _truncation
    donor, reason = choose(me, mine, others, settings, draws, barred)
    its = others[donor] if donor is not None else mine
    hyperparameters = dict(its.hyperparameters)
    if donor is not None:
        hyperparameters = explored(hyperparameters, settings, draws)
    made = Decision(
        donor=b"" if donor is None else its.digest,
        hyperparameters=in_order(hyperparameters),
        basis=basis,
        failed=tuple(sorted(barred & set(basis))),
    )
    return made, reason


def worst(settings: PopulationSettings) -> float:
    """Return the score that a member publishes whose own is not finite. It counts in no other member's decision."""
    return MAX_SCORE if settings.mode == "min" else -MAX_SCORE


def quantile_size(members: int, quantile: float) -> int:
    """Return the number of members in the lowest and in the highest quantile: rounded up, half of them at most."""
    return min(math.ceil(members * quantile), members // 2)


def ranked(words: Mapping[str, Standing], settings: PopulationSettings) -> list[str]:
    """Return peer ids in the order of their scores, the best last. Equal scores are in the order of peer ids."""
    sign = -1.0 if settings.mode == "min" else 1.0
    return sorted(words, key=lambda peer: (sign * words[peer].score, peer))


def _truncation(
    me: str,
    mine: Standing,
    others: Mapping[str, Standing],
    settings: PopulationSettings,
    draws: Draws,
    failed: Collection[bytes],
) -> tuple[str | None, str]:
    words = {**others, me: mine}
    order = ranked(words, settings)
    size = quantile_size(len(order), settings.quantile)
    place = f"its score is number {len(order) - order.index(me)} of {len(order)}"
    if not size:
        return None, "no word of another member counts"
    if me not in order[:size]:
        return None, f"{place}, above the lowest {size}"
    able = [
        peer
        for peer in order[-size:]
        if settings.better(words[peer].score, mine.score) and words[peer].digest not in failed
    ]
    if not able:
        return None, f"{place}, and none of the highest {size} is better and can be copied"
    donor = draws.choose(able)
    return donor, f"{place}, among the lowest {size}; drawn from the highest {size}: {words[donor].member}"


def _tournament(
    _me: str,
    mine: Standing,
    others: Mapping[str, Standing],
    settings: PopulationSettings,
    draws: Draws,
    failed: Collection[bytes],
) -> tuple[str | None, str]:
    able = [peer for peer in sorted(others) if others[peer].digest not in failed]
    if not able:
        return None, "no word of another member counts"
    rival = draws.choose(able)
    its = others[rival]
    if not settings.better(its.score, mine.score):
        return None, f"drew {its.member}, whose score {its.score:g} is not better than {mine.score:g}"
    return rival, f"drew {its.member}, whose score {its.score:g} is better than {mine.score:g}"


def explored(
    hyperparameters: Mapping[str, Value], settings: PopulationSettings, draws: Draws
) -> dict[str, Value]:
    """Return hyperparameters that were copied, as the member that copied them goes on with them."""
    found: dict[str, Value] = {}
    for name, range_ in settings.space.items():
        # The number of draws is always the same, so that one hyperparameter's draws do not depend on another's.
        again, fraction, side = draws.fraction(), draws.fraction(), draws.fraction()
        if settings.explore == "resample" or again < settings.resample_probability:
            found[name] = range_.draw(fraction)
        else:
            factor = settings.factors[int(fraction * len(settings.factors))]
            found[name] = range_.perturbed(hyperparameters[name], factor, side)
    return found


def check_decision(
    peer_id: str, word: Word, known: Mapping[bytes, tuple[str, Standing]], settings: PopulationSettings
) -> str:
    """Return why a published decision does not follow from the published words; empty if it does.

    Args:
        peer_id: the publisher of the word.
        word: has a decision.
        known: words that were published, with their publishers, by digest.

    Raises:
        ValueError: the word has no decision, or some words on which it rests are not known.
    """
    made = word.decision
    if made is None:
        raise ValueError("the word has no decision")
    if lacking := [digest for digest in made.basis if digest not in known]:
        raise ValueError(f"{len(lacking)} of the {len(made.basis)} words on which it rests are not known")
    others = dict(known[digest] for digest in made.basis)
    if len(others) != len(made.basis):
        return "it rests on two words of one peer"
    if any(_why_not(word.standing, other, settings) for other in others.values()):
        return "it rests on a word that does not count"
    again, reason = decide(peer_id, word.standing, others, settings, failed=made.failed)
    if again.donor != made.donor:
        return f"from the same words it follows that {reason}"
    if again.hyperparameters != made.hyperparameters:
        return "the hyperparameters with which it goes on do not follow from the same words"
    return ""
