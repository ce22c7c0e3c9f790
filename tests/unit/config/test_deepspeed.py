"""Tests that a DeepSpeed configuration becomes the same training, and that no key of it is lost."""

import json
import math
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import yaml
from hypothesis import given
from hypothesis import strategies as st
from pydantic import TypeAdapter

from undula.config.deepspeed import as_yaml, load
from undula.config.deepspeed.convert import convert
from undula.config.deepspeed.reasons import AUTO, REASONS, UNKNOWN
from undula.config.job import JobSpec, load_spec
from undula.errors import SpecError
from undula.optim.optimizers import OptimizerConfig
from undula.plan.plan import Plan
from undula.train.step_part import GROWTH_INTERVAL, INITIAL_SCALE

BATCH = {"train_batch_size": 64}
OFFLOADED = {"device": "cpu", "pin_memory": True}
STAGE_3 = {
    **BATCH,
    "gradient_accumulation_steps": 4,
    "optimizer": {"type": "Adam", "params": {"lr": 1e-5}},
    "zero_optimization": {
        "stage": 3,
        "offload_optimizer": OFFLOADED,
        "offload_param": OFFLOADED,
        "sub_group_size": 1e9,
        "reduce_bucket_size": 5e8,
        "stage3_prefetch_bucket_size": 5e8,
        "stage3_max_live_parameters": 1e9,
        "stage3_max_reuse_distance": 1e9,
        "stage3_param_persistence_threshold": 1e6,
    },
    "gradient_clipping": 1.0,
    "fp16": {"enabled": True, "loss_scale": 0, "loss_scale_window": 1000, "hysteresis": 2, "min_loss_scale": 1},
}


def settings(config: Any, virtual_workers: int | None = None) -> dict[str, Any]:
    converted = convert({**BATCH, **config}, virtual_workers).settings
    return {key: value for key, (value, _) in converted.items()}


def batch(config: Any, virtual_workers: int | None = None) -> tuple[Any, ...]:
    """Return the batch, the virtual workers, the micro-batch and the largest number of workers."""
    found = {key: value for key, (value, _) in convert(config, virtual_workers).settings.items()}
    keys = ("plan.global_batch", "plan.virtual_workers", "plan.micro_batch", "workers.max")
    return tuple(found.get(key) for key in keys)


def leaves(config: Any, prefix: str = "") -> Iterator[str]:
    for key, value in config.items():
        if isinstance(value, dict) and value:
            yield from leaves(value, f"{prefix}{key}.")
        elif value is not None and value != {}:
            yield prefix + key


def tree(found: dict[str, Any]) -> dict[str, Any]:
    root: dict[str, Any] = {}
    for key, value in found.items():
        *parents, leaf = key.split(".")
        section = root
        for parent in parents:
            section = section.setdefault(parent, {})
        section[leaf] = value
    return root


def job_of(job: dict[str, Any]) -> JobSpec:
    return TypeAdapter(JobSpec).validate_python(job)


def test_a_configuration_of_stage_3_becomes_a_job_that_loads(tmp_path: Path) -> None:
    (tmp_path / "ds.json").write_text(json.dumps(STAGE_3))
    text = as_yaml(load(tmp_path / "ds.json"), "ds.json")
    (tmp_path / "job.yaml").write_text(text)
    spec = load_spec(tmp_path / "job.yaml", ["name=run"]).spec
    assert (spec.plan.global_batch, spec.plan.virtual_workers, spec.plan.micro_batch) == (64, 16, 4)
    assert (spec.precision.compute, spec.precision.loss_scale) == ("fp16", "dynamic")
    assert (spec.schedule.base_lr, spec.schedule.decay, spec.gradient.max_norm) == (1e-5, "constant", 1.0)
    assert (spec.sharding.stage, spec.sharding.gather, spec.workers.max) == (3, "compute", 4)
    assert OptimizerConfig(**spec.config["optimizer"]) == OptimizerConfig("adamw")
    assert spec.sharding.offload == "all"
    assert "offload: all              # zero_optimization.offload_optimizer and offload_param\n" in text
    for key in ("sub_group_size", "reduce_bucket_size", "stage3_param_persistence_threshold"):
        assert f"# - zero_optimization.{key}: " in text


