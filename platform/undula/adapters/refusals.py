"""What scripts of other libraries ask for and a run refuses, with what to do instead. A name that a run refuses is one entry here.

A refusal that depends on the state of a script, such as a call at the wrong time, is beside its condition.
"""

from collections.abc import Iterator, Mapping
from contextlib import contextmanager

from undula.errors import UsageError
from undula.train.launched_habits import refusal_of

_SHARD = "remove it; a model that is too large for a GPU can be sharded with fully_shard"
_ORDER = "a run decides the samples of a batch; set train_sampling_strategy and pass train_dataset and data_collator"
_LOOP = "a run has a loop of its own; use a TrainerCallback"
_SHARDED = "set sharding.stage in the job's YAML (docs/transformers.md)"
_REDUCES = "remove it, because Undula reduces the gradients itself"
_LOADER = "remove it, because loader processes are Undula's"
_HUB = "push the saved model after the run"
_MODE = "a run sets the eval mode itself, and restores the mode of each layer"
_AVERAGE = "average the checkpoints that checkpoint.keep keeps, with undula.load_weights"
AVERAGE = (
    "keep an average of weights in buffers of the module, which setup() registers by register_buffer(), and move it in "
    "on_before_optimizer_step(), which is called once per step (docs/lightning.md)"
)
"""What to do instead of keeping an average of the weights beside a LightningModule."""
_AFTERWARDS = "load the weights with undula.load_weights in another script after the run, for Lightning's own Trainer"
_WHOLE = "remove it; a run takes all batches of its plan"

