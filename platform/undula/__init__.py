"""Undula: elastic training on Ray whose result does not depend on which nodes were there."""

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from undula.elastic.horovod import HorovodConfig
    from undula.elastic.trainer import ElasticHorovodTrainer, ElasticTorchTrainer
    from undula.entrypoint import main, study_main
    from undula.run.loop import Run
    from undula.run.optimizers import OptimizerConfig, make_optimizer
    from undula.run.step import Step

__all__ = [
    "ElasticHorovodTrainer",
    "ElasticTorchTrainer",
    "HorovodConfig",
    "OptimizerConfig",
    "Run",
    "Step",
    "main",
    "make_optimizer",
    "study_main",
]

_HOMES = {
    "ElasticHorovodTrainer": "undula.elastic.trainer",
    "ElasticTorchTrainer": "undula.elastic.trainer",
    "HorovodConfig": "undula.elastic.horovod",
    "OptimizerConfig": "undula.run.optimizers",
    "Run": "undula.run.loop",
    "Step": "undula.run.step",
    "main": "undula.entrypoint",
    "make_optimizer": "undula.run.optimizers",
    "study_main": "undula.entrypoint",
}


def __getattr__(name: str) -> Any:
    """Import a public name when it is first used: torch and Ray take seconds, and most commands need neither."""
    if name not in __all__:
        raise AttributeError(f"module 'undula' has no attribute {name!r}")
    return getattr(import_module(_HOMES[name]), name)
