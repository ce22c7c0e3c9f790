"""Data of a Lightning script: the DataLoaders that a run reads in their stead, and what the plan has to be for them."""

import json
from dataclasses import dataclass
from typing import Any

from torch.utils.data import DataLoader

from undula.adapters.lightning.library import name_of
from undula.adapters.loaders import check_loader, is_shuffled, plan_settings
from undula.config.yaml_file import Setting
from undula.errors import UsageError
from undula.plan.plan import Plan
from undula.train.run import Run

GOT = "{}() returned a DataLoader"


@dataclass(frozen=True)
class Data:
    """DataLoaders of a script.

    Raises:
        UsageError: A run cannot read one of them.
    """

    training: Any
    validation: Any
    """None if the module does not validate."""

    def __post_init__(self) -> None:
        for hook, loader in (("train_dataloader", self.training), ("val_dataloader", self.validation)):
            if loader is None:
                continue
            if not isinstance(loader, DataLoader):
                instead = "but a run reads one map-style dataset; return one DataLoader of torch"
                raise UsageError(f"{hook}() returned {name_of(loader)}, {instead}")
            check_loader(loader, GOT.format(hook), storing="write the loop with run.steps()")
            is_shuffled(loader, GOT.format(hook))

    def give(self, run: Run, name: str | None = None) -> None:
        """Give the datasets to a run."""
        training = self.training
        run.dataset(
            training.dataset,
            validation=self.validation.dataset if self.validation else None,
            collate_fn=training.collate_fn,
            validation_collate_fn=self.validation.collate_fn if self.validation else None,
            num_workers=training.num_workers,
            name=name,
        )

    def settings(self, virtual_workers: int, accumulation: int) -> dict[str, Setting]:
        """Return the settings of the plan that follow from the DataLoader that trains, by dotted key."""
        got, origin = GOT.format("train_dataloader"), "the DataLoader of train_dataloader()"
        batch = self.training.batch_size * virtual_workers
        return plan_settings(self.training, got, origin, virtual_workers, batch, accumulation)

    def check(self, plan: Plan) -> None:
        """Check that a plan that the YAML decides alone has the order and the batches of the DataLoader that trains.

        Raises:
            UsageError: It has not.
        """
        spec = plan.spec
        settings = self.settings(spec.virtual_workers, 1)
        refuse_difference(
            settings, "plan.micro_batch", min(spec.micro_batch or plan.virtual_worker_batch, plan.virtual_worker_batch)
        )
        refuse_difference(settings, "plan.shuffle", "none" if spec.shuffle == "none" else "window")
        if settings["plan.last_step"].value == "drop":
            refuse_difference(settings, "plan.last_step", spec.last_step)


def refuse_difference(settings: dict[str, Setting], key: str, value: object) -> None:
    """Check that the job has the value of a setting that follows from the script.

    Raises:
        UsageError: It has not.
    """
    setting = settings[key]
    if setting.value != value:
        raise UsageError(
            f"{setting.origin} makes {key} {json.dumps(setting.value)}, but the job has {json.dumps(value)}; set it in the job's YAML, or "
            "train with Trainer and launch(main) of undula.adapters.lightning, which take it from the script"
        )
