"""Random numbers that depend on the computation and not on the rank that performs it."""

import os
from typing import Literal, TypeAlias

import torch

from undula.data.script.items import for_torch, seed_generators
from undula.plan.keys import key64

Moment: TypeAlias = Literal["after the update", "after_step", "before the batches"]
"""Part of a script between two steps: the loop's body after `step.update()`, the function `after_step`, and the loop's body before the
first batch of the next step."""


def seed_weights(seed: int) -> None:
    """Seed the random numbers of code that runs before the first step and initializes weights, equally on every rank."""
    key = key64("weights", seed)
    torch.manual_seed(for_torch(key))  # also seeds devices that are initialized later
    _seed(key)


def seed_micro_batch(seed: int, step: int, virtual_worker: int, micro_batch: int) -> None:
    """Seed the random numbers of a micro-batch, such as those of dropout. They do not depend on the rank that runs it."""
    _seed(key64("micro-batch", seed, step, virtual_worker, micro_batch))


def seed_validation(seed: int, step: int, virtual_worker: int, micro_batch: int) -> None:
    """Seed the random numbers of a micro-batch of a validation, given its step in the validation's plan.

    All validations of a run draw the same numbers, so that their losses differ only because the weights do.
    """
    _seed(key64("validation", seed, step, virtual_worker, micro_batch))


def seed_between_steps(seed: int, moment: Moment, done: int) -> None:
    """Seed the random numbers of the script's own code between two steps, equally on every rank.

    Otherwise a run that resumes there, or repeats such code, would draw other numbers than one that does not.

    Args:
        seed: Seed of the plan.
        moment: Part of the script that follows.
        done: Number of committed steps.
    """
    _seed(key64("between steps", moment, seed, done))


def seed_update(seed: int, step: int) -> None:
    """Seed the random numbers that an optimizer may draw in its step, equally on every rank."""
    _seed(key64("update", seed, step))


def compute_deterministically() -> None:
    """Restrict torch to deterministic algorithms. An operation without one raises an error that names it.

    A process should call this before its first matrix product on a GPU, at which torch reads the variable and cuBLAS its workspace, and
    before its first process group: while it is in effect, torch keeps NCCL from the algorithm NVLS, and the ranks must agree on that.
    """
    os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")
    torch.use_deterministic_algorithms(True)
    torch.utils.deterministic.fill_uninitialized_memory = False  # type: ignore[attr-defined]  # is slow and only helps to find bugs
    torch.backends.cudnn.benchmark = False
    fix_threads()


def fix_threads() -> None:
    """Set the number of threads, which changes the order of sums, to the worker's CPUs, or to 1 for a worker without CPUs.

    Ray passes it to the workers of all nodes in a variable, but a process that was forked with torch in memory has not read it.
    """
    torch.set_num_threads(int(os.environ.get("OMP_NUM_THREADS", 1)))


def _seed(key: int) -> None:
    seed_generators(key)
    if torch.cuda.is_initialized():  # type: ignore[no-untyped-call]
        torch.cuda.manual_seed_all(for_torch(key))
