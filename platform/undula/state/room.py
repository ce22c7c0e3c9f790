"""Room that the checkpoints of a run take in its folder. Pure."""

from undula.state.spec import CheckpointSpec


def lack_of_room(spec: CheckpointSpec, url: str, checkpoint_bytes: int, free_bytes: float) -> str | None:
    """Return that the checkpoints of a run do not fit into its folder, as a sentence with the fix; None if they fit.

    Args:
        spec: Number of checkpoints that the run keeps. It writes one more before it deletes the oldest.
        url: Folder of the run or of its runs.
        checkpoint_bytes: Size of a checkpoint.
        free_bytes: Free space of the folder, with what checkpoints of the run take now.
    """
    most = spec.keep + 1 + (spec.keep_best is not None)
    if most * checkpoint_bytes <= free_bytes:
        return None
    return (
        f"the run holds up to {most} checkpoints of {size(checkpoint_bytes)} at a time, and {url} has {size(free_bytes)} free; make room "
        "there, set another folder with runs, or lower checkpoint.keep"
    )


def size(num_bytes: float) -> str:
    """Return a number of bytes as text, such as `4.2 kB`, `12.4 MB` or `3.20 GB`."""
    if num_bytes < 1e6:
        return f"{num_bytes / 1e3:.1f} kB"
    return f"{num_bytes / 1e9:,.2f} GB" if num_bytes >= 1e9 else f"{num_bytes / 1e6:,.1f} MB"
