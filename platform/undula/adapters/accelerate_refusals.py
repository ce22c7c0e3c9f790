"""What Accelerate's `Accelerator` has and the stand-in refuses, and what to do instead."""

from collections.abc import Mapping

from undula.errors import UsageError

ARGUMENTS: Mapping[str, str] = {
    "step_scheduler_with_optimizer": "leave it True, with a scheduler that counts steps",
    "log_with": "remove it; what accelerator.log() gets is in the ledger and on TensorBoard, and the job has trackers of its own",
    "project_dir": "remove it; checkpoints and logs are in the run directory",
    "project_config": "remove it; checkpoints and logs are in the run directory, and checkpoint.keep_last limits their number",
    "cpu": "remove it; workers train on the CPU if workers.gpus is 0 or the cluster has no GPU",
    "device_placement": "leave it True",
    "dataloader_config": "pass split_batches= to Accelerator itself; the plan decides the rest",
    "gradient_accumulation_plugin": "pass gradient_accumulation_steps= to Accelerator itself",
    "kwargs_handlers": "remove it; the job's YAML has precision.loss_scale and gradient.compression",
    "rng_types": "remove it; random numbers are keyed by plan.seed",
    "dynamo_backend": "set compile in the job's YAML",
    "dynamo_plugin": "set compile in the job's YAML",
    "deepspeed_plugin": "remove it; a model that is too large for a GPU can be sharded with fully_shard",
    "deepspeed_plugins": "remove it; a model that is too large for a GPU can be sharded with fully_shard",
    "fsdp_plugin": "remove it, and call torch's fully_shard on the model before accelerator.prepare()",
    "torch_tp_plugin": "remove it",
    "megatron_lm_plugin": "remove it",
    "parallelism_config": "remove it",
}
"""Arguments that a run does not take."""
DEFAULTS: Mapping[str, object] = {"step_scheduler_with_optimizer": True, "device_placement": True, "cpu": False}
"""Default values of arguments; None for the others."""
ATTRIBUTES: Mapping[str, str] = {
    "load_state": "remove it; the run restores its newest state itself",
    "skip_first_batches": "remove it; the run continues at its next step itself",
    "save_iteration": "remove it; the run names its checkpoints",
    "clip_grad_value_": "use accelerator.clip_grad_norm_()",
    "unscale_gradients": "remove it; the run unscales gradients when it reduces them",
    "no_sync": "use `with accelerator.accumulate(model)`",
    "trigger_sync_in_backward": "use `with accelerator.accumulate(model)`",
    "join_uneven_inputs": "remove it; the plan shares an uneven step among the workers",
    "split_between_processes": "remove it; DataLoaders that accelerator.prepare() gets are shared among the workers",
    "set_trigger": "end the training with plan.max_steps",
    "check_trigger": "end the training with plan.max_steps",
    "state": "remove it; use attributes of the accelerator itself, and log with logging.getLogger(__name__)",
    "distributed_type": "remove it; the run decides where it trains, on CPUs or GPUs",
    "get_tracker": "use accelerator.log(), whose values are in the ledger and on TensorBoard",
    "register_save_state_pre_hook": "use accelerator.register_for_checkpointing()",
    "register_load_state_pre_hook": "use accelerator.register_for_checkpointing()",
    "local_process_index": "use accelerator.is_main_process",
    "prepare_model": "use accelerator.prepare()",
    "prepare_optimizer": "use accelerator.prepare()",
    "prepare_scheduler": "use accelerator.prepare()",
    "prepare_data_loader": "use accelerator.prepare()",
}
"""Methods and attributes that the stand-in does not have."""


def refuse_arguments(arguments: Mapping[str, object]) -> None:
    """Check arguments of `Accelerator` that have to have their default values.

    Raises:
        UsageError: One has another value, or Accelerate does not have it.
    """
    for name, value in arguments.items():
        if name not in ARGUMENTS:
            raise UsageError(f"Accelerator got {name}=, which it does not know; remove it")
        if value is not None and value != DEFAULTS.get(name):
            raise UsageError(f"Accelerator does not take {name}=; {ARGUMENTS[name]}")


def refused_attribute(name: str) -> Exception:
    """Return the error for an attribute that the stand-in does not have. Python's own protocols need an AttributeError."""
    if name in ATTRIBUTES:
        return UsageError(f"accelerator.{name} is not possible in a run; {ATTRIBUTES[name]}")
    return AttributeError(f"the Accelerator of undula.adapters.accelerate has no attribute {name!r}")


def require_first(found: object, what: str) -> None:
    """Check that `prepare` has got no other object of a kind.

    Raises:
        UsageError: It has.
    """
    if found is not None:
        raise UsageError(f"accelerator.prepare() got a second {what}, because a run has one")
