"""Figures of a smoke test: what was measured on one worker, and what follows from it for the whole run. Pure, except for the prices."""

from collections.abc import Sequence
from dataclasses import dataclass

from undula.config.job import JobSpec
from undula.plan.plan import Plan
from undula.plan.prices import Prices
from undula.report.data.cost import cost
from undula.report.data.goodput import CLASSES, Allocation
from undula.report.text import counted, dollars, duration, number
from undula.state.events import WorkerPlace


@dataclass(frozen=True)
class Measured:
    """What a smoke test has measured on one worker. All times are in seconds."""

    start_s: float
    """Time from the launch until the group had its model and its state."""
    first_step_s: float
    step_s: float
    """Duration of the second step, if the plan has two."""
    step_samples: int
    """Number of samples of that step."""
    validation_s: float | None
    """Duration of a validation; None if there was none."""
    has_interval: bool
    """Whether the run decides when to validate, by `validation.every_steps`. Otherwise the script does."""
    checkpoint_s: float
    """Time from the start of a checkpoint to its commit, most of it beside the next steps."""
    blocked_s: float
    """Time for which a checkpoint has blocked the training."""
    checkpoint_bytes: int
    host_bytes: float | None
    """Peak of the worker's resident memory; None if its report was lost."""
    device_bytes: float | None
    """Peak of the memory of its tensors on the GPU; None without a GPU."""
    workers: tuple[WorkerPlace, ...]
    """The worker and its machine, for the price."""


@dataclass(frozen=True)
class WholeRun:
    """The whole run on one worker, estimated from what a smoke test has measured. Validations that a script does by itself do not count."""

    steps: int
    validations: int
    checkpoints: int
    seconds: float

    @classmethod
    def of(cls, measured: Measured, spec: JobSpec, plan: Plan) -> "WholeRun":
        """Return the estimate for a job. Checkpoints count with the time for which they block, and the last one as a whole."""
        steps = plan.total_steps
        validations = 1 + -(-steps // spec.validation.every_steps) if measured.has_interval else 0
        checkpoints = -(-steps // spec.checkpoint.every_steps)
        first_s = max(measured.first_step_s - measured.step_s, 0.0)
        saving_s = checkpoints * measured.blocked_s + measured.checkpoint_s
        validating_s = validations * (measured.validation_s or 0.0)
        seconds = measured.start_s + first_s + steps * measured.step_s + validating_s + saving_s
        return cls(steps, validations, checkpoints, seconds)


def summary(took_s: float, measured: Measured, spec: JobSpec, plan: Plan, prices: Prices) -> list[str]:
    """Return the lines that a smoke test ends with.

    Args:
        took_s: Seconds that the smoke test took.
        measured: What it has measured.
        spec: The job.
        plan: Plan of the whole run.
        prices: Prices of machines.
    """
    run = WholeRun.of(measured, spec, plan)
    extra = [counted(run.checkpoints, "checkpoint")]
    extra += [counted(run.validations, "validation")] if run.validations else []
    own = ""
    if measured.validation_s is not None and not measured.has_interval:
        own = f"; each validation of the script adds {duration(measured.validation_s)}"
    places = {"the host": measured.host_bytes, "the GPU": measured.device_bytes}
    memory = [f"{used / 2**30:.2f} GiB on {place}" for place, used in places.items() if used is not None]
    rate = measured.step_samples / measured.step_s if measured.step_s else 0.0
    rows = {
        "step time": f"{number(measured.step_s, 3)} s, {rate:,.0f} samples/s; the first step took {number(measured.first_step_s, 3)} s",
        "whole run": f"{duration(run.seconds)} for {counted(run.steps, 'step')}, with {' and '.join(extra)}{own}",
        "memory": " and ".join(memory) + ", at the worker's peak" if memory else "",
        "price": _price(measured.workers, run, plan, prices),
    }
    lines = [f"  {key:<11} {text}" for key, text in rows.items() if text]
    return [f"the smoke test of {spec.name} passed in {duration(took_s)}; on one worker:", *lines]


def _price(workers: Sequence[WorkerPlace], run: WholeRun, plan: Plan, prices: Prices) -> str:
    """Return the price of the whole run on these workers, as text; empty if their machine is none of a cloud."""
    if not any(worker.get("machine") for worker in workers):
        return ""
    held = Allocation(tuple(workers), {**dict.fromkeys(CLASSES, 0.0), "useful": run.seconds})
    found = cost([held], prices, plan.total_samples, run.steps)
    if found.unpriced:
        machine = found.unpriced[0].machine
        return f"not known for {machine.market or 'unknown market'} {machine.type}; name a price file in UNDULA_PRICES"
    return f"{dollars(found.total)} by {', '.join(found.quoted)}"
