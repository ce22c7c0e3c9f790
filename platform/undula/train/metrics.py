"""Metrics of torchmetrics in a validation, whose results are those over all samples, equal at any world size.

Each micro-batch leaves a copy of the metric with what it has added. The copies of all ranks are joined in the order of the plan, in the
way in which the metric joins the states of several processes (torchmetrics, `Metric.sync`).
"""

import copy
import sys
import warnings
from collections.abc import Mapping, Sequence
from typing import Any

import torch.distributed as dist
from torch import Tensor

from undula.errors import UsageError
from undula.plan.plan import MicroBatch

Place = tuple[int, int, int]
"""Step, virtual worker and number of a micro-batch, in whose order copies are joined."""


def is_metric(value: object) -> bool:
    library = sys.modules.get("torchmetrics")
    return library is not None and isinstance(value, library.Metric)


def place_of(micro_batch: MicroBatch) -> Place:
    return micro_batch.step, micro_batch.virtual_worker, micro_batch.number


def taken(metric: Any) -> Any:
    """Return a copy of a metric in host memory, and reset the metric.

    Raises:
        UsageError: It consists of other metrics, which join their states by themselves.
    """
    if any(is_metric(part) for part in metric.modules() if part is not metric):
        raise UsageError(
            f"a validation returned or logged a {type(metric).__name__}, which consists of other metrics; give each of these, and combine "
            "their results afterwards"
        )
    copied = copy.deepcopy(metric).cpu()
    metric.reset()
    return copied


def results(metrics: Mapping[str, Sequence[tuple[Place, Any]]], group: dist.ProcessGroup) -> dict[str, float]:
    """Return the results of metrics over the samples of all ranks by name. All ranks must call this.

    Args:
        metrics: Copies of metrics by name, with the micro-batches that have made them; empty if the rank has no samples.
        group: Process group of the ranks.

    Raises:
        UsageError: A result is no single number, or the micro-batches have different states. All ranks raise it.
    """
    parts: list[Any] = [None] * dist.get_world_size(group)
    dist.all_gather_object(parts, metrics, group=group)
    joined: dict[str, list[tuple[Place, Any]]] = {}
    for part in parts:
        for name, copies in part.items():
            joined.setdefault(name, []).extend(copies)
    return {
        name: _result(name, [it for _, it in sorted(copies, key=lambda pair: pair[0])])
        for name, copies in joined.items()
    }


def _result(name: str, copies: Sequence[Any]) -> float:
    states = [_states(each) for each in copies]
    if len({len(state) for state in states}) > 1:
        raise UsageError(
            f"the metric {name!r} has another number of states after some batches of a validation than after others; update it once for "
            "each batch"
        )
    metric, columns = copy.deepcopy(copies[0]), zip(*states, strict=True)  # a copy can have several names
    metric.sync(dist_sync_fn=lambda state, group=None: list(next(columns)), distributed_available=lambda: True)
    whole = metric.metric_state
    metric.unsync()
    metric.reset()  # forgets a result of its batch as well
    for key, value in whole.items():
        setattr(metric, key, value)
    metric.distributed_available_fn = lambda: False
    with warnings.catch_warnings():
        warnings.filterwarnings(
            "ignore", "The ``compute`` method of metric"
        )  # it has not seen `update` since its reset
        result = metric.compute()
    if not isinstance(result, Tensor) or result.numel() != 1:
        raise UsageError(f"the metric {name!r} has {result!r} as its result; a validation takes single numbers")
    return float(result)


def _states(metric: Any) -> list[Tensor]:
    """Return the states of a metric as it would send them to other processes."""
    seen: list[Tensor] = []

    def see(state: Tensor, group: object = None) -> list[Tensor]:
        seen.append(state)
        return [state]

    metric.sync(dist_sync_fn=see, distributed_available=lambda: True)
    metric.unsync()
    return seen
