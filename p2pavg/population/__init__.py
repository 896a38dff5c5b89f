"""Population based training: members train with different hyperparameters and copy the best, without a coordinator."""

from p2pavg.population.history import Ancestor, Generation, GenerationReport, History
from p2pavg.population.population import Population
from p2pavg.population.rules import check_decision, decide
from p2pavg.population.settings import Choice, LogUniform, PopulationSettings, Uniform
from p2pavg.population.words import Decision, Standing, Word

__all__ = [
    "Ancestor",
    "Choice",
    "Decision",
    "Generation",
    "GenerationReport",
    "History",
    "LogUniform",
    "Population",
    "PopulationSettings",
    "Standing",
    "Uniform",
    "Word",
    "check_decision",
    "decide",
]
