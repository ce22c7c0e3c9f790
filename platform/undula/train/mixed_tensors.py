"""Torch's error about a shard of a parameter and a whole tensor in one operation, and what the script can do about it."""

FIX = (
    "the script has computed with a shard of a parameter and a whole tensor: in a sharded model, call the module that run.model() returns "
    "instead of a part of it, and make averages and other copies of weights a part of the module before run.model()"
)


def is_of_mixed_tensors(error: BaseException) -> bool:
    """Return whether an error is that of torch."""
    return isinstance(error, RuntimeError) and "mixed torch.Tensor and DTensor" in str(error)


def note_mixed_tensors(error: BaseException) -> None:
    """Add a note to torch's error. It does nothing to other errors."""
    if is_of_mixed_tensors(error):
        error.add_note(FIX)
