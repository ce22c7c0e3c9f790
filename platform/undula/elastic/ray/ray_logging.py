"""Keeps Ray's error messages in Ray's log files: for each node that is removed, a driver would print pages of a raylet's state."""

from typing import Any

import ray._private.worker


def stop_error_messages() -> None:
    """End the thread in which the connected driver prints the cluster's error messages; `log_to_driver=False` does not.

    Ray's own disconnect ends it in the same way. The messages stay in the logs of the node's raylet or of the head.
    """
    worker: Any = ray._private.worker.global_worker
    worker.threads_stopped.set()
    worker.gcs_error_subscriber.close()
