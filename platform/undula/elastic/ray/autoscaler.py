"""The request that a run makes of Ray's autoscaler: room for each of its workers."""

import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any

from ray.data._internal.cluster_autoscaler import default_autoscaling_coordinator

from undula.elastic.ray.capacity import BackgroundCall

REPEAT_S = 20.0
"""Between requests that say the same, which Ray forgets after a while."""


EXPIRES_S = 180.0


@dataclass
class AutoscalerRequest:
    """Tells Ray's autoscaler what a run can use; nothing waits for its answer."""

    requester: str
    _sent: Sequence[Mapping[str, str]] | None = None
    _when: float = float("-inf")
    _background: BackgroundCall = field(default_factory=BackgroundCall)

    def send(self, resources: Mapping[str, float], labels: Sequence[Mapping[str, str]]) -> None:
        """Ask for a node's room with `resources` for each of `labels`, where that is news or was said long ago."""
        now = time.monotonic()
        if labels == self._sent and now - self._when < REPEAT_S:
            return
        if self._background(partial(self._ask, dict(resources), [dict(each) for each in labels])):
            self._sent, self._when = labels, now

    def _ask(self, resources: dict[str, float], labels: list[dict[str, str]]) -> None:
        autoscaling: Any = default_autoscaling_coordinator
        autoscaling.get_or_create_autoscaling_coordinator().request_resources.remote(
            requester_id=self.requester,
            resources=[resources for _ in labels],
            label_selectors=labels,
            expire_after_s=EXPIRES_S,
            priority=autoscaling.ResourceRequestPriority.HIGH,
        )
