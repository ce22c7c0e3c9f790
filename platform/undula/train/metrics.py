"""Metrics of torchmetrics in a validation, whose results are those over all samples, equal at any world size.

Each micro-batch leaves the state of the metric with what it has added. The states of all ranks are joined in the order of the plan, in the
way in which the metric joins the states of several processes (torchmetrics, `Metric.sync`). The metric itself, which may have a network, or
be of a class of the script that no other process finds, stays where it is.
"""

import copy
import sys
import warnings
from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch.distributed as dist
from torch import Tensor

from undula.data.nested import with_tensors
from undula.errors import UsageError
from undula.plan.plan import MicroBatch

Place = tuple[int, int, int]
"""Step, virtual worker and number of a micro-batch, in whose order states are joined."""


@dataclass(frozen=True)
class Taken:
    """What a micro-batch has left in a metric."""

    metric: Any
    state: Any
    """Tensors, and lists of tensors, by name, in host memory."""


def is_metric(value: object) -> bool:
    library = sys.modules.get("torchmetrics")
    return library is not None and isinstance(value, library.Metric)


def place_of(micro_batch: MicroBatch) -> Place:
    return micro_batch.step, micro_batch.virtual_worker, micro_batch.number


def taken(metric: Any) -> Taken:
    """Return the state of a metric, and reset the metric.

    Raises:
        UsageError: It consists of other metrics, which join their states by themselves, or has more in its state than the batch.
    """
    kind = type(metric).__name__
    if any(is_metric(part) for part in metric.modules() if part is not metric):
        raise UsageError(
            f"a validation returned or logged a {kind}, which consists of other metrics; give each of these, and combine their results "
            "afterwards"
        )
    if metric.update_count != 1:
        raise UsageError(
            f"a validation returned or logged a {kind} with {metric.update_count} updates instead of one for the batch; update it once for "
            "each batch, do not use it in training as well, and give all metrics of a MetricCollection"
        )
    state = with_tensors(metric.metric_state, lambda tensor: tensor.detach().to("cpu", copy=True))
    metric.reset()
    return Taken(metric, state)


def results(metrics: Mapping[str, Sequence[tuple[Place, Taken]]], group: dist.ProcessGroup) -> dict[str, float]:
    """Return the results of metrics over the samples of all ranks by name. All ranks must call this.

    Args:
        metrics: What the micro-batches of this rank have left in metrics, by name; empty if the rank has no samples.
        group: Process group of the ranks.

    Raises:
        UsageError: A result is no single number, or the micro-batches have different states. All ranks with samples raise it.
    """
    own = {name: [(place, it.state) for place, it in parts] for name, parts in metrics.items()}
    states: dict[str, list[tuple[Place, Any]]] = defaultdict(list)
    for parts in _gathered(own, group):
        for name, placed in parts.items():
            states[name] += placed
    found = {
        name: _result(name, parts[0][1].metric, [state for _, state in sorted(states[name], key=lambda pair: pair[0])])
        for name, parts in metrics.items()
    }
    return {name: result for each in _gathered(found, group) for name, result in each.items()}


def _gathered(value: dict[str, Any], group: dist.ProcessGroup) -> list[dict[str, Any]]:
    parts: list[Any] = [None] * dist.get_world_size(group)
    dist.all_gather_object(parts, value, group=group)
    return parts


def _result(name: str, metric: Any, states: Sequence[Any]) -> float:
    whole = copy.deepcopy(metric).cpu()
    sent = [_sent(whole, state) for state in states]
    if len({len(state) for state in sent}) > 1:
        raise UsageError(
            f"the metric {name!r} has another number of states after some batches of a validation than after others; update it once for "
            "each batch"
        )
    columns = zip(*sent, strict=True)
    whole.sync(dist_sync_fn=lambda state, group=None: list(next(columns)), distributed_available=lambda: True)
    joined = whole.metric_state
    whole.unsync()
    whole.reset()
    _set(whole, joined)
    whole.distributed_available_fn = lambda: False
    with warnings.catch_warnings():
        warnings.filterwarnings(
            "ignore", "The ``compute`` method of metric"
        )  # it has not seen `update` since its reset
        result = whole.compute()
    if not isinstance(result, Tensor) or result.numel() != 1:
        raise UsageError(f"the metric {name!r} has {result!r} as its result; a validation takes single numbers")
    return float(result)


def _sent(metric: Any, state: Mapping[str, Any]) -> list[Tensor]:
    """Return the tensors that a metric with this state would send to other processes."""
    seen: list[Tensor] = []

    def see(tensor: Tensor, group: object = None) -> list[Tensor]:
        seen.append(tensor)
        return [tensor]

    _set(metric, state)
    metric.sync(dist_sync_fn=see, distributed_available=lambda: True)
    metric.unsync()
    return seen


def _set(metric: Any, state: Mapping[str, Any]) -> None:
    for name, value in state.items():
        setattr(metric, name, value)
