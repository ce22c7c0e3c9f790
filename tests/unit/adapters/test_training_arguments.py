"""Tests of what a run honours of a trainer and its arguments: every argument, results of any shape, and methods or datasets of its own."""

from dataclasses import fields
from pathlib import Path
from types import SimpleNamespace
from typing import cast

import datasets
import pytest
import torch
import transformers
from adapters_kit import job_of_script, train_here
from tiny_lm import Sequences, tiny_gpt
from transformers import Seq2SeqTrainingArguments, TrainingArguments, training_args
from transformers_kit import Trained, arguments

from undula.adapters import script
from undula.adapters.refusals import TRAINING_ARGUMENTS
from undula.adapters.transformers import ElasticMixin, Trainer, launch, trainer
from undula.adapters.transformers.arguments import refuse_unsupported
from undula.adapters.transformers.library import joined, require_on_all_ranks
from undula.errors import SpecError, UsageError
from undula.train.run import Run

pytestmark = pytest.mark.usefixtures("one_thread")


BECOMES_A_SETTING = """
    per_device_train_batch_size gradient_accumulation_steps num_train_epochs max_steps learning_rate seed data_seed train_sampling_strategy
    dataloader_drop_last max_grad_norm bf16 fp16 torch_compile full_determinism"""
HONOURED = """
    output_dir lr_scheduler_type lr_scheduler_kwargs warmup_steps optim optim_args weight_decay adam_beta1 adam_beta2 adam_epsilon
    optim_target_modules average_tokens_across_devices label_smoothing_factor neftune_noise_alpha activation_checkpointing
    activation_checkpointing_kwargs gradient_checkpointing gradient_checkpointing_kwargs use_cache use_liger_kernel liger_kernel_config
    tf32 torch_empty_cache_steps logging_strategy logging_steps logging_first_step logging_nan_inf_filter log_on_each_node log_level
    log_level_replica disable_tqdm debug skip_memory_metrics run_name eval_strategy eval_steps eval_delay eval_on_start
    per_device_eval_batch_size prediction_loss_only eval_do_concat_batches eval_accumulation_steps include_for_metrics save_strategy
    save_steps save_total_limit load_best_model_at_end metric_for_best_model greater_is_better dataloader_num_workers
    remove_unused_columns label_names length_column_name do_train do_eval do_predict"""
"""Arguments that Hugging Face's own code honours under the loop of a run."""
WITHOUT_EFFECT = """
    use_cpu local_rank save_only_model dataloader_pin_memory dataloader_persistent_workers ddp_find_unused_parameters ddp_backend
    ddp_timeout project"""
"""Arguments whose effect a run has, or does not need, whatever their value is."""


def test_every_argument_is_known_and_has_one_treatment() -> None:
    """An update of transformers that adds one must decide what a run does with it."""
    accepted = f"{BECOMES_A_SETTING} {HONOURED} {WITHOUT_EFFECT}".split()
    assert sorted([*accepted, *TRAINING_ARGUMENTS]) == sorted(field.name for field in fields(TrainingArguments))


def objects(images: int) -> list[dict[str, torch.Tensor]]:
    return [{"boxes": torch.ones(5, 4) * number, "orig_size": torch.tensor([480, 640])} for number in range(images)]


def test_only_the_repeated_loss_of_a_small_batch_is_cut() -> None:
    found = joined([(objects(2), 2), (objects(1), 1)], 2)
    assert [tuple(each["boxes"].shape) for each in found] == [(5, 4)] * 3
    assert [each["orig_size"].tolist() for each in found] == [[480, 640]] * 3
    assert joined([(torch.zeros(12, 3), 2), (torch.zeros(6, 3), 1)], 2).shape == (18, 3)
    losses = joined([(torch.tensor([1.0, 1.0]), 2), (torch.tensor([3.0, 3.0]), 1)], 2)
    assert losses.tolist() == [1, 1, 3]


def test_arguments_of_a_derived_class_are_the_scripts(tmp_path: Path) -> None:
    refuse_unsupported(Seq2SeqTrainingArguments(output_dir=str(tmp_path), predict_with_generate=True), 1)


def overriding(method: str) -> type:
    """Return an elastic trainer that derives from one of another library with a method of its own."""
    return type("Elastic", (ElasticMixin, type("Theirs", (transformers.Trainer,), {method: None})), {})