@pytest.mark.parametrize(
    ("stage", "optimizer", "param", "offload", "different", "left_out"),
    [
        (3, "cpu", "cpu", "all", {}, {}),
        (3, "cpu", None, "all", {"optimizer": "the shards of the parameters wait in host memory, too"}, {}),
        (1, "cpu", None, "all", {"optimizer": "the shards of the parameters wait in host memory, too"}, {}),
        (2, "cpu", "cpu", "all", {"optimizer": "the shards"}, {"param": "DeepSpeed offloads parameters in stage 3 alone"}),
        (3, None, "cpu", "all", {"param": "the optimizer's state is in host memory, too"}, {}),
        (3, "nvme", "cpu", "all", {"param": "the optimizer's state"}, {"optimizer": "nothing is offloaded to disks"}),
        (3, "nvme", "nvme", None, {}, {"optimizer": "nothing is offloaded to disks", "param": "nothing is offloaded to disks"}),
        (3, "none", None, None, {}, {"optimizer": "nothing is offloaded unless"}),
        (0, "cpu", None, None, {}, {"optimizer": "only the shards of a sharded model"}),
    ],
)  # fmt: skip
def test_shards_wait_in_host_memory_where_deepspeed_offloads(
    stage: int, optimizer: str | None, param: str | None, offload: str | None, different: Any, left_out: Any
) -> None:
    sections = {"offload_optimizer": optimizer, "offload_param": param}
    zero = {name: {"device": device} for name, device in sections.items() if device}
    done = convert({**BATCH, "zero_optimization": {"stage": stage, **zero}})
    assert done.settings.get("sharding.offload", (None, ""))[0] == offload
    for found, expected in ((done.differences, different), (done.left_out, left_out)):
        assert {key for key in found if "offload" in key} == {f"zero_optimization.offload_{name}" for name in expected}
        for name, sentence in expected.items():
            assert found[f"zero_optimization.offload_{name}"].startswith(sentence)


def test_shards_in_host_memory_are_pinned() -> None:
    zero = {"stage": 3, "offload_optimizer": {"device": "cpu", "pin_memory": False, "ratio": 0.5}}
    left_out = convert({**BATCH, "zero_optimization": zero}).left_out
    assert left_out["zero_optimization.offload_optimizer.pin_memory"].startswith(
        "shards in host memory are always pinned"
    )
    assert left_out["zero_optimization.offload_optimizer.ratio"] == "all of the optimizer's state is in host memory"


@pytest.mark.parametrize(
    ("config", "virtual_workers", "expected"),
    [
        ({"train_batch_size": 64}, None, (64, 4, None, 4)),
        ({"train_batch_size": 6}, None, (6, 2, None, 2)),
        ({"train_batch_size": 64}, 8, (64, 8, None, 8)),
        ({"train_batch_size": 64, "gradient_accumulation_steps": 4}, None, (64, 4, 4, 4)),
        ({"train_batch_size": 64, "gradient_accumulation_steps": 4}, 8, (64, 8, 2, 8)),
        ({"train_batch_size": 64, "train_micro_batch_size_per_gpu": 8}, None, (64, 4, 8, 4)),
        ({"train_batch_size": 64, "train_micro_batch_size_per_gpu": 8}, 16, (64, 16, 8, 16)),
        ({"train_micro_batch_size_per_gpu": 4, "gradient_accumulation_steps": 2}, 3, (24, 3, 4, 3)),
        ({"train_micro_batch_size_per_gpu": 4}, 3, (12, 3, 4, 3)),
        ({"train_batch_size": 64, "train_micro_batch_size_per_gpu": 2, "gradient_accumulation_steps": 4}, None, (64, 8, 2, 8)),
        ({"train_batch_size": 64, "train_micro_batch_size_per_gpu": 2, "gradient_accumulation_steps": 4}, 16, (64, 16, 2, 8)),
        ({"train_batch_size": "auto", "train_micro_batch_size_per_gpu": "auto"}, None, (None, None, None, None)),
        ({"train_batch_size": "auto", "train_micro_batch_size_per_gpu": 4}, 2, (8, 2, 4, 2)),
        ({"elasticity": {"enabled": True, "max_train_batch_size": 2000}}, 2, (None, 2, None, 2)),
    ],
)  # fmt: skip
def test_the_batch_is_micro_batch_times_accumulation_times_gpus(
    config: Any, virtual_workers: int | None, expected: Any
) -> None:
    assert batch(config, virtual_workers) == expected


