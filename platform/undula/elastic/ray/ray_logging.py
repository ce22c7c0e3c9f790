"""Keeps Ray's own talk in Ray's log files: of each node that goes, the driver would print pages of a raylet's state."""

from typing import Any

import ray._private.worker


def keep_quiet() -> None:
    """Called in a driver; `log_to_driver=False` leaves these messages."""
    ray._private.worker.print_to_stdstream = _leave_out


def _leave_out(data: dict[str, Any], *arguments: Any, **more: Any) -> None:
    """It is in the logs of the node's raylet, or of the head."""
