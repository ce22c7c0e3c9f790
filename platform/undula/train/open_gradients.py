"""Gradients of an open step, which only the run's own backward passes may change until they are reduced.

On a rank, the gradients of its virtual workers add up in the model. What a script did to them in between, such as clipping, would count for
the virtual workers of one rank and not for the step, and the ranks' weights would drift apart.
"""

import sys
from collections.abc import Callable, Mapping, Sequence
from itertools import chain
from operator import attrgetter, is_
from types import FrameType
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_leaves

from undula.errors import UsageError
from undula.parallel.engines.engine import Engine
from undula.state.pieces import is_sharded_tensor

_HOOKED_BY = ("undula", "horovod")
"""Packages whose hooks at the accumulation of a gradient belong to the run."""
_WRAPPERS = ("decorate_context", "wrapper", "inner")
"""Names of torch's functions that wrap others, beside those that begin with an underscore."""
_ZEROING = ("zero_", "_foreach_zero_")
"""Functions with which `zero_grad(set_to_none=False)` changes gradients."""
_UNCOUNTED = "_amp_foreach_non_finite_check_and_unscale_"
"""Function with which torch's GradScaler changes gradients; torch does not count these changes."""
_grad_of, _version_of = attrgetter("grad"), attrgetter("_version")


class OpenGradients:
    """Notices changes of the gradients of an open step, and refuses them.

    Gradients are compared by identity and by the version that torch counts with every change, so their elements are never read. While a
    gradient is held, it is an instance of a subclass of Tensor, which refuses calls that change it and names the call.

    Args:
        engine: Engine of the model.
        optimizer: Optimizer of the run.
    """

    def __init__(self, engine: Engine, optimizer: torch.optim.Optimizer):
        self._engine = engine
        self._optimizer = optimizer
        self._known = dict(engine.module.named_parameters())
        self._parameters: list[nn.Parameter] = []
        self._gradients: list[Tensor | None] = []
        self._versions: list[int] = []
        self._step = 0

    def free_former(self) -> None:
        """Free gradients that the script has computed for itself since the last step."""
        for parameter in self._engine.trainable:
            if parameter.grad is not None:
                parameter.grad = None

    def begin_step(self, index: int) -> None:
        """Begin a step, after the engine has found out which parameters train.

        Raises:
            UsageError: Gradients exist already, a parameter is new, or it has a hook that would see sums of gradients.
        """
        self._step = index
        trainable = self._engine.trainable
        if self._parameters is not trainable:
            self._require_known()
            self._parameters = trainable
        self._gradients, self._versions = [None] * len(trainable), []
        for parameter in trainable:
            if parameter.grad is not None:
                raise UsageError(
                    f"a backward() of the script left a gradient of {self._name(parameter)!r} before the first batch of step {index}; add "
                    "the loss to that of a batch, or call model.zero_grad() if the gradient is no part of the step"
                )
            if (hooks := parameter._post_accumulate_grad_hooks) and any(map(_is_of_script, hooks.values())):
                raise UsageError(
                    f"{self._name(parameter)!r} has a hook of register_post_accumulate_grad_hook(), which would see the sum over some "
                    "virtual workers; use register_hook(), which sees the gradient of one batch, or change gradients between "
                    "step.reduce() and step.update()"
                )

    def hold(self, after_backward: bool) -> None:
        """Remember the gradients of the batches so far, and refuse changes of them until `release`.

        Args:
            after_backward: Whether the current batch has had its backward pass. Many loops call `zero_grad` for each batch before that, to
                be rid of the gradients of former steps. The run has freed those already, so the call does nothing then, and is refused
                afterwards.
        """
        _HeldGradient.ignores_zero_grad = not after_backward
        gradients = list(map(_grad_of, self._parameters))
        is_held = len(gradients) == len(self._gradients) and all(map(is_, gradients, self._gradients))
        if is_held:
            return
        self._gradients = gradients
        present = [gradient for gradient in self._gradients if gradient is not None]
        self._versions = list(map(_version_of, present))
        for gradient in present:
            if type(gradient) is Tensor:  # a sharded gradient has a class of its own
                gradient.__class__ = _HeldGradient

    def keep(self) -> None:
        """Undo `zero_grad` of the script. Adapters call this where a loop of their library frees gradients."""
        if self._are_zeroed(list(map(_grad_of, self._parameters))):
            self._restore()

    def release(self, after_backward: bool) -> None:
        """Check the gradients as `check` does, and allow changes of them again."""
        self.check(after_backward)
        for gradient in self._gradients:
            if type(gradient) is _HeldGradient:
                gradient.__class__ = Tensor  # type: ignore[assignment]
        self._gradients, self._versions = [], []

    def check(self, after_backward: bool) -> None:
        """Check that the gradients are those that are held.

        Args:
            after_backward: Whether the current batch has had its backward pass. Until then, `zero_grad` is undone.

        Raises:
            UsageError: The script has changed a gradient.
        """
        gradients = list(map(_grad_of, self._parameters))
        if not all(map(is_, gradients, self._gradients)):
            if after_backward or not self._are_zeroed(gradients):
                self._refuse(gradients)
            self._restore()
        with torch._C.DisableTorchFunctionSubclass():
            versions = [gradient._version for gradient in self._gradients if gradient is not None]
        if versions != self._versions:
            raise UsageError(
                self._added(next(parameter for parameter in self._parameters if parameter.grad is not None))
            )

    def _require_known(self) -> None:
        for name, parameter in self._engine.module.named_parameters():
            known = self._known.get(name)
            # A sharded module has other objects as its parameters while they are gathered.
            if known is None or (known is not parameter and not is_sharded_tensor(known)):
                raise UsageError(
                    f"the parameter {name!r} was added to the model or replaced after run.steps() had begun, so a resumed "
                    "run would lack it; make it before run.model(), and freeze it with requires_grad_(False) until it trains"
                )

    def _are_zeroed(self, gradients: Sequence[Tensor | None]) -> bool:
        """Return whether the optimizer's parameters have lost all gradients that are held."""
        had = {
            parameter: now is None
            for parameter, before, now in zip(self._parameters, self._gradients, gradients, strict=False)
            if before is not None
        }
        if not any(had.values()):
            return False
        optimized = {member for group in self._optimizer.param_groups for member in group["params"]}
        return all(is_gone for parameter, is_gone in had.items() if parameter in optimized)

    def _restore(self) -> None:
        for parameter, gradient in zip(self._parameters, self._gradients, strict=True):
            parameter.grad = gradient

    def _refuse(self, gradients: Sequence[Tensor | None]) -> None:
        """Raise UsageError about gradients that are others than those that are held."""
        if self._are_zeroed(gradients):
            raise UsageError(
                f"zero_grad() was called after step.backward() in step {self._step}, and would delete gradients of the step; remove it, "
                "because step.update() frees them"
            )
        changed = zip(self._parameters, self._gradients, gradients, strict=True)
        parameter, before = next((parameter, before) for parameter, before, now in changed if before is not now)
        if before is None:
            raise UsageError(self._added(parameter))
        name = self._name(parameter)
        raise UsageError(
            f"the script set the gradient of {name!r} in step {self._step} before it was reduced (p.grad = ...); set it between "
            "step.reduce() and step.update(), or use requires_grad_(False) between two steps"
        )

    def _added(self, parameter: nn.Parameter) -> str:
        return (
            f"loss.backward() was called in step {self._step}, or another change was made to the gradient of {self._name(parameter)!r}; "
            "call step.backward(loss) once for each batch with the sum of its losses, torch.autograd.grad() for gradients that are no "
            "part of the step, and change gradients between step.reduce() and step.update()"
        )

    def _name(self, parameter: nn.Parameter) -> str:
        now = self._engine.module.named_parameters()  # those of a sharded module are others while they are gathered
        return next(name for name, candidate in chain(self._known.items(), now) if candidate is parameter)


