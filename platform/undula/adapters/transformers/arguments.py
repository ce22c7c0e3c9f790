"""TrainingArguments of Hugging Face as settings of a job, and those that a run cannot honour."""

import math
import re
from collections.abc import Mapping
from dataclasses import MISSING, Field, fields
from typing import Any

import transformers
from torch.optim import Optimizer
from transformers import TrainingArguments

from undula.adapters.refusals import TRAINING_ARGUMENTS, TRAINING_VALUES
from undula.adapters.transformers.world_size import refuse_early_world_size
from undula.config.secrets import hide_secrets
from undula.config.yaml_file import Setting
from undula.errors import SpecError

_SETTINGS = """
    per_device_train_batch_size gradient_accumulation_steps num_train_epochs max_steps learning_rate seed data_seed train_sampling_strategy
    dataloader_drop_last max_grad_norm bf16 fp16 torch_compile full_determinism"""
_HONOURED = """
    output_dir lr_scheduler_type lr_scheduler_kwargs warmup_steps warmup_ratio optim optim_args weight_decay adam_beta1 adam_beta2
    adam_epsilon optim_target_modules average_tokens_across_devices label_smoothing_factor neftune_noise_alpha activation_checkpointing
    activation_checkpointing_kwargs gradient_checkpointing gradient_checkpointing_kwargs use_cache use_liger_kernel liger_kernel_config
    tf32 torch_empty_cache_steps logging_strategy logging_steps logging_first_step logging_nan_inf_filter log_on_each_node log_level
    log_level_replica disable_tqdm debug skip_memory_metrics run_name eval_strategy eval_steps eval_delay eval_on_start
    per_device_eval_batch_size prediction_loss_only eval_do_concat_batches eval_accumulation_steps include_for_metrics save_strategy
    save_steps save_total_limit metric_for_best_model greater_is_better dataloader_num_workers remove_unused_columns label_names
    load_best_model_at_end
    length_column_name do_train do_eval do_predict adafactor include_inputs_for_metrics per_gpu_eval_batch_size save_safetensors"""
"""Arguments that Hugging Face's own code honours under the loop of a run."""
_WITHOUT_EFFECT = """
    use_cpu local_rank save_only_model dataloader_pin_memory dataloader_persistent_workers ddp_find_unused_parameters ddp_backend
    ddp_timeout project logging_dir fp16_backend fp16_opt_level half_precision_backend no_cuda overwrite_output_dir use_mps_device"""
"""Arguments whose effect a run has, or does not need, whatever their value is."""
KNOWN = frozenset(f"{_SETTINGS} {_HONOURED} {_WITHOUT_EFFECT}".split())
"""Arguments of any supported version of transformers that a run takes."""
_OWN_DEFAULTS: Mapping[str, Any] = {
    "report_to": ["none", [], None, "none"],
    "torch_compile_backend": ["inductor"],
    "include_num_input_tokens_seen": ["no"],
}
"""Values that TrainingArguments itself gives to an argument whose default it replaces."""


