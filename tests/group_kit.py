"""Worker processes that outlive their groups, as on Ray: one is killed in the middle of a step, and the others go on in a new group."""

import gc
import pickle
import signal
import traceback
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from datetime import timedelta
from functools import partial
from pathlib import Path
from typing import Any, Literal

import psutil
import pytest
import torch
import torch.distributed as dist
from drawn_changes import drawn_change
from example_parts import averaged, summed
from feature_scripts import Loop, Train, adamw, of_name, square, with_own_average
from features import FEATURES, SCALE_INTERVAL, Feature
from numbers_job import cpu_run, network
from ranks import forks
from torch import Tensor, nn
from torch.optim.optimizer import register_optimizer_step_pre_hook

from undula.elastic.sockets import cut_connections, listening_ports
from undula.parallel.engines.engine import Engine
from undula.parallel.spec import ShardingSpec
from undula.recovery.live_state import Targets
from undula.recovery.moves import Part, packed_parts
from undula.recovery.offers import Common, Described, Offer, described
from undula.recovery.restore import Restorer
from undula.recovery.worker_state import HeldState, LeaveGroup, Request, WorkerState
from undula.state.boxes import elements, without
from undula.state.processes import send_signal
from undula.state.spec import CheckpointSpec
from undula.train import step_part
from undula.train.boundary import StepBoundary
from undula.train.job import Job
from undula.train.run import Run
from undula.train.session import GroupSession
from undula.train.step_reduction import StepReducer

Place = Literal[
    "before the reduction",
    "between reduction and commit",
    "inside the commit",
    "after its commit",
    "in the optimizer's step",
    "after the optimizer's step",
    "after a gather",
]
LIMIT_S = 120.0


def wide() -> nn.Module:
    """Return a network whose state is large beside what alignment adds to a message."""
    torch.manual_seed(3)
    return nn.Sequential(nn.Linear(1, 240), nn.Tanh(), nn.Linear(240, 240), nn.Tanh(), nn.Linear(240, 1))


def decayed(
    run: Run,
    ends: Callable[[int], None],
    in_after_step: bool = False,
    gathers: bool = False,
    has_state: bool = False,
    factor: float = 0.9,
) -> None:
    """Train, and change the weights after each step as well, in the loop or in `after_step`, once a step.

    Args:
        run: The run.
        ends: Function that is called before each commit.
        in_after_step: Whether the weights are changed in `after_step`.
        gathers: Whether the ranks meet before that.
        has_state: Whether the script has state of its own, and an `after_step` in any case.
        factor: Factor of the weights.
    """
    model = run.model(network())
    run.optimizer(adamw(model))
    if has_state:
        run.state("nothing", lambda: 0, lambda value, is_unfinished: None)

    def decay(*_: object) -> None:
        if gathers:
            run.gather(0)
        with torch.no_grad():
            for parameter in model.parameters():
                parameter.mul_(factor)

    for step in run.steps(after_step=decay if in_after_step else (lambda *_: None) if has_state else None):
        for batch in step.batches():
            step.backward(square(model, batch))
        ends(step.index)
        step.update()
        if not in_after_step:
            decay()


FP16 = FEATURES["fp16, sharded in stage 3"]
SCRIPTS = {
    **FEATURES,
    "fp16 and lamb": replace(FP16, train=replace(FP16.train, optimize=of_name("lamb")), like=None),  # type: ignore[type-var]
    "decayed": Feature(decayed, {"sharding": ShardingSpec(3)}),
    "not changed": Feature(partial(decayed, factor=1.0), {"sharding": ShardingSpec(3)}),
    "decayed in after_step": Feature(partial(decayed, in_after_step=True), {"sharding": ShardingSpec(3)}),
    "decayed after a gather": Feature(partial(decayed, gathers=True)),
    "decayed after a gather, with state": Feature(partial(decayed, gathers=True, has_state=True)),
    "decayed after a gather in after_step": Feature(partial(decayed, in_after_step=True, gathers=True)),
    "an average that is lost": Feature(partial(with_own_average, is_kept=False)),
    "averaged": Feature(averaged, {"sharding": ShardingSpec(3)}),
    "summed": Feature(summed),
    "summed, sharded": Feature(summed, {"sharding": ShardingSpec(2)}),
    "wide": Feature(Loop(wide, adamw), {"sharding": ShardingSpec(3)}),
}
"""Rows that workers can train, by name."""


def _script(name: str) -> Train:
    """Return the train function of a row, or of a change that is drawn, such as `drawn 7`."""
    kind, _, number = name.partition(" ")
    return drawn_change(int(number)) if kind == "drawn" and number.isdigit() else SCRIPTS[name].train


@dataclass(frozen=True)
class Fault:
    """What ends a group: a rank is killed at some place of a step, and others may not learn of the commit."""

    place: Place
    rank: int
    step: int
    deaf: tuple[int, ...] = ()
    """Ranks whose commit fails although others succeed in theirs."""


