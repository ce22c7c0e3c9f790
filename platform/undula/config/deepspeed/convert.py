"""The settings of a job that do what the keys of a DeepSpeed configuration do."""

import math
from collections.abc import Mapping
from typing import Any

from undula.config.deepspeed.reader import (
    BETAS,
    COUNT,
    DEVICE,
    FLAG,
    FRACTION,
    NUMBER,
    POSITIVE,
    RATIO,
    STAGE,
    STEPS,
    TEXT,
    Conversion,
    Keys,
    in_one_line,
)
from undula.errors import SpecError

DEFAULT_GPUS = 4
"""Number of GPUs if neither the file nor the user says it, or else the largest divisor that fits the batch."""
_BATCH, _MICRO, _STEPS = "train_batch_size", "train_micro_batch_size_per_gpu", "gradient_accumulation_steps"
_ADAM = {"betas": BETAS, "eps": POSITIVE, "weight_decay": NUMBER}
_OPTIMIZERS = {
    "adam": _ADAM,
    "adamw": _ADAM,
    "lamb": _ADAM,
    "sgd": {"momentum": FRACTION, "nesterov": FLAG, "weight_decay": NUMBER},
}
"""Keys of `optimizer.params` that make_optimizer has under the same names, by the name of the optimizer."""
_OTHER_DEFAULTS: Mapping[str, Mapping[str, float]] = {"lamb": {"eps": 1e-8}, "sgd": {"momentum": 0.0}}
"""Defaults of DeepSpeed's optimizers that differ from those of make_optimizer."""
_DECAYS = {"WarmupLR": "constant", "WarmupDecayLR": "polynomial", "WarmupCosineLR": "cosine"}
"""Shape of the decay of each scheduler that has an equivalent."""
_ORDER = ("plan", "precision", "schedule", "gradient", "sharding", "workers", "trackers", "config")


def convert(config: Mapping[str, Any], virtual_workers: int | None = None) -> Conversion:
    """Convert a configuration.

    Args:
        config: DeepSpeed's configuration.
        virtual_workers: Number of virtual workers; by default, the sizes of the batch decide.

    Raises:
        SpecError: A value has a wrong type, or values contradict each other.
    """
    keys = Keys(config)
    stage = keys.read("zero_optimization.stage", STAGE)
    batch = _batch(keys, stage or 0, virtual_workers)
    compute = _precision(keys, stage or 0)
    rate = _optimizer(keys)
    _schedule(keys, batch, rate)
    _gradient(keys)
    if stage is not None:
        keys.settings["sharding.stage"] = stage, "zero_optimization.stage"
    if stage and compute:
        keys.settings["sharding.gather"] = "compute", f"{compute}.enabled: DeepSpeed gathers in 16 bits, too"
    _offload(keys, stage or 0)
    _trackers(keys)
    keys.leave_out_rest()
    settings = sorted(keys.settings.items(), key=lambda item: _ORDER.index(item[0].split(".")[0]))
    return Conversion(dict(settings), keys.missing, keys.differences, keys.left_out)


