"""Errors of torch about what cannot be computed with shards of parameters, and what the script can do about them."""

MIXED = (
    "the script has computed with a shard of a parameter and a whole tensor: in a sharded model, call the module that run.model() returns "
    "instead of a part of it, and make averages and other copies of weights a part of the module before run.model()"
)
NO_RULE = (
    "the script has computed with shards of parameters in a way that torch has no rule for, such as parameters_to_vector(); in a sharded "
    "model, take `whole = weight.full_tensor()`, which all workers call, and to change the weight, call weight.copy_(whole) afterwards"
)
ASSIGNED = (
    "load_state_dict(assign=True) puts whole tensors in the places of shards; in a sharded model, leave assign=True out, so that the "
    "tensors are copied, or call it before run.model()"
)
FIXES = {
    "has no attribute '_local_tensor'": ASSIGNED,
    "mixed torch.Tensor and DTensor": MIXED,
    "Sharding propagation failed": NO_RULE,
    "does not have a sharding strategy": NO_RULE,
    "as_strided not supported with DTensor": NO_RULE,
}
"""What the script can do, by a part of torch's message."""


def is_of_shards(error: BaseException) -> bool:
    """Return whether an error is one of these."""
    return _fix_of(error) is not None


def note_shards(error: BaseException) -> None:
    """Add a note to an error that is one of these."""
    if fix := _fix_of(error):
        error.add_note(fix)


def _fix_of(error: BaseException) -> str | None:
    is_of_torch = isinstance(error, RuntimeError | AttributeError)  # NotImplementedError is a RuntimeError
    return next((fix for part, fix in FIXES.items() if is_of_torch and part in str(error)), None)
