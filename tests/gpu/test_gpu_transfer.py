"""Tests of the copies of micro-batches to a GPU, which run beside the kernels of the one before."""

import numpy as np
import torch

from undula.data.reader import Samples
from undula.plan.plan import MicroBatch
from undula.train.micro_batches import DeviceBatches

ROWS = 2**16


class Numbered:
    """Stream whose n-th micro-batch is filled with n."""

    def __init__(self) -> None:
        self.taken = 0

    def take(self, virtual_worker: int, count: int) -> Samples:
        self.taken += 1
        x = torch.full((count, 256), float(self.taken))
        return Samples(np.arange(count), {"x": x, "text": ["a"] * count})


def test_each_micro_batch_has_its_own_values_however_long_the_kernels_run(device: torch.device) -> None:
    batches = DeviceBatches(Numbered(), device)  # type: ignore[arg-type]
    assert batches.reads_ahead
    matrix, found = torch.ones(2048, 2048, device=device), []
    for _ in range(6):
        placed = batches.take(MicroBatch(0, 0, 0, ROWS))
        x = placed.batch["x"]
        assert isinstance(x, torch.Tensor)
        assert x.device == device
        for _ in range(10):
            matrix = (matrix @ matrix).clamp(max=1.0)  # these kernels still run when the next copy begins
        found.append((x * matrix[0, 0]).double().mean())
        batches.begin_next(MicroBatch(0, 0, 0, ROWS))
        del x, placed
    assert [each.item() for each in found] == [1.0, 2.0, 3.0, 4.0, 5.0, 6.0]


def test_a_copy_overlaps_with_the_kernels_before_it(device: torch.device) -> None:
    batches = DeviceBatches(Numbered(), device)  # type: ignore[arg-type]
    matrix = torch.ones(4096, 4096, device=device)

    def work() -> None:
        nonlocal matrix
        for _ in range(20):
            matrix = (matrix @ matrix).clamp(max=1.0)
        batches.begin_next(MicroBatch(0, 0, 0, ROWS))
        batches.take(MicroBatch(0, 0, 0, ROWS))

    work()
    torch.cuda.synchronize()
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CUDA]) as profile:
        work()
        torch.cuda.synchronize()
    spans = [
        ("HtoD" in event.name, event.time_range.start, event.time_range.end)
        for event in profile.events()
        if event.device_type == torch.autograd.DeviceType.CUDA
    ]
    copies = [span for span in spans if span[0]]
    kernels = [span for span in spans if not span[0]]
    assert copies
    assert any(copy[1] < kernel[2] and kernel[1] < copy[2] for copy in copies for kernel in kernels)
