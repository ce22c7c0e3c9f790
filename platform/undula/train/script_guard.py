"""Checks of what a script does to a run between the run's own calls.

What depends on which batches a rank runs, or on where the run is interrupted, is refused in the step in which it happens, on every rank.

Also here: steps of optimizers during a run: only those of the run's own optimizer, in `step.update`, are part of it.
"""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any
from weakref import WeakKeyDictionary

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.optim import Optimizer
from torch.optim.optimizer import register_optimizer_step_pre_hook

from undula.errors import UsageError
from undula.parallel.collectives import ScriptCollectives, begun_collectives
from undula.parallel.engines.engine import Engine
from undula.parallel.sharding import has_own_step
from undula.recovery.baseline import Baseline
from undula.state.pieces import is_sharded_tensor
from undula.train.open_gradients import OpenGradients


class OptimizerSteps:
    """Refuses steps of an optimizer that the script takes by itself.

    An optimizer that the run does not know is refused when it steps in a second step of the run: what it trains differs between the ranks,
    and is lost with them. One that is made anew for each batch, for example to compute an input, is not.

    Args:
        model: Module that the script calls.
    """

    def __init__(self, model: nn.Module):
        self._parameters = set(model.parameters())
        self._others: WeakKeyDictionary[Optimizer, int] = WeakKeyDictionary()
        """Step of the run in which an optimizer that the run does not know was stepped first."""
        self._is_own = False
        self._step: int | None = None
        self._hook = register_optimizer_step_pre_hook(self._check)

    def close(self) -> None:
        self._hook.remove()

    def begin_step(self, index: int) -> None:
        self._step = index

    @contextmanager
    def own(self) -> Iterator[None]:
        """Surround the step that the run takes."""
        self._is_own = True
        try:
            yield
        finally:
            self._is_own = False

    def _check(self, optimizer: Optimizer, arguments: Any, keywords: Any) -> None:
        if self._is_own or self._step is None:
            return
        if any(parameter in self._parameters for group in optimizer.param_groups for parameter in group["params"]):
            raise UsageError(
                f"optimizer.step() of {type(optimizer).__name__} was called by the script in step {self._step}, but step.update() steps "
                "the optimizer; remove the call, and give run.optimizer() one optimizer with all parameter groups"
            )
        first = self._others.setdefault(optimizer, self._step)
        if first != self._step:
            raise UsageError(
                f"optimizer.step() of {type(optimizer).__name__} was called in steps {first} and {self._step}, but run.optimizer() did not "
                "get this optimizer, so what it trains is no part of the run; make its module a part of the model, and give "
                "run.optimizer() one optimizer with a parameter group for each"
            )


