"""Properties of a process that decide which bits a computation produces. Runs are equal bit for bit only where they are equal."""

import os
import re
from collections.abc import Mapping, Sequence
from pathlib import Path

import torch

Arithmetic = Mapping[str, str]
"""Properties by name."""
STATE = "arithmetic"
"""Name under which the state of a run records the properties of the group that computed it."""
CPU_INFO = Path("/proc/cpuinfo")
VARIABLES = ("MKL_", "ATEN_CPU_CAPABILITY", "DNNL_MAX_CPU_ISA", "ONEDNN_MAX_CPU_ISA", "NVIDIA_TF32_OVERRIDE")
"""Beginnings of the names of environment variables that choose kernels."""


def arithmetic_of(
    device: torch.device, compiled: str | None = None, is_offloaded: bool = False, gathered: str | None = None
) -> Arithmetic:
    """Return the properties of this process.

    Args:
        device: Device on which it trains.
        compiled: Parts of the model that torch compiles; None for none.
        is_offloaded: Whether the state of the optimizer is in host memory.
        gathered: Format in which parameters are gathered; None for their own.
    """
    properties = {
        "torch": str(torch.__version__),
        "the CPU": f"{_cpu()} ({torch.backends.cpu.get_cpu_capability()})",
        "the number of threads": str(torch.get_num_threads()),
        **{name: value for name, value in sorted(os.environ.items()) if name.startswith(VARIABLES)},
    }
    if compiled:
        properties["what torch compiles"] = compiled
    if is_offloaded:
        properties["what computes on the CPU"] = "the optimizer"
    if gathered:
        properties["the format of gathered parameters"] = gathered
    if device.type == "cuda":
        properties["the GPU"] = torch.cuda.get_device_name(device)
    return properties


def difference(known: Sequence[Arithmetic], places: tuple[str, str] = ("for one worker", "for another")) -> str | None:
    """Return the first property in which processes or groups differ, with two of its values; None if all are equal.

    Args:
        known: Properties of the processes or groups.
        places: Description of the first one and of the others.
    """
    first, *others = known
    for other in others:
        for name in [*first, *(name for name in other if name not in first)]:
            if first.get(name) != other.get(name):
                mine, others_own = first.get(name, "not set"), other.get(name, "not set")
                return f"{name} is {mine} {places[0]} and {others_own} {places[1]}"
    return None


def _cpu() -> str:
    try:
        model = re.search(r"^model name\s*:\s*(.*)$", CPU_INFO.read_text(), re.MULTILINE)
    except OSError:  # not on Linux
        model = None
    return model[1] if model else "unknown"
