"""Tests for `make test-gpu`. Those that need a GPU are skipped where torch sees none. Only test_gpu_cluster.py starts a Ray cluster.

`make test-gpu` leaves out the conftest.py of the folder above, which starts servers.
"""

import json
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

sys.path.insert(0, str(Path(__file__).parents[1]))
HAS_GPU = torch.cuda.is_available()
FIGURES = Path(__file__).parents[2] / "build" / "bench" / "gpu.json"


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    for item in items:
        if (
            not HAS_GPU
            and item.path.is_relative_to(Path(__file__).parent)
            and "any_device" not in getattr(item, "fixturenames", ())
        ):
            item.add_marker(pytest.mark.skip(reason="torch sees no GPU"))
        elif not HAS_GPU and item.path.name == "test_gpu_training.py":
            item.add_marker(pytest.mark.nightly)  # on a CPU, tests/unit has the same promises


@pytest.fixture
def device() -> torch.device:
    return torch.device("cuda", 0)


@pytest.fixture
def any_device() -> torch.device:
    """The GPU, or the CPU if there is none."""
    return torch.device("cuda", 0) if HAS_GPU else torch.device("cpu")


@pytest.fixture(scope="session")
def figures() -> Iterator[dict[str, float]]:
    """Figures that the tests have measured on the GPU, which are written to build/bench/gpu.json at the end."""
    found: dict[str, float] = {}
    yield found
    if HAS_GPU and found:
        FIGURES.parent.mkdir(parents=True, exist_ok=True)
        FIGURES.write_text(
            json.dumps({"gpu": torch.cuda.get_device_name(), "torch": torch.__version__, **found}, indent=1)
        )
