"""The training loop as the user's script sees it: `Run` gives steps, `Step` gives micro-batches and commits.

def train(run: undula.Run) -> None:
    model = run.model(GPT(run.config.model))
    optimizer = run.optimizer(torch.optim.AdamW(model.parameters(), lr=run.base_lr))
    for step in run.steps(validate=loss):
        for batch in step.batches():
            step.backward(loss(batch))
        step.update()
"""

import json
import time
from collections.abc import Callable, Iterator
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from undula.data.manifest import load_manifest
from undula.data.maps import SampleFunction
from undula.data.mixture import Stream, load_data, rank_stream
from undula.data.rows import Batch
from undula.errors import RunError
from undula.plan.keys import multiset_digest
from undula.plan.plan import Plan, StepShape, assign
from undula.run.buffers import BufferMean
from undula.run.clock import Mark, mark_on
from undula.run.engine import Engine, ExactEngine, TorchEngine
from undula.run.job import Job
from undula.run.messages import Publisher
from undula.run.modelstate import load_state, model_and_optimizer_state, weights_digest
from undula.run.randomness import compute_deterministically, seed_micro_batch, seed_weights
from undula.run.stats import LocalStats, StepReducer, exact_mean
from undula.run.telemetry import Telemetry
from undula.run.validation import Validation
from undula.state.checkpoint import Checkpointer
from undula.state.commit import Commit
from undula.state.ledger import Event, StepRow, next_attempt
from undula.storage import open_store

DIGEST_EVERY = 10
"""Steps between digests of the weights in the ledger of a deterministic run."""
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

    def __init__(self, job: Job, rank: int, world_size: int, device: torch.device, publish: Publisher):
        self.config = job.config
        self.base_lr = job.schedule.base_lr
        self.rank = rank
        self.world_size = world_size
        self.device = device
        self._job = job
        self._store = open_store(job.run_url)
        self._data = load_data(job.data)
        self.plan = Plan(job.plan, self._data.num_rows)
        self._plan_digest = self.plan.digest(self._data.digest)
        self._virtual_workers = assign(job.plan.virtual_workers, world_size)[rank]
        self._engine: Engine = (ExactEngine if job.deterministic else TorchEngine)(device)
        # Small sums over the ranks, on the host, so that they never wait for a GPU.
        world = dist.group.WORLD
        assert world is not None
        self._control = world if dist.get_backend() == "gloo" else dist.new_group(backend="gloo")
        self._reducer = StepReducer(self._control)
        self._attempt = self._agreed(lambda: next_attempt(self._store))
        self._publish = publish
        self._telemetry: Telemetry | None = None
        self._checkpoints = Checkpointer(
            self._store, self._control, self._attempt, job.checkpoint.keep, self._flush_telemetry, self._tell_saved
        )
        self._model: nn.Module | None = None
        self._optimizer: torch.optim.Optimizer | None = None
        self._base_lrs: list[float] = []
        self._pending: Callable[[], None] | None = None
        self._map: SampleFunction | None = None
        self._validation_map: SampleFunction | None = None
        self._has_started = False
        if job.deterministic:
            compute_deterministically()
        seed_weights(job.plan.seed)

    def model(self, module: nn.Module) -> nn.Module:
        """Place and wrap the module; its weights become rank 0's, then the checkpoint's when the run resumes."""
        if self._model is not None:
            raise RuntimeError("run.model() was called twice: a run has one model; put several modules into one")
        self._model = self._engine.wrap(module)
        self._buffers = BufferMean(module, exact=self._job.deterministic)
        return self._model

    def optimizer(self, optimizer: torch.optim.Optimizer) -> torch.optim.Optimizer:
        """Hand over the optimizer: the loop steps it and moves each group's learning rate along the schedule."""
        self._optimizer = optimizer
        self._base_lrs = [float(group["lr"]) for group in optimizer.param_groups]
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
        commit = self._restore()
        start = commit.step if commit else 0
        if self.rank == 0:
            self._telemetry = Telemetry(
                self._store, self._job.name, self._attempt, start, self.plan.total_steps, self._publish
            )
        self._tell_start(start, commit)
        validation = self._validation(validate)
        if validate is None and self._job.data.validation is not None:
            self._event(
                Event("notice", "data.validation is given, and run.steps() has no validate=: nothing is validated")
            )
        stream = rank_stream(self._data, self.plan, self._virtual_workers, self._job.data, start, self._map)
        try:
            stream.open()
            if validation and start == 0:
                self._validate(validation, 0)
            for index in range(start, self.plan.total_steps):
                step = Step(self, stream, index)
                yield step
                if not step.updated:
                    raise RuntimeError(f"step {index} was left without step.update()")
                self._after_step(index + 1, validation)
            self._end()
        finally:
            stream.close()
            if self._telemetry:
                self._telemetry.close()

    def _after_step(self, done: int, validation: Validation | None) -> None:
        last = done == self.plan.total_steps
        if validation and (last or done % self._job.validation.every_steps == 0):
            self._validate(validation, done)
        if last or done % self._job.checkpoint.every_steps == 0:
            self._save(done)

    def _restore(self) -> Commit | None:
        if self.rank == 0:
            self._checkpoints.remove_uncommitted()
        commit, self._damaged = self._checkpoints.newest_whole()
        if self.rank == 0:
            self._checkpoints.remove(self._damaged)  # or they would count among those to keep
        if commit:
            if commit.plan_digest != self._plan_digest:
                raise RunError(
                    f"{self._store.url}/{commit.folder} is of another plan or other data than this job's: "
                    "restore them, give another name, or start over with --fresh"
                )
            assert self._model is not None
            assert self._optimizer is not None
            state = model_and_optimizer_state(self._model, self._optimizer)
            values = self._checkpoints.load(commit, state)
            load_state(self._model, self._optimizer, {**state, **values})
        return commit

    def _tell_start(self, start: int, commit: Commit | None) -> None:
        for problem in self._damaged.values():
            self._event(Event("notice", f"checkpoint skipped: {problem}", start))
        workers = f"{self.world_size} worker{'s' if self.world_size > 1 else ''}"
        message = f"resumed from the checkpoint of step {start}" if commit else "started"
        data = {"world_size": self.world_size, "attempt": self._attempt, "resumed": bool(commit)}
        self._event(Event("start", f"{message} with {workers}", start, data))

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
        )

    def _validate(self, validation: Validation, done: int) -> None:
        loss, samples = exact_mean(*validation.losses(), self._control)
        self._commit_pending()
        self._event(Event("validation", f"validation loss {loss:.4f}", done, {"loss": loss, "samples": samples}))

    def _save(self, done: int) -> None:
        self._commit_pending()
        self._finish_saving()
        assert self._model is not None
        assert self._optimizer is not None
        state = model_and_optimizer_state(self._model, self._optimizer)
        self._checkpoints.save(done, self._plan_digest, state)

    def _tell_saved(self, done: int, seconds: float) -> None:
        self._event(Event("checkpoint", f"checkpoint of step {done} committed", done, {"seconds": seconds}))

    def _finish_saving(self) -> BaseException | None:
        error = self._checkpoints.wait()
        if error:
            reason = str(error).strip().splitlines()[-1]
            self._event(Event("notice", f"a checkpoint failed, training goes on: {reason}"))
        return error

    def _end(self) -> None:
        self._commit_pending()
        if error := self._finish_saving():
            raise error
        self._event(Event("end", f"finished after {self.plan.total_steps} steps", self.plan.total_steps))

    def _commit_pending(self) -> None:
        """Bring the row of the last step to the ledger: rows are one step late, so that no step waits for a GPU."""
        if self._pending:
            self._pending()
            self._pending = None

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


