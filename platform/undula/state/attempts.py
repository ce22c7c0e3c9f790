"""Attempts of a run, and which parts of their work belong to the run.

An attempt *claims* a number of its own when its group forms, and *begins* when the group has restored a state. Its record then lists the
first steps of the attempts that belong to the run, its own included, and the checkpoints that existed. From that moment on, nothing that an
attempt with a lower number still does has an effect: readers ignore the checkpoints that are not listed, and states and rows of later
steps. The record is a single file that is written once, so there is no moment at which two attempts can both commit.

An attempt with a lower number notices that a newer one exists when it looks for claims, and ends. It looks before and after each commit
of a checkpoint, and with each periodic write of the ledger.
"""

import json
import re
import socket
import sys
import time
from collections.abc import Collection, Mapping
from dataclasses import dataclass, field
from secrets import token_hex

from undula.errors import StorageError, SupersededError
from undula.storage import Store

ATTEMPTS = "attempts"


@dataclass(frozen=True)
class Lineage:
    """Parts of the work of a run's attempts that belong to the run, from the record of the newest attempt that has begun."""

    newest: int = 0
    """Number of the newest attempt that has begun; 0 if none has a record."""
    starts: Mapping[int, int] = field(default_factory=dict)
    """First step of each attempt that belongs to the run and has a record, by number."""
    checkpoints: frozenset[str] = frozenset()
    """Folders of the checkpoints of earlier attempts that belong to the run."""
    unrecorded: int = sys.maxsize
    """Largest number among the attempts of former versions of this library, which wrote no records."""

    def includes(self, attempt: int) -> bool:
        """Return whether an attempt belongs to the run. It does not if it began after an attempt with a higher number had begun."""
        return attempt in self.starts or attempt <= self.unrecorded

    def includes_state(self, attempt: int, step: int) -> bool:
        """Return whether the state of an attempt after `step` steps belongs to the run.

        It does not if a later attempt began at an earlier step, because that attempt's steps have replaced those that led to the state.
        """
        return self.includes(attempt) and all(step <= start for later, start in self.starts.items() if later > attempt)

    def includes_checkpoint(self, folder: str, attempt: int) -> bool:
        """Return whether the committed checkpoint of an attempt belongs to the run."""
        if not self.newest:
            return attempt <= self.unrecorded
        return attempt == self.newest or folder in self.checkpoints


EVERYTHING = Lineage()
"""Lineage of a run without records, to which the work of every attempt belongs."""


def claim(store: Store, recorded: Collection[int], held: int = 0) -> tuple[int, Lineage]:
    """Claim the number of a new attempt, as `claim_number` does, and read the lineage at that time.

    Raises:
        StorageError: The newest record cannot be read or is damaged.
    """
    claimed = _claimed(store)
    number = claim_number(store, recorded, held)
    before = read_lineage(store)
    return number, before if before.newest else Lineage(unrecorded=max({*recorded} - {*claimed}, default=0))


def claim_number(store: Store, recorded: Collection[int], held: int = 0) -> int:
    """Claim the number of a new attempt, which is larger than those of all former attempts, and return it.

    Args:
        store: Run directory.
        recorded: Numbers of the attempts that have written to the ledger.
        held: Largest number among the attempts whose state the ranks hold. On a shared disk, what a listing shows can be out of date.
    """
    number = 1 + max(held, *_claimed(store), *recorded, 0)
    while not store.create(f"{ATTEMPTS}/{number:06d}.claimed.json", _claim_json()):
        number += 1
    return number


def begin(store: Store, attempt: int, before: Lineage, step: int, checkpoints: Collection[str]) -> None:
    """Record that an attempt begins at `step`. This replaces what earlier attempts did or will do from that step on.

    Args:
        store: Run directory.
        attempt: Number of the attempt.
        before: Lineage that the attempt read after it had claimed its number.
        step: Number of committed steps that the attempt starts from.
        checkpoints: Folders of the checkpoints of earlier attempts that belong to the run.
    """
    record = {
        "starts": {str(number): start for number, start in {**before.starts, attempt: step}.items()},
        "checkpoints": sorted(checkpoints),
        "unrecorded": before.unrecorded,
    }
    store.write(f"{ATTEMPTS}/{attempt:06d}.begun.json", json.dumps(record, indent=1).encode())


def read_lineage(store: Store) -> Lineage:
    """Read the record of the newest attempt that has begun.

    Raises:
        StorageError: The record cannot be read or is damaged.
    """
    newest = max(_numbers(store, "begun"), default=0)
    if not newest:
        return EVERYTHING
    name = f"{ATTEMPTS}/{newest:06d}.begun.json"
    try:
        record = json.loads(store.read(name))
        starts = {int(number): int(start) for number, start in record["starts"].items()}
        return Lineage(newest, starts, frozenset(record["checkpoints"]), int(record["unrecorded"]))
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        raise StorageError(
            f"{store.url}/{name} is damaged ({error}); restore it, or start over with --fresh"
        ) from error


def require_newest(store: Store, attempt: int) -> None:
    """Check that no later attempt has claimed a number.

    Raises:
        SupersededError: A later attempt has.
    """
    newest = max(_claimed(store), default=0)
    if newest > attempt:
        raise SupersededError(
            f"attempt {newest} of {store.url} was started{_place(store, newest)}, so the older attempt {attempt} ends and saves "
            "nothing more; follow the newer job, or stop it and submit this one again"
        )


def _claimed(store: Store) -> list[int]:
    return _numbers(store, "claimed")


def _numbers(store: Store, kind: str) -> list[int]:
    matches = [re.fullmatch(rf"(\d{{6,}})\.{kind}\.json", name) for name in store.names(ATTEMPTS)]
    return [int(match[1]) for match in matches if match]


def _claim_json() -> bytes:
    return json.dumps({"host": socket.gethostname(), "time": time.time(), "token": token_hex(8)}).encode()


def _place(store: Store, attempt: int) -> str:
    """Return where an attempt was started, as part of a sentence; empty if its claim cannot be read."""
    try:
        return f" on {json.loads(store.read(f'{ATTEMPTS}/{attempt:06d}.claimed.json'))['host']}"
    except (StorageError, ValueError, KeyError, TypeError):
        return ""
