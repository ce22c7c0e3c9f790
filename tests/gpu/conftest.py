"""Tests that need a GPU, for `make test-gpu`. They use no Ray cluster. Where torch sees no GPU, all of them are skipped."""

import sys
from pathlib import Path

import pytest
import torch

sys.path.insert(
    0, str(Path(__file__).parents[1])
)  # `make test-gpu` leaves out the conftest.py of that folder, which starts servers


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    if not torch.cuda.is_available():
        for item in items:
            if item.path.is_relative_to(Path(__file__).parent):
                item.add_marker(pytest.mark.skip(reason="torch sees no GPU"))


@pytest.fixture
def device() -> torch.device:
    return torch.device("cuda", 0)
