"""A test of a job's model and optimizer: does a run come out the same, bit for bit, wherever it is interrupted?

    from undula.testing import conformance
    from train import Config, train

    conformance.check(train, "train.yaml", config=Config)
    conformance.check_on_ranks(train, "train.yaml", "deterministic=true", config=Config)

Both functions train the script's own train function for a few steps, once without interruption and once with, and return if every
tensor and value of the state is equal, and the strides of the tensors are as well. Otherwise they raise an error of one sentence. `check`
interrupts after each step of a run in this process. `check_on_ranks` runs ranks in processes of their own, kills some, and changes their
number.
"""

import json
import multiprocessing
import signal
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from functools import partial
from multiprocessing.connection import Connection
from pathlib import Path
from secrets import token_hex
from tempfile import TemporaryDirectory
from typing import Any, TypeAlias

import torch
from torch import Tensor, nn
from torch.optim.lr_scheduler import LRScheduler

from undula.config.job import LoadedSpec, load_spec
from undula.driver.launch import job_of
from undula.driver.preflight import Examined, check_job, check_model, examine
from undula.errors import ConformanceError, UndulaError
from undula.state.commit import find_commits
from undula.state.model_state import bare_module, model_and_optimizer_state
from undula.storage import open_store
from undula.train.job import Job
from undula.train.run import Run
from undula.train.single_process import SingleProcess, local_device

Train: TypeAlias = Callable[[Run], None]
Record: TypeAlias = Mapping[str, tuple[str, bytes]]
"""Kind and bytes of each tensor and value of a state, by name."""
Visit: TypeAlias = Callable[[int, nn.Module, torch.optim.Optimizer], None]
"""Called with the number of steps done, the model and the optimizer."""
SETTINGS = (
    *("name=conformance", "data.validation=null", "stop=null", "checkpoint.keep_best=null", "plan.max_steps=6"),
)
"""Overrides of the job that the caller's overrides precede."""
CHECKPOINT = "a checkpoint"
EVERY_STEP = ("checkpoint.every_steps=1", "checkpoint.snapshot_every_steps=0")
SNAPSHOTS_ALONE = ("checkpoint.every_steps=1000000", "checkpoint.snapshot_every_steps=1")
MOST_RANKS = 2
"""Number of ranks of the largest group of `check_on_ranks`."""
LIMIT_S = 120.0
"""Maximum time in seconds for a group of ranks to end."""
PRELOADED = ["undula.testing.conformance", "torch._dynamo", "torch.distributed.fsdp", "undula.telemetry.tensorboard"]
"""Modules that the process imports once from which ranks are forked."""


def check(train: Train, job: str | Path, *overrides: str, config: type | None = None) -> None:
    """Check in this process that a run resumes exactly after each of its steps, from snapshots and from checkpoints.

    Args:
        train: The script's train function.
        job: YAML file of the job. The run has 6 steps unless `plan.max_steps` is overridden, and no validation.
        overrides: Overrides of the job, as `key=value`.
        config: The script's dataclass for the section `config`, as in `undula.main`.

    Raises:
        ConformanceError: A tensor or a value of the state differs from that of the uninterrupted run.
        UndulaError: The job is refused, as `undula run` would refuse it before a worker starts.
    """
    with TemporaryDirectory() as folder:
        sources = {CHECKPOINT: EVERY_STEP, "a snapshot": SNAPSHOTS_ALONE}
        jobs = {
            source: _checked(train, job, [*settings, *overrides], folder, config)
            for source, settings in sources.items()
        }
        boundaries: dict[int, Record] = {}
        for number, checked in enumerate(jobs.values()):
            visit = _Comparison(boundaries, "a second, equal run") if number else _Recorder(boundaries)
            _train_here(train, _new_job(checked, f"whole-{number}"), visit)
        for source, checked in jobs.items():
            legs = _new_job(checked, source)
            comparison = _Comparison(boundaries, f"a run that was interrupted and resumed from {source}")
            for done in range(1, max(boundaries) + 1):
                _train_here(train, legs, comparison, until=done, saves=source == CHECKPOINT)


