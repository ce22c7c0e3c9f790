"""Fixtures of the adapters' tests."""

import os
from collections.abc import Iterator

import pytest
import torch


@pytest.fixture
def one_thread() -> Iterator[None]:
    """Compute with one thread: several are slow for tensors as small as these, above all beside other tests."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


@pytest.fixture(autouse=True)
def without_variables_of_accelerate(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Begin without the environment variables that Hugging Face's TrainingArguments and Trainers leave for an Accelerator."""
    before = {name: value for name, value in os.environ.items() if name.startswith("ACCELERATE_")}
    for name in before:
        monkeypatch.delenv(name)
    yield
    for name in [name for name in os.environ if name.startswith("ACCELERATE_")]:
        del os.environ[name]