@given(micro=st.integers(1, 16), steps=st.integers(1, 8), gpus=st.integers(1, 8), stage=st.integers(0, 3))
def test_a_worker_computes_the_micro_batches_of_a_gpu(micro: int, steps: int, gpus: int, stage: int) -> None:
    """In stages 2 and 3, the gradient is sent after each of them."""
    config = {
        "train_batch_size": micro * steps * gpus,
        "train_micro_batch_size_per_gpu": micro,
        "gradient_accumulation_steps": steps,
        "zero_optimization": {"stage": stage},
    }
    found = settings(config)
    spec = job_of({"name": "run", **tree(found)})
    works = [Plan(spec.plan, 10**6).micro_batches(0, each) for each in range(spec.plan.virtual_workers)]
    assert spec.workers.max == gpus
    assert works == ([(micro,)] * (gpus * steps) if stage >= 2 else [(micro,) * steps] * gpus)
    del config["train_micro_batch_size_per_gpu"]
    assert settings(config, found["plan.virtual_workers"]) == found


@pytest.mark.parametrize(
    ("optimizer", "expected"),
    [
        ({"type": "Adam"}, {"name": "adamw"}),
        ({"type": "Adam", "params": {"adam_w_mode": True}}, {"name": "adamw"}),
        ({"type": "Adam", "params": {"adam_w_mode": False, "weight_decay": 0.1}}, {"name": "adam", "weight_decay": 0.1}),
        ({"type": "AdamW", "params": {"adam_w_mode": False}}, {"name": "adamw"}),
        ({"type": "AdamW", "params": {"torch_adam": True}}, {"name": "adamw", "weight_decay": 0.01}),
        ({"type": "AdamW", "params": {"betas": [0.9, 0.95], "eps": 1e-6}}, {"name": "adamw", "betas": [0.9, 0.95], "eps": 1e-6}),
        ({"type": "Lamb"}, {"name": "lamb", "eps": 1e-8}),
        ({"type": "SGD"}, {"name": "sgd", "momentum": 0.0}),
        ({"type": "SGD", "params": {"momentum": 0.9, "nesterov": True}}, {"name": "sgd", "momentum": 0.9, "nesterov": True}),
        ({"type": "OneBitAdam", "params": {"freeze_step": 100}}, {}),
    ],
)  # fmt: skip
def test_the_optimizer_is_that_of_deepspeed(optimizer: Any, expected: dict[str, Any]) -> None:
    found = tree(settings({"optimizer": optimizer})).get("config", {}).get("optimizer", {})
    assert found == expected
    OptimizerConfig(**found)


def schedule(kind: str, rate: float | None = None, **params: Any) -> dict[str, Any]:
    optimizer = {"optimizer": {"type": "Adam", "params": {"lr": rate}}} if rate else {}
    found = settings({**optimizer, "scheduler": {"type": kind, "params": params}})
    return {key.partition(".")[2]: value for key, value in found.items() if key.startswith("schedule.")}


def test_schedules_are_those_of_deepspeed() -> None:
    warmup = {"warmup_num_steps": 100, "warmup_type": "linear"}
    linear = {"warmup_steps": 100, "warmup": "linear"}
    assert schedule("WarmupLR", 1.0, warmup_max_lr=0.01, **warmup) == {"base_lr": 0.01, "decay": "constant", **linear}
    assert schedule("WarmupLR") == {"decay": "constant", "warmup_steps": 1000}
    assert schedule("WarmupLR", 1e-5) == {"base_lr": 1e-5, "decay": "constant", "warmup_steps": 1000}
    assert schedule("WarmupDecayLR", 1e-5, total_num_steps=9)["base_lr"] == 1e-3, "its default is another one"
    decayed = schedule("WarmupDecayLR", warmup_min_lr=0.001, warmup_max_lr=0.01, total_num_steps=500, **warmup)
    ends = {"warmup_begin": 0.1, "decay_samples": 64 * 500, "final_fraction": 0.1}
    assert decayed == {"base_lr": 0.01, "decay": "polynomial", **linear, **ends}
    cosine = schedule("WarmupCosineLR", 0.5, warmup_min_ratio=0.2, total_num_steps=500, **warmup)
    ends = {"warmup_begin": 0.2, "decay_samples": 64 * 500, "final_fraction": 1e-4}
    assert cosine == {"base_lr": 0.5, "decay": "cosine", **linear, **ends}
    assert schedule("OneCycle", 0.5, cycle_max_lr=0.1) == {"base_lr": 0.5}


