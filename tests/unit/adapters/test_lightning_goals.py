"""EarlyStopping and ModelCheckpoint: refused with their own values, and left out where the job does their work."""

import re
from pathlib import Path
from typing import Any

import pytest
from adapters_kit import job_of_script
from lightning_kit import JOB, Tiny, tiny, train_module
from pytorch_lightning.callbacks import EarlyStopping, EMAWeightAveraging, ModelCheckpoint

from undula.adapters.lightning import Trainer, fit
from undula.config.job import load_spec
from undula.driver.model_facts import script_facts
from undula.errors import UsageError
from undula.state.events import EndEvent
from undula.state.ledger import last_event

EARLY = {"monitor": "val_f1", "mode": "max", "patience": 5}
STOP = "stop={metric: val_f1, mode: max, patience: 5}"
BEST = "checkpoint.keep_best={metric: val_f1, mode: max}"


class OwnStopping(EarlyStopping):
    pass


def examine(callbacks: list[Any], folder: Path, is_trainer: bool, *overrides: str) -> None:
    """Look at a script with these callbacks in the driver, which trains with Trainer or in a train function."""
    if is_trainer:
        job_of_script(lambda: Trainer(max_epochs=2, callbacks=callbacks).fit(Tiny()), folder, *overrides)
        return
    (folder / "digits.yaml").write_text(JOB)
    script_facts(lambda run: fit(run, Tiny(), callbacks=callbacks), load_spec(folder / "digits.yaml", overrides), None)


@pytest.mark.parametrize("is_trainer", [True, False])
@pytest.mark.parametrize(
    ("callback", "overrides", "sentence"),
    [
        (EarlyStopping(**EARLY), (), "fit() got the callback EarlyStopping, which a run does not take; set stop in the job's YAML: "
         "{metric: val_f1, mode: max, patience: 5}"),
        (EarlyStopping(**EARLY), ("stop={metric: val_f1, mode: max, patience: 3}",),
         "fit() got the callback EarlyStopping with {metric: val_f1, mode: max, patience: 5}, but stop of the job is {metric: val_f1, "
         "mode: max, patience: 3}; make them equal, or remove the callback"),
        (EarlyStopping("val_loss", min_delta=0.01), ("stop.patience=3",),
         "fit() got the callback EarlyStopping with min_delta=0.01, which a run does not have; remove min_delta"),
        (OwnStopping(**EARLY), (STOP,), "fit() got the callback OwnStopping, whose own methods a run does not call; set stop"),
        (ModelCheckpoint(monitor="val_f1", mode="max"), (), "fit() got the callback ModelCheckpoint, which a run does not take; set "
         "checkpoint.keep_best in the job's YAML: {metric: val_f1, mode: max}"),
        (ModelCheckpoint(monitor="val_f1"), (BEST,), "fit() got the callback ModelCheckpoint with {metric: val_f1, mode: min}, but "
         "checkpoint.keep_best of the job is {metric: val_f1, mode: max}; make them equal"),
        (ModelCheckpoint(monitor="val_f1", mode="max", save_top_k=3), (BEST,), "fit() got the callback ModelCheckpoint with "
         "save_top_k=3, but a run keeps one best checkpoint; set save_top_k=1"),
        (EMAWeightAveraging(), (), "fit() got the callback EMAWeightAveraging, which a run does not take; keep an average of weights in "
         "buffers of the module"),
    ],
)  # fmt: skip
def test_goals_that_the_job_does_not_have_are_refused_with_the_values_of_the_callback(
    tmp_path: Path, callback: Any, overrides: tuple[str, ...], sentence: str, is_trainer: bool
) -> None:
    with pytest.raises(UsageError, match=rf"^{re.escape(sentence)}"):
        examine([callback], tmp_path, is_trainer, *overrides)


@pytest.mark.parametrize("is_trainer", [True, False])
@pytest.mark.parametrize(
    ("callbacks", "overrides"),
    [
        ([EarlyStopping(**EARLY), ModelCheckpoint("folder", monitor="val_f1", mode="max")], (STOP, BEST)),
        ([EarlyStopping("val_loss"), ModelCheckpoint(monitor="val_loss")], ("stop.patience=3", "checkpoint.keep_best={}")),
        ([EarlyStopping("val_loss"), ModelCheckpoint(monitor="val_loss")], ("stop=null", "checkpoint.keep_best=null")),
    ],
)  # fmt: skip
def test_goals_that_the_job_has_are_accepted(
    tmp_path: Path, callbacks: list[Any], overrides: tuple[str, ...], is_trainer: bool
) -> None:
    examine(callbacks, tmp_path, is_trainer, *overrides)


def test_a_callback_of_a_goal_is_left_out_and_the_job_stops_in_its_place(tmp_path: Path) -> None:
    def training_step(self: Any, batch: Any, batch_idx: int) -> Any:
        return self.net(batch[0]).mean() * 0

    make = type("Still", (Tiny,), {"training_step": training_step})
    goals = ("stop={metric: loss, patience: 2}", "checkpoint.keep_best={metric: val_loss}")
    callbacks = [EarlyStopping("val_loss", patience=2), ModelCheckpoint("nowhere", monitor="loss")]
    with pytest.raises(UsageError, match=r"^checkpoint.keep_best has metric 'val_loss', but validation_step\(\) logs"):
        train_module(make, tmp_path, *goals, callbacks=callbacks)  # Tiny validates its loss alone
    ledger = train_module(make, tmp_path, goals[0], callbacks=callbacks[:1], max_epochs=9)
    end = last_event(ledger.events, EndEvent)
    assert end is not None
    assert end.step < 27
    assert not (tmp_path / "nowhere").exists()


def test_a_goal_whose_metric_is_logged_at_the_end_of_a_validation_is_refused_with_the_place_where_to_log_it(
    tmp_path: Path,
) -> None:
    def on_validation_epoch_end(self: Any) -> None:
        self.log("val_f1", 0.5)

    sentence = (
        r"^stop has metric 'val_f1', but validation_step\(\) logs \['loss'\]; set one of these, or log 'val_f1' in validation_step\(\), as "
        r"the mean over the samples of the batch or as a metric of torchmetrics itself, because on_validation_epoch_end\(\) and"
    )
    with pytest.raises(UsageError, match=sentence):
        train_module(tiny(on_validation_epoch_end=on_validation_epoch_end), tmp_path, STOP)
