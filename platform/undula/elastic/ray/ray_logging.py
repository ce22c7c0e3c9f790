"""Suppression of Ray's error messages in a driver, which would print pages about the state of the raylet for each removed node."""

from typing import Any

import ray._private.worker


def stop_error_messages() -> None:
    """End the thread in which the connected driver prints the cluster's error messages. `log_to_driver=False` does not end it.

    Ray ends the thread in the same way when it disconnects. The messages remain in the logs of the node's raylet or of the head.
    """
    worker: Any = ray._private.worker.global_worker
    worker.threads_stopped.set()
    worker.gcs_error_subscriber.close()
