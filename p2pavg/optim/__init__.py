"""Training with the averager: large batches, local updates with an outer optimizer, error feedback."""

from p2pavg.optim.averaged import AveragedOptimizer
from p2pavg.optim.cell_optimizer import CellOptimizer
from p2pavg.optim.cells import Cells
from p2pavg.optim.display import RunProgress
from p2pavg.optim.divided import divided_optimizer
from p2pavg.optim.feedback import ErrorFeedback
from p2pavg.optim.joined import JoinedOptimizer
from p2pavg.optim.local import LocalUpdates
from p2pavg.optim.loggers import FiguresLog, TensorBoardLog, WandbLog
from p2pavg.optim.mesh import PeerMesh
from p2pavg.optim.mixed import MixedUpdates
from p2pavg.optim.outer import FedAdagrad, FedAdam, FedYogi
from p2pavg.optim.recipes import (
    diloco,
    fedadagrad,
    fedadam,
    fedavg,
    fedprox,
    fedyogi,
    gossip,
    noloco,
    sparseloco,
)
from p2pavg.optim.replicas import ReplicatedOptimizer
from p2pavg.optim.report import StepReport
from p2pavg.optim.run_state import RunState
from p2pavg.optim.shards import shard_config
from p2pavg.optim.sync import SyncError, sync_parameters
from p2pavg.state.progress import StateProgress

__all__ = [
    "AveragedOptimizer",
    "CellOptimizer",
    "Cells",
    "ErrorFeedback",
    "FedAdagrad",
    "FedAdam",
    "FedYogi",
    "FiguresLog",
    "JoinedOptimizer",
    "LocalUpdates",
    "MixedUpdates",
    "PeerMesh",
    "ReplicatedOptimizer",
    "RunProgress",
    "RunState",
    "StateProgress",
    "StepReport",
    "SyncError",
    "TensorBoardLog",
    "WandbLog",
    "diloco",
    "divided_optimizer",
    "fedadagrad",
    "fedadam",
    "fedavg",
    "fedprox",
    "fedyogi",
    "gossip",
    "noloco",
    "shard_config",
    "sparseloco",
    "sync_parameters",
]
