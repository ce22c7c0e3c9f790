"""Tests of what a run honours of a trainer and its arguments: every argument, results of any shape, and methods or datasets of its own."""

import re
from dataclasses import fields
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import datasets
import pytest
import torch
import transformers
from adapters_kit import job_of_script, train_here
from tiny_lm import Sequences, tiny_gpt
from transformers import Seq2SeqTrainingArguments, TrainerCallback, TrainingArguments, training_args
from transformers_kit import Theirs, Trained, arguments

from undula.adapters import script
from undula.adapters.refusals import TRAINING_ARGUMENTS
from undula.adapters.transformers import ElasticMixin, Trainer, launch, trainer
from undula.adapters.transformers import TrainingArguments as PlannedTrainingArguments
from undula.adapters.transformers.arguments import KNOWN, refuse_unsupported
from undula.adapters.transformers.library import joined, require_on_all_ranks
from undula.errors import SpecError, UsageError
from undula.train.run import Run

pytestmark = pytest.mark.usefixtures("one_thread")


def test_every_argument_is_known_and_has_one_treatment() -> None:
    """An update of transformers that adds one must decide what a run does with it."""
    assert not KNOWN & TRAINING_ARGUMENTS.keys()
    assert {
        field.name for field in fields(TrainingArguments) if field.init
    } - KNOWN - TRAINING_ARGUMENTS.keys() == set()


def test_an_argument_that_undula_does_not_know_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("undula.adapters.transformers.arguments.KNOWN", KNOWN - {"adam_beta1"})
    refuse_unsupported(TrainingArguments(str(tmp_path), report_to="none"), 1)
    sentence = "^TrainingArguments.adam_beta1 is 0.5, which a run does not support; remove it, because Undula does not know this argument"
    with pytest.raises(SpecError, match=sentence):
        refuse_unsupported(TrainingArguments(str(tmp_path), report_to="none", adam_beta1=0.5), 1)


class ScaledByWorkers(Trainer):
    def compute_loss(self, *given: Any, **more: Any) -> Any:
        return super().compute_loss(*given, **more) * torch.distributed.get_world_size()


def test_a_trainer_whose_loss_depends_on_the_number_of_workers_is_refused_before_a_worker_starts(
    tmp_path: Path,
) -> None:
    sentence = (
        r"get_world_size\(\) of torch.distributed is called for a batch, but .*; use self.accelerator.num_processes"
    )
    with pytest.raises(UsageError, match=sentence):
        job_of_script(Trained(ScaledByWorkers, arguments(tmp_path / "out")), tmp_path)


@pytest.mark.parametrize("norm", [None, 0, 0.0, -1.0])
def test_a_trainer_without_a_largest_norm_does_not_clip(tmp_path: Path, norm: float | None) -> None:
    args = arguments(tmp_path / "out")
    args.max_grad_norm = norm  # some versions refuse None as an argument
    assert job_of_script(Trained(Trainer, args), tmp_path).gradient.max_norm is None


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
    refuse_unsupported(Seq2SeqTrainingArguments(str(tmp_path), report_to="none", predict_with_generate=True), 1)


SCALED = """
def scale(args):
    args.learning_rate *= SIZE_IN_FUNCTION

def main():
    args = Arguments(folder, max_steps=2, use_cpu=True, disable_tqdm=True, save_strategy="no", learning_rate=0.01)
    scale(args)
    args.learning_rate *= SIZE_BEFORE
    trainer = Trainer(tiny_gpt(), args, train_dataset=Sequences(24))
    assert SIZE_AFTER in (1, 2)
    trainer.train()
"""


@pytest.mark.parametrize(("where", "line"), [("IN_FUNCTION", 3), ("BEFORE", 8), ("AFTER", None)])
def test_a_rate_is_scaled_by_the_planned_number_of_processes_or_refused(
    tmp_path: Path, where: str, line: int | None
) -> None:
    script = re.sub("SIZE_[A-Z_]+", "1", SCALED.replace(f"SIZE_{where}", "args.world_size"))

    def rate(kind: type) -> float:
        names: dict[str, Any] = {"__name__": "scaled", "Arguments": kind, "folder": str(tmp_path / "out")}
        names |= {"Trainer": Trainer, "tiny_gpt": tiny_gpt, "Sequences": Sequences}
        exec(compile(script, "scaled.py", "exec"), names)
        return job_of_script(names["main"], tmp_path, virtual_workers=2).schedule.base_lr

    assert rate(PlannedTrainingArguments) == (0.01 if line is None else 0.02)
    if line is None:
        assert rate(TrainingArguments) == 0.01
    else:
        sentence = f"^scaled.py:{line}: world_size of the TrainingArguments is 1 until the Trainer is made; import"
        with pytest.raises(UsageError, match=sentence):
            rate(TrainingArguments)


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


def test_the_format_and_the_compilation_are_those_of_the_run_alone(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in ("ACCELERATE_DYNAMO_BACKEND", "ACCELERATE_MIXED_PRECISION"):
        monkeypatch.setenv(name, "no")  # TrainingArguments set it for all that follows
    asked = arguments(
        tmp_path / "out", max_steps=3, eval_strategy="no", save_strategy="no", bf16=True, torch_compile=True
    )
    found = []

    def main() -> None:
        made = Trainer(model=tiny_gpt(), args=asked, train_dataset=Sequences(24))
        found.append((made.accelerator.mixed_precision, made.accelerator.state.dynamo_plugin.backend.value))
        made.train()

    job = job_of_script(main, tmp_path)
    assert (job.precision.compute, job.compile) == ("bf16", True)
    assert found == [("no", "NO")]


class Watched(TrainerCallback):  # type: ignore[misc]
    """Callback that looks at the model in a step."""

    def on_step_begin(self, args: Any, state: Any, control: Any, model: Any = None, **_: Any) -> None:
        self.is_checkpointing = model.is_gradient_checkpointing
        self.hooks_in_training = len(model.get_input_embeddings()._forward_hooks)

    def on_train_end(self, args: Any, state: Any, control: Any, model: Any = None, **_: Any) -> None:
        self.model = model


@pytest.mark.parametrize("kind", [Theirs, Trainer])
def test_what_surrounds_their_loop_surrounds_that_of_a_run(tmp_path: Path, kind: type) -> None:
    """The first model is the best one here, and the only one that is kept."""
    more = {
        "gradient_checkpointing": True,
        "neftune_noise_alpha": 1.0,
        "save_total_limit": 1,
        "metric_for_best_model": "loss",
    }
    args = arguments(tmp_path / "out", max_steps=6, save_steps=2, eval_steps=2, learning_rate=10.0, **more)
    script = Trained(kind, args, callbacks=[Watched()])
    script() if kind is Theirs else train_here(script, tmp_path)
    (watched,) = script.more["callbacks"]
    assert watched.is_checkpointing
    assert watched.hooks_in_training - len(watched.model.get_input_embeddings()._forward_hooks) == 1
    assert [folder.name for folder in (tmp_path / "out").glob("checkpoint-*")] == ["checkpoint-2"]


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
