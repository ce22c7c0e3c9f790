"""The training loop as the user's script sees it: `Run` gives steps, `Step` gives micro-batches and commits.

def train(run: undula.Run) -> None:
    model = run.model(GPT(run.config.model))
    optimizer = run.optimizer(torch.optim.AdamW(model.parameters(), lr=run.base_lr))
    for step in run.steps(validate=loss):
        for batch in step.batches():
            step.backward(loss(batch))
        step.update()
"""

import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from undula.data.manifest import load_manifest
from undula.data.maps import SampleFunction
from undula.data.mixture import load_data
from undula.data.rows import Batch
from undula.data.streams import Stream, rank_stream
from undula.errors import StorageError
from undula.parallel.engines.select import engine_for
from undula.parallel.engines.torch_engines import Engine
from undula.plan.plan import Plan, assign
from undula.recovery.handover import Kept, LeaveGroup, Request, process
from undula.recovery.live_state import LiveState, StateMemory, find_state
from undula.recovery.replica import Mirror
from undula.recovery.restore import Restored, restore
from undula.recovery.snapshot import folder_of
from undula.recovery.snapshot_writer import SnapshotWriter
from undula.state.checkpoint import Checkpointer
from undula.state.ledger import next_attempt
from undula.state.model_state import check_state, model_and_optimizer_state
from undula.state.records import Event, StepRow
from undula.storage import open_store
from undula.telemetry.messages import Publisher
from undula.telemetry.reporter import Telemetry
from undula.train.buffers import BufferMean
from undula.train.job import Job
from undula.train.learning_rate import GroupRates, rate_for
from undula.train.noise_scale import NoiseMeter, every_steps
from undula.train.randomness import compute_deterministically, seed_weights
from undula.train.step import Step
from undula.train.step_reduction import Asked, StepReducer, exact_mean
from undula.train.validation import Validation

Loss = Callable[[Batch], Tensor]
"""Mean loss over a batch's samples, as a scalar tensor."""


