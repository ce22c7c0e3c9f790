"""A test of a job's model and optimizer: does a run come out the same, bit for bit, wherever it is interrupted?

    from undula.testing import conformance
    from train import Config, train

    conformance.check(train, "train.yaml", config=Config)
    conformance.check_on_ranks(train, "train.yaml", config=Config)

Both functions train the script's own train function for a few steps, once without interruption and once with, and return if every
tensor and value of the state is equal, and the strides of the tensors are as well. Otherwise they raise an error of one sentence. `check`
interrupts a run in this process, and compares it with a plain loop. `check_on_ranks` runs ranks in processes of their own, kills some, and
changes their number.
"""

import multiprocessing
import signal
from collections.abc import Callable, Collection, Mapping
from contextlib import suppress
from dataclasses import dataclass, replace
from functools import partial
from itertools import cycle
from multiprocessing.connection import Connection
from pathlib import Path
from secrets import token_hex
from tempfile import TemporaryDirectory
from typing import Literal, get_args

import torch
from torch import Tensor

from undula.config.job import LoadedSpec, load_spec
from undula.driver.preflight import Examined, check_job, check_model, examine
from undula.driver.record import job_of
from undula.errors import ConformanceError, UndulaError
from undula.state.commit import find_commits
from undula.state.figures import LOGGED, OWN_STATE, Figures, figures_of, other_figures
from undula.storage import open_store
from undula.testing.records import Comparison, Record, Recorder, first_difference
from undula.testing.watched import GroupEnded, Train, Watched, WatchedRun
from undula.train.job import Job
from undula.train.plain_loop import RecordedStep, first_gap, train_plainly
from undula.train.single_process import SingleProcess, local_device

SETTINGS = (
    *("name=conformance", "validation.every_steps=2", "stop=null", "checkpoint.keep_best=null", "plan.max_steps=6"),
)
"""Overrides of the job that the caller's overrides precede."""
CHECKPOINT = "a checkpoint"
EVERY_STEP = ("checkpoint.every_steps=1", "checkpoint.snapshot_every_steps=0")
SNAPSHOTS_ALONE = ("checkpoint.every_steps=1000000", "checkpoint.snapshot_every_steps=1")
NO_COPIES = ("checkpoint.every_steps=1000000", "checkpoint.snapshot_every_steps=0")
PLAIN = (*NO_COPIES, "deterministic=false", "precision.compute=fp32", "compile=false", "engine=torch")
"""Overrides of a run that is compared with a plain loop, so that both round in the same way."""
GROUP_STEPS = (1, 3)
"""Numbers of steps of the groups that interrupted runs consist of. Defects of copies that are kept only show in groups of several steps."""
VIRTUAL_WORKERS = (1, 2, 4)
"""Numbers of virtual workers of the runs that are compared with a plain loop."""
Part = Literal["resume", "hand over", "plain loop"]
PARTS: tuple[Part, ...] = get_args(Part)
"""Parts of `check`: groups that resume from snapshots and from checkpoints, groups that end within a step and hand their state over, and
the comparison with a plain loop."""
MOST_RANKS = 2
"""Number of ranks of the largest group of `check_on_ranks`."""
LIMIT_S = 120.0
"""Maximum time in seconds for a group of ranks to end."""
PRELOADED = ["undula.testing.conformance", "torch._dynamo", "torch.distributed.fsdp"]
"""Modules that the process imports once from which ranks are forked."""


def check(
    train: Train, job: str | Path, *overrides: str, config: type | None = None, parts: Collection[Part] = PARTS
) -> tuple[str, ...]:
    """Check in this process that a run resumes exactly after each of its steps, and that it trains as a plain loop does.

    After every step, the copies of the state that the run has stored, would send or would hand over are compared with the model and the
    optimizer.

    Args:
        train: The script's train function.
        job: YAML file of the job. The run has 6 steps unless `plan.max_steps` is overridden. It validates every 2 steps if the job has
            validation data, unless `data.validation=null` is overridden.
        overrides: Overrides of the job, as `key=value`.
        config: The script's dataclass for the section `config`, as in `undula.main`.
        parts: Parts of the check.

    Returns:
        What was checked, and what was left out and why, a sentence each. They are also printed.

    Raises:
        ConformanceError: A tensor or a value of the state, a loss, a validation or a logged number differs from that of the uninterrupted
            run, or a parameter from that of the plain loop.
        UndulaError: The job is refused, as `undula run` would refuse it before a worker starts.
    """
    with TemporaryDirectory() as folder:
        make = partial(_checked, train, job, folder=folder, config=config)
        sources = {CHECKPOINT: EVERY_STEP, "a snapshot": SNAPSHOTS_ALONE}
        jobs = {source: make(*settings, *overrides) for source, settings in sources.items()}
        boundaries: dict[int, Record] = {}
        watched = Watched(train)
        whole = [_new_job(checked, f"whole-{number}") for number, checked in enumerate(jobs.values())]
        for number, each in enumerate(whole):
            visit = Comparison(boundaries, "a second, equal run") if number else Recorder(boundaries)
            _train_here(replace(watched, visit=visit), each)
        figures = _repeatable(*map(_figures, whole))
        last = max(boundaries)
        told = [f"Two equal runs of {last} steps and the copies of their state after each step were compared."]
        if "resume" in parts:
            told += [_check_resuming(watched, source, checked, boundaries, figures) for source, checked in jobs.items()]
        if "hand over" in parts:
            told += _check_hand_overs(watched, make(*NO_COPIES, *overrides), boundaries, figures)
        if "plain loop" in parts:
            told += _check_plain_loop(
                watched, lambda count: make(*overrides, *PLAIN, *([f"plan.virtual_workers={count}"] if count else []))
            )
    print(*told, sep="\n")
    return tuple(told)