def job_settings(
    args: TrainingArguments, num_samples: int, virtual_workers: int, optimizer: Optimizer | None
) -> dict[str, Setting]:
    """Return the settings of a job that trains as the arguments say, by dotted key.

    Args:
        args: Arguments of the trainer.
        num_samples: Number of samples of the training data.
        virtual_workers: Number of virtual workers, which stand for the processes of torchrun.
        optimizer: Optimizer that the script has made itself.

    Raises:
        SpecError: The data have too few samples.
    """
    micro_batch = args.per_device_train_batch_size
    batch = micro_batch * args.gradient_accumulation_steps * virtual_workers
    per_epoch = num_samples // batch if args.dataloader_drop_last else math.ceil(num_samples / batch)
    if not per_epoch:
        raise SpecError(
            f"a step takes {batch} samples (per_device_train_batch_size x gradient_accumulation_steps x plan.virtual_workers), but the "
            f"training data have {num_samples}; lower one of them"
        )
    steps = args.max_steps if args.max_steps > 0 else math.ceil(args.num_train_epochs * per_epoch)
    strategy = getattr(args, "train_sampling_strategy", None)
    values = {
        "plan.global_batch": (batch, "per_device_train_batch_size"),
        "plan.micro_batch": (micro_batch, "per_device_train_batch_size"),
        "plan.epochs": (math.ceil(steps / per_epoch), "num_train_epochs"),
        "plan.max_steps": (steps, "max_steps" if args.max_steps > 0 else "num_train_epochs"),
        "plan.seed": (args.seed, "seed"),
        "plan.last_step": ("drop" if args.dataloader_drop_last else "short", "dataloader_drop_last"),
        "schedule.base_lr": (args.learning_rate, "learning_rate"),
        "gradient.max_norm": (max(args.max_grad_norm or 0, 0) or None, "max_grad_norm"),
        "compile": (bool(args.torch_compile), "torch_compile"),
        # Older versions of transformers have no such argument, so that only the YAML can ask for an order.
        **({"plan.shuffle": (_shuffle(strategy), "train_sampling_strategy")} if strategy else {}),
        # Without either, the YAML may have it, so that a driver without a GPU can check the job.
        **({"precision.compute": ("bf16", "bf16")} if args.bf16 else {}),
        **({"precision.compute": ("fp16", "fp16")} if args.fp16 else {}),
        **({"deterministic": (True, "full_determinism")} if args.full_determinism else {}),
    }
    settings = {}
    for key, (value, argument) in values.items():
        name = "max_steps" if key == "plan.max_steps" else argument  # without it, it follows from the epochs
        settings[key] = Setting(value, f"TrainingArguments.{argument}", f"TrainingArguments.{name} (--{name})")
    if optimizer:
        group = optimizer.param_groups[0]
        rate = group.get("initial_lr", group["lr"])  # a scheduler has set the rate of its first step
        settings["schedule.base_lr"] = Setting(rate, "the optimizer of the script")
    return settings


def _shuffle(strategy: Any) -> str:
    return "none" if str(strategy) == "sequential" else "window"


def refuse_unsupported(args: TrainingArguments, virtual_workers: int) -> None:
    """Refuse arguments that a run cannot honour. The fields of a class that derives from TrainingArguments are left to the script.

    Raises:
        SpecError: The first of them.
        UsageError: The script has read `world_size` too early.
    """
    refuse_early_world_size(args)
    for field in filter(lambda field: field.init, fields(TrainingArguments)):
        value, fix = getattr(args, field.name), TRAINING_ARGUMENTS.get(field.name)
        if field.name not in KNOWN and not fix:
            fix = f"remove it, because Undula does not know this argument of transformers {transformers.__version__}"
        if _is_default(field, value):
            fix = None
        for pattern, instead in TRAINING_VALUES.get(field.name, ()):
            if re.fullmatch(pattern, str(_plain(value))):
                fix = instead
        if fix:
            shown = _shown(field.name, value)
            raise SpecError(f"TrainingArguments.{field.name} is {shown}, which a run does not support; {fix}")
    if args.data_seed not in (None, args.seed):
        raise SpecError(
            f"TrainingArguments.data_seed is {args.data_seed} and seed is {args.seed}, but a run has one seed; remove data_seed"
        )
    if not args.average_tokens_across_devices and virtual_workers > 1:
        raise SpecError(
            "TrainingArguments.average_tokens_across_devices is False, which a run does not support with several virtual workers; remove it"
        )


def _is_default(field: "Field[Any]", value: Any) -> bool:
    """Return whether an argument has its default, or what TrainingArguments makes of its default."""
    default = field.default_factory() if field.default_factory is not MISSING else field.default
    if _plain(value) == _plain(default) or value in ({}, [], None, ""):
        return True
    if field.name == "fsdp_config":  # some versions fill in what is off
        return not any(value.values())
    if field.name == "accelerator_config":
        return bool(value == type(value)())
    return value in _OWN_DEFAULTS.get(field.name, ())


def _plain(value: Any) -> Any:
    """Return an enumeration's value, and other values as they are."""
    return getattr(value, "value", value)


def _shown(name: str, value: Any) -> str:
    plain = _plain(value)
    if hide_secrets({name: plain}) != {name: plain}:
        return "(hidden)"
    text = repr(plain)
    return text if len(text) <= 60 else f"{text[:57]}..."
