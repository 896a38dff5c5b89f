"""Training with the averager: large batches, local updates with an outer optimizer, error feedback."""

from p2pavg.optim.averaged import AveragedOptimizer
from p2pavg.optim.display import RunProgress, TensorBoardLog
from p2pavg.optim.feedback import ErrorFeedback
from p2pavg.optim.local import LocalUpdates
from p2pavg.optim.outer import FedAdagrad, FedAdam, FedYogi
from p2pavg.optim.recipes import diloco, fedadagrad, fedadam, fedavg, fedprox, fedyogi
from p2pavg.optim.replicas import ReplicatedOptimizer
from p2pavg.optim.report import StepReport
from p2pavg.optim.run_state import RunState
from p2pavg.optim.shards import shard_config
from p2pavg.optim.sync import SyncError, sync_parameters
from p2pavg.state.progress import StateProgress

__all__ = [
    "AveragedOptimizer",
    "ErrorFeedback",
    "FedAdagrad",
    "FedAdam",
    "FedYogi",
    "LocalUpdates",
    "ReplicatedOptimizer",
    "RunProgress",
    "RunState",
    "StateProgress",
    "StepReport",
    "SyncError",
    "TensorBoardLog",
    "diloco",
    "fedadagrad",
    "fedadam",
    "fedavg",
    "fedprox",
    "fedyogi",
    "shard_config",
    "sync_parameters",
]