def _batch(keys: Keys, stage: int, given: int | None) -> int | None:
    """Convert the sizes of the batch, and return that of a step, given the number of virtual workers.

    DeepSpeed's batch is micro-batch x accumulation x GPUs, and stages 2 and 3 send gradients after each micro-batch. There, each
    micro-batch is a virtual worker, and otherwise each GPU.
    """
    batch: int | None = keys.read(_BATCH, COUNT)
    micro, steps = keys.read(_MICRO, COUNT), keys.read(_STEPS, COUNT)
    turns = (steps or 1) if stage >= 2 else 1
    each = f" x {_STEPS}" if turns > 1 else ""
    if not (batch and micro) and given and given % turns:
        raise SpecError(
            f"--virtual-workers is {given}, but stage {stage} takes GPUs{each} ({turns}); give a multiple of {turns}"
        )
    gpus: int | None = given // turns if given else None
    is_known = True
    if batch:
        keys.settings["plan.global_batch"] = batch, _BATCH
        shares = _shares(batch, micro, steps)
        if given is None or gpus is None:
            is_known = bool(micro and steps)
            gpus = shares if is_known else math.gcd(DEFAULT_GPUS, shares)
        elif batch % given if micro else shares % gpus:
            fits = math.gcd(batch, given) if micro else turns * math.gcd(shares, gpus)
            raise SpecError(
                f"--virtual-workers is {given}, into which {_BATCH} ({batch}) cannot be divided; give {fits}, for example"
            )
        elif micro:
            gpus = min(given, shares) if steps else given
    elif micro:
        product = f"{_MICRO}{f' x {_STEPS}' if steps else ''} x GPUs"
        if gpus:
            batch = micro * (steps or 1) * gpus
            keys.settings["plan.global_batch"] = batch, product
        else:
            keys.missing[_BATCH] = (
                f"convert again with --virtual-workers (GPUs{each}), or set plan.global_batch ({product}) and plan.virtual_workers"
            )
    elif not {_BATCH, _MICRO} & keys.left_out.keys() and "elasticity" not in keys.config:
        keys.missing[_BATCH] = "set plan.global_batch, the samples of a step on all GPUs, and plan.virtual_workers"
    if gpus:
        origin = f"{gpus} GPUs{each}" + (
            "" if is_known else "; the file does not say how many GPUs, see --virtual-workers"
        )
        keys.settings["plan.virtual_workers"] = (
            (gpus * turns, origin) if given is None else (given, "--virtual-workers")
        )
        keys.settings["workers.max"] = gpus, "one for each GPU"
    if micro:
        shared = (
            f"; {_STEPS} ({steps}) of them in each virtual worker"
            if steps and turns == 1 and gpus == (given or gpus)
            else ""
        )
        keys.settings["plan.micro_batch"] = micro, f"{_MICRO}{shared}"
    elif batch and gpus and steps:
        keys.settings["plan.micro_batch"] = batch // (steps * gpus), f"{_BATCH} / {_STEPS} / GPUs"
    if not (batch and gpus):
        keys.leave_out(
            _STEPS, keys.left_out.get(_STEPS, "set plan.global_batch and plan.micro_batch, from which it follows")
        )
    return batch


def _shares(batch: int, micro: int | None, steps: int | None) -> int:
    """Return the batch divided by the sizes that are given. This is the number of GPUs if both are."""
    factors = {_MICRO: micro, _STEPS: steps}
    product = (micro or 1) * (steps or 1)
    if batch % product:
        text = " x ".join(f"{key} ({value})" for key, value in factors.items() if value)
        raise SpecError(
            f"{_BATCH} is {batch}, which is not a multiple of {text}; set it to {max(batch - batch % product, product)}"
        )
    return batch // product


def _precision(keys: Keys, stage: int) -> str | None:
    """Convert the format in which the model computes, and return its section; None for fp32."""
    names = ("fp16", "bf16", "bfloat16")
    enabled = [name for name in names if keys.read(f"{name}.enabled", FLAG)]
    if len(enabled) > 1:
        raise SpecError(f"{enabled[0]}.enabled and {enabled[1]}.enabled are both true; set one of them to false")
    scale = keys.read("fp16.loss_scale", NUMBER)
    for name in names:
        if name in enabled or f"{name}.enabled" in keys.left_out:
            continue
        keys.leave_out(f"{name}.enabled", "false is the default of Undula, too")
        for key in keys.below(name):
            if key != f"{name}.enabled":
                keys.leave_out(key, f"it has no effect, because {name}.enabled is not true")
    if not enabled:
        keys.leave_out(
            "fp16.loss_scale",
            keys.left_out.get("fp16.loss_scale", "set precision.loss_scale beside precision.compute: fp16"),
        )
        return None
    name = enabled[0]
    keys.settings["precision.compute"] = "fp16" if name == "fp16" else "bf16", f"{name}.enabled"
    keys.differences[f"{name}.enabled"] = (
        "the script must leave the parameters in fp32, "
        + ("of which units get copies in 16 bits" if stage else "and the model runs under torch.autocast")
        + ("; a step that overflows is skipped, but moves the schedule on" if name == "fp16" else "")
    )
    if name == "fp16" and scale and math.frexp(scale)[0] != 0.5:
        nearest = 2.0 ** round(math.log2(scale))
        keys.leave_out(
            "fp16.loss_scale", f"a fixed scale is a power of two in Undula; set precision.loss_scale: {nearest:g}"
        )
    elif name == "fp16" and scale is not None:
        keys.settings["precision.loss_scale"] = float(scale) or "dynamic", "fp16.loss_scale"
    return name


