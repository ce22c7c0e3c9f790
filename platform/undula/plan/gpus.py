"""GPUs that clouds rent: their memory, their rates by data sheet, and the machines that have them."""

from collections.abc import Mapping
from dataclasses import dataclass

from undula.plan.precision import Compute

GIB = 2**30
CONTEXT_BYTES = 0.6 * GIB
"""Memory that CUDA's context, the libraries of matrix products and NCCL's channels take."""
MARGIN = 0.06
"""Share of the estimated memory by which the allocator of torch holds more, because of the sizes of its blocks and of fragmentation."""

ESTIMATE_ERROR = 0.08
"""Largest error of an estimate of the memory that tensors take in a step."""


@dataclass(frozen=True)
class Gpu:
    """A kind of GPU."""

    title: str
    memory_gib: float
    """Memory that CUDA reports, which is less than the name says."""
    tflops: Mapping[Compute, float]
    """Peak of dense matrix products in 10^12 operations per second, by number format. fp32 is without TF32, as in torch by default."""
    gb_per_s: float
    """Bandwidth of its memory in 10^9 bytes per second."""
    machines: Mapping[str, int]
    """Number of these GPUs of a machine, by machine type of AWS."""

    @property
    def memory_bytes(self) -> float:
        return self.memory_gib * GIB


def _rates(fp32: float, fp16: float, bf16: float) -> dict[Compute, float]:
    return {"fp32": fp32, "fp16": fp16, "bf16": bf16}


GPUS: Mapping[str, Gpu] = {
    # Turing and Volta compute bf16 without tensor cores, no faster than fp32.
    "V100": Gpu("V100 16 GB", 15.8, _rates(15.7, 125, 15.7), 900, {"p3.2xlarge": 1, "p3.8xlarge": 4, "p3.16xlarge": 8}),
    "T4": Gpu("T4", 14.7, _rates(8.1, 65, 8.1), 320, {"g4dn.xlarge": 1, "g4dn.12xlarge": 4, "g4dn.metal": 8}),
    "A10G": Gpu("A10G", 22.1, _rates(35, 70, 70), 600, {"g5.xlarge": 1, "g5.12xlarge": 4, "g5.48xlarge": 8}),
    "L4": Gpu("L4", 22.0, _rates(30.3, 121, 121), 300, {"g6.xlarge": 1, "g6.12xlarge": 4, "g6.48xlarge": 8}),
    "L40S": Gpu("L40S", 44.4, _rates(91.6, 362, 362), 864, {"g6e.xlarge": 1, "g6e.12xlarge": 4, "g6e.48xlarge": 8}),
    "A100-40": Gpu("A100 40 GB", 39.4, _rates(19.5, 312, 312), 1555, {"p4d.24xlarge": 8}),
    "A100-80": Gpu("A100 80 GB", 79.1, _rates(19.5, 312, 312), 2039, {"p4de.24xlarge": 8}),
    "H100": Gpu("H100 80 GB", 79.2, _rates(67, 989, 989), 3350, {"p5.4xlarge": 1, "p5.48xlarge": 8}),
    "H200": Gpu("H200", 139.8, _rates(67, 989, 989), 4800, {"p5en.48xlarge": 8}),
    "B200": Gpu("B200", 179.0, _rates(75, 2250, 2250), 8000, {"p6-b200.48xlarge": 8}),
}
"""Kinds of GPUs by name. Rates are those of NVIDIA's data sheets: V100 (2020), T4 (2019), A10G (AWS G5, 2021), L4 (2023), L40S (2023), A100
(2021), H100 SXM (2023), H200 (2024) and B200 (2025); memory is that which `nvidia-smi` shows."""

_MACHINES_BY_GIB = {
    16: ("g4dn.xlarge", "g5.xlarge", "g6.xlarge"),
    32: ("g6e.xlarge",),
    61: ("p3.2xlarge",),
    192: ("g4dn.12xlarge", "g5.12xlarge", "g6.12xlarge"),
    244: ("p3.8xlarge",),
    256: ("p5.4xlarge",),
    384: ("g4dn.metal", "g6e.12xlarge"),
    488: ("p3.16xlarge",),
    768: ("g5.48xlarge", "g6.48xlarge"),
    1152: ("p4d.24xlarge", "p4de.24xlarge"),
    1536: ("g6e.48xlarge",),
    2048: ("p5.48xlarge", "p5en.48xlarge", "p6-b200.48xlarge"),
}
MACHINE_GIB: Mapping[str, int] = {machine: gib for gib, machines in _MACHINES_BY_GIB.items() for machine in machines}
"""Memory of the machines of GPUS in GiB, as AWS's DescribeInstanceTypes and, for P3, its list of instance types say."""


def known_gpu(name: str, memory_bytes: float) -> Gpu | None:
    """Return the kind of GPU with a name of Ray's, such as A100, and about so much memory; None if GPUS has none."""
    same = [gpu for key, gpu in GPUS.items() if key.partition("-")[0] == name.upper().partition("-")[0]]
    nearest = min(same, key=lambda gpu: abs(gpu.memory_bytes - memory_bytes), default=None)
    return nearest if nearest and abs(nearest.memory_bytes / memory_bytes - 1) < 0.1 else None


def gpu_of_machine(machine: str) -> Gpu | None:
    """Return the GPU of a machine type of AWS, such as g6.2xlarge, whose family has only one kind; None if GPUS has none."""
    family = machine.partition(".")[0]
    return next((gpu for gpu in GPUS.values() if family in {each.partition(".")[0] for each in gpu.machines}), None)