class ScriptGuard:
    """Checks one step after another. The step tells where it is, in the order of the methods.

    Args:
        engine: Engine of the model.
        model: Module that the script calls.
        optimizer: Optimizer of the run.
        baseline: State of the last step boundary.
    """

    def __init__(self, engine: Engine, model: nn.Module, optimizer: torch.optim.Optimizer, baseline: Baseline):
        self._engine = engine
        self._baseline = baseline
        self._gradients = OpenGradients(engine, optimizer)
        self._optimizers = OptimizerSteps(model)
        # flatten_parameters() of an RNN moves its weights to other memory without changing them.
        recurrent = [part for part in model.modules() if isinstance(part, nn.RNNBase)]
        self._relocated = {id(parameter) for part in recurrent for parameter in part.parameters()}
        self._versions: dict[nn.Parameter, int] = {}
        """Number of changes in place of each parameter that torch had counted at the first batch."""
        self._trains: dict[nn.Parameter, bool] = {}
        """Whether each parameter of a whole model trains in the step."""
        self._frozen: list[bool] | None = None
        """Whether each parameter trained in the step before; None before the first one of the group."""
        self._forms = [_form(parameter) for parameter in engine.parameters]
        self._collectives = ScriptCollectives(lambda: engine.num_begun)
        self._step = 0
        self.moved = torch.tensor(False, device="cpu")
        """Whether parameters changed from the boundary to the end of the batches. It is a scalar on the device, so that a GPU need not be
        waited for; pass its value to `check_moved`."""

    def begin_step(self, index: int) -> None:
        """Begin a step, before the script works on it."""
        self._step = index
        self._optimizers.begin_step(index)
        self._gradients.free_former()

    def meet_after_freezing(self) -> None:
        """Meet the other ranks if the script has changed which parameters train, before gradients of different sizes are exchanged.

        A rank that has done so alone waits here for the others, and they for its gradients, which is found and named.
        """
        former, self._frozen = self._frozen, [parameter.requires_grad for parameter in self._engine.module.parameters()]
        if former not in (None, self._frozen) and self._engine.layout.world_size > 1:
            dist.barrier()

    def check_forms(self) -> None:
        """Raise UsageError if a parameter has another dtype or shape than at the beginning, which no resumed run could restore."""
        for parameter, form in zip(self._engine.parameters, self._forms, strict=True):
            if _form(parameter) != form:
                names = {id(each): name for name, each in self._engine.module.named_parameters()}
                before, now = (f"{dtype} of shape {tuple(shape)}" for dtype, shape in (form, _form(parameter)))
                raise UsageError(
                    f"the parameter {names.get(id(parameter), '')!r} was {before} and is {now} after step {self._step}, but a run that "
                    "resumes makes the model as at the beginning; give it its dtype and its shape before run.model()"
                )

    def begin_batches(self) -> None:
        """Begin the batches of the step, after the engine."""
        self._gradients.begin_step(self._step)
        parameters = self._engine.parameters
        # Forward passes of a sharded model replace its parameters by whole ones.
        is_sharded = bool(parameters) and is_sharded_tensor(parameters[0])
        counted = [parameter for parameter in parameters if not is_sharded and id(parameter) not in self._relocated]
        self._versions = {parameter: parameter._version for parameter in counted}
        trained = [] if is_sharded else self._engine.module.parameters()
        self._trains = {parameter: parameter.requires_grad for parameter in trained}

    def begin_batch(self) -> None:
        self._gradients.hold(after_backward=False)
        self._collectives.begin_batch()

    def before_backward(self) -> None:
        """Check the script before a backward pass.

        Raises:
            UsageError: It has begun a collective, or has frozen a parameter in this step.
        """
        self._require_no_collectives()
        # Ranks that train other parameters than others would send gradients of other sizes. Sums of shards check this themselves.
        if any(parameter.requires_grad != trains for parameter, trains in self._trains.items()):
            raise UsageError(
                "requires_grad of a parameter was changed between step.batches() and step.backward(), but all workers must train the same "
                "parameters in a step; call requires_grad_() before step.batches() or after step.update()"
            )
        self._gradients.release(after_backward=False)

    def after_backward(self) -> None:
        self._require_no_collectives()
        self._gradients.hold(after_backward=True)

    def keep_gradients(self) -> None:
        """Undo `zero_grad` of the script."""
        self._gradients.keep()

    def end_batch(self, is_last: bool) -> None:
        """End a batch. Only after its last one, a rank may meet the others in a collective of the script."""
        if is_last:
            self._gradients.release(after_backward=True)
        else:
            self._gradients.check(after_backward=True)
            self._require_no_collectives()

    def end_batches(self) -> None:
        """End the last batch, before the gradient is reduced.

        Raises:
            UsageError: Torch has counted a change of a parameter.
        """
        self.end_batch(is_last=True)
        self.moved = self._baseline.moved()
        if changed := [parameter for parameter, version in self._versions.items() if parameter._version != version]:
            names = {id(parameter): name for name, parameter in self._engine.module.named_parameters()}
            raise UsageError(
                f"the parameter {names.get(id(changed[0]), '')!r} changed between the first batch of a step and step.update(), for example "
                "in the forward pass, but a rank would change it once for each of its micro-batches; change it after step.update()"
            )

    def check_moved(self, moved: bool) -> None:
        """Raise UsageError if parameters changed between the boundary and the end of the batches.

        A group that ends in the step hands over what the script has changed before the first batch, and the next group would change it once
        more.
        """
        if moved:
            raise UsageError(
                f"a parameter or the state of the optimizer changed in step {self._step} before step.update(): in the forward pass, where "
                "a rank would change it once for each of its micro-batches, or before step.batches(), where a run that resumes would "
                "change it again; change it after step.update() or in after_step"
            )

    @contextmanager
    def own_update(self) -> Iterator[None]:
        """Surround the optimizer's step that the run takes.

        Raises:
            UsageError: The optimizer has begun a collective, so that ranks may have other states. Its hooks may do so, for a log.
        """
        begun = begun_collectives()
        with self._optimizers.own():
            yield
        optimizer = self._engine.optimizer
        is_sharded = self._engine.capabilities.equal_rounds  # whose norms need collectives
        if begun_collectives() != begun and not is_sharded and not has_own_step(optimizer):
            raise UsageError(
                f"{type(optimizer).__name__}.step() has begun a collective of torch.distributed, so that each rank may have another part "
                "of its state, which a run could not restore at another number of workers; use an optimizer that does not communicate, "
                "and sharding.stage: 1 in the job's YAML to shard its state"
            )

    def close(self) -> None:
        self._optimizers.close()

    def _require_no_collectives(self) -> None:
        self._collectives.require_none(
            f"step {self._step}",
            "compute it from the batch alone, which has all samples of a virtual worker unless plan.micro_batch is smaller, or from "
            "weights in forward() of the module that has them, or call run.gather() or step.total() outside of the loop over "
            "step.batches()",
        )


def _form(parameter: nn.Parameter) -> tuple[torch.dtype, torch.Size]:
    return parameter.dtype, parameter.shape


def check_loss(loss: object, share: float | None, measures_noise: bool) -> None:
    """Raise UsageError if the run cannot use the arguments of `step.backward`."""
    if share is not None and measures_noise:
        raise UsageError(
            "step.backward() got a share, but the job measures the gradient noise scale, which needs mean losses over samples; set "
            "gradient.noise_every_steps=0 and another schedule.batch_rule, or remove the share"
        )
    if isinstance(loss, Tensor) and loss.numel() == 1:
        return
    kind = (
        f"a tensor of shape {tuple(loss.shape)}"
        if isinstance(loss, Tensor)
        else f"an object of type {type(loss).__name__}"
    )
    raise UsageError(
        f"step.backward(loss) got {kind}; pass the mean loss over the batch's samples as a tensor with one element"
    )