@pytest.mark.parametrize(
    ("kind", "params", "expected"),
    [
        ("WarmupLR", {"warmup_min_lr": 0.01, "warmup_max_lr": 0.01}, {"decay": "constant"}),
        ("WarmupLR", {"warmup_min_lr": 0.01}, {"decay": "constant"}),
        ("WarmupLR", {"warmup_min_lr": 0.02, "warmup_max_lr": 0.01}, {"decay": "constant"}),
        ("WarmupDecayLR", {"warmup_min_lr": 0.01, "warmup_max_lr": 0.01}, {"decay": "polynomial", "final_fraction": 1.0}),
        ("WarmupCosineLR", {"warmup_min_ratio": 1.0}, {"decay": "cosine", "final_fraction": 1e-4}),
    ],
)  # fmt: skip
def test_a_warmup_from_the_peak_is_none(kind: str, params: dict[str, Any], expected: dict[str, Any]) -> None:
    steps = {"warmup_num_steps": 10, "warmup_type": "linear"}
    total = {} if kind == "WarmupLR" else {"total_num_steps": 500}
    found = schedule(kind, 0.01, **params, **steps, **total)
    assert found == {"base_lr": 0.01, **expected, **({"decay_samples": 64 * 500} if total else {})}
    done = convert(
        {
            **BATCH,
            "optimizer": {"type": "Adam", "params": {"lr": 0.01}},
            "scheduler": {"type": kind, "params": {**params, **steps, **total}},
        }
    )
    assert done.left_out["scheduler.params.warmup_num_steps"].endswith(", so there is no warmup")
    assert ("scheduler.type" in done.differences) == (kind == "WarmupCosineLR")


@pytest.mark.parametrize(
    ("config", "virtual_workers", "sentence"),
    [
        ({}, None, "train_batch_size: set plan.global_batch, the samples of a step on all GPUs, and plan.virtual_workers."),
        ({"train_micro_batch_size_per_gpu": 4}, None, "train_batch_size: convert again with --virtual-workers (GPUs), or set"),
        ({**BATCH, "scheduler": {"type": "WarmupLR"}}, None, "scheduler.params.warmup_max_lr: set schedule.base_lr to the learning rate"),
    ],
)  # fmt: skip
def test_what_is_missing_is_said_first_and_the_rest_is_converted(
    tmp_path: Path, config: Any, virtual_workers: int | None, sentence: str
) -> None:
    (tmp_path / "ds.json").write_text(json.dumps({**config, "zero_optimization": {"stage": 3}, "steps_per_print": 9}))
    text = as_yaml(load(tmp_path / "ds.json", virtual_workers), "ds.json")
    comments, found, _ = text.partition("sharding:\n  stage: 3")
    assert found
    assert f"Keys that are missing: - {sentence}" in " ".join(comments.replace("#", " ").split())
    assert "# - steps_per_print: the progress line shows the newest step" in text


def test_a_schedule_is_one_or_two_steps_ahead_of_deepspeeds() -> None:
    """DeepSpeed's formulas, for the step with this number from 1 on."""
    params = {"warmup_num_steps": 10, "warmup_type": "linear", "total_num_steps": 100, "warmup_max_lr": 1.0}
    spec = job_of({"name": "run", **tree(settings({"scheduler": {"type": "WarmupDecayLR", "params": params}}))})
    ours = spec.schedule.over(Plan(spec.plan, 10**6))

    def theirs(step: int) -> float:
        last = step - 2
        return last / 10 if last < 10 else (100 - last) / 90

    for step in range(3, 99):
        assert math.isclose(ours.multiplier(64 * (step - 2)), theirs(step))


def test_precision_is_that_of_deepspeed() -> None:
    assert settings({"bf16": {"enabled": True}})["precision.compute"] == "bf16"
    assert settings({"bfloat16": {"enabled": True}})["precision.compute"] == "bf16"
    fixed = settings({"fp16": {"enabled": True, "loss_scale": 128}})
    assert (fixed["precision.compute"], fixed["precision.loss_scale"]) == ("fp16", 128.0)
    odd = convert({**BATCH, "fp16": {"enabled": True, "loss_scale": 100}})
    assert "precision.loss_scale: 128" in odd.left_out["fp16.loss_scale"]
    off = convert({**BATCH, "fp16": {"enabled": False, "loss_scale": 128, "hysteresis": 2}})
    assert "precision.compute" not in off.settings
    assert off.left_out["fp16.hysteresis"] == "it has no effect, because fp16.enabled is not true"