class _HeldGradient(Tensor):
    """Gradient of an open step, which refuses a call that changes it."""

    ignores_zero_grad = False

    @classmethod
    def __torch_function__(
        cls,
        function: Callable[..., Any],
        types: object,
        arguments: Sequence[Any] = (),
        keywords: Mapping[str, Any] | None = None,
    ) -> Any:
        keywords = keywords or {}
        if (
            cls.ignores_zero_grad
            and function.__name__ in _ZEROING
            and _called(function, sys._getframe(1)) == "zero_grad"
        ):
            return arguments[0]
        with torch._C.DisableTorchFunctionSubclass():
            held = [leaf for leaf in tree_leaves((arguments, keywords)) if isinstance(leaf, cls)]
            before = list(map(_version_of, held))
            try:
                result = function(*arguments, **keywords)
                if list(map(_version_of, held)) == before and function.__name__ != _UNCOUNTED:
                    return result
            except RuntimeError:
                # A sharded model has expanded zeros in place of its gradients, which torch cannot change.
                if not any(0 in gradient.stride() for gradient in held):
                    raise
        name = _called(function, sys._getframe(1))
        if name == "zero_grad":
            raise UsageError(
                "zero_grad(set_to_none=False) deleted gradients of an open step; remove it, because step.update() frees them"
            )
        raise UsageError(
            f"{name}() changed a gradient of an open step, before it was reduced over all virtual workers; call it between step.reduce() "
            "and step.update(), or clip with gradient.max_norm in the job's YAML"
        )

    @property
    def data(self) -> Tensor:
        """The gradient itself, because torch does not count changes of what `data` usually is."""
        gradient = self.detach()
        gradient.__class__ = _HeldGradient
        return gradient

    @data.setter
    def data(self, value: Tensor) -> None:
        if (value.data_ptr(), value.dtype, value.shape) != (self.data_ptr(), self.dtype, self.shape):
            raise UsageError(
                "a gradient of an open step was moved or converted, for example by model.to(); do this before run.model()"
            )

    def __deepcopy__(self, memo: dict[int, Any]) -> Tensor:
        copy = self.detach().clone()
        copy.__class__ = Tensor
        return copy


def _is_of_script(hook: object) -> bool:
    return str(getattr(hook, "__module__", "")).partition(".")[0] not in _HOOKED_BY


def _called(function: Callable[..., Any], frame: FrameType | None) -> str:
    """Return the name of the function of torch that the script called, which has called `function`."""
    name = function.__name__
    while frame and str(frame.f_globals.get("__name__")).partition(".")[0] == "torch":
        caller = frame.f_code.co_name
        if caller not in _WRAPPERS and not caller.startswith("_"):
            name = caller
        frame = frame.f_back
    return name
