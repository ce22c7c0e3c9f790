"""The processes of a script as its Accelerator shows them: what they gather, what only the first of them does, and what it writes."""

import os
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import safetensors.torch
import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from undula.adapters.accelerate.loaders import EvaluationLoader, merged
from undula.adapters.accelerate.steps import Steps
from undula.adapters.process_state import shared_state
from undula.adapters.script import Place
from undula.data.nested import moved, with_tensors
from undula.errors import UsageError
from undula.train.run import Run
from undula.train.whole_weights import whole_weights


class Processes:
    """Part of the Accelerator that concerns all ranks.

    Args:
        here: Process in which the script runs.
    """

    def __init__(self, here: Place):
        self._run = here.run
        self.num_processes = here.virtual_workers
        self.process_index = here.rank
        self.device = here.device
        self.state = shared_state(here, here.device.type == "cpu")
        """State that scripts print, and that `accelerate.logging.get_logger` needs."""
        self._steps: Steps | None = None
        self._evaluations: list[EvaluationLoader] = []
        """DataLoaders that are being iterated over."""
        self._is_triggered = False

    @property
    def is_main_process(self) -> bool:
        return self.process_index == 0

    is_local_main_process = is_main_process

    @property
    def distributed_type(self) -> Any:
        """Kind of processes that the script sees, of Accelerate's DistributedType."""
        from accelerate.utils import DistributedType

        kind = DistributedType.MULTI_GPU if self.device.type == "cuda" else DistributedType.MULTI_CPU
        return kind if self.num_processes > 1 else DistributedType.NO

    def gather(self, tensor: Any) -> Any:
        """Return the tensors of all ranks as one, along their first dimension. All ranks call this in an evaluation or after an epoch.

        Raises:
            UsageError: It is called for a batch of the training, of which ranks have different numbers.
        """
        run = self._run_after_batches("accelerator.gather()")
        return self._on_device(merged(run.gather(_on_host(tensor))))

    def gather_for_metrics(self, input_data: Any, use_gather_object: bool = False) -> Any:
        """Return the results of all ranks for their current evaluation batches as one, each sample once and in the dataset's order.

        Raises:
            UsageError: No evaluation batch is current.
        """
        if not self._evaluations:
            raise UsageError(
                "accelerator.gather_for_metrics() was called outside of the loop over a DataLoader for evaluation; call it there for each "
                "batch, because ranks without a batch of their own repeat one"
            )
        if use_gather_object and not isinstance(input_data, list):
            raise UsageError(
                "accelerator.gather_for_metrics(use_gather_object=True) needs a list with an object for each sample"
            )
        self._run_between_steps("accelerator.gather_for_metrics()")
        return self._on_device(self._evaluations[-1].gathered(_on_host(input_data)))

    def pad_across_processes(self, tensor: Any, dim: int = 0, pad_index: int = 0, pad_first: bool = False) -> Any:
        """Pad tensors to the largest size that any rank has in a dimension. All ranks call this between two steps."""
        run = self._run_between_steps("accelerator.pad_across_processes()")

        def padded(part: Tensor) -> Tensor:
            if dim >= part.ndim:
                return part
            shape = list(part.shape)
            shape[dim] = max(run.gather(part.shape[dim])) - part.shape[dim]
            filler = part.new_full(shape, pad_index)
            return torch.cat([filler, part] if pad_first else [part, filler], dim=dim)

        return with_tensors(tensor, padded)

    def reduce(self, tensor: Any, reduction: str = "sum", scale: float = 1.0) -> Any:
        """Return the sum of the tensors of all ranks. All ranks call this in an evaluation or after an epoch.

        Raises:
            UsageError: It is called for a batch of the training, or it is not a sum.
        """
        if reduction != "sum":
            raise UsageError(
                f"accelerator.reduce() got reduction={reduction!r}, but the number of ranks changes; sum the values and a count, and divide"
            )
        run = self._run_after_batches("accelerator.reduce()")
        parts = merged(run.gather(with_tensors(_on_host(tensor), lambda part: part[None])))
        return with_tensors(parts, lambda part: part.sum(dim=0).to(self.device) * scale)

    def wait_for_everyone(self) -> None:
        """Wait until all ranks call this, outside of a step."""
        if self._run is None:
            return
        if self._steps and self._steps.step:
            self._run_between_steps("accelerator.wait_for_everyone()")
        self._run.gather(None)

    def set_trigger(self) -> None:
        """Let the next `check_trigger` return true on all ranks."""
        self._is_triggered = True

    def check_trigger(self) -> bool:
        """Return whether any rank has called `set_trigger` since the last check. All ranks call this between two steps."""
        flags = self._run_between_steps("accelerator.check_trigger()").gather(self._is_triggered)
        self._is_triggered = False
        return any(flags)

    @contextmanager
    def main_process_first(self) -> Iterator[None]:
        """Let rank 0 run a block before the other ranks do, for example to fill a cache on a file system that they share."""
        if not self.is_main_process:
            self.wait_for_everyone()
        yield
        if self.is_main_process:
            self.wait_for_everyone()

    local_main_process_first = main_process_first

    def on_main_process(self, function: Callable[..., Any]) -> Callable[..., Any]:
        """Return a function that does something on rank 0 only."""
        return lambda *arguments, **more: function(*arguments, **more) if self.is_main_process else None

    on_local_main_process = on_main_process

    def print(self, *arguments: object, **more: Any) -> None:
        """Print on rank 0."""
        if self._run and self.is_main_process:
            print(*arguments, **more)

    def get_state_dict(self, model: nn.Module) -> dict[str, Any]:
        """Return the weights of a model; those of a sharded one are on rank 0 alone. All ranks call this between two steps."""
        self._run_between_steps("accelerator.get_state_dict()")
        if any(isinstance(parameter, DTensor) for parameter in model.parameters()):
            return whole_weights(model, self.is_main_process)
        return model.state_dict()

    def save_model(self, model: nn.Module, save_directory: str | os.PathLike[str]) -> None:
        """Write the weights as `model.safetensors` on rank 0, and wait until it has. All ranks call this between two steps."""
        weights = self.get_state_dict(model)
        self.save(weights, Path(save_directory) / "model.safetensors", safe_serialization=True)
        self.wait_for_everyone()

    def save(self, obj: Any, f: str | os.PathLike[str], safe_serialization: bool = False) -> None:
        """Write an object on rank 0, as a whole or not at all."""
        if not self.is_main_process:
            return
        file = Path(f)
        file.parent.mkdir(parents=True, exist_ok=True)
        partial = file.with_name(f".{file.name}.partial")
        if safe_serialization:
            safetensors.torch.save_file(_without_copies(obj), partial, metadata={"format": "pt"})
        else:
            torch.save(obj, partial)
        partial.replace(file)

    def _on_device(self, value: Any) -> Any:
        return moved(value, self.device)

    def _begun(self, call: str) -> Steps:
        if self._steps is None:
            raise UsageError(
                f"{call} was used outside of `for epoch in accelerator.epochs(n)`; write the loop over epochs so, and use it there"
            )
        return self._steps

    def _run_after_batches(self, call: str) -> Run:
        """Return the run, unless the call is about a batch of the training, of which some ranks have more than others."""
        if not self._evaluations and self._begun(call).is_in_batch:
            raise UsageError(
                f"{call} was used for a batch of the training, but the number of workers decides which batches each has; for a loss in the "
                "log, call accelerator.log({'loss': loss}) before optimizer.step(), which takes the mean over all samples, and use "
                f"{call} in an evaluation or after the loop over the training DataLoader"
            )
        return self._run_between_steps(call)

    def _run_between_steps(self, call: str) -> Run:
        if self._begun(call).step is not None:
            raise UsageError(
                f"{call} was used in an open step, in which ranks have different numbers of batches; use it after optimizer.step() if "
                "accelerator.sync_gradients, or after the loop over the training DataLoader"
            )
        assert self._run is not None
        return self._run


def _on_host(value: Any) -> Any:
    return with_tensors(value, lambda tensor: tensor.detach().cpu())


def _without_copies(weights: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Return weights with one name for each tensor, because safetensors refuses tensors that share their memory."""
    names: dict[tuple[int, torch.Size], str] = {}
    for name, tensor in weights.items():
        names.setdefault((tensor.data_ptr(), tensor.shape), name)
    return {name: weights[name].contiguous() for name in names.values()}