def check_on_ranks(
    train: Train, job: str | Path, *overrides: str, config: type | None = None, device: torch.device | None = None
) -> None:
    """Check that a run on ranks in separate processes is unchanged by two SIGKILLs, departures, growth and a resubmission.

    With `deterministic=true`, the number of ranks changes between 1 and 2, and the comparison is a run on one rank. Otherwise the
    sum of gradients depends on the number of ranks: it stays 2, and the comparison is an uninterrupted run on 2.

    Args:
        train: The script's train function. A new Python process must be able to import it by name.
        job, overrides, config: As for `check`, but that the run needs at least 6 steps.
        device: Device that all ranks share, over gloo. By default, each rank has a GPU of its own if this process sees enough of them,
            and otherwise all ranks train on the CPU.

    Raises:
        ConformanceError: A tensor or a value of the last state differs from that of the uninterrupted run.
        UndulaError: The job is refused, as `undula run` would refuse it before a worker starts.
    """
    with TemporaryDirectory() as folder:
        settings = ["checkpoint.every_steps=1000000", "checkpoint.snapshot_every_steps=1", *overrides]
        checked = _checked(train, job, settings, folder, config)
        fewest = 1 if checked.loaded.spec.deterministic else 2
        run_group = partial(_group, train, device)
        expected = _last(run_group(_new_job(checked, "whole"), _Group(fewest)))
        interrupted = _new_job(checked, "interrupted")
        for group in (
            _Group(2, until=1, victim=1),
            _Group(fewest, until=2, leaves=True),
            _Group(2, until=3, victim=0),
            _Group(2, until=4, leaves=True, saves=True),
            _Group(fewest, until=5, leaves=True, saves=True),
        ):
            run_group(interrupted, group)
        newest = find_commits(open_store(interrupted.run_url))[0][0]
        check_model(checked.examined.model, checked.loaded, newest)
        resubmitted = replace(interrupted, run_id=token_hex(8))  # other machines, whose memory has no snapshots
        found = _last(run_group(resubmitted, _Group(2)))
        for rank, (one, other) in enumerate(
            zip(found, expected, strict=False)
        ):  # the uninterrupted run can have one rank
            if difference := first_difference(one, other):
                raise ConformanceError(
                    f"{difference} on rank {rank} at the end of a run whose ranks were killed and changed in number"
                )


def record_of(model: nn.Module, optimizer: torch.optim.Optimizer) -> Record:
    """A copy of the state of this rank, with the buffers that are not persistent."""
    record = {name: _leaf(value) for name, value in model_and_optimizer_state(model, optimizer).items()}
    for name, module in bare_module(model).named_modules():
        for key in module._non_persistent_buffers_set:
            if (buffer := module._buffers[key]) is not None:
                record[f"buffer.{name}.{key}, which is not persistent,"] = _leaf(buffer)
    return record


def first_difference(found: Record, expected: Record) -> str | None:
    """The first tensor or value in which two records differ, and how; None where they are equal bit for bit."""
    for name in sorted(expected.keys() | found.keys()):
        if name not in found or name not in expected:
            return f"{name} is {'missing' if name in expected else 'there only after an interruption'}"
        (kind, bits), (expected_kind, expected_bits) = found[name], expected[name]
        if kind != expected_kind:
            return f"{name} is {kind}, and was {expected_kind}"
        if bits != expected_bits:
            return f"{name} has other bits"
    return None


@dataclass(frozen=True)
class _Recorder:
    """Records the states of a run by the number of steps done."""

    boundaries: dict[int, Record]

    def __call__(self, done: int, model: nn.Module, optimizer: torch.optim.Optimizer) -> None:
        self.boundaries[done] = record_of(model, optimizer)


@dataclass(frozen=True)
class _Comparison:
    """Compares a run with the uninterrupted one."""

    boundaries: Mapping[int, Record]
    run: str
    """The run, for messages."""

    def __call__(self, done: int, model: nn.Module, optimizer: torch.optim.Optimizer) -> None:
        if difference := first_difference(record_of(model, optimizer), self.boundaries[done]):
            raise ConformanceError(f"{difference} after {done} steps of {self.run}")


@dataclass(frozen=True)
class _Group:
    """Ranks that train together, and how they end: at the end of the plan, by SIGKILL of `victim`, or by leaving."""

    world_size: int
    until: int | None = None
    """Number of steps done at which they end."""
    victim: int | None = None
    leaves: bool = False
    saves: bool = False
    """Whether a checkpoint is written where they leave."""


class _WatchedRun:
    """A run whose step boundaries are visited."""

    def __init__(self, run: Run, visit: Visit):
        self._run = run
        self._visit = visit

    def __getattr__(self, name: str) -> Any:
        return getattr(self._run, name)

    def model(self, module: nn.Module) -> nn.Module:
        self._model = self._run.model(module)
        return self._model

    def optimizer(
        self, optimizer: torch.optim.Optimizer, scheduler: LRScheduler | None = None
    ) -> torch.optim.Optimizer:
        self._optimizer = self._run.optimizer(optimizer, scheduler)
        return self._optimizer

    def steps(self, *arguments: Any, **more: Any) -> Any:
        for step in self._run.steps(*arguments, **more):
            self._visit(step.index, self._model, self._optimizer)
            yield step
        self._visit(self._run.plan.total_steps, self._model, self._optimizer)