def _optimizer(keys: Keys) -> float | None:
    """Convert the optimizer, and return its learning rate."""
    params, others = "optimizer.params", dict[str, float]()
    rate: float | None = keys.read(f"{params}.lr", POSITIVE)
    kind = _type(keys, "optimizer")
    if kind is None:
        return rate
    name = kind.lower()
    if name not in _OPTIMIZERS:
        keys.leave_out(
            "optimizer.type",
            f"make_optimizer has no {in_one_line(kind)}; make the optimizer in the script, with run.base_lr",
        )
        for key in keys.below(params):
            if key not in (f"{params}.lr", *keys.left_out):
                keys.leave_out(key, "it belongs to the optimizer, which the script makes")
        return rate
    origin = "optimizer.type, for undula.make_optimizer"
    if name in ("adam", "adamw"):
        # DeepSpeed's Adam is AdamW by default, and its AdamW whatever adam_w_mode is.
        is_adamw = keys.read(f"{params}.adam_w_mode", FLAG) is not False or name == "adamw"
        origin = "optimizer.type, which is AdamW unless adam_w_mode is false" if is_adamw and name == "adam" else origin
        name = "adamw" if is_adamw else "adam"
        if keys.read(f"{params}.torch_adam", FLAG) and is_adamw:
            others = {"weight_decay": 0.01}
    keys.settings["config.optimizer.name"] = name, origin
    others = {**others, **_OTHER_DEFAULTS.get(name, {})}
    for setting, accepted in _OPTIMIZERS[name].items():
        value = keys.read(f"{params}.{setting}", accepted)
        if value is not None:
            keys.settings[f"config.optimizer.{setting}"] = value, f"{params}.{setting}"
        elif setting in others and f"{params}.{setting}" not in keys.left_out:
            keys.settings[f"config.optimizer.{setting}"] = others[setting], f"default of {kind} in DeepSpeed"
    if keys.settings.get("config.optimizer.weight_decay", (0, ""))[0]:
        keys.differences[f"{params}.weight_decay"] = (
            "make_optimizer applies it to matrices only, not to biases and norms; DeepSpeed applies it as the script says"
        )
    if name == "lamb":
        keys.differences["optimizer.type"] = (
            "DeepSpeed's LAMB limits the trust ratio, by default to 0.01 to 10, and has one for vectors; Undula's does neither"
        )
    keys.leave_out_rest(params, f"make_optimizer has no such setting of {name}; make the optimizer in the script")
    return rate