class Step:
    """One optimizer step.

    Attributes:
        index: counted from 0 over the whole run.
        lr: learning rate of the schedule at this step, for a group whose own rate is the base rate.
    """

    def __init__(self, run: Run, stream: Stream, index: int):
        self._run = run
        self._stream = stream
        self._began = time.perf_counter()
        self._data_s = 0.0
        self._spans: list[tuple[str, Mark, Mark]] = []
        self._losses: list[tuple[Tensor, int]] = []
        self._local = LocalStats()
        self._weight = 0
        self._in_micro_batch: Mark | None = None
        self._has_begun = self._is_in_batch = self._has_ended = False
        self.index = index
        self.shape: StepShape = run.plan.step(index)
        self._multiplier = run._job.schedule.multiplier(
            self.shape.samples_before + self.shape.samples, run.plan.total_samples
        )
        self.lr = run.base_lr * self._multiplier
        self.updated = False
        self._weights_digest: int | None = None

    def batches(self) -> Iterator[Batch]:
        """The micro-batches of this rank's virtual workers; call backward() once for each."""
        run = self._run
        assert run._model is not None
        if self._has_begun:
            raise RuntimeError("step.batches() was called twice: a step's samples come once")
        self._has_begun = True
        shares = [
            (virtual_worker, number, size)
            for virtual_worker in run._virtual_workers
            for number, size in enumerate(run.plan.micro_batches(self.shape.step_in_epoch, virtual_worker))
        ]
        run._buffers.begin_step()
        # Without a share in a short step, two rows of weight zero run instead: the ranks' collectives must match, and some layers,
        # BatchNorm among them, cannot train on one row.
        for place, (virtual_worker, number, size) in enumerate(shares or [(run._virtual_workers[0], 0, 0)]):
            batch = self._next_batch(virtual_worker, size)
            run._engine.before_micro_batch(run._model, is_last=place >= len(shares) - 1)
            run._buffers.begin_micro_batch()
            seed_micro_batch(run._job.plan.seed, self.index, virtual_worker, number)
            self._weight = size
            self._is_in_batch = True
            self._in_micro_batch = mark_on(run.device)
            yield batch
            self._is_in_batch = False
            if self._in_micro_batch is not None:
                raise RuntimeError("a batch was left without step.backward(loss)")
        self._has_ended = True

    def backward(self, loss: Tensor) -> None:
        """Accumulate the gradient of the current batch.

        Args:
            loss: mean over the batch's samples, a scalar.
        """
        run = self._run
        begin, self._in_micro_batch = self._in_micro_batch, None
        if begin is None:
            raise RuntimeError("step.backward(loss) goes once into each turn of `for batch in step.batches()`")
        (loss * (self._weight / self.shape.samples)).backward()  # type: ignore[no-untyped-call]
        end = mark_on(run.device)
        ready = run._engine.gradients_ready or end
        self._spans += [("compute_s", begin, ready), ("communication_s", ready, end)]
        self._losses.append((loss.detach(), self._weight))
        run._engine.after_micro_batch(self._weight)
        run._buffers.end_micro_batch(self._weight)

    def log(self, **values: float | Tensor) -> None:
        """Record values in the ledger, averaged over the step's samples: of the current batch, or of the rank outside of one."""
        weight = float(self._weight if self._is_in_batch else sum(size for _, size in self._losses))
        for name, value in values.items():
            total, weights = self._local.logged.get(name, (0.0, 0.0))
            self._local.logged[name] = (total + float(value) * weight, weights + weight)

    def update(self) -> None:
        """Clip, step the optimizer along the schedule, and commit the step."""
        run = self._run
        if not self._has_ended:
            raise RuntimeError(
                "step.update() comes after the loop over step.batches(), all of them: each is part of the step"
            )
        assert run._model is not None
        assert run._optimizer is not None
        begin = mark_on(run.device)
        run._engine.end_step()
        if run._buffers.is_needed:
            run._buffers.end_step(self.shape.samples)
        self._spans.append(("communication_s", begin, mark_on(run.device)))
        if run._job.gradient.max_norm is not None:
            torch.nn.utils.clip_grad_norm_(run._model.parameters(), run._job.gradient.max_norm)
        for group, base in zip(run._optimizer.param_groups, run._base_lrs, strict=True):
            group["lr"] = base * self._multiplier
        run._optimizer.step()
        run._optimizer.zero_grad(set_to_none=True)
        losses = torch.stack([loss.double() * size for loss, size in self._losses])
        losses_on_host = losses.to("cpu", non_blocking=True)
        copied = mark_on(run.device)
        is_digested = (self.index + 1) % DIGEST_EVERY == 0 or self.index + 1 == run.plan.total_steps
        if run._job.deterministic and run.rank == 0 and is_digested:
            self._weights_digest = weights_digest(run._model)
        run._commit_pending()
        wall_s = time.perf_counter() - self._began
        run._pending = lambda: self._commit(losses_on_host, copied, wall_s)
        self.updated = True

    def _next_batch(self, virtual_worker: int, size: int) -> Batch:
        began = time.perf_counter()
        samples = self._stream.take(virtual_worker, size) if size else self._stream.any_rows(2)
        if size:
            self._local.sample_digest += multiset_digest(samples.ids)
        device = self._run.device
        batch = {
            name: value.to(device, non_blocking=True) if isinstance(value, Tensor) else value
            for name, value in samples.batch.items()
        }
        self._data_s += time.perf_counter() - began
        return batch

    def _commit(self, losses_on_host: Tensor, copied: Mark, wall_s: float) -> None:
        run = self._run
        copied.seconds_since(copied)  # on a GPU: wait until the copy is there
        seconds = self._local.seconds
        seconds["data_s"] = self._data_s
        for name, begin, end in self._spans:
            seconds[name] += end.seconds_since(begin)
        seconds["other_s"] = max(wall_s - sum(seconds.values()), 0.0)
        self._local.losses = losses_on_host.tolist()
        self._local.sample_digest %= 2**64
        self._local.has_saved = run._checkpoints.has_finished_here
        reduced = run._reducer.reduce(self._local, self.shape.samples)
        if reduced.pop("all_have_saved"):
            run._finish_saving()
        if run._telemetry:
            run._telemetry.step(
                StepRow(
                    attempt=run._attempt,
                    step=self.index,
                    epoch=self.shape.epoch,
                    samples=self.shape.samples_before + self.shape.samples,
                    step_samples=self.shape.samples,
                    world_size=run.world_size,
                    lr=self.lr,
                    time=time.time(),
                    weights_digest=self._weights_digest,
                    **{**reduced, "logged": json.dumps(reduced["logged"])},
                )
            )
