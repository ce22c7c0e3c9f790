"""W&B as a tracker. The run there has the run's id. Its newest step is known to W&B's server, or to the files of a run that is offline.

These files have LevelDB's log format (doc/log_format.md of github.com/google/leveldb) after a header of their own. A killed driver leaves a
file that ends anywhere, and that lacks the last steps that W&B was given.
"""

import os
import struct
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from contextlib import suppress
from netrc import NetrcParseError, netrc
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Literal
from urllib.parse import urlparse

from annotated_types import MinLen
from pydantic import StringConstraints
from pydantic.dataclasses import dataclass as checked_dataclass

from undula.errors import STRICT, SpecError, needs_extra
from undula.state.defaults import TRACKERS
from undula.telemetry.tracker import Entry, RunState, TrackedRun, TrackedStep

if TYPE_CHECKING:
    import wandb

    from undula.storage import Store

SERVER = "https://api.wandb.ai"
LIMIT_S = 20
"""Maximum time in seconds to reach the server when a run is opened, and to send the last steps when it is closed."""
HEADER_BYTES = 7
BLOCK_BYTES = 32 * 2**10
RECORD_HEADER = struct.Struct("<IHB")
"""Header of a part of a record: checksum, length in bytes, and type."""
TAIL_BYTES = 2**20
"""Number of bytes at the end of a file in which its newest step is looked for first."""
FULL, FIRST, MIDDLE, LAST = 1, 2, 3, 4


@checked_dataclass(frozen=True, config=STRICT)
class WandbSpec:
    """W&B, which `pip install 'undula[wandb]'` installs."""

    project: Annotated[str, MinLen(1)] = "undula"
    """Name of the project."""
    entity: Annotated[str, MinLen(1)] | None = None
    """User or team that owns the project; by default, W&B's own default."""
    mode: Literal["online", "offline"] = "online"
    """`online` sends steps to W&B's server, with the key in the environment variable WANDB_API_KEY. `offline` writes files, which
    `wandb sync` sends."""
    folder: Annotated[str, StringConstraints(pattern=r"^[/~]")] | None = None
    """Absolute path of a folder for W&B's files on the node of the driver; by default, `trackers` in the run directory. A run on S3 needs
    one for `mode: offline`."""


class WandbTracker:
    """Run of W&B.

    Args:
        spec: Settings of the job.
        store: Run directory.
    """

    name = "W&B"

    def __init__(self, spec: WandbSpec, store: "Store"):
        self._spec, self._store = spec, store
        self._run: wandb.Run | None = None

    def check(self) -> None:
        """Check that W&B is installed, and that it has a key for its server or a folder for its files."""
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


def newest_step(folder: Path, run_id: str) -> int | None:
    """Return the newest step of a run in the files of all its submissions; None if there is none.

    Args:
        folder: Folder that was given to W&B as `dir`.
        run_id: Id of the run.
    """
    files = folder.glob(f"wandb/*run-*-{run_id}/run-{run_id}.wandb")
    for file in sorted(files, key=lambda file: file.parent.name.partition("run-")[2], reverse=True):
        # Each submission continues after the newest step of the ones before it.
        for tail_bytes in (TAIL_BYTES, file.stat().st_size):
            if steps := history_steps(file, tail_bytes):
                return max(steps)
    return None


def history_steps(file: Path, tail_bytes: int | None = None) -> list[int]:
    """Return the numbers of the steps in a file, in the order in which they were written.

    Args:
        file: The file.
        tail_bytes: Number of bytes at the end of the file to read, rounded up to whole blocks; None to read all of it.
    """
    from wandb.proto.wandb_internal_pb2 import Record

    size = file.stat().st_size
    start = max(size - (size if tail_bytes is None else tail_bytes), 0) // BLOCK_BYTES * BLOCK_BYTES
    with file.open("rb") as opened:
        opened.seek(start)
        data = opened.read()
    steps = []
    for content in records(data, position=0 if start else HEADER_BYTES):
        record = Record()
        record.ParseFromString(content)
        if record.WhichOneof("record_type") == "history":
            steps.append(int(record.history.step.num))
    return steps


def records(data: bytes, position: int) -> Iterator[bytes]:
    """Return the complete records in blocks of a file, from a position in the first block on."""
    record: bytes | None = None
    while position + RECORD_HEADER.size <= len(data):
        left = BLOCK_BYTES - position % BLOCK_BYTES
        if left < RECORD_HEADER.size:  # the end of a block is padded with zeros
            position += left
            continue
        _, length, part = RECORD_HEADER.unpack_from(data, position)
        position += RECORD_HEADER.size
        content = data[position : position + length]
        position += length
        if part not in (FULL, FIRST, MIDDLE, LAST) or len(content) < length:
            return
        if part in (FULL, FIRST):
            record = content
        elif record is not None:  # otherwise, the record began before these blocks
            record += content
        if part in (FULL, LAST) and record is not None:
            yield record
            record = None


ENTRY = Entry(WandbTracker, WandbSpec)