def _schedule(keys: Keys, batch: int | None, rate: float | None) -> None:
    """Convert the learning rate and its scheduler, given the samples of a step and the optimizer's rate."""
    kind, params = _type(keys, "scheduler"), "scheduler.params"
    peak, origin = rate, "optimizer.params.lr"
    if kind in ("WarmupLR", "WarmupDecayLR"):
        most, key = keys.read(f"{params}.warmup_max_lr", POSITIVE), f"{params}.warmup_max_lr"
        if most or key in keys.left_out or kind == "WarmupDecayLR":
            is_default = most is None and key not in keys.left_out
            peak, origin = (1e-3, f"default of warmup_max_lr of {kind}") if is_default else (most, key)
            keys.leave_out("optimizer.params.lr", f"{kind} replaces it by warmup_max_lr")
        elif rate is None and origin not in keys.left_out:
            keys.missing[key] = (
                "set schedule.base_lr to the learning rate of the optimizer, which DeepSpeed takes for it"
            )
    if peak is not None:
        keys.settings["schedule.base_lr"] = peak, origin
    if kind is None:
        keys.settings["schedule.decay"] = "constant", "no scheduler; set the schedule that the script makes"
        return
    if kind not in _DECAYS:
        shown = in_one_line(kind)
        keys.leave_out(
            "scheduler.type",
            f"there is no {shown}; set schedule.warmup_steps and schedule.decay, which is cosine by default",
        )
        for key in keys.below(params):
            keys.leave_out(key, f"it belongs to {shown}; docs/learning_rate.md describes the shapes of a schedule")
        return
    keys.settings["schedule.decay"] = _DECAYS[kind], "scheduler.type"
    begin = _warmup(keys, kind, peak)
    if kind != "WarmupLR":
        _end_of_decay(keys, kind, batch, begin)
    keys.leave_out_rest(params, f"{kind} has no such parameter")


def _warmup(keys: Keys, kind: str, peak: float | None) -> float:
    """Convert the warmup, and return the rate at which it begins as a fraction of the peak."""
    params = "scheduler.params"
    key = f"{params}.warmup_min_ratio" if kind == "WarmupCosineLR" else f"{params}.warmup_min_lr"
    least = keys.read(key, RATIO if kind == "WarmupCosineLR" else NUMBER) or 0.0
    begin: float = least if kind == "WarmupCosineLR" else least / peak if peak else 0.0
    steps = keys.read(f"{params}.warmup_num_steps", STEPS)
    has_length = f"{params}.warmup_num_steps" not in keys.left_out
    shape = keys.read(f"{params}.warmup_type", TEXT)
    if begin >= 1:
        rate = "begins at its peak" if begin == 1 else "would begin above its peak, and begins there"
        for name in (key, f"{params}.warmup_num_steps", f"{params}.warmup_type"):
            keys.leave_out(name, f"the rate {rate}, so there is no warmup")
        if kind == "WarmupCosineLR":
            keys.differences["scheduler.type"] = "the cosine begins at once, and not after warmup_num_steps at the peak"
        return begin
    if has_length:
        # DeepSpeed warms up for 1000 steps by default, and WarmupLR and WarmupDecayLR for 2 at least.
        keys.settings["schedule.warmup_steps"] = max(1000 if steps is None else steps, 2), f"{params}.warmup_num_steps"
        keys.differences[f"{params}.warmup_num_steps"] = (
            "Undula's rate is one or two steps ahead, because it counts the step itself"
        )
    if shape == "linear":
        keys.settings["schedule.warmup"] = "linear", f"{params}.warmup_type"
    else:
        keys.differences[f"{params}.warmup_type"] = (
            f"it is {'log' if shape else 'log by default'}, which Undula does not have; a linear warmup of as many steps takes its place"
        )
    if least and not peak and kind != "WarmupCosineLR":
        keys.leave_out(key, "set schedule.warmup_begin to it divided by schedule.base_lr")
    elif begin and not has_length:
        keys.leave_out(key, f"set schedule.warmup_begin: {begin:g} beside schedule.warmup_steps")
    elif key in keys.converted:
        keys.settings["schedule.warmup_begin"] = begin, key
    return begin


def _end_of_decay(keys: Keys, kind: str, batch: int | None, begin: float) -> None:
    """Convert the length of the decay and the rate at its end."""
    total_key, least_key = "scheduler.params.total_num_steps", "scheduler.params.cos_min_ratio"
    total = keys.read(total_key, COUNT)
    if total is None and total_key not in keys.left_out:
        raise SpecError(f"{total_key} is missing, but {kind} needs it; set it to the number of steps of the run")
    if total and batch:
        keys.settings["schedule.decay_samples"] = total * batch, f"{total_key} x plan.global_batch"
        keys.differences[total_key] = (
            "a schedule counts samples, so that a short last step of an epoch counts less; plan.epochs or plan.max_steps ends the run"
        )
    elif total:
        keys.leave_out(
            total_key, "set schedule.decay_samples to it times plan.global_batch, which the file does not give"
        )
    if kind == "WarmupCosineLR":
        least = keys.read(least_key, RATIO)
        final = (1e-4, f"default of cos_min_ratio of {kind}") if least is None else (least, least_key)
    else:
        final = min(begin, 1.0), f"{kind} decays to warmup_min_lr"
        if begin > 1:
            keys.differences["scheduler.type"] = "the rate stays at warmup_max_lr, and does not rise to warmup_min_lr"
    keys.settings["schedule.final_fraction"] = final