class Run:
    """A rank's view of the run. The script gets it as the argument of its train function.

    Attributes:
        config: the script's own settings.
        base_lr: learning rate at the top of the schedule.
        plan: what each step consumes.
        rank, world_size, device: of this process.
    """

    def __init__(
        self,
        job: Job,
        rank: int,
        world_size: int,
        device: torch.device,
        publish: Publisher,
        local_rank: int = 0,
        mirror: Mirror | None = None,
    ):
        self.config = job.config
        self.base_lr = job.schedule.base_lr
        self.rank = rank
        self.world_size = world_size
        self.device = device
        self._job = job
        self._local_rank = local_rank
        self._mirror = mirror
        self._store = open_store(job.run_url)
        self._data = load_data(job.data)
        self.plan = Plan(job.plan, self._data.num_rows)
        self._plan_digest = self.plan.digest(self._data.digest)
        self._virtual_workers = assign(job.plan.virtual_workers, world_size)[rank]
        # Small sums over the ranks, on the host, so that they never wait for a GPU.
        world = dist.group.WORLD
        assert world is not None
        self._control = world if dist.get_backend() == "gloo" else dist.new_group(backend="gloo")
        self._reducer = StepReducer(self._control)
        self._attempt = self._agreed(lambda: next_attempt(self._store))
        self._publish = publish
        self._telemetry: Telemetry | None = None
        self._stream: Stream | None = None
        self._checkpoints = Checkpointer(
            self._store, self._control, self._attempt, job.checkpoint.keep, self._flush_telemetry, self._tell_saved
        )
        self._model: nn.Module | None = None
        self._optimizer: torch.optim.Optimizer | None = None
        self._rows: list[StepRow] = []
        self._memory: StateMemory | None = None
        self._live: LiveState | None = None
        self._step_s = 0.0
        self._blocked_s = 0.0
        self._rate, _ = rate_for(job.schedule, self.plan, world_size, 0, {})
        self._loss_scale = job.plan.virtual_workers if job.gradient.reduce == "sum" else 1
        self._boundary: int | None = None
        self._asked = Asked()
        self._map: SampleFunction | None = None
        self._validation_map: SampleFunction | None = None
        self._has_started = False
        if job.deterministic:
            compute_deterministically()
        seed_weights(job.plan.seed)

    def model(self, module: nn.Module) -> nn.Module:
        """Place and wrap the module; its weights become rank 0's, then the checkpoint's when the run resumes.

        A module that torch's `fully_shard` has sharded is taken as it is.
        """
        if self._model is not None:
            raise RuntimeError("run.model() was called twice: a run has one model; put several modules into one")
        self._engine: Engine = engine_for(module, self.device, self._job, self.rank, self.world_size)
        self._model = self._engine.wrap(module)
        self._buffers = BufferMean(module, exact=self._job.deterministic)
        every = every_steps(self._job.gradient, self._job.schedule, self._job.plan)
        self._meter = NoiseMeter(module, every, self._loss_scale, is_first=self.rank == 0)
        return self._model

    def optimizer(self, optimizer: torch.optim.Optimizer) -> torch.optim.Optimizer:
        """Hand over the optimizer: the loop steps it and moves each group's learning rate along the schedule."""
        if hasattr(optimizer, "skip_synchronize"):
            raise TypeError("run.optimizer() got a DistributedOptimizer of Horovod: hand over the optimizer itself")
        self._optimizer = optimizer
        self._group_rates = GroupRates(optimizer, self._job.schedule, self.plan)
        return optimizer

    def map(self, function: SampleFunction, validation: SampleFunction | None = None) -> None:
        """Transform every sample where it is read, in Ray Data's tasks: decode, crop, augment.

        Args:
            function: (sample, random generator) -> sample, columns by name. The generator is keyed by epoch and sample, so that
                augmentation is the same at any world size and after any resume.
            validation: the function for validation data; by default the same one.
        """
        if self._has_started:
            raise RuntimeError("run.map() comes before run.steps(): samples are read from there on")
        self._map, self._validation_map = function, validation or function

    def steps(self, validate: Loss | None = None) -> Iterator["Step"]:
        """The steps that are left of the plan, from the newest whole checkpoint on.

        Args:
            validate: mean loss of a batch; called without gradients, in eval mode, on validation data before the first step, every
                validation.every_steps steps and after the last.
        """
        if self._model is None or self._optimizer is None:
            raise RuntimeError("call run.model() and run.optimizer() before run.steps()")
        self._has_started = True
        check_state(self._model, self._optimizer)
        folder = folder_of(self._job.run_url, self._job.run_id)
        restored = restore(
            self._model,
            self._optimizer,
            self._checkpoints,
            self._plan_digest,
            process.kept,
            lambda: find_state(folder, self._plan_digest, self._mirror, self.rank, self.world_size),
            self._open_stream,
            self._attempt,
            self._control,
            self._meter.tensors,
        )
        start = self._boundary = restored.step
        process.kept = None
        self._rows = list(restored.rows)
        if self.rank == 0:
            self._telemetry = Telemetry(
                self._store, self._job.name, self._attempt, start, self.plan.total_steps, self._publish
            )
            self._telemetry.repeat(restored.rows)
        self._tell_start(restored)
        self._rate, change = rate_for(self._job.schedule, self.plan, self.world_size, start, restored.values)
        if change:
            self._event(change)
        if start == 0 and self._group_rates.warning:
            self._event(Event("notice", self._group_rates.warning))
        self._live = LiveState(self._model, self._optimizer, self._state)
        if (every := self._job.checkpoint.snapshot_every_steps) != 0:
            writer = SnapshotWriter(folder, self._plan_digest, self._attempt, self._local_rank, every)
            self._memory = StateMemory(self._live, writer, self._mirror, self.rank, self._local_rank)
        validation = self._validation(validate)
        if validate is None and self._job.data.validation is not None:
            self._event(
                Event("notice", "data.validation is given, and run.steps() has no validate=: nothing is validated")
            )
        try:
            process.progress.begin(start)
            if validation and start == 0:
                self._validate(validation, 0)
            index = start
            while index < self.plan.total_steps:
                assert self._stream is not None
                step = Step(self, self._stream, index)
                yield step
                if not step.updated:
                    raise RuntimeError(f"step {index} was left without step.update()")
                self._after_step(index, index + step.span, validation)
                index += step.span
            if start == self.plan.total_steps and not restored.is_checkpoint:
                self._after_step(
                    start - 1, start, validation
                )  # the last group was lost on its way to the last checkpoint
            self._end()
        except LeaveGroup:
            self._close(wait=False)  # rows that are not stored yet go to the next group with the state
            raise
        finally:
            self._close()

    def forget(self) -> None:
        """Let go of model and optimizer, which the next group of this process makes anew: there may not be room for both."""
        self._model = self._optimizer = self._live = self._memory = None
        for name in ("_engine", "_buffers", "_checkpoints", "_meter"):
            self.__dict__.pop(name, None)

    def _open_stream(self, start: int) -> None:
        self._stream = rank_stream(self._data, self.plan, self._virtual_workers, self._job.data, start, self._map)
        self._stream.open()

    def _close(self, wait: bool = True) -> None:
        """End what works beside the loop. A loop that an exception has left is not there to do it until its frame has gone.

        Args:
            wait: for storage to have what was told.
        """
        if self._stream:
            _in_thread(
                self._stream.close
            )  # it may wait for Ray Data's first block, and the next group of workers for us
        if self._memory:
            self._memory.close()
        if self._telemetry and wait:
            self._telemetry.close()
        elif self._telemetry:
            _in_thread(self._telemetry.close)
        self._stream = self._memory = self._telemetry = None

    def hand_over(self) -> None:
        """Leave the state of the last step boundary to the next worker group of this process, where there is one that is whole."""
        # Otherwise the state that a former group has left is still the newest. Before the first step, a fresh start lacks nothing.
        if self._boundary and self._live is not None and self._optimizer is not None:
            process.kept = None
            self._buffers.undo_step()
            self._optimizer.zero_grad(set_to_none=True)
            process.kept = self._kept(self._live, self._boundary)
        self._close(wait=not process.is_sound)

    def _kept(self, live: LiveState, boundary: int) -> Kept:
        return Kept(self._plan_digest, self._attempt, boundary, live.held().on_host(), tuple(self._rows))

    def _leave(self, done: int) -> None:
        """End the group here. All ranks call it at the same step boundary.

        Raises:
            LeaveGroup: always.
        """
        # A part that only a rank which is not in the next group has would be lost with it.
        if self._asked.gives and self._live and self._live.is_sharded:
            is_given = self._mirror is not None and self._mirror.give(self._kept(self._live, done))
            answers: list[Any] = [None] * self.world_size
            dist.all_gather_object(answers, is_given, group=self._control)
            if not all(answers):
                self._event(Event("notice", "the head has no room for the parts of the model: saving to storage", done))
                self._save(done)
        self._finish_saving()
        raise LeaveGroup

    def _after_step(self, before: int, done: int, validation: Validation | None) -> None:
        process.enter("other")
        last = done == self.plan.total_steps

        def is_due(every: int) -> bool:
            return last or done // every > before // every

        if is_due(self._job.validation.every_steps):
            if validation:
                self._validate(validation, done)
            elif self._telemetry:
                self._telemetry.mean_loss(done)
        began = time.perf_counter()
        if is_due(self._job.checkpoint.every_steps) or self._asked.saves:
            self._save(done)
        if self._asked.leaves and not last:
            self._leave(done)
        self._blocked_s += time.perf_counter() - began

    @contextmanager
    def _changing_state(self, span: int) -> Iterator[None]:
        """While the optimizer steps: whoever is torn out of this has a state of no step."""
        if self._memory:
            self._memory.wait()
        boundary, self._boundary = self._boundary, None
        assert boundary is not None
        yield
        self._boundary = boundary + span
        self._buffers.keep_step()

    def _wishes(self) -> Asked:
        """What this rank asks for after the step that it is about to commit."""
        takes, sends = self._memory.wants(self._step_s) if self._memory else (False, False)
        request = process.request
        # A checkpoint that is being written is not torn down for a resize that can wait for it.
        leaves = request.leaves and (request.saves or self._checkpoints.saving_step is None)
        lacks_memory = self._memory is not None and self._memory.lacks_part
        has_saved = self._checkpoints.has_finished_here
        return Asked(leaves, request.gives, request.saves, takes, sends, lacks_memory, has_saved)

    def _committed(self, row: StepRow, stored_steps: int, asked: Asked) -> None:
        self._rows = [*(each for each in self._rows if each.step >= stored_steps), row]
        self._asked = asked
        if asked.saves and process.request == Request(saves=True):
            process.request = Request()
        self._step_s = row.seconds
        if self._telemetry:
            self._telemetry.step(row)
        if self._memory and (news := self._memory.news(row.done, asked.lacks_memory)):
            self._event(news)
        if self._memory and asked.snapshots:
            self._memory.begin(row.done, self._rows, asked.sends)
        if asked.has_saved:
            self._finish_saving()

    def _state(self) -> dict[str, Any]:
        """All that a step changes, for a checkpoint."""
        assert self._model is not None
        assert self._optimizer is not None
        state = model_and_optimizer_state(self._model, self._optimizer)
        return {**state, **self._meter.tensors, **self._rate.values()}

    def _tell_start(self, restored: Restored) -> None:
        for problem in restored.damaged.values():
            self._event(Event("notice", f"checkpoint skipped: {problem}", restored.step))
        workers = f"{self.world_size} worker{'s' if self.world_size > 1 else ''}"
        message = f"resumed from {restored.origin} of step {restored.step}" if restored.origin else "started"
        data = {"world_size": self.world_size, "attempt": self._attempt, "resumed": bool(restored.origin)}
        self._event(Event("start", f"{message} with {workers}", restored.step, data))

    def _validation(self, validate: Loss | None) -> Validation | None:
        if validate is None or self._job.data.validation is None:
            return None
        assert self._model is not None
        return Validation(
            self._model,
            validate,
            self._job,
            load_manifest(self._job.data.validation),
            self._validation_map,
            self._virtual_workers,
            self.device,
            self.world_size if self._engine.rounds_must_match else None,
        )

    def _validate(self, validation: Validation, done: int) -> None:
        loss, samples = exact_mean(*validation.losses(), self._control)
        self._event(Event("validation", f"validation loss {loss:.4f}", done, {"loss": loss, "samples": samples}))

    def _save(self, done: int) -> None:
        self._finish_saving()
        assert self._model is not None
        assert self._optimizer is not None
        self._checkpoints.save(done, self._plan_digest, self._state())

    def _tell_saved(self, done: int, seconds: float) -> None:
        self._event(Event("checkpoint", f"checkpoint of step {done} committed", done, {"seconds": seconds}))

    def _finish_saving(self) -> BaseException | None:
        error = self._checkpoints.wait()
        if error:
            self._event(Event("notice", f"a checkpoint failed, training goes on: {_reason(error)}"))
        return error

    def _end(self) -> None:
        if error := self._finish_saving():
            raise StorageError(f"the last checkpoint was not written: {_reason(error)}") from error
        if self._memory:
            self._memory.forget()
        self._event(Event("end", f"finished after {self.plan.total_steps} steps", self.plan.total_steps))

    def _event(self, event: Event) -> None:
        if self._telemetry:
            self._telemetry.event(event)

    def _flush_telemetry(self) -> None:
        if self._telemetry:
            self._telemetry.flush()

    def _agreed(self, decide: Callable[[], int]) -> int:
        box: list[Any] = [decide() if self.rank == 0 else None]
        dist.broadcast_object_list(box, src=0, group=self._control)
        return int(box[0])


def _reason(error: BaseException) -> str:
    return (str(error).strip().splitlines() or [type(error).__name__])[-1]


def _in_thread(close: Callable[[], None]) -> None:
    threading.Thread(target=close, name="undula-close", daemon=True).start()
