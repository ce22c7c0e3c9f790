"""Undula: elastic training on Ray whose result does not depend on which nodes were there."""

import ast
from importlib import import_module
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:  # read below as well, so that each public name is written once
    from undula.elastic.ray.horovod import HorovodConfig as HorovodConfig
    from undula.elastic.ray.horovod_trainer import ElasticHorovodTrainer as ElasticHorovodTrainer
    from undula.elastic.ray.trainer import ElasticTorchTrainer as ElasticTorchTrainer
    from undula.entry import main as main
    from undula.optim.optimizers import OptimizerConfig as OptimizerConfig
    from undula.optim.optimizers import make_optimizer as make_optimizer
    from undula.state.weights import load_weights as load_weights
    from undula.study.script import study_main as study_main
    from undula.telemetry.tracker import TrackedRun as TrackedRun
    from undula.telemetry.tracker import TrackedStep as TrackedStep
    from undula.telemetry.tracker import Tracker as Tracker
    from undula.train.run import Run as Run
    from undula.train.step import Step as Step

_HOMES = {
    alias.name: node.module
    for node in ast.walk(ast.parse(Path(__file__).read_bytes()))
    if isinstance(node, ast.ImportFrom) and node.module and node.module.startswith("undula.")
    for alias in node.names
}
__all__ = sorted(_HOMES)


def __getattr__(name: str) -> Any:
    """Import a public name when it is first used: torch and Ray take seconds, and most commands need neither."""
    if name not in _HOMES:
        raise AttributeError(f"module 'undula' has no attribute {name!r}")
    return getattr(import_module(_HOMES[name]), name)