@dataclass(frozen=True)
class _Checked:
    """A job that the driver's checks have accepted."""

    loaded: LoadedSpec
    examined: Examined


def _checked(train: Train, job: str | Path, overrides: list[str], runs: str, config: type | None) -> _Checked:
    loaded = load_spec(Path(job), [*SETTINGS, f"runs={runs}", *overrides], config)
    examined = examine(train, loaded, check_job(loaded))
    check_model(examined.model, loaded, None)
    return _Checked(loaded, examined)


def _new_job(checked: _Checked, name: str) -> Job:
    job = job_of(checked.loaded, token_hex(8), script_data=checked.examined.script_data)
    return replace(job, name=name, run_url=f"{checked.loaded.spec.runs}/{name}")


def _train_here(train: Train, job: Job, visit: Visit, until: int | None = None, saves: bool = False) -> None:
    """Train in this process, to the end of the plan or until so many steps are done, and then save a checkpoint if `saves`."""

    def watch(done: int, model: nn.Module, optimizer: torch.optim.Optimizer) -> None:
        visit(done, model, optimizer)
        if until == done + 1:
            process.leave(saves)

    process = SingleProcess(_watched(train, watch), job, lambda message: None)
    process()


def _group(train: Train, device: torch.device | None, job: Job, group: _Group) -> list[Record | UndulaError | None]:
    """Train on a group of ranks, each in a process of its own.

    Returns:
        By rank, its state at the end, the error with which Undula refused the training, or None for a rank that crashed.
    """
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(PRELOADED)
    with TemporaryDirectory() as folder:
        pipes = [context.Pipe(duplex=False) for _ in range(group.world_size)]
        ranks = [
            context.Process(target=_rank, args=(train, device, job, group, rank, f"{folder}/store", pipes[rank][1]))
            for rank in range(group.world_size)
        ]
        for rank in ranks:
            rank.start()
        for _, sender in pipes:
            sender.close()
        found = [_received(receiver) for receiver, _ in pipes]
        for rank in ranks:
            rank.join(LIMIT_S)
            rank.kill()
            rank.join()
        return found


def _last(found: list[Record | UndulaError | None]) -> list[Record]:
    """The states after the last step, by rank."""
    states: list[Record] = []
    for each in found:
        if isinstance(each, UndulaError):
            raise each
        if each is None:
            raise ConformanceError("the run did not come to its end on ranks: the traceback of a rank is above")
        states.append(each)
    return states


def _received(receiver: Connection) -> Record | UndulaError | None:
    try:
        return receiver.recv() if receiver.poll(LIMIT_S) else None
    except EOFError:
        return None


def _rank(
    train: Train,
    device: torch.device | None,
    job: Job,
    group: _Group,
    rank: int,
    rendezvous: str,
    sender: Connection,
) -> None:
    torch.set_num_threads(1)
    last: dict[str, tuple[str, bytes]] = {}

    def visit(done: int, model: nn.Module, optimizer: torch.optim.Optimizer) -> None:
        if done == group.until and rank == group.victim:
            signal.raise_signal(signal.SIGKILL)
        if group.leaves and group.until == done + 1:
            process.leave(group.saves)
        last.clear()
        last.update(record_of(model, optimizer))

    # The same kind of device in all groups, because other kinds compute other bits.
    device = device or local_device(rank, MOST_RANKS)
    watched = _watched(train, visit)
    process = SingleProcess(watched, job, lambda message: None, rank, group.world_size, rendezvous, device)
    try:
        process()
    except UndulaError as error:
        sender.send(error)
    except Exception:
        if group.victim is None:  # otherwise, it is the collective in which this rank lost another one
            raise
    else:
        sender.send(last)


def _watched(train: Train, visit: Visit) -> Train:
    return lambda run: train(_WatchedRun(run, visit))  # type: ignore[arg-type]


def _leaf(value: Any) -> tuple[str, bytes]:
    if not isinstance(value, Tensor):
        return "a value", json.dumps(value).encode()
    local = getattr(value, "to_local", lambda: value)()
    kind = f"{str(local.dtype).removeprefix('torch.')} of shape {tuple(local.shape)} with strides {local.stride()}"
    return kind, local.detach().cpu().contiguous().flatten().view(torch.uint8).numpy().tobytes()
