"""Environment variables with which the processes of workers start, because glibc, CUDA and torch read them before a train function runs."""

from collections.abc import Mapping

KEEP_HEAP = {
    "MALLOC_ARENA_MAX": "1",
    "MALLOC_MMAP_THRESHOLD_": str(32 * 2**20),
    "MALLOC_TRIM_THRESHOLD_": str(2**30),
}
"""Settings of glibc's allocator for workers that train on CPUs: all threads share one heap, which keeps freed memory. Otherwise the train
function of each group, which runs in a new thread, would cause page faults for all of its activations again, which takes as long as its
first step."""
NO_GPU = {"CUDA_VISIBLE_DEVICES": ""}
"""Setting that hides the GPUs of its node from a worker that has reserved none. Ray restricts only processes that have reserved a GPU."""
SURVIVE_NCCL = {
    # By default, the watchdog thread ends this process if a collective fails or times out, as it does when another rank is lost. 0 leaves
    # the failure to the controller, which notices the lost rank, aborts the collectives and lets this process join the next group. torch's
    # `_abort_process_group` requires it. Hung ranks are found by workers.hang_limit_s.
    "TORCH_NCCL_ASYNC_ERROR_HANDLING": "0",
    # After a failure, the monitor thread would dump what it has recorded and then sleep for TORCH_NCCL_HEARTBEAT_TIMEOUT_SEC (480 s).
    # Freeing the process group waits for this thread, so that the worker could not leave its group in time.
    "TORCH_NCCL_DUMP_ON_TIMEOUT": "0",
    # The watchdog sleeps four times as long (by default, 4 x 15 s) for each failed collective, so that other ranks can dump. Freeing the
    # process group also waits for this thread.
    "TORCH_NCCL_WAIT_TIMEOUT_DUMP_MILSEC": "0",
    # The monitor thread would also end this process if the watchdog has made no progress for TORCH_NCCL_HEARTBEAT_TIMEOUT_SEC, as can
    # happen while another thread waits in CUDA for a lost rank.
    "TORCH_NCCL_ENABLE_MONITORING": "0",
}
"""Settings of torch's ProcessGroupNCCL with which a worker survives the loss of another rank. Each process group reads them once, when it
is created (ProcessGroupNCCL.cpp)."""


def variables_of_worker(resources: Mapping[str, float], is_watched: bool = True) -> dict[str, str]:
    """Return the environment variables of a worker.

    Args:
        resources: Resources that the worker has reserved.
        is_watched: Whether the controller finds hung ranks. Ray Train's own leaves them to torch.
    """
    if resources.get("GPU"):
        return dict(SURVIVE_NCCL) if is_watched else {}
    return {**KEEP_HEAP, **NO_GPU}
