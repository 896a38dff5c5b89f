"""Training with the averager: large batches, local updates with an outer optimizer, error feedback."""

from p2pavg.optim.base.joined import JoinedOptimizer
from p2pavg.optim.base.report import StepReport
from p2pavg.optim.catching_up.run_state import RunState
from p2pavg.optim.cells.cell_optimizer import CellOptimizer
from p2pavg.optim.cells.cells import Cells
from p2pavg.optim.large_batch.averaged import AveragedOptimizer
from p2pavg.optim.large_batch.sync import SyncError, sync_parameters
from p2pavg.optim.local.feedback import ErrorFeedback
from p2pavg.optim.local.local import LocalUpdates
from p2pavg.optim.local.outer import AutoSGD, FedAdagrad, FedAdam, FedYogi
from p2pavg.optim.local.recipes import (
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
from p2pavg.optim.logging.display import RunProgress
from p2pavg.optim.logging.loggers import FiguresLog, TensorBoardLog, WandbLog
from p2pavg.optim.mixing.mixed import MixedUpdates
from p2pavg.optim.ranks.divided import divided_optimizer
from p2pavg.optim.ranks.mesh import PeerMesh
from p2pavg.optim.ranks.replicas import ReplicatedOptimizer
from p2pavg.optim.ranks.shards import shard_config
from p2pavg.state.progress import StateProgress

__all__ = [
    "AutoSGD",
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
