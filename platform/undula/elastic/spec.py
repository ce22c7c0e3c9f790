"""The part of a job's spec that says how many workers it wants and what each needs."""

from dataclasses import field
from typing import Annotated

from annotated_types import Ge, Gt
from pydantic.dataclasses import dataclass as checked_dataclass

from undula.plan.plan import STRICT


@checked_dataclass(frozen=True, config=STRICT)
class WorkersSpec:
    """How many workers, and what each needs."""

    min: Annotated[int, Gt(0)] = 1
    """Fewest workers to train with; below, the job waits for nodes."""
    max: Annotated[int, Gt(0)] = 1
    """Most workers to train with; at most plan.virtual_workers."""
    cpus: Annotated[float, Ge(0)] = 1.0
    """CPUs that Ray reserves for a worker."""
    gpus: Annotated[float, Ge(0)] = 0.0
    """GPUs that Ray reserves for a worker; with one, gradients go over NCCL."""
    resources: dict[str, float] = field(default_factory=dict)
    """Further Ray resources that a worker needs, by name."""
    resize_interval_s: Annotated[float, Gt(0)] = 10.0
    """Seconds between looks at whether the cluster has room for more workers."""
    max_failures: Annotated[int, Ge(-1)] = 3
    """Failures of workers after which the job gives up; -1 for never. An exception that another attempt would not mend, such as a
    KeyError, ends the job at once."""

    def __post_init__(self) -> None:
        if self.min > self.max:
            raise ValueError(f"min is {self.min}, more than max ({self.max}): lower min or raise max")