@dataclass(frozen=True)
class Order:
    """Group that a worker joins."""

    name: str
    """Row of the features."""
    job: Job
    rank: int
    world_size: int
    file: str
    fault: Fault | None = None
    leaves_after: int | None = None
    every: int | None = None
    """Number of steps between two snapshots."""
    leavers: tuple[str, ...] = ()
    """Files with the states of workers that have left and are not in this group."""
    is_new: bool = False
    """Whether the worker forgets what it keeps of former groups, which were those of other runs."""


@dataclass(frozen=True)
class Ended:
    """End of a group on a worker."""

    how: Literal["ended", "left", "broken"]
    committed: int
    """Number of steps that the worker has committed."""
    held: int | None
    """Number of steps of the state that it keeps; None for none."""
    updates: int
    """Number of updates that it keeps."""
    state: str
    """File with the state that it keeps."""
    received: int
    """Number of bytes of the state that it got from others when it joined the group."""
    lacked: int
    """Number of bytes of its own part of the state that it did not hold then."""


class Workers:
    """Worker processes, which are killed at the end of the block.

    Args:
        folder: Folder for the files by which the ranks find each other.
    """

    def __init__(self, folder: Path):
        self._folder = folder
        self._groups = 0
        self._all: list[Any] = []
        self._idle: list[Any] = []

    def __enter__(self) -> "Workers":
        return self

    def __exit__(self, *_: object) -> None:
        self._idle = []
        self._kill()

    def idle(self, count: int) -> list[Any]:
        """Return workers that have come to rest, and new ones if there are too few. Those of a test that has failed are killed."""
        self._kill()
        found, self._idle = [*self._idle, *(self.start() for _ in range(count - len(self._idle)))], []
        return found

    def rest(self, members: Sequence[Any]) -> None:
        """Keep workers, which have ended their groups, for other runs."""
        self._idle = [*members]

    def _kill(self) -> None:
        for member in [each for each in self._all if each not in self._idle]:
            member[0].kill()
            member[0].join()
            self._all.remove(member)

    def start(self) -> Any:
        """Start a worker, and return its process and its connection."""
        context = forks("features", "group_kit")
        ours, theirs = context.Pipe()
        process = context.Process(target=_work, args=(theirs,))
        process.start()
        theirs.close()
        self._all.append((process, ours))
        return self._all[-1]

    def train(self, members: Sequence[Any], name: str, job: Job, **order: Any) -> list[Ended | None]:
        """Let workers train as a group, and return how it has ended on each; None for one that was killed."""
        self._groups += 1
        file = str(self._folder / f"group-{self._groups}")
        for rank, (_, pipe) in enumerate(members):
            pipe.send(Order(name, job, rank, len(members), file, **order))
        ends = []
        for _, pipe in members:
            try:
                assert pipe.poll(LIMIT_S), "a worker does not answer"
                end, error = pipe.recv()
                assert error is None, error
                ends.append(end)
            except (EOFError, ConnectionResetError):
                ends.append(None)
        return ends


def _work(pipe: Any) -> None:
    torch.set_num_threads(1)
    worker = WorkerState(is_run=True, controller=object())
    while True:
        order = pipe.recv()
        if order.is_new:
            worker = WorkerState(is_run=True, controller=object())
        try:
            pipe.send((_train(order, worker), None))
        except BaseException:
            pipe.send((None, traceback.format_exc()))


def _train(order: Order, worker: WorkerState) -> Ended:
    limit = timedelta(seconds=LIMIT_S)
    store = f"file://{order.file}"
    dist.init_process_group("gloo", init_method=store, rank=order.rank, world_size=order.world_size, timeout=limit)
    worker.join_group()
    leavers = FileLeavers(order.leavers)
    # Checkpoints would hold up ranks that leave.
    checkpoint = CheckpointSpec(every_steps=10**6, snapshot_every_steps=order.every)
    job = replace(order.job, checkpoint=checkpoint)
    run = cpu_run(job, order.rank, order.world_size, worker, leavers=leavers)
    how: Any = "ended"
    former = worker.held
    counted: list[int] = []
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(step_part, "GROWTH_INTERVAL", SCALE_INTERVAL)
        if order.fault:
            _inject(order.fault, order.rank, patch)
        _count(patch, former, counted, leavers)
        try:
            _script(order.name)(run, lambda index: _request(worker, index, order.leaves_after))
        except LeaveGroup:
            how = "left"
        except RuntimeError as error:
            if "gloo" not in str(error).lower():
                raise
            how, worker.is_sound = "broken", True
        committed = run._loop.attempt.committed if run._loop else None
        if how != "ended":
            run.hand_over()
        run.free()
        del run
    if how == "broken":
        cut_connections(listening_ports())  # as the controller asks for, so that no rank waits for this one
    dist.destroy_process_group()
    gc.collect()  # closes the connections that this process has opened itself
    held, state = worker.held, f"{order.file}-{order.rank}.state"
    Path(state).write_bytes(pickle.dumps(held))
    lacked, received = counted or (0, 0)
    updates = len(held.updates) if held else 0
    return Ended(how, committed or 0, held.step if held else None, updates, state, received, lacked)


