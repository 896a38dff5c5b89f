"""Strategies as data: how the peers of a run train together, as values that go to JSON, TOML and run files."""

from p2pavg.strategies.base import Strategy
from p2pavg.strategies.kinds import Custom, DataParallel, Federated, Local
from p2pavg.strategies.model_parallel import ModelParallel
from p2pavg.strategies.reading import PopulationBased, read_json, read_toml, strategy_of

__all__ = [
    "Custom",
    "DataParallel",
    "Federated",
    "Local",
    "ModelParallel",
    "PopulationBased",
    "Strategy",
    "read_json",
    "read_toml",
    "strategy_of",
]
