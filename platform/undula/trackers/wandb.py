"""W&B as a tracker. The run there has the run's id. Its newest step is known to W&B's server, or to the files of a run that is offline."""

import os
import tempfile
from collections.abc import Mapping, Sequence
from contextlib import suppress
from netrc import NetrcParseError, netrc
from pathlib import Path
from typing import TYPE_CHECKING
from urllib.parse import urlparse

from undula.errors import SpecError, needs_extra
from undula.state.directory import TRACKERS
from undula.storage import Store
from undula.trackers.spec import WandbSpec
from undula.trackers.tracker import RunState, TrackedRun, TrackedStep

if TYPE_CHECKING:
    import wandb

SERVER = "https://api.wandb.ai"
LIMIT_S = 20
"""Maximum time in seconds to reach the server when a run is opened, and to send the last steps when it is closed."""


class WandbTracker:
    """Run of W&B.

    Args:
        spec: Settings of the job.
        store: Run directory.
    """

    name = "W&B"

    def __init__(self, spec: WandbSpec, store: Store):
        self._spec, self._store = spec, store
        self._run: wandb.Run | None = None

    def check(self) -> None:
        """Check that W&B is installed, and that it has a key for its server or a folder for its files.

        Raises:
            SpecError: One of these is missing. The message begins with a key of the spec or with a module.
        """
        with needs_extra("wandb"):
            import wandb  # noqa: F401
        if self._spec.mode == "offline":
            if self._spec.folder is None and self._store.is_s3:
                raise SpecError(
                    "folder is missing, and W&B cannot write its files to S3; set it, or set mode to online"
                )
        elif not _has_credentials():
            raise SpecError(
                "mode is online, but the job has no key for W&B; give it one with --secret WANDB_API_KEY, or set mode to offline"
            )

    def open(self, run: TrackedRun) -> int | None:
        import wandb

        if self._run is not None:
            with suppress(Exception):  # W&B's process may have ended
                self._run.finish(exit_code=1)
        folder = self._folder()
        folder.mkdir(parents=True, exist_ok=True)  # W&B would otherwise take another one
        self._run = wandb.init(
            project=self._spec.project,
            entity=self._spec.entity,
            id=run.id,
            name=run.name,
            dir=folder,
            mode=self._spec.mode,
            resume="allow",
            config=dict(run.parameters),
            settings=_settings(),
        )
        if self._spec.mode == "offline":
            from undula.trackers.wandb_files import newest_step

            return newest_step(folder, run.id)
        return self._run.step - 1 if self._run.resumed else None

    def send(self, steps: Sequence[TrackedStep]) -> None:
        assert self._run is not None
        for step in steps:
            self._run.log({**step.values, "_timestamp": step.time}, step=step.step, commit=True)

    def describe(self, tags: Mapping[str, str]) -> None:
        assert self._run is not None
        self._run.config.update(dict(tags), allow_val_change=True)

    def close(self, state: RunState) -> None:
        assert self._run is not None
        self._run.finish(exit_code=0 if state == "finished" else 1)

    def _folder(self) -> Path:
        if self._spec.folder is not None:
            return Path(self._spec.folder).expanduser()
        if self._store.is_s3:
            return Path(tempfile.gettempdir()) / "undula-wandb"
        return Path(self._store.path(TRACKERS))


def _settings() -> "wandb.Settings":
    """Return settings with which W&B stores what it is given, and nothing else of the driver, such as its command line and its output."""
    import wandb

    return wandb.Settings(
        silent=True,
        console="off",
        disable_code=True,
        disable_git=True,
        x_disable_meta=True,
        x_disable_stats=True,
        x_disable_machine_info=True,
        init_timeout=LIMIT_S,
        finish_timeout=LIMIT_S,
        finish_timeout_raises=True,
    )


def _has_credentials() -> bool:
    """Return whether W&B finds a key where its documentation says: in the environment, or in the file that `wandb login` writes."""
    if os.environ.get("WANDB_API_KEY") or os.environ.get("WANDB_IDENTITY_TOKEN_FILE"):
        return True
    host = urlparse(os.environ.get("WANDB_BASE_URL", SERVER)).hostname or ""
    try:
        return netrc(os.environ.get("NETRC") or Path("~/.netrc").expanduser()).authenticators(host) is not None
    except (OSError, NetrcParseError):
        return False
