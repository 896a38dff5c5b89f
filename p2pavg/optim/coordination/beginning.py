"""Beginning of a peer's run: with its own first parameters, or from a loaded state."""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import Any

import torch

from p2pavg.base.errors import RemoteProtocolError
from p2pavg.optim.base.recipe import VERSION, Recipe, Settings
from p2pavg.optim.base.state import (
    Lineage,
    Origin,
    digest_in,
    digest_of,
    lineage_from,
    origin_of,
    pack_lineage,
    pack_origin,
)
from p2pavg.optim.coordination.together import RoundCoordinator
from p2pavg.optim.coordination.word import RecipeRecord
from p2pavg.optim.ranks.shards import Ranks

logger = logging.getLogger(__name__)


class Beginning:
    """The beginning of one optimizer's run, which sets the lineage and the origin of its parameters.

    A run begins at the first step. Loading a state makes the next step begin again.

    Args:
        together: the optimizer's coordination with the other peers.
        ranks: the ranks of this peer.
        recipe: returns the recipe with the present settings.
        parameters: returns the present parameters, or this process's part of them.
    """

    def __init__(
        self,
        together: RoundCoordinator,
        ranks: Ranks,
        *,
        recipe: Callable[[], Recipe],
        parameters: Callable[[], Sequence[torch.Tensor]],
    ) -> None:
        self._together = together
        self._ranks = ranks
        self._recipe = recipe
        self._parameters = parameters
        self.has_begun = False
        self._origin: Origin | None = None
        self._loaded: Mapping[str, Any] | None = None
        """The state that was loaded since the last step."""
        if ranks.are_several:
            together.is_at(self._as_one(together.run.lineage))

    def begin(self) -> bool:
        """Begin with the present parameters; return whether they changed since the optimizer was made.

        Raises:
            ValueError: a state was loaded, and the parameters are not those that were saved with it.
        """
        recipe, parameters = self._recipe(), digest_of(self._parameters())
        changed = False
        loaded = self._loaded
        is_first = loaded is not None and not self._together.run.lineage.epoch
        if loaded is not None and is_first and not self._ranks.all_agree(_is_of(loaded, parameters)):
            loaded = None
        if loaded is None:
            changed = self._begin_anew(parameters, recipe)
            self._origin = _origin(parameters, recipe)
        else:
            self._origin = self._go_on(loaded, parameters, recipe)
        self.has_begun, self._loaded = True, None
        return changed

    def _begin_anew(self, parameters: bytes, recipe: Recipe) -> bool:
        first = self._as_one(lineage_from(parameters, recipe.digest))
        changed = first != self._together.run.lineage
        if changed:
            logger.info(
                "the parameters were changed after this optimizer was made: the run begins with them as they are now"
            )
            self._together.is_at(first)
        return changed

    def _go_on(self, loaded: Mapping[str, Any], parameters: bytes, recipe: Recipe) -> Origin:
        """Continue from a loaded state; return its origin."""
        saved = origin_of(loaded)
        if not self._ranks.all_agree(_is_of(loaded, parameters)):
            raise ValueError(
                "the parameters are not those that the state was saved with: load the model's state that was saved"
                " beside the optimizer's"
            )
        if self._ranks.all_agree(saved.rules == recipe.rules_digest):
            if saved.recipe not in (recipe.digest, self._origin and self._origin.recipe):
                # A rate in this program may be meant to be another one: it must not be replaced without a word.
                logger.warning(
                    "the run began with %s; the hyperparameters are those of the run's state now",
                    _told_differences(saved, recipe, recipe.numbers),
                )
            return saved
        logger.warning(
            "the state was saved by a peer with other settings; this peer continues with its own settings, and only"
            " with peers that do the same"
        )
        rules = bytes.fromhex(self._ranks.as_one(recipe.rules_digest.hex()))
        self._together.is_at(self._together.run.lineage.with_rules(rules))
        return _origin(saved.parameters, recipe)

    def load(self, state: Mapping[str, Any], lineage: Lineage) -> None:
        """Continue from a loaded state.

        The parameters are compared with it at the next step, since they may be loaded later. A state without an update
        belongs to no parameters: if the next step has others, the run begins with those.
        """
        self._together.is_at(lineage)
        self._loaded, self.has_begun = state, False

    def refusal(self, state: Mapping[str, Any], *, is_own: bool) -> str | None:
        """Return the reason for which this peer cannot continue from a state: other settings; or ``None``.

        Args:
            is_own: true for this peer's own checkpoint, false for a state of another peer.

        Raises:
            ValueError: ``state`` is malformed.
        """
        saved, recipe = origin_of(state), self._recipe()
        try:
            self._word_of(saved).normalised()  # this peer would publish it, and shows its texts
        except (RemoteProtocolError, ValueError) as error:
            raise ValueError(f"state: its origin is {error}") from None
        # The next version of a program begins where the one before has ended, and may have other settings.
        is_next = is_own and dict(saved.fields).get(VERSION) != dict(recipe.fields).get(VERSION)
        if is_next or saved.rules == recipe.rules_digest:
            return None
        return f"the run trains with {_told_differences(saved, recipe, recipe.rules)}"

    def has_other_rules(self, state: Mapping[str, Any]) -> bool:
        """Return whether a state was saved with other rules than this peer's; raise ValueError if it is malformed."""
        return origin_of(state).rules != self._recipe().rules_digest

    @property
    def rules(self) -> frozenset[str]:
        """Names of the settings that never change during the optimizer's life."""
        return frozenset(name for name, _ in self._recipe().rules)

    def word(self) -> RecipeRecord:
        """Return the record that describes this peer's origin and parameters to the others."""
        return self._word_of(self._present_origin())

    def _word_of(self, origin: Origin) -> RecipeRecord:
        parameters = self._parameters()
        return RecipeRecord(
            recipe=origin.recipe,
            origin=origin.parameters,
            tensors=len(parameters),
            elements=sum(tensor.numel() for tensor in parameters),
            fields=origin.fields,
        )

    def saved(self) -> dict[str, Any]:
        """Return the lineage and the origin as plain values, for a saved state."""
        lineage, origin = self._together.run.lineage, self._present_origin()
        if not self.has_begun and self._loaded is None:
            lineage = self._as_one(lineage_from(origin.parameters, origin.recipe))
        return {"lineage": pack_lineage(lineage), "origin": pack_origin(origin)}

    def _present_origin(self) -> Origin:
        if self._loaded is not None:
            return origin_of(self._loaded)
        if self.has_begun and self._origin is not None:
            return self._origin
        return _origin(digest_of(self._parameters()), self._recipe())

    def _as_one(self, lineage: Lineage) -> Lineage:
        """Return one common lineage for all ranks of this peer."""
        return replace(lineage, state=bytes.fromhex(self._ranks.as_one(lineage.state.hex())))


def _is_of(loaded: Mapping[str, Any], parameters: bytes) -> bool:
    """Return whether a loaded state was saved with these parameters, as far as it tells."""
    return loaded.get("parameters") is None or digest_in(loaded, "parameters") == parameters


def _told_differences(saved: Origin, recipe: Recipe, settings: Settings) -> str:
    """Return the settings of a loaded state's run that are not this peer's, as a part of a sentence."""
    names = {name for name, _ in settings}
    its, own = dict(saved.fields), dict(recipe.fields)
    told = [
        f"{name} {its.get(name, 'none')}, this peer with {own.get(name, 'none')}"
        for name in {**own, **its}
        if name in names and its.get(name) != own.get(name)
    ]
    return "; ".join(told) or "other settings, which are too many or too long to tell"


def _origin(parameters: bytes, recipe: Recipe) -> Origin:
    return Origin(
        parameters=parameters,
        recipe=recipe.digest,
        rules=recipe.rules_digest,
        fields=recipe.fields,
        settings=recipe.packed,
    )
