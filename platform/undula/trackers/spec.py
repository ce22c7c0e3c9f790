"""Specification of the experiment trackers that a job reports to."""

from typing import Annotated, Literal

from annotated_types import MinLen
from pydantic import StringConstraints
from pydantic.dataclasses import dataclass as checked_dataclass

from undula.errors import STRICT

Text = Annotated[str, MinLen(1)]


@checked_dataclass(frozen=True, config=STRICT)
class MlflowSpec:
    """MLflow server that shows the run."""

    uri: Annotated[str, StringConstraints(pattern=r"^https?://")] | None = None
    """URL of the server; by default, the environment variable MLFLOW_TRACKING_URI of the job. Credentials come from MLflow's own variables,
    such as MLFLOW_TRACKING_TOKEN."""
    experiment: Text = "undula"
    """Name of the experiment, which is created if it does not exist."""


@checked_dataclass(frozen=True, config=STRICT)
class WandbSpec:
    """W&B project that shows the run."""

    project: Text = "undula"
    """Name of the project."""
    entity: Text | None = None
    """User or team that owns the project; by default, W&B's own default."""
    mode: Literal["online", "offline"] = "online"
    """`online` sends steps to W&B's server, with the key in the environment variable WANDB_API_KEY. `offline` writes files, which
    `wandb sync` sends."""
    folder: Annotated[str, StringConstraints(pattern=r"^[/~]")] | None = None
    """Absolute path of a folder for W&B's files on the node of the driver; by default, `trackers` in the run directory. A run on S3 needs
    one for `mode: offline`."""


@checked_dataclass(frozen=True, config=STRICT)
class TrackersSpec:
    """Experiment trackers that show the run beside TensorBoard. Each needs an extra of the package."""

    mlflow: MlflowSpec | None = None
    """MLflow, for which `pip install 'undula[mlflow]'` installs the client."""
    wandb: WandbSpec | None = None
    """W&B, which `pip install 'undula[wandb]'` installs."""

    def __bool__(self) -> bool:
        return self.mlflow is not None or self.wandb is not None