def test_reasons_name_the_loss_scale_of_undula() -> None:
    assert f"after {GROWTH_INTERVAL} steps" in REASONS["fp16.loss_scale_window"]
    assert f"2^{round(math.log2(INITIAL_SCALE))}" in REASONS["fp16.initial_scale_power"]


def test_trackers_and_compression_are_those_of_deepspeed() -> None:
    found = settings({"wandb": {"enabled": True, "team": "a team", "group": "x"}, "communication_data_type": "fp16"})
    assert (found["trackers.wandb.project"], found["trackers.wandb.entity"]) == ("deepspeed", "a team")
    assert found["gradient.compression"] == "fp16"
    sharded = settings({"communication_data_type": "bf16", "zero_optimization": {"stage": 3}})
    assert sharded["gradient.compression"] == "bf16"


VALUES = {
    "optimizer.type": st.sampled_from(["Adam", "AdamW", "Lamb", "SGD", "OneBitAdam", "Lion"]),
    "optimizer.params.lr": st.sampled_from([1e-5, "auto"]),
    "optimizer.params.weight_decay": st.sampled_from([0, 0.1, "auto"]),
    "optimizer.params.betas": st.sampled_from([[0.9, 0.95], "auto"]),
    "optimizer.params.eps": st.sampled_from([1e-8, "auto"]),
    "optimizer.params.momentum": st.just(0.9),
    "optimizer.params.torch_adam": st.booleans(),
    "optimizer.params.adam_w_mode": st.booleans(),
    "scheduler.type": st.sampled_from(["WarmupLR", "WarmupDecayLR", "WarmupCosineLR", "OneCycle", "LRRangeTest"]),
    "scheduler.params.warmup_min_lr": st.sampled_from([0, 1e-6, 1.0, "auto"]),
    "scheduler.params.warmup_max_lr": st.sampled_from([1e-5, "auto"]),
    "scheduler.params.warmup_min_ratio": st.sampled_from([0.0, 0.5, 1.0]),
    "scheduler.params.warmup_num_steps": st.sampled_from([0, 100, "auto"]),
    "scheduler.params.warmup_type": st.sampled_from(["log", "linear"]),
    "scheduler.params.total_num_steps": st.sampled_from([1000, "auto"]),
    "scheduler.params.cos_min_ratio": st.sampled_from([0.0, 0.1]),
    "train_micro_batch_size_per_gpu": st.sampled_from([1, 2, "auto"]),
    "gradient_accumulation_steps": st.sampled_from([1, 4, "auto"]),
    "gradient_clipping": st.sampled_from([0, 1.0, "auto"]),
    "communication_data_type": st.sampled_from(["fp16", "bf16", "fp32"]),
    "zero_optimization.stage": st.sampled_from([0, 1, 2, 3, "auto"]),
    "zero_optimization.offload_optimizer.device": st.sampled_from(["none", "cpu", "nvme"]),
    "zero_optimization.offload_optimizer.pin_memory": st.booleans(),
    "zero_optimization.offload_param.device": st.sampled_from(["none", "cpu", "nvme"]),
    "zero_optimization.offload_param.pin_memory": st.booleans(),
    "fp16.enabled": st.sampled_from([True, False, "auto"]),
    "fp16.loss_scale": st.sampled_from([0, 100, 128, "auto"]),
    "bf16.enabled": st.sampled_from([False, "auto"]),
    "wandb.enabled": st.booleans(),
    "wandb.project": st.just("a: project\n# 'x'"),
    "wandb.team": st.just("team"),
    "some.other": st.just("x\n- y"),
    "other\nkey": st.just(3),
}
SECTIONS = ("activation_checkpointing", "elasticity", "compile", "checkpoint", "zero_optimization.leaf_module")
PLAIN = {key: st.sampled_from([False, 1, "auto"]) for key in REASONS if key not in VALUES and key not in SECTIONS}