ACCELERATOR_ARGUMENTS: Mapping[str, str] = {
    "step_scheduler_with_optimizer": "leave it True, with a scheduler that counts steps",
    "log_with": "remove it, or set 'tensorboard'; what accelerator.log() gets is in the ledger and on TensorBoard, and trackers in the "
    "job's YAML send it elsewhere",
    "cpu": "remove it; workers train on the CPU if workers.gpus is 0 or the cluster has no GPU",
    "device_placement": "leave it True",
    "gradient_accumulation_plugin": "pass gradient_accumulation_steps= to Accelerator itself",
    "kwargs_handlers": "remove those that change what is computed; the job's YAML has precision.loss_scale and gradient.compression",
    "rng_types": "remove it; random numbers are keyed by plan.seed",
    **dict.fromkeys(("dynamo_backend", "dynamo_plugin"), "set compile in the job's YAML"),
    **dict.fromkeys(("deepspeed_plugin", "deepspeed_plugins"), _SHARD),
    "fsdp_plugin": "remove it, and call torch's fully_shard on the model before accelerator.prepare()",
    **dict.fromkeys(("torch_tp_plugin", "megatron_lm_plugin", "parallelism_config"), "remove it"),
}
"""Arguments of Accelerate's Accelerator."""
ACCELERATE_LAUNCH: Mapping[str, str] = {
    "ACCELERATE_USE_FSDP": "set sharding.stage in the job's YAML",
    "ACCELERATE_USE_DEEPSPEED": "set in the job's YAML what `undula convert deepspeed` says",
    "ACCELERATE_DYNAMO_BACKEND": "set compile: true in the job's YAML",
    **dict.fromkeys(("ACCELERATE_USE_MEGATRON_LM", "ACCELERATE_USE_PARALLELISM_CONFIG"), "remove it"),
}
"""Environment variables with which `accelerate launch` tells an Accelerator what it has been asked for."""
ACCELERATOR: Mapping[str, str] = {
    "load_state": "remove it; the run restores its newest state itself",
    "skip_first_batches": "remove it; the run continues at its next step itself",
    "save_iteration": "remove it; the run names its checkpoints",
    "clip_grad_value_": "use accelerator.clip_grad_norm_()",
    "unscale_gradients": "remove it; the run unscales gradients when it reduces them",
    **dict.fromkeys(("no_sync", "trigger_sync_in_backward"), "use `with accelerator.accumulate(model)`"),
    "join_uneven_inputs": "remove it; the plan shares an uneven step among the workers",
    "split_between_processes": "remove it; DataLoaders that accelerator.prepare() gets are shared among the workers",
    "get_tracker": "use accelerator.log(), whose values are in the ledger and on TensorBoard",
    "register_save_state_pre_hook": "use accelerator.register_for_checkpointing()",
    "register_load_state_pre_hook": "use accelerator.register_for_checkpointing()",
    "local_process_index": "use accelerator.is_main_process",
    **dict.fromkeys(
        ("prepare_model", "prepare_optimizer", "prepare_scheduler", "prepare_data_loader"), "use accelerator.prepare()"
    ),
}
"""Methods and attributes of Accelerate's Accelerator."""
TRAINING_ARGUMENTS: Mapping[str, str] = {
    **dict.fromkeys(("deepspeed", "fsdp", "fsdp_config", "parallelism_config"), _SHARDED),
    **dict.fromkeys(("fsdp_min_num_params", "fsdp_transformer_layer_cls_to_wrap"), _SHARDED),
    "accelerator_config": "remove it, because Undula's plan decides the batches",
    "group_by_length": "remove it, because a run decides the samples of a batch",
    **dict.fromkeys(("auto_find_batch_size", "per_gpu_train_batch_size"), "set per_device_train_batch_size"),
    "resume_from_checkpoint": "submit the job again under its name, and it continues by itself",
    "ignore_data_skip": "remove it: a resumed run continues with the next sample, without reading the earlier ones",
    "restore_callback_states_from_checkpoint": "remove it: the state of callbacks is part of the run's",
    "enable_jit_checkpoint": "remove it: Undula saves the state on a notice",
    "save_on_each_node": "use an output_dir that all nodes share",
    "report_to": "set 'none'; `undula show`, TensorBoard and Prometheus have the run (docs/trackers.md)",
    **dict.fromkeys(("push_to_hub", "hub_token", "hub_private_repo", "hub_model_id", "hub_strategy"), _HUB),
    **dict.fromkeys(("hub_always_push", "hub_revision"), _HUB),
    **dict.fromkeys(("push_to_hub_model_id", "push_to_hub_organization", "push_to_hub_token"), _HUB),
    **dict.fromkeys(("trackio_space_id", "trackio_bucket_id", "trackio_static_space_id"), "remove it"),
    "bf16_full_eval": "set bf16, which evaluations use as well",
    "fp16_full_eval": "set fp16, which evaluations use as well",
    **dict.fromkeys(("torch_compile_backend", "torch_compile_mode", "torchdynamo"), "set torch_compile=True alone"),
    **dict.fromkeys(
        ("include_num_input_tokens_seen", "include_tokens_per_second", "eval_use_gather_object"), "remove it"
    ),
    **dict.fromkeys(
        ("jit_mode_eval", "mp_parameters", "past_index", "ray_scope", "use_legacy_prediction_loop"), "remove it"
    ),
    **dict.fromkeys(("tpu_metrics_debug", "tpu_num_cores"), "remove it"),
    "batch_eval_metrics": "remove it, and let compute_metrics get all predictions at once",
    **dict.fromkeys(("ddp_bucket_cap_mb", "ddp_broadcast_buffers", "ddp_static_graph"), _REDUCES),
    **dict.fromkeys(
        ("dataloader_prefetch_factor", "dataloader_multiprocessing_context", "dataloader_in_order"), _LOADER
    ),
}
"""TrainingArguments of Hugging Face, of any supported version, unless they have their default values."""
TRAINING_VALUES: Mapping[str, tuple[tuple[str, str], ...]] = {
    **dict.fromkeys(("fp16_backend", "half_precision_backend"), (("apex", "remove it"),)),
    "lr_scheduler_type": (("reduce_lr_on_plateau|greedy", "use a schedule that depends on the step only"),),
    "optim": (
        ("(ada)?lomo", "use an optimizer that does not update in the backward pass"),
        ("schedule_free.*|.*layerwise", "use another optimizer"),
    ),
    "train_sampling_strategy": (("(?!(random|sequential)$).+", "set 'random' or 'sequential'"),),
}
"""Values of TrainingArguments that are otherwise honoured, as regular expressions."""
TRAINER_METHODS: Mapping[str, str] = {
    **dict.fromkeys(("get_train_dataloader", "_get_train_sampler"), _ORDER),
    "_get_eval_sampler": "evaluations go through a dataset in its order; pass it as you want it",
    "_get_dataloader": "pass the datasets and data_collator",
    "get_batch_samples": "override compute_loss()",
    **dict.fromkeys(("_clip_grad_norm", "_get_grad_norm"), "set max_grad_norm"),
    **dict.fromkeys(("_inner_training_loop", "_prepare_for_training", "_run_epoch"), _LOOP),
}
"""Methods of Hugging Face's Trainer that a script may not override, because a run does not call them."""
MODULE_HOOKS: Mapping[str, str] = {
    "optimizer_step": "a run steps the optimizer itself; return a scheduler from configure_optimizers to change the learning rate",
    "optimizer_zero_grad": "a run frees gradients itself",
    "backward": "a run calls backward itself; return the loss from training_step",
    "configure_gradient_clipping": "set gradient.max_norm in the job's YAML",
    "configure_sharded_model": "use configure_model",
    **dict.fromkeys(("on_validation_model_eval", "on_validation_model_train"), _MODE),
    "on_validation_model_zero_grad": "a run has freed the gradients when it validates",
}
"""Hooks of a LightningModule that it may not override, because a run does not call them."""
CALLBACKS: Mapping[str, str] = {
    "Checkpoint": "set checkpoint.every_steps in the job's YAML, and checkpoint.keep_best for the best one",
    "Timer": "set workers.fleet, or plan.max_steps, in the job's YAML",
    "StochasticWeightAveraging": _AVERAGE,
    "WeightAveraging": AVERAGE,
    "GradientAccumulationScheduler": "set plan.global_batch and plan.micro_batch in the job's YAML; the batch of a run is fixed",
    "BaseFinetuning": "freeze layers in configure_model, because its parameter groups would not be restored",
    "ModelPruning": "prune the exported weights, because masks would not be restored",
    "BatchSizeFinder": "choose plan.micro_batch in the job's YAML",
    "LearningRateFinder": "compare learning rates with `undula study`",
}
"""Callbacks of Lightning, by the name of their class or of a base class of it."""
DISPLAYS = ("LearningRateMonitor", "DeviceStatsMonitor", "ProgressBar", "ModelSummary")
"""Callbacks of Lightning that are left out: they show what the driver, the report and TensorBoard show of each run."""
LIGHTNING_TRAINER: Mapping[str, str] = {
    "strategy": "remove it; a model that is too large for a GPU can be sharded with fully_shard in configure_model",
    "fast_dev_run": "set plan.max_steps in the job's YAML",
    "max_time": "set workers.fleet in the job's YAML",
    "min_epochs": "set max_epochs",
    "min_steps": "set max_steps",
    **dict.fromkeys(("limit_train_batches", "limit_val_batches", "overfit_batches"), _WHOLE),
    "gradient_clip_algorithm": "clip by the norm, with gradient_clip_val alone",
    "logger": "remove it; self.log is in the ledger and on TensorBoard, and the job has trackers of its own",
    "profiler": "remove it; the report of the run shows where the time of each step goes",
    **dict.fromkeys(("plugins", "detect_anomaly", "barebones"), "remove it"),
    "reload_dataloaders_every_n_epochs": "remove it; a run reads one dataset",
    "sync_batchnorm": "remove it; statistics of a batch must not depend on the number of workers",
}
"""Arguments of Lightning's Trainer, unless they have their default values."""
LIGHTNING_METHODS: Mapping[str, str] = {
    "ckpt_path": "submit the job again under its name, and it continues by itself",
    **dict.fromkeys(("validate", "test", "predict"), _AFTERWARDS),
    "save_checkpoint": "set checkpoint.every_steps in the job's YAML",
    "checkpoint_callback": 'set checkpoint.keep_best in the job\'s YAML, and read the best weights with undula.load_weights(..., "best")',
}
"""Methods of Lightning's Trainer, and an argument of its `fit`."""
_OF_LIBRARIES: Mapping[str, str] = {
    "GatheredNumber": "a number of what accelerator.gather() returned in a training step is used where it would lose that it may not "
    "become a part of the loss; compute the loss from the batch alone, or with num_items_in_batch, which compute_loss() gets for the "
    "whole step, and log the number as it is",
    "initialize the accelerate state": "the script uses accelerate.logging.get_logger() or another part of Accelerate that needs "
    "Accelerate's own Accelerator; log with logging.getLogger(__name__), and use what undula.adapters.accelerate has",
    "support bf16": "TrainingArguments.bf16 is refused on this machine, whose GPU cannot do it; leave it out, and set "
    "precision.compute: bf16 in the job's YAML, which the driver does not need a GPU for",
    "--tf32 requires": "TrainingArguments.tf32 is refused on this machine, whose GPU cannot do it; leave it out, and call "
    "torch.set_float32_matmul_precision('high') in the main function",
    "train_dataset does not implement __len__": "train_dataset= of the Trainer is an IterableDataset, or another dataset without a length, "
    "whose samples have no index; write the samples as Parquet with `undula data convert` and use undula.main, or pass a view of them with "
    "__len__ and __getitem__",
}
"""What to say of an error of another library, by a part of its text."""


