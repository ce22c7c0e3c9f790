"""The part of a job's spec that says how many workers it wants and what each needs."""

from dataclasses import field
from typing import Annotated, Literal

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
    grow: Literal["auto", "always", "never"] = "auto"
    """When to take in more workers than train: `auto`, where the work that they would do until the cluster's next change, as expected
    from those so far, is more than is lost in the pause, as measured; `always`; or `never`."""
    hang_limit_s: Annotated[float, Gt(0)] | None = None
    """Seconds after which a worker that makes no step is treated as lost; by default 10 times the longest of the last steps, and at
    least 5. While it starts, validates or saves: 600 without a sign, or this, where it is more."""
    max_failures: Annotated[int, Ge(-1)] = 3
    """Failures after which the job gives up; -1 for never: exceptions of the script over the whole run, or workers lost without a step
    between them. An exception that another attempt would not mend, such as a KeyError, ends the job at once."""

    def __post_init__(self) -> None:
        if self.min > self.max:
            raise ValueError(f"min is {self.min}, more than max ({self.max}): lower min or raise max")