@pytest.mark.parametrize(
    ("kind", "sentence"),
    [
        (overriding("get_train_dataloader"), "Theirs overrides get_train_dataloader(), which a run does not call; a run"),
        (overriding("_inner_training_loop"), "Theirs overrides _inner_training_loop(), which a run does not call; a run"),
        (type("Own", (Trainer,), {"_get_train_sampler": None}), "Own overrides _get_train_sampler(), which a run does not"),
    ],
)  # fmt: skip
def test_methods_that_a_run_does_not_call_are_refused(tmp_path: Path, kind: type, sentence: str) -> None:
    with pytest.raises(UsageError) as caught:
        job_of_script(Trained(kind, arguments(tmp_path / "out")), tmp_path)
    assert str(caught.value).startswith(sentence)


REFUSED = "is refused on this machine, whose GPU cannot do it; leave it out, and"


@pytest.mark.parametrize(
    ("argument", "sentence"),
    [
        ("bf16", f"TrainingArguments.bf16 {REFUSED} set precision.compute: bf16"),
        ("tf32", f"TrainingArguments.tf32 {REFUSED} call torch.set_float32"),
    ],
)
def test_a_driver_without_a_gpu_says_where_else_to_ask_for_a_format(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, argument: str, sentence: str
) -> None:
    for name in ("is_torch_bf16_gpu_available", "is_torch_tf32_available"):
        monkeypatch.setattr(training_args, name, lambda: False)
    monkeypatch.setattr(script, "job_main", lambda train, config, settings: settings({}))
    with pytest.raises(UsageError) as caught:
        launch(lambda: TrainingArguments(output_dir=str(tmp_path), **{argument: True}))
    assert str(caught.value).startswith(sentence)


def test_the_yaml_may_have_the_format_of_the_computation(tmp_path: Path) -> None:
    job = job_of_script(Trained(Trainer, arguments(tmp_path / "out")), tmp_path, "precision.compute=bf16")
    assert job.precision.compute == "bf16"


def test_the_rate_of_an_optimizer_of_the_script_is_not_that_of_its_warmup(tmp_path: Path) -> None:
    def main() -> None:
        model = tiny_gpt()
        optimizer = torch.optim.SGD(model.parameters(), lr=0.5)
        warmup = transformers.get_scheduler("linear", optimizer, 2, 10)
        assert optimizer.param_groups[0]["lr"] == 0
        args = arguments(tmp_path / "out", eval_strategy="no")
        Trainer(model, args, train_dataset=Sequences(16), optimizers=(optimizer, warmup)).train()

    assert job_of_script(main, tmp_path).schedule.base_lr == 0.5


def test_a_dataset_with_columns_that_the_model_does_not_take_keeps_its_fingerprint(tmp_path: Path) -> None:
    """Hugging Face's Trainer removes them in the order of a set, which is another one in each process."""
    rows = [{**row, "text": "", "idx": 0} for row in map(Sequences(16).__getitem__, range(16))]
    data = datasets.Dataset.from_list(rows)

    def main() -> None:
        Trainer(tiny_gpt(), arguments(tmp_path / "out", eval_strategy="no"), train_dataset=data).train()

    job = job_of_script(main, tmp_path)
    assert job.script_data is not None
    assert job.script_data.training.name == data._fingerprint


def test_a_best_model_that_a_rank_does_not_see_is_refused(tmp_path: Path) -> None:
    run = cast(Run, SimpleNamespace(gather=lambda value: [value, False]))
    with pytest.raises(
        UsageError, match=r"load_best_model_at_end: rank 1 does not see the best model .*; set output_dir to"
    ):
        require_on_all_ranks(str(tmp_path), run)


def test_an_evaluation_dataset_without_a_length_is_refused_before_a_worker_starts(tmp_path: Path) -> None:
    def main() -> None:
        args = arguments(tmp_path / "out")
        Trainer(tiny_gpt(), args, train_dataset=Sequences(9), eval_dataset={"long": iter(())}).train()

    with pytest.raises(SpecError, match=r"^eval_dataset\['long'\] of the Trainer has no length"):
        job_of_script(main, tmp_path)


def test_another_evaluation_dataset_gets_other_loader_processes(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    kept, make = [], trainer.kept_loader
    monkeypatch.setattr(
        trainer, "kept_loader", lambda run, name, workers: kept.append(name) or make(run, name, workers)
    )

    def main() -> None:
        args = arguments(tmp_path / "out", max_steps=2, eval_steps=1, save_strategy="no")
        made = Trainer(model=tiny_gpt(), args=args, train_dataset=Sequences(16), eval_dataset=Sequences(5, first=1000))
        made.train()
        made.evaluate()
        made.eval_dataset = Sequences(5, first=2003)
        made.evaluate()

    train_here(main, tmp_path)
    assert kept == ["eval"] * 3