def _gradient(keys: Keys) -> None:
    """Convert what happens to the gradient."""
    norm = keys.read("gradient_clipping", NUMBER)
    if norm:
        keys.settings["gradient.max_norm"] = norm, "gradient_clipping"
    else:
        keys.leave_out(
            "gradient_clipping", keys.left_out.get("gradient_clipping", "0 clips nothing, which is the default")
        )
    sent = keys.read("communication_data_type", TEXT)
    if sent in ("fp16", "bf16"):
        keys.settings["gradient.compression"] = sent, "communication_data_type"
    elif sent is not None:
        keys.leave_out("communication_data_type", "gradients are sent in fp32, which is the default")


def _offload(keys: Keys, stage: int) -> None:
    """Convert what waits in host memory."""
    zero = "zero_optimization"
    optimizer, param = f"{zero}.offload_optimizer", f"{zero}.offload_param"
    on_host = [section for section in (optimizer, param) if _is_on_host(keys, section, stage)]
    if on_host:
        names = " and ".join([on_host[0], *(section.removeprefix(f"{zero}.") for section in on_host[1:])])
        keys.settings["sharding.offload"] = "all", names
    if on_host == [optimizer]:
        keys.differences[optimizer] = (
            "the shards of the parameters wait in host memory, too, and are copied to the GPU whenever they are gathered"
        )
    elif on_host == [param]:
        keys.differences[param] = "the optimizer's state is in host memory, too, and the optimizer steps on the CPU"


def _is_on_host(keys: Keys, section: str, stage: int) -> bool:
    """Return whether DeepSpeed keeps in host memory what a section is about; if not, leave the section out."""
    device = keys.read(f"{section}.device", DEVICE) or "none"
    if device == "none":
        reason = "nothing is offloaded unless its device is cpu, which is the default of Undula, too"
    elif device == "nvme":
        reason = (
            "nothing is offloaded to disks; sharding.offload: all keeps parameters and optimizer states in host memory"
        )
    elif not stage:
        reason = (
            "only the shards of a sharded model can wait in host memory; set sharding.stage and sharding.offload: all"
        )
    elif section.endswith("param") and stage < 3:
        reason = "DeepSpeed offloads parameters in stage 3 alone"
    else:
        if keys.read(f"{section}.pin_memory", FLAG) is False:
            keys.leave_out(
                f"{section}.pin_memory", "shards in host memory are always pinned, so that copies to the GPU are fast"
            )
        return True
    keys.leave_out(section, reason)
    return False


def _trackers(keys: Keys) -> None:
    """Convert the settings of W&B."""
    if not keys.read("wandb.enabled", FLAG):
        for key in keys.below("wandb"):
            keys.leave_out(key, "wandb.enabled is not true; set trackers.wandb to use W&B")
        return
    project, team = keys.read("wandb.project", TEXT), keys.read("wandb.team", TEXT)
    origin = "default of wandb.project in DeepSpeed" if project is None else "wandb.project"
    keys.settings["trackers.wandb.project"] = project or "deepspeed", origin
    if team is not None:
        keys.settings["trackers.wandb.entity"] = team, "wandb.team"


def _type(keys: Keys, section: str) -> str | None:
    """Return the type of the optimizer or of the scheduler; None if there is none."""
    kind: str | None = keys.read(f"{section}.type", TEXT)
    if kind is None and any(keys.below(section)):
        raise SpecError(f"{section}.type is missing; set it, or remove {section}")
    return kind