@contextmanager
def explained() -> Iterator[None]:
    """Say what to do if another library, or the script, fails because this process is not as it expects.

    Raises:
        UsageError: It does.
    """
    try:
        yield
    except Exception as error:
        for part, sentence in _OF_LIBRARIES.items():
            if part in str(error) and isinstance(error, RuntimeError | TypeError | ValueError):
                raise UsageError(sentence) from error
        if refusal := refusal_of(error):
            raise refusal from error
        raise


def refuse_launched(environment: Mapping[str, str]) -> None:
    """Check what `accelerate launch` has been asked for.

    Raises:
        UsageError: A run cannot do it, or gets it from the job's YAML.
    """
    for name, instead in ACCELERATE_LAUNCH.items():
        if (value := environment.get(name, "no")).lower() not in ("no", "false", "0", ""):
            raise UsageError(f"accelerate launch has set {name}={value}, which a run does not take; {instead}")


def refuse_arguments(
    owner: str, given: Mapping[str, object], defaults: Mapping[str, object], instead: Mapping[str, str]
) -> None:
    """Check arguments of a class of another library.

    Args:
        owner: Name of the class that gets them.
        given: The arguments.
        defaults: Default values of all arguments that its library knows.
        instead: Arguments that a run cannot honour, and what to do instead; the others have no effect in a run.

    Raises:
        UsageError: A run cannot honour the values of some, or the library does not have them. All of them are named at once.
    """
    refused = []
    for name, value in given.items():
        if name not in defaults:
            refused.append(f"{owner} got {name}=, which it does not know; remove it")
        elif name in instead and value is not None and value != defaults[name]:
            refused.append(f"{owner} does not take {name}=; {instead[name]}")
    if refused:
        raise UsageError(". ".join(refused))


def refuse_backward(given: Mapping[str, object]) -> None:
    """Check arguments of `accelerator.backward` beside the loss.

    Raises:
        UsageError: One would make another gradient.
    """
    for name, value in given.items():
        if name in ("gradient", "inputs", "create_graph") and value is not None and value is not False:
            raise UsageError(
                f"accelerator.backward() does not take {name}=; scale the loss itself, freeze other parameters with requires_grad_(False), "
                "and use torch.autograd.grad() for gradients that are no part of the step"
            )


def refused_override(owner: type, method: str, instead: Mapping[str, str]) -> UsageError:
    """Return the error for a class that overrides a method that a run does not call."""
    return UsageError(f"{owner.__name__} overrides {method}(), which a run does not call; {instead[method]}")