class FileLeavers:
    """Leavers whose states are in files, in place of processes that Ray would reach."""

    def __init__(self, files: Sequence[str]):
        self._files = files
        self.names: list[str] = []
        self.sent = 0

    def _held(self, number: int) -> HeldState:
        held: HeldState = pickle.loads(Path(self._files[number]).read_bytes())
        return held

    def answers(self, plan_digest: str) -> list[tuple[str, Described]]:
        states = [(file, self._held(number)) for number, file in enumerate(self._files)]
        return [(file, described(Offer(held).answers())) for file, held in states]

    def common(self, number: int) -> Common:
        held = self._held(number)
        return held.values, held.rows, held.state.expected

    def parts(self, asked: Sequence[tuple[int, Sequence[Part]]]) -> Iterator[Tensor]:
        for number, parts in asked:
            flat = packed_parts([self._held(number).state], parts)
            self.sent += flat.nbytes
            yield flat


def _count(patch: pytest.MonkeyPatch, held: HeldState | None, counted: list[int], leavers: FileLeavers) -> None:
    """Count the bytes that a rank lacks of its part of the state, and those that it gets."""
    gather, receive = Restorer._gather, dist.irecv
    received: list[int] = []

    def counting(restorer: Restorer, targets: Targets, *more: Any) -> None:
        lacked = 0
        for name, target in targets.distinct.items():
            own = held.state.pieces.get(name) if held else None
            missing = without(target.box, [own.box] if own else [])
            lacked += target.tensor.itemsize * sum(map(elements, missing))
        with pytest.MonkeyPatch.context() as here:  # P2POp wants torch's own function
            here.setattr(dist, "irecv", receiving)
            gather(restorer, targets, *more)
        counted.extend([lacked, sum(received) + leavers.sent])

    def receiving(tensor: Tensor, *arguments: Any, **more: Any) -> Any:
        received.append(tensor.nbytes)
        return receive(tensor, *arguments, **more)

    patch.setattr(Restorer, "_gather", counting)


def _request(worker: WorkerState, index: int, leaves_after: int | None) -> None:
    worker.request = Request(leaves=index + 1 == leaves_after)


def _inject(fault: Fault, rank: int, patch: pytest.MonkeyPatch) -> None:
    """Let a fault happen in this process, if it is one of this rank."""
    if fault.place == "after a gather" and rank in (fault.rank, *fault.deaf):
        _after(patch, GroupSession, "gather", _die if rank == fault.rank else _fail, _times(fault.step))
    elif rank in fault.deaf:
        _after(patch, StepReducer, "reduce", _fail, _times(fault.step))
    if rank != fault.rank:
        return
    match fault.place:
        case "before the reduction":
            _before(patch, Engine, "finish_gradients", _die, _times(fault.step))
        case "between reduction and commit":
            _before(patch, StepBoundary, "reduce", _die, _times(fault.step))
        case "inside the commit":
            _before(patch, StepReducer, "reduce", _die, _times(fault.step))
        case "after its commit":
            _after(patch, StepReducer, "reduce", _die, _times(fault.step))
        case "in the optimizer's step":
            steps: list[bool] = []  # that the engine has begun; a step that is skipped has no step of the optimizer
            _before(patch, Engine, "step", lambda: steps.append(True), lambda: True)

            def die_in_step(*_: object) -> None:
                if len(steps) == fault.step + 1:
                    _die()

            die_in_step.__module__ = "undula.faults"  # no hook of the script, which no record of updates would have
            register_optimizer_step_pre_hook(die_in_step)
            _after(patch, Engine, "step", _die, _times(fault.step))
        case "after the optimizer's step":
            _before(patch, StepBoundary, "committed", _die, _times(fault.step))


def _times(step: int) -> Callable[[], bool]:
    """Return a function that returns True in the call of that step, of those of this group's steps."""
    calls = iter(range(step + 1))
    return lambda: next(calls, step + 1) == step


def _die() -> None:
    send_signal(psutil.Process(), signal.SIGKILL)


def _fail() -> None:
    raise RuntimeError("gloo: the connection was lost before the last part arrived")


def _before(
    patch: pytest.MonkeyPatch, owner: Any, name: str, act: Callable[[], None], is_now: Callable[[], bool]
) -> None:
    original = getattr(owner, name)

    def patched(*arguments: Any, **more: Any) -> Any:
        if is_now():
            act()
        return original(*arguments, **more)

    patch.setattr(owner, name, patched)


def _after(
    patch: pytest.MonkeyPatch, owner: Any, name: str, act: Callable[[], None], is_now: Callable[[], bool]
) -> None:
    original = getattr(owner, name)

    def patched(*arguments: Any, **more: Any) -> Any:
        result = original(*arguments, **more)
        if is_now():
            act()
        return result

    patch.setattr(owner, name, patched)
