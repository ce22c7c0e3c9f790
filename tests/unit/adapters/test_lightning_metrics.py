"""Metrics of torchmetrics in a validation: their results are those over all samples, at any number of ranks."""

import sys
import warnings
from pathlib import Path
from typing import Any

import pytest
import torch
from alone import train_alone
from lightning_kit import tiny, train_module
from torchmetrics import MetricCollection, MinMaxMetric
from torchmetrics.classification import BinaryAccuracy, BinaryConfusionMatrix, BinaryF1Score, BinaryPrecision

from undula.errors import UsageError
from undula.state.events import ValidationEvent
from undula.state.ledger import events_of, read_ledger
from undula.train.metrics import taken

SCRIPT = """
import pytorch_lightning as pl
import torch
from torch.utils.data import DataLoader, TensorDataset
from torchmetrics import MeanMetric, Metric, MetricCollection, PearsonCorrCoef
from torchmetrics.classification import BinaryAUROC, BinaryAveragePrecision, BinaryF1Score, BinaryPrecision

from undula.adapters.lightning import Trainer, launch

X = torch.linspace(-1, 1, 26).reshape(13, 2)
Y = (torch.arange(13) * 5 % 3 == 0).long()


class Own(Metric):  # of a class and with a function that no other process finds
    def __init__(self):
        super().__init__()
        self.add_state("count", torch.tensor(0), dist_reduce_fx=lambda counts: counts.sum())

    def update(self, labels):
        self.count += labels.sum()

    def compute(self):
        return self.count


class Module(pl.LightningModule):
    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.own = Own()
        self.net = torch.nn.Linear(2, 1)
        self.val_loss, self.auroc, self.pearson = MeanMetric(), BinaryAUROC(), PearsonCorrCoef()
        self.several = MetricCollection([BinaryF1Score(), BinaryPrecision(), BinaryAveragePrecision()])

    def loss(self, batch):
        x, y = batch
        logits = self.net(x).flatten()
        return torch.nn.functional.binary_cross_entropy_with_logits(logits, y.float()), logits

    def training_step(self, batch, batch_idx):
        return self.loss(batch)[0]

    def validation_step(self, batch, batch_idx):
        loss, logits = self.loss(batch)
        self.val_loss(loss, weight=len(logits))
        self.auroc.update(logits, batch[1])
        self.pearson.update(logits, batch[1].float())
        self.several.update(logits, batch[1])
        self.own.update(batch[1])
        self.log("own", self.own)
        self.log("val_loss", self.val_loss)
        self.log("auroc", self.auroc, prog_bar=True)
        self.log("pearson", self.pearson)
        self.log_dict(self.several)

    def configure_optimizers(self):
        return torch.optim.SGD(self.parameters(), lr=1e-30)  # keeps the weights


def main():
    module = Module()
    data = TensorDataset(X, Y)
    Trainer(max_epochs=2).fit(module, DataLoader(data, batch_size=2), DataLoader(data, batch_size=2))


if __name__ == "__main__":
    launch(main)
"""


def validations(folder: Path, world_size: int) -> list[tuple[int, float, dict[str, float]]]:
    folder.mkdir()
    (folder / "script.py").write_text(SCRIPT)
    (folder / "script.yaml").write_text(
        "{name: run, plan: {virtual_workers: 3}, validation: {every_steps: 1}, deterministic: true}"
    )
    store = train_alone([sys.executable, str(folder / "script.py"), f"runs={folder}", "name=run"], world_size)
    return [(event.step, event.loss, event.means) for event in events_of(read_ledger(store).events, ValidationEvent)]


def test_results_of_metrics_are_those_of_all_samples_at_any_number_of_ranks(tmp_path: Path) -> None:
    one, three = validations(tmp_path / "1", 1), validations(tmp_path / "3", 3)
    assert one == three
    names: dict[str, Any] = {"__name__": "script"}
    exec(SCRIPT.replace("undula.adapters.lightning", "lightning_kit").replace(", launch", ""), names)
    module, (step, loss, means) = names["Module"](), one[0]
    with torch.no_grad():
        whole, logits = module.loss((names["X"], names["Y"]))
    assert (step, loss) == (0, pytest.approx(float(whole)))
    metrics = {"auroc": module.auroc, "pearson": module.pearson, **dict(module.several.items())}
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        expected = {
            name: float(metric(logits, names["Y"].float() if name == "pearson" else names["Y"]))
            for name, metric in metrics.items()
        }
    expected["own"] = float(names["Y"].sum())
    assert {name: means[name] for name in expected} == pytest.approx(expected, abs=1e-6)


def test_a_metric_that_has_seen_more_than_the_batch_is_refused() -> None:
    predicted, labels = torch.tensor([0.2, 0.8]), torch.tensor([0, 1])
    shared, several = BinaryAccuracy(), MetricCollection([BinaryF1Score(), BinaryPrecision()])
    shared(predicted, labels)  # in a training step
    shared.update(predicted, labels)
    with pytest.raises(UsageError, match="BinaryAccuracy with 2 updates instead of one"):
        taken(shared)
    several.update(predicted, labels)
    assert float(taken(several["BinaryPrecision"]).state["tp"]) == 1
    several.update(predicted, labels)  # of which the F1 score, with the same state, was not taken
    with pytest.raises(UsageError, match=r"BinaryPrecision with 2 updates .* give all metrics of a MetricCollection"):
        taken(several["BinaryPrecision"])


@pytest.mark.parametrize(
    ("metric", "hook", "sentence"),
    [
        (BinaryAccuracy, "training_step", "self.log('m') got a BinaryAccuracy, which a run takes in validation_step only"),
        (BinaryConfusionMatrix, "validation_step", "the metric 'm' has tensor("),
        (lambda: MinMaxMetric(BinaryF1Score()), "validation_step", "a validation returned or logged a MinMaxMetric, which consists of"),
    ],
)  # fmt: skip
def test_a_metric_without_a_single_result_in_a_validation_is_refused(
    tmp_path: Path, metric: Any, hook: str, sentence: str
) -> None:
    class WithMetric(tiny()):  # type: ignore[misc]
        def __init__(self) -> None:
            super().__init__()
            self.metric = metric()

    def step(self: Any, batch: Any, batch_idx: int) -> Any:
        self.metric.update(torch.tensor([0.2, 0.8]), torch.tensor([0, 1]))
        self.log("m", self.metric)
        return self.net(batch[0]).mean()

    setattr(WithMetric, hook, step)
    with pytest.raises(UsageError) as caught:
        train_module(WithMetric, tmp_path)
    assert str(caught.value).startswith(sentence)
