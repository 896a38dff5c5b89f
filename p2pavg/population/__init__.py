"""Population based training: members train with different hyperparameters and copy the best, without a coordinator."""

from p2pavg.population.concurrent import TrioPopulation, open_population
from p2pavg.population.history import Generation, History
from p2pavg.population.lineage import Ancestor
from p2pavg.population.population import Population
from p2pavg.population.report import GenerationReport
from p2pavg.population.rules import check_decision, decide
from p2pavg.population.settings import PopulationSettings
from p2pavg.population.space import Choice, LogUniform, Uniform
from p2pavg.population.team_history import TeamHistory
from p2pavg.population.team_rules import check_ballot
from p2pavg.population.team_words import Ballot, TeamWord
from p2pavg.population.teams import TeamPopulation, TeamReport
from p2pavg.population.words import Decision, Standing, Word

__all__ = [
    "Ancestor",
    "Ballot",
    "Choice",
    "Decision",
    "Generation",
    "GenerationReport",
    "History",
    "LogUniform",
    "Population",
    "PopulationSettings",
    "Standing",
    "TeamHistory",
    "TeamPopulation",
    "TeamReport",
    "TeamWord",
    "TrioPopulation",
    "Uniform",
    "Word",
    "check_ballot",
    "check_decision",
    "decide",
    "open_population",
]
