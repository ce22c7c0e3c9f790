"""Workers that leave, as actors that do not answer."""

from types import SimpleNamespace
from typing import Any

import pytest
from ray.exceptions import GetTimeoutError

from undula.recovery import leaving_workers
from undula.recovery.leaving_workers import LOST_S, LeavingWorkers
from undula.recovery.worker_state import LostLeaverError


def test_a_suspended_worker_counts_as_lost_after_a_while(monkeypatch: pytest.MonkeyPatch) -> None:
    limits = []

    def get(reference: Any, timeout: float | None = None) -> Any:
        limits.append(timeout)
        if reference == "actors":
            return {"one": SimpleNamespace(offered_values=SimpleNamespace(remote=lambda: "values"))}
        raise GetTimeoutError("nothing came")

    monkeypatch.setattr(leaving_workers.ray, "get", get)
    leavers = LeavingWorkers(SimpleNamespace(leavers=SimpleNamespace(remote=lambda: "actors")))
    leavers.names = ["one"]
    with pytest.raises(LostLeaverError, match="nothing came"):
        leavers.common(0)
    assert limits == [LOST_S, LOST_S]
