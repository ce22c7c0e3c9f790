"""Request of a run to Ray's autoscaler for nodes with room for all of its workers. It stays in effect while the run lasts."""

import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any

from ray.data._internal.cluster_autoscaler import default_autoscaling_coordinator

from undula.elastic.ray.capacity import BackgroundCall

REPEAT_S = 20.0
"""Seconds after which an unchanged request is sent again, because Ray drops it after EXPIRES_S."""
EXPIRES_S = 180.0
"""Seconds after which Ray drops a request that was not sent again."""


@dataclass
class AutoscalerRequest:
    """Sender of the request. It works in the background, so that the controller does not wait for the autoscaler."""

    requester: str
    _sent: Sequence[Mapping[str, str]] | None = None
    _sent_at: float = float("-inf")
    _background: BackgroundCall = field(default_factory=BackgroundCall)

    def send(self, resources: Mapping[str, float], labels: Sequence[Mapping[str, str]]) -> None:
        """Request a node with `resources` free for each entry of `labels`. An unchanged request is sent again only after REPEAT_S."""
        now = time.monotonic()
        if labels == self._sent and now - self._sent_at < REPEAT_S:
            return
        if self._background(partial(self._request, dict(resources), [dict(selector) for selector in labels])):
            self._sent, self._sent_at = labels, now

    def _request(self, resources: dict[str, float], labels: list[dict[str, str]]) -> None:
        autoscaling: Any = default_autoscaling_coordinator
        autoscaling.get_or_create_autoscaling_coordinator().request_resources.remote(
            requester_id=self.requester,
            resources=[resources for _ in labels],
            label_selectors=labels,
            expire_after_s=EXPIRES_S,
            priority=autoscaling.ResourceRequestPriority.HIGH,
        )