def _figures(job: Job) -> Figures:
    return figures_of(open_store(job.run_url))


def _repeatable(figures: Figures, again: Figures) -> Figures:
    """Return the numbers of a run without logged ones that differ in a second, equal run, such as times."""
    others = other_figures(again, figures, "a second, equal run")
    for (_, name), gap in others.items():
        if not name.endswith(LOGGED):
            raise ConformanceError(gap)
    names = {name for _, name in others}
    return {place: numbers for place, numbers in figures.items() if place[1] not in names}


def _compare_figures(job: Job, expected: Figures, run: str) -> None:
    """Compare the numbers that a run has reported with those of the uninterrupted one."""
    for gap in other_figures(_figures(job), expected, run).values():
        raise ConformanceError(f"{gap}; {OWN_STATE}")


def _check_resuming(
    watched: Watched, source: str, checked: "_Checked", boundaries: Mapping[int, Record], figures: Figures
) -> str:
    """Check that groups resume exactly from copies of a kind."""
    last = max(boundaries)
    for size in GROUP_STEPS:
        legs = _new_job(checked, f"{source}-{size}")
        visit = Comparison(boundaries, f"a run that was interrupted and resumed from {source}")
        for done in [*range(size, last, size), last]:
            _train_here(replace(watched, visit=visit), legs, until=done, saves=source == CHECKPOINT)
        _compare_figures(legs, figures, visit.run)
    return f"Groups of {' and of '.join(map(str, GROUP_STEPS))} steps resumed from {source}."


def _check_hand_overs(
    watched: Watched, checked: "_Checked", boundaries: Mapping[int, Record], figures: Figures
) -> list[str]:
    """Check that groups resume exactly from the state that a group hands over that ends within a step."""
    last = max(boundaries)
    visit = Comparison(boundaries, "a run whose groups ended within a step and handed their state over")
    for size in GROUP_STEPS:
        steps = range(size, last, size)
        ends = iter([*steps, None])
        job = _new_job(checked, f"hand-over-{size}")
        process = SingleProcess(
            lambda run, ends=ends: replace(watched, visit=visit, ends_in=next(ends))(run),  # type: ignore[misc]
            job,
            lambda message: None,
            hands_over=True,
        )
        for _ in steps:
            with suppress(GroupEnded):
                process()
        process()
        _compare_figures(job, figures, visit.run)
    sizes = " and after ".join(map(str, GROUP_STEPS))
    return [f"Groups that ended within a step, after {sizes} steps, handed their state over."]


def _check_plain_loop(watched: Watched, make: Callable[[int | None], "_Checked"]) -> list[str]:
    """Check that runs with several numbers of virtual workers train as a plain loop does, and compare them with each other.

    Args:
        watched: The script.
        make: Function that returns the job with a number of virtual workers; with None, that of the job itself.
    """
    spec = (checked := make(None)).loaded.spec
    if spec.plan.batch == "elastic" or spec.gradient.reduce == "adasum" or spec.gradient.compression != "none":
        return [
            "There was no comparison with a plain loop, whose steps are those of other settings of plan and gradient."
        ]
    own, ends, told = spec.plan.virtual_workers, dict[int, Mapping[str, Tensor]](), list[str]()
    for count in sorted({own, *VIRTUAL_WORKERS}):
        if count != own and spec.plan.global_batch < 2 * count:  # some layers cannot train on one sample
            continue
        try:
            ends[count] = _trained_as_plain_loop(watched, checked if count == own else make(count), count)
        except ConformanceError:
            raise
        except UndulaError as error:  # a script may insist on a number
            if count == own:
                raise
            told.append(f"There was no comparison with {count} virtual workers: {error}.")
    same = (
        f"A plain loop over the same samples came to the same weights, with {', '.join(map(str, ends))} virtual workers"
    )
    if checked.examined.script_data is None:
        same += "; these were not compared with each other, because the order of stored samples depends on their number"
    elif gap := next((gap for end in ends.values() if (gap := first_gap(end, ends[own]))), None):
        same += f". They depend on this number ({gap}), as with BatchNorm, dropout or losses that compare samples"
    else:
        same += ", which are equal"
    return [*told, f"{same}."]


