"""Unit of a sharded model: what torch's `fully_shard` gathers at once, and the sum of its gradients."""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from functools import partial

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.fsdp import FSDPModule
from torch.distributed.tensor import DTensor

from undula.parallel.collectives import OwnCollectives
from undula.parallel.layout import Layout
from undula.parallel.reduce.unit_sum import UnitSum

Place = tuple[nn.Module, str, nn.Parameter]
"""Layer, name in the layer, and sharded parameter, in whose place the layer has a whole one while it is gathered."""
_all_gather = getattr(dist, "all_gather_single", dist.all_gather_into_tensor)  # torch 2.13 has given it another name


@dataclass
class Unit:
    """Module that `fully_shard` gathers at once, and the sum of its gradients. It has the methods of torch's `AllGather`."""

    name: str
    module: FSDPModule
    places: Sequence[Place]
    """Parameters of the unit that require a gradient."""
    stays: bool
    """Whether the unit stays gathered from its forward pass to its backward pass."""
    sum: UnitSum
    reach: Callable[[], object]
    """Function that takes part in the collectives that come before a gathering of this unit."""
    collectives: OwnCollectives
    num_gathered: int = 0
    """Number of times that this rank has gathered the unit."""
    views: dict[nn.Parameter, Callable[[Tensor], Tensor]] = field(default_factory=dict)
    """Functions that return the gradient of a parameter's shard as a view of a slice of the flat gradient."""
    is_watched: bool = False
    """Whether a forward pass has shown which parameters are gathered. Only then is it known which of them get a gradient."""

    def allocate(self, size: Sequence[int], *, dtype: torch.dtype, device: torch.device) -> Tensor:
        return torch.empty(*size, dtype=dtype, device=device)

    def __call__(
        self, output_tensor: Tensor, input_tensor: Tensor, group: dist.ProcessGroup, async_op: bool = False
    ) -> dist.Work | None:
        """Gather the parameters of the unit, when the other ranks do."""
        with self.collectives.counted():
            self.reach()
            self.num_gathered += 1
            return _all_gather(output_tensor, input_tensor, group=group, async_op=async_op)  # type: ignore[no-any-return]

    def find_views(self) -> None:
        """Find out, after a backward pass, where torch has the gradient of each parameter in the slice."""
        if len(self.views) < len(self.places):
            for _, _, parameter in self.places:
                if isinstance(parameter.grad, DTensor):
                    shard = parameter.grad.to_local()
                    place = (shard.shape, shard.stride(), int(shard.storage_offset()))
                    self.views[parameter] = partial(_view, place=place)


def places_of(part: FSDPModule) -> list[Place]:
    """Return the trainable parameters of a sharded module, without those of sharded modules inside it."""
    assert isinstance(part, nn.Module)
    return [
        (layer, name, parameter)
        for layer in _own_layers(part)
        for name, parameter in layer._parameters.items()
        if parameter is not None and parameter.requires_grad
    ]


def stays_gathered(part: FSDPModule) -> bool:
    """Return whether a sharded module inside another one stays gathered after its forward pass."""
    return all(group.post_forward_mesh_info is None for group in part._get_fsdp_state()._fsdp_param_groups)


def flat_gradient(part: FSDPModule, places: Sequence[Place], layout: Layout) -> Tensor:
    """Return a tensor like the flat gradient of a sharded module, without its memory. Shards are padded to equal lengths."""
    policy, ranks = part._get_fsdp_state()._mp_policy, layout.num_cells
    length, dtype = 0, policy.reduce_dtype or policy.param_dtype
    for parameter in dict.fromkeys(parameter for _, _, parameter in places):
        if not isinstance(parameter, DTensor):
            continue  # the script has added it, which the run refuses
        dim = parameter.placements[0].dim  # type: ignore[attr-defined]
        rows = parameter.shape[dim]
        length += -(-rows // ranks) * ranks * (parameter.numel() // rows)
        dtype = dtype or parameter.dtype
    return torch.zeros((), dtype=dtype, device=layout.device).expand(length)


def _own_layers(part: nn.Module) -> Iterator[nn.Module]:
    yield part
    for child in part.children():
        if not isinstance(child, FSDPModule):
            yield from _own_layers(child)


def _view(flat: Tensor, place: tuple[Sequence[int], Sequence[int], int]) -> Tensor:
    return flat.as_strided(*place)
