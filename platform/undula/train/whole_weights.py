"""Sharded models for libraries that make optimizers of whole models, and that save and load whole models."""

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor, distribute_tensor

from undula.errors import UsageError
from undula.parallel.sharding import follow
from undula.state.model_state import bare_module, named_parameters
from undula.state.weights import read_weights
from undula.storage import open_store
from undula.train.run import Run


def placed(run: Run, model: nn.Module, optimizer: torch.optim.Optimizer | None) -> nn.Module:
    """Give a model to the run, and let an optimizer that was made before train the shards that replace the parameters, with its state.

    Returns:
        The module that the script must call.
    """
    former = {parameter: name for name, parameter in model.named_parameters()}
    placed = run.model(model)
    if optimizer is not None:
        follow(optimizer, former, dict(model.named_parameters()))
    return placed


def whole_weights(model: nn.Module, is_kept: bool) -> dict[str, Any]:
    """Return the entries of the `state_dict()` of a sharded model with whole tensors in host memory. All ranks call this together.

    Args:
        model: The model.
        is_kept: Whether this rank gets the weights; otherwise it returns nothing.
    """
    whole = _gathered(model, is_kept)
    state = dict(bare_module(model).state_dict()) if is_kept else {}
    _show_whole(bare_module(model), state, "", whole)
    return state


class WholeWeights:
    """Lets a library load whole weights into a sharded model, and save whole ones: during the training on rank 0 while all ranks are in
    `gathered`, and afterwards on any rank, from the last checkpoint of the run. It does nothing to other models.

    Args:
        model: Model of the run.
        run: The run.
    """

    def __init__(self, model: nn.Module, run: Run):
        self._model, self._run = model, run
        self._gathered: Mapping[Tensor, Tensor] = {}
        self._loaded: dict[Tensor, Tensor] = {}
        """Whole weights that were loaded after the last step, by their shards."""
        self._steps: int | None = None
        """Number of steps of the run; None until it has ended."""
        self._versions: Mapping[Tensor, int] = {}
        """Number of changes of each shard that torch had counted at the end, or when weights were loaded after it."""
        self._is_needed = bool(_shards(model))
        if self._is_needed:
            hooked: Any = model  # torch's methods have no types
            hooked.register_state_dict_post_hook(partial(self._show))  # torch sets an attribute of it
            hooked.register_load_state_dict_pre_hook(self._shard)
            hooked.register_load_state_dict_post_hook(self._count_changes)

    @contextmanager
    def gathered(self) -> Iterator[None]:
        """Gather the weights on rank 0 for a save. All ranks enter this together, unless the run has ended."""
        if self._is_needed and self._steps is None:
            self._gathered = _gathered(self._model, self._run.rank == 0)
        try:
            yield
        finally:
            self._gathered = {}

    def end(self, steps: int) -> None:
        """Show the weights of the checkpoint after so many steps from now on. All ranks call this after the last step."""
        if self._is_needed:
            self._run.gather(None)  # rank 0 has committed the checkpoint
            self._model.state_dict()  # torch puts the shards back in the place of what a forward pass has gathered
            self._steps = steps
            self._count_changes()

    def _show(self, model: nn.Module, state: dict[str, Any], prefix: str, _: object) -> None:
        whole = self._gathered
        if self._steps is not None and not self._run.has_left:
            shards = _shards(model)
            if any(self._versions.get(shard) != shard._version for shard in shards.values()):
                raise UsageError(
                    "the script has changed weights of the sharded model after train(), and reads them where a worker has only its part of "
                    "them; save the model before, and change the saved one in another script"
                )
            names = [name for name, shard in shards.items() if shard not in self._loaded]
            read = read_weights(open_store(self._run.url), self._steps, names)
            whole = {**self._loaded, **{shards[name]: weights for name, weights in read.items()}}
        _show_whole(model, state, prefix, whole)

    def _shard(self, model: nn.Module, state: dict[str, Any], prefix: str, *_: object) -> None:
        """Replace whole weights that are being loaded by their shards."""
        for name, shard in model.named_parameters(prefix.rstrip("."), remove_duplicate=False):
            whole = state.get(name)
            if not isinstance(shard, DTensor) or not isinstance(whole, Tensor) or whole.shape != shard.shape:
                continue
            if self._steps is not None:
                self._loaded[shard] = (whole.full_tensor() if isinstance(whole, DTensor) else whole).cpu()
            if not isinstance(whole, DTensor):  # PEFT shards the adapters that it loads itself
                part = whole.to(shard.device, shard.dtype)
                state[name] = distribute_tensor(part, shard.device_mesh, shard.placements, src_data_rank=None)

    def _count_changes(self, *_: object) -> None:
        self._versions = {shard: shard._version for shard in _shards(self._model).values()}


def _shards(model: nn.Module) -> dict[str, DTensor]:
    """Return the sharded parameters of a model by their names in a checkpoint."""
    return {name: parameter for name, parameter in named_parameters(model) if isinstance(parameter, DTensor)}


def _gathered(model: nn.Module, is_kept: bool) -> dict[Tensor, Tensor]:
    """Gather the parameters of a sharded model, one after another, in host memory. All ranks call this together.

    Returns:
        The whole parameters by their shards; nothing on a rank that does not keep them.
    """
    whole: dict[Tensor, Tensor] = {}
    model.state_dict()  # puts the shards back
    for shard in _shards(model).values():
        # A shard that waits in host memory is gathered on the device.
        on_device: Any = shard.detach().to(shard.device_mesh.device_type)
        gathered = on_device.full_tensor()
        if is_kept:
            whole[shard] = gathered.cpu()
    return whole


def _show_whole(model: nn.Module, state: dict[str, Any], prefix: str, whole: Mapping[Tensor, Tensor]) -> None:
    """Replace the shards in a state by whole tensors. A weight with two names remains one tensor, as files of safetensors require."""
    for name, shard in model.named_parameters(prefix.rstrip("."), remove_duplicate=False):
        if shard in whole and name in state:
            state[name] = whole[shard]
