"""Undula: elastic training on Ray whose result does not depend on which nodes were there."""

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from undula.cli.job_script import main, study_main
    from undula.elastic.ray.horovod import HorovodConfig
    from undula.elastic.ray.trainer import ElasticHorovodTrainer, ElasticTorchTrainer
    from undula.optim.optimizers import OptimizerConfig, make_optimizer
    from undula.state.weights import load_weights
    from undula.telemetry.tracker import TrackedRun, TrackedStep, Tracker
    from undula.train.run import Run
    from undula.train.step import Step

__all__ = [
    "ElasticHorovodTrainer",
    "ElasticTorchTrainer",
    "HorovodConfig",
    "OptimizerConfig",
    "Run",
    "Step",
    "TrackedRun",
    "TrackedStep",
    "Tracker",
    "load_weights",
    "main",
    "make_optimizer",
    "study_main",
]

_HOMES = {
    "ElasticHorovodTrainer": "undula.elastic.ray.trainer",
    "ElasticTorchTrainer": "undula.elastic.ray.trainer",
    "HorovodConfig": "undula.elastic.ray.horovod",
    "OptimizerConfig": "undula.optim.optimizers",
    "Run": "undula.train.run",
    "Step": "undula.train.step",
    "TrackedRun": "undula.telemetry.tracker",
    "TrackedStep": "undula.telemetry.tracker",
    "Tracker": "undula.telemetry.tracker",
    "load_weights": "undula.state.weights",
    "main": "undula.cli.job_script",
    "make_optimizer": "undula.optim.optimizers",
    "study_main": "undula.cli.job_script",
}


def __getattr__(name: str) -> Any:
    """Import a public name when it is first used: torch and Ray take seconds, and most commands need neither."""
    if name not in __all__:
        raise AttributeError(f"module 'undula' has no attribute {name!r}")
    return getattr(import_module(_HOMES[name]), name)