def _trained_as_plain_loop(watched: Watched, checked: "_Checked", virtual_workers: int) -> Mapping[str, Tensor]:
    """Train in a run and in a plain loop, and return the parameters at the end, which must be equal up to rounding."""
    job, steps = _new_job(checked, f"plain-{virtual_workers}"), list[RecordedStep]()
    end = _train_here(replace(watched, steps=steps), job)
    if gap := first_gap(end, train_plainly(watched.train, job, steps, local_device(0, 1))):
        raise ConformanceError(
            f"{gap} after {len(steps) - 1} steps from a plain loop over the same samples (plan.virtual_workers={virtual_workers})"
        )
    return end


def _has_same_bits(checked: "_Checked", device: torch.device | None) -> bool:
    """Return whether the job has the same bits at any number of ranks."""
    on_gpus = device.type == "cuda" if device else torch.cuda.device_count() >= MOST_RANKS
    return checked.loaded.spec.has_same_bits(on_gpus)


def check_on_ranks(
    train: Train, job: str | Path, *overrides: str, config: type | None = None, device: torch.device | None = None
) -> None:
    """Check that a run on ranks in separate processes is unchanged by two SIGKILLs, departures, growth and a resubmission.

    The number of ranks changes between 1 and 2, and the comparison is a run on one rank. If the result may depend on the number of ranks,
    because `deterministic=true` is missing on GPUs, it stays 2, and the comparison is an uninterrupted run on 2.

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
        checked = _checked(train, job, *SNAPSHOTS_ALONE, *overrides, folder=folder, config=config)
        fewest = 1 if _has_same_bits(checked, device) else MOST_RANKS
        run_group = partial(_group, train, device)
        whole = _new_job(checked, "whole")
        expected = _last(run_group(whole, _Group(fewest)))
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
        resumed = _last(run_group(resubmitted, _Group(2)))
        # The uninterrupted run can have one rank, whose state all ranks then have.
        faults = "a run whose ranks were killed and changed in number"
        for rank, (one, other) in enumerate(zip(resumed, cycle(expected), strict=False)):
            if difference := first_difference(one, other):
                raise ConformanceError(f"{difference} on rank {rank} at the end of {faults}")
        # Logged times differ between equal runs.
        figures = {place: numbers for place, numbers in _figures(whole).items() if not place[1].endswith(LOGGED)}
        _compare_figures(interrupted, figures, faults)


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


@dataclass(frozen=True)
class _Checked:
    """A job that the driver's checks have accepted."""

    loaded: LoadedSpec
    examined: Examined


def _checked(train: Train, job: str | Path, *overrides: str, folder: str, config: type | None) -> _Checked:
    loaded = load_spec(Path(job), [*SETTINGS, f"runs={folder}", *overrides], config)
    examined = examine(train, loaded, check_job(loaded))
    check_model(examined.model, loaded, None)
    return _Checked(loaded, examined)


def _new_job(checked: _Checked, name: str) -> Job:
    job = job_of(checked.loaded, token_hex(8), script_data=checked.examined.script_data)
    return replace(job, name=name, run_url=f"{checked.loaded.spec.runs}/{name}")


def _train_here(watched: Watched, job: Job, until: int | None = None, saves: bool = False) -> dict[str, Tensor]:
    """Train in this process, to the end of the plan or until so many steps are done, and then save a checkpoint if `saves`.

    Returns:
        The parameters at the last step boundary that was visited.
    """
    last: dict[str, Tensor] = {}

    def visit(done: int, run: WatchedRun) -> None:
        if watched.visit is not None:
            watched.visit(done, run)
        if until == done + 1:
            process.leave(saves)
        last.update(run.parameters())

    process = SingleProcess(replace(watched, visit=visit), job, lambda message: None)
    process()
    return last


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
        states = [_received(receiver) for receiver, _ in pipes]
        for rank in ranks:
            rank.join(LIMIT_S)
            rank.kill()
            rank.join()
        return states


def _last(results: list[Record | UndulaError | None]) -> list[Record]:
    """The states after the last step, by rank."""
    states: list[Record] = []
    for result in results:
        if isinstance(result, UndulaError):
            raise result
        if result is None:
            raise ConformanceError("the run did not come to its end on ranks: the traceback of a rank is above")
        states.append(result)
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

    def visit(done: int, run: WatchedRun) -> None:
        if done == group.until and rank == group.victim:
            signal.raise_signal(signal.SIGKILL)
        if group.leaves and group.until == done + 1:
            process.leave(group.saves)
        last.clear()
        last.update(run.record(is_whole=True))

    # The same kind of device in all groups, because other kinds compute other bits.
    device = device or local_device(rank, MOST_RANKS)
    process = SingleProcess(
        Watched(train, visit), job, lambda message: None, rank, group.world_size, rendezvous, device
    )
    try:
        process()
    except UndulaError as error:
        sender.send(error)
    except Exception:
        if group.victim is None:  # otherwise, it is the collective in which this rank lost another one
            raise
    else:
        sender.send(last)
