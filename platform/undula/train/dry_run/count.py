"""Count of the memory and the computation of a job's steps, in a process of its own and without the job's GPU.

The script's train function runs up to its steps. Its model, its batches and everything that follows from them are fake tensors of torch,
which have shapes but neither memory nor values. It gets one step for each setting of interest, and nothing is committed.
"""

import io
import warnings
from collections.abc import Callable, Sequence
from contextlib import ExitStack, redirect_stdout
from dataclasses import replace

import psutil
import torch
from torch.utils._python_dispatch import _disable_current_modes

from undula.errors import UsageError, one_line
from undula.parallel.spec import ActivationsSpec
from undula.plan.memory import extrapolated
from undula.plan.precision import Compute
from undula.recovery.worker_state import LeaveGroup, WorkerState
from undula.train.dry_run.counting import Count, CountingSession, Setting
from undula.train.job import Job
from undula.train.run import Run
from undula.train.single_process import local_world

FEW = (2, 3)
"""Numbers of samples of the real passes from which larger ones are extrapolated."""
REAL_COPIES = 5
"""Memory of real passes, as a multiple of that of the model: weights, a gradient, the state of the optimizer, and activations of a few
samples."""


def count(train: Callable[[Run], None], job: Job, settings: Sequence[Setting], may_be_real: bool = True) -> Count:
    """Count a step of a job for each of some settings.

    Where the script needs a value, a few samples run through the real model on the CPU, and the count of more is extrapolated.

    Args:
        train: Train function of the script.
        job: Settings of the job.
        settings: Settings of the steps. The first one must suit the model, and its step also updates the weights. The result leaves out
            others that the model cannot have, and says why.
        may_be_real: Whether real passes, which can take long, may take the place of those without values.

    Raises:
        UsageError: The script needs values, and the real model does not fit into this machine.
        Exception: An exception of the script.
    """
    model_bytes: list[int] = []
    try:
        return _counted(train, job, settings, True, model_bytes.append)
    except Exception as error:
        if not may_be_real:
            raise
        _require_room(model_bytes, error)
        kinds = dict.fromkeys((each.compute, each.activations) for each in settings)
        few = _counted(train, job, [Setting(*kind, samples) for kind in kinds for samples in FEW], False)
    passes = {}
    for each in settings:
        one, other = (few.passes.get(Setting(each.compute, each.activations, samples)) for samples in FEW)
        if one and other:
            passes[each] = extrapolated(one, other, each.samples)
    return replace(few, passes=passes)


def _require_room(model_bytes: Sequence[int], error: Exception) -> None:
    """Check that the real model fits into this machine, given its size if it is known, and why values are needed.

    Raises:
        UsageError: It does not.
    """
    free = psutil.virtual_memory().available
    if model_bytes and REAL_COPIES * model_bytes[-1] > free:
        raise UsageError(
            f"the steps cannot be counted without values ({type(error).__name__}: {one_line(error)}), and the real model of "
            f"{model_bytes[-1] / 2**30:.1f} GiB cannot take steps in the {free / 2**30:.1f} GiB that are free on this machine; read values "
            "of tensors outside of the step, or count the job on a larger machine"
        ) from error


def _counted(
    train: Callable[[Run], None],
    job: Job,
    settings: Sequence[Setting],
    is_fake: bool,
    placed: Callable[[int], None] = lambda size: None,
) -> Count:
    """Count the steps, with fake tensors or with real ones. `placed` is called with the bytes of the model."""
    device, worker = torch.device("cpu"), WorkerState()
    with local_world(device), redirect_stdout(io.StringIO()), warnings.catch_warnings(), ExitStack() as stack:
        warnings.simplefilter("ignore")
        session = CountingSession(job, device, worker, settings, is_fake, stack, placed)
        run, left_out = Run(session), dict[str, str]()
        refused: Compute | ActivationsSpec | None = None
        try:
            train(run)
        except LeaveGroup:
            pass
        except Exception as error:
            own, begun = settings[0], session.begun or settings[0]
            if begun.compute != own.compute:
                refused, override = begun.compute, f"precision.compute={begun.compute}"
            elif begun.activations != own.activations:
                refused, override = begun.activations, f"activations.keep={begun.activations.keep}"
            else:
                raise
            if refused == begun.compute or not isinstance(error, UsageError):  # many models have no units
                left_out[override] = f"{type(error).__name__}: {one_line(error)}"
        finally:
            with _disable_current_modes():
                run.free()
                worker.close_kept()
                torch.set_default_device(None)  # the script may have set one for this thread
        if refused is None:
            return session.count
    rest = [each for each in settings if refused not in (each.compute, each.activations)]
    counted = _counted(train, job, rest, is_fake, placed)
    return replace(counted, left_out={**left_out, **counted.left_out})