@given(st.fixed_dictionaries({}, optional={**VALUES, **PLAIN}), st.booleans())
def test_every_key_is_converted_or_explained_and_the_job_loads(flat: dict[str, Any], has_batch: bool) -> None:
    for section in ("optimizer", "scheduler"):
        if any(key.startswith(f"{section}.") for key in flat):
            flat.setdefault(f"{section}.type", "WarmupLR" if section == "scheduler" else "Adam")
    if flat.get("scheduler.type") in ("WarmupDecayLR", "WarmupCosineLR"):
        flat.setdefault("scheduler.params.total_num_steps", 1000)
    config = tree({**flat, "train_batch_size": 64 if has_batch else "auto"})
    virtual_workers = None if has_batch or not isinstance(flat.get("train_micro_batch_size_per_gpu"), int) else 4
    done = convert(config, virtual_workers)
    origins = " ".join(origin for _, origin in done.settings.values())
    for key in leaves(config):
        names = [key.rsplit(".", count)[0] for count in range(key.count(".") + 1)]
        is_explained = any(name in done.left_out or name in done.differences for name in names)
        assert is_explained or key in origins or key in STATED, key
    for key in flat:
        if key in REASONS and key in done.left_out:
            assert done.left_out[key] != UNKNOWN
    job = yaml.safe_load(as_yaml(done, "a\nfile.json"))
    assert {**job, "name": "run"} == {"name": "run", **tree({key: value for key, (value, _) in done.settings.items()})}
    job_of({**job, "name": "run"})
    if "optimizer" in job.get("config", {}):
        OptimizerConfig(**job["config"]["optimizer"])


STATED = {
    "optimizer.params.adam_w_mode",  # decides the name of the optimizer
    "optimizer.params.torch_adam",  # decides a default
    "wandb.enabled",
    *(f"zero_optimization.offload_{part}.{key}" for part in ("optimizer", "param") for key in ("device", "pin_memory")),
}
"""Converted keys that need not be the origin of a value."""


def test_every_reason_is_a_sentence_about_a_key_that_is_not_converted() -> None:
    for reason in (*REASONS.values(), UNKNOWN):
        assert not reason.endswith(".")
        assert len(reason) < 140
    assert not REASONS.keys() & AUTO.keys()


@pytest.mark.parametrize(
    ("text", "problem"),
    [
        ("{",
         "is not JSON (Expecting property name enclosed in double quotes: line 1 column 2 (char 1)); give the JSON file that "
         "DeepSpeed reads"),
        ("[]", ": there are no keys in braces; give the JSON file that DeepSpeed reads"),
        ('{"fp16": {}, "fp16": {}}', ": fp16 is given twice; remove one of them"),
        ('{"train_batch_size": 64.5}', ": train_batch_size is 64.5; set it to an integer above 0"),
        ('{"train_batch_size": true}', ": train_batch_size is true; set it to an integer above 0"),
        ('{"train_batch_size": 10, "gradient_accumulation_steps": 4}',
         ": train_batch_size is 10, which is not a multiple of gradient_accumulation_steps (4); set it to 8"),
        ('{"train_batch_size": 8, "zero_optimization": true}', ": zero_optimization is true; set it to an object"),
        ('{"train_batch_size": 8, "zero_optimization": {"stage": 4}}', ": zero_optimization.stage is 4; set it to 0, 1, 2 or 3"),
        ('{"train_batch_size": 8, "gradient_clipping": NaN}', ": gradient_clipping is NaN; set it to a number of at least 0"),
        ('{"train_batch_size": 8, "fp16": {"enabled": true}, "bf16": {"enabled": true}}',
         ": fp16.enabled and bf16.enabled are both true; set one of them to false"),
        ('{"train_batch_size": 8, "scheduler": {"type": "WarmupDecayLR"}}',
         ": scheduler.params.total_num_steps is missing, but WarmupDecayLR needs it; set it to the number of steps of the run"),
        ('{"train_batch_size": 8, "optimizer": {"params": {"lr": 1}}}', ": optimizer.type is missing; set it, or remove optimizer"),
    ],
)  # fmt: skip
def test_an_invalid_file_is_refused_in_one_sentence(tmp_path: Path, text: str, problem: str) -> None:
    file = tmp_path / "ds.json"
    file.write_text(text)
    with pytest.raises(SpecError) as refused:
        load(file)
    assert str(refused.value) == f"{file}{'' if problem.startswith(':') else ' '}{problem}"


def test_virtual_workers_that_do_not_divide_the_batch_are_refused() -> None:
    with pytest.raises(
        SpecError, match=r"--virtual-workers is 12, into which train_batch_size \(64\) .* give 4, for example"
    ):
        convert(BATCH, 12)
    with pytest.raises(
        SpecError, match=r"stage 3 takes GPUs x gradient_accumulation_steps \(4\); give a multiple of 4"
    ):
        convert(STAGE_3, 6)


def test_an_unknown_key_is_named() -> None:
    assert convert({**BATCH, "their_new": {"key": 1}}).left_out == {"their_new.key": UNKNOWN}
