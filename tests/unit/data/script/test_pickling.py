"""Tests of the pickling of functions of a script."""

import pickle
from typing import Any

import torch
import torch.distributed

from undula.data.script.pickling import dumps


def test_a_function_that_names_torch_distributed_and_config_is_pickled() -> None:
    def train(run: Any) -> Any:
        return torch.distributed.is_initialized(), torch.compiler.is_compiling(), run.config

    train.__module__ = "__main__"  # functions of a script are pickled by value
    loaded = pickle.loads(dumps(train))

    class Run:
        config = 3

    assert loaded(Run) == (False, False, 3)


def test_torch_settings_are_those_of_the_process() -> None:
    settings = torch.distributed.config  # type: ignore[attr-defined]
    assert pickle.loads(dumps(settings)) is settings


def test_functions_that_set_backends_or_name_operators_are_pickled() -> None:
    before = torch.backends.cudnn.benchmark

    def train(run: Any) -> Any:
        torch.backends.cudnn.benchmark = run
        torch.backends.cuda.matmul.allow_tf32 = False
        return torch.ops.aten.relu(torch.tensor(-1.0)).item()

    train.__module__ = "__main__"
    try:
        assert pickle.loads(dumps(train))(True) == 0
        assert torch.backends.cudnn.benchmark
    finally:
        torch.backends.cudnn.benchmark = before


def test_modules_with_classes_of_their_own_are_those_of_the_process() -> None:
    for module in (torch.backends.cudnn, torch.backends.cuda, torch.ops):
        assert pickle.loads(dumps(module)) is module
