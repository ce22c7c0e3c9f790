"""Fixtures of the unit tests."""

from collections.abc import Iterator

import pytest
import torch.distributed as dist


@pytest.fixture
def process_group() -> Iterator[None]:
    """Process group with this process as its only rank."""
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    yield
    dist.destroy_process_group()
