"""The table of the recipes that a federated strategy can name. Their options are read from their signatures."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from inspect import Parameter, signature
from types import MappingProxyType

from p2pavg.base.errors import ConfigError
from p2pavg.optim import LocalUpdates, MixedUpdates
from p2pavg.optim.local import recipes
from p2pavg.strategies.checks import MAX_NUMBER, is_number


class NamedRecipe:
    """A function of :mod:`p2pavg.optim` that makes an optimizer with the rule of a paper.

    Its options in a strategy are its arguments that are annotated as ``float`` or ``float | None``.

    Args:
        make: the function. Its name is that of the rule.
        needs: what an option without a default is, for the error that it is missing.
    """

    def __init__(self, make: Callable[..., LocalUpdates], needs: str = "") -> None:
        found = signature(make, eval_str=True)
        self.make = make
        self.name = make.__name__
        self.mixes = found.return_annotation is MixedUpdates
        """True if each round has a few peers only."""
        numbers = {
            n: each for n, each in found.parameters.items() if each.annotation in (float, float | None)
        }
        self.options = (*numbers, *(("group_size",) if self.mixes else ()))
        """Names of the options, which are numbers."""
        self._required = [name for name, each in numbers.items() if each.default is Parameter.empty]
        self._needs = needs

    def check(self, given: object) -> None:
        """Raise ConfigError unless this is a table of options of the recipe, all in range."""
        if not isinstance(given, Mapping):
            raise ConfigError(f"options must be a table of numbers, got {type(given).__name__}")
        for name, value in given.items():
            if name not in self.options:
                allowed = ", ".join(self.options) or "none"
                raise ConfigError(f"options.{name} is unknown; {self.name} has {allowed}")
            if not is_number(value) or not 0 <= value <= MAX_NUMBER:
                raise ConfigError(f"options.{name} must be a number from 0, got {value!r}")
        if missing := [name for name in self._required if name not in given]:
            raise ConfigError(f"options.{missing[0]} is missing: {self.name} needs {self._needs}")


RECIPES: Mapping[str, NamedRecipe] = MappingProxyType(
    {
        each.name: each
        for each in (
            NamedRecipe(recipes.diloco),
            NamedRecipe(recipes.sparseloco),
            NamedRecipe(recipes.fedavg),
            NamedRecipe(recipes.fedprox, needs="the strength of its pull"),
            NamedRecipe(recipes.fedadagrad),
            NamedRecipe(recipes.fedadam),
            NamedRecipe(recipes.fedyogi),
            NamedRecipe(recipes.gossip),
            NamedRecipe(recipes.noloco),
        )
    }
)
"""The recipes by name, in the order of error messages."""
