"""Tests of attempts: two of them never have the same number, and an older one cannot add anything to the run once a newer one has begun."""

import random
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field, replace
from pathlib import Path

import numpy as np
import pytest
import torch
import torch.distributed as dist
from hypothesis import given, settings
from hypothesis import strategies as st
from ledger_rows import write_attempt, write_two_attempts

from undula.errors import StorageError, SupersededError
from undula.state import checkpoint
from undula.state.attempts import ATTEMPTS, EVERYTHING, Lineage, begin, claim, read_lineage, require_newest
from undula.state.checkpoint import Checkpointer
from undula.state.commit import COMMIT, Commit, find_commits
from undula.state.directory import delete_run, require_newest_submission
from undula.state.ledger import committed, read_ledger, recorded_attempts
from undula.state.pieces import rank_state
from undula.storage import Entry, Store, open_store


@pytest.fixture(params=["local", "s3"])
def store(request: pytest.FixtureRequest, tmp_path: Path) -> Store:
    """Empty run directory on each kind of storage."""
    return open_store(request.getfixturevalue("s3").url("run") if request.param == "s3" else str(tmp_path / "run"))


@dataclass(frozen=True)
class Commits(Store):
    """Storage in which something happens before and after the commit of the checkpoint of step 110 is written."""

    before: Callable[[], object] = int
    after: Callable[[], object] = int

    def write(self, name: str, data: bytes) -> None:
        is_commit = name.endswith(f"step-00000110-a1/{COMMIT}")
        if is_commit:
            self.before()
        super().write(name, data)
        if is_commit:
            self.after()


class StaleListing(Store):
    """Store whose listings are out of date, as on a disk that is shared through NFS."""

    def list(self, prefix: str = "") -> list[Entry]:
        return []

    def names(self, folder: str) -> set[str]:
        return set()


def attempt_from(store: Store, step: int) -> tuple[int, Checkpointer]:
    """Claim and begin an attempt, as a group does that has restored the state after `step` steps."""
    number, before = claim(store, recorded_attempts(store))
    checkpoints = Checkpointer(store, dist.group.WORLD, number, keep=2, before=before)
    checkpoints.begin(step)
    return number, checkpoints


def save(checkpoints: Checkpointer, step: int) -> BaseException | None:
    checkpoints.save(step, "plan", rank_state({"model.w": torch.full((3,), float(step))}))
    return checkpoints.wait()


def visible(store: Store) -> list[tuple[int, int]]:
    """Return the attempt and the step of each visible checkpoint, newest first, after a check that it is whole."""
    commits, damaged = find_commits(store)
    assert not damaged
    assert [commit.damage(store, sorted(commit.files)) for commit in commits] == [None] * len(commits)
    return [(commit.attempt, commit.step) for commit in commits]


def test_attempts_that_start_at_once_have_different_numbers(tmp_path: Path) -> None:
    store = Store(str(tmp_path))  # moto's S3 server does not handle two conditional writes at once as S3 does
    with ThreadPoolExecutor(8) as threads:
        numbers = list(threads.map(lambda _: claim(store, ())[0], range(8)))
    assert sorted(numbers) == list(range(1, 9))


def test_a_number_is_larger_than_all_former_ones_although_a_listing_is_out_of_date(store: Store) -> None:
    assert [claim(store, ())[0] for _ in range(3)] == [1, 2, 3]
    assert claim(StaleListing(store.url), ()) == (4, Lineage(unrecorded=0))
    assert claim(store, (2, 5))[0] == 6, "the ledger has rows of attempt 5"
    assert claim(store, (2, 5), held=9)[0] == 10


@pytest.mark.usefixtures("process_group")
def test_a_run_of_a_version_without_claims_is_continued(store: Store) -> None:
    """Its rows count by their first steps, and its checkpoints stay until newer ones replace them."""
    write_two_attempts(store)
    old = Checkpointer(store, dist.group.WORLD, attempt=2, keep=2)
    assert save(old, 6) is None
    number, before = claim(store, recorded_attempts(store))
    assert (number, before) == (3, Lineage(unrecorded=2))
    new = Checkpointer(store, dist.group.WORLD, number, keep=2, before=before)
    commit, _ = new.newest_whole()
    assert commit is not None
    new.begin(commit.step)
    assert visible(store) == [(2, 6)]
    assert save(new, 8) is None
    assert visible(store) == [(3, 8), (2, 6)]
    assert read_ledger(store).steps["attempt"].to_pylist() == [1, 1, 1, 2, 2, 2]


@pytest.mark.usefixtures("process_group")
@pytest.mark.parametrize("moment", ["before its commit", "while it commits"])
def test_an_older_attempt_cannot_commit_once_a_newer_one_has_begun(store: Store, moment: str) -> None:
    """The newer attempt begins after the older one has written its files, and before or after its last look for claims."""
    number, before = claim(store, ())
    started: list[Checkpointer] = []

    def start_newer() -> None:
        started.append(attempt_from(store, step=100)[1])

    is_last = False

    def before_commit() -> None:
        if moment == "before its commit" and is_last:
            start_newer()

    its_store = Commits(store.url, before=start_newer if moment == "while it commits" else int)
    old = Checkpointer(its_store, dist.group.WORLD, number, 2, before_commit, before=before)
    old.begin(0)
    assert save(old, 100) is None
    is_last = True
    assert isinstance(save(old, 110), SupersededError)
    assert visible(store) == [(1, 100)]
    (new,) = started
    assert save(new, 105) is None
    assert visible(store) == [(2, 105), (1, 100)]
    assert {entry.name.split("/")[1][5:] for entry in store.list("checkpoints")} == {"00000100-a1", "00000105-a2"}
    assert isinstance(save(old, 120), SupersededError)
    assert visible(store) == [(2, 105), (1, 100)]


@pytest.mark.usefixtures("process_group")
def test_a_checkpoint_from_which_a_newer_attempt_resumes_is_not_deleted_by_an_older_one(store: Store) -> None:
    """The newer attempt reads the checkpoint when its commit has just been written."""
    number, before = claim(store, ())
    found: list[Commit | None] = []

    def start_newer() -> None:
        newer, lineage = claim(store, ())
        found.append(Checkpointer(store, dist.group.WORLD, newer, 1, before=lineage).newest_whole()[0])

    its_store = Commits(store.url, after=start_newer)
    old = Checkpointer(its_store, dist.group.WORLD, number, keep=1, before=before)
    old.begin(0)
    assert save(old, 100) is None
    assert isinstance(save(old, 110), SupersededError)
    assert [commit.step for commit in found if commit] == [110]
    assert visible(store) == [(1, 110), (1, 100)]


@pytest.mark.usefixtures("process_group")
def test_an_attempt_that_begins_after_a_newer_one_does_not_count(store: Store) -> None:
    first, old = attempt_from(store, step=0)
    assert save(old, 100) is None
    late, before = claim(store, ())
    newest, new = attempt_from(store, step=100)
    Checkpointer(store, dist.group.WORLD, late, keep=2, before=before).begin(0)
    write_attempt(store, first, range(100))
    write_attempt(store, late, range(20))
    assert read_ledger(store).steps["attempt"].to_pylist() == [first] * 100
    assert (first, late, newest) == (1, 2, 3)
    assert read_lineage(store).starts == {1: 0, 3: 100}
    assert save(new, 200) is None
    assert visible(store) == [(3, 200), (1, 100)]


@pytest.mark.usefixtures("process_group")
def test_a_run_that_starts_over_gets_nothing_from_workers_of_the_former_run(store: Store) -> None:
    store.write("job.json", b"{}")
    number, old = attempt_from(store, step=0)
    assert save(old, 100) is None
    delete_run(store)
    write_attempt(store, number, [0])
    assert isinstance(save(old, 110), SupersededError)
    assert visible(store) == []
    assert read_ledger(store).steps.num_rows == 0
    newer, new = attempt_from(store, step=0)
    assert newer > number
    assert save(new, 10) is None
    assert visible(store) == [(newer, 10)]


def test_a_newer_attempt_is_named_with_its_host(store: Store) -> None:
    number, _ = claim(store, ())
    require_newest(store, number)
    claim(store, ())
    with pytest.raises(SupersededError, match=rf"^attempt 2 of {store.url} was started on \S+, so the older attempt 1"):
        require_newest(store, number)


def test_a_job_ends_if_its_run_was_submitted_again(tmp_path: Path) -> None:
    store = Store(str(tmp_path))
    require_newest_submission(store, "ours")
    store.write("job.json", b'{"submission": "ours"}')
    require_newest_submission(store, "ours")
    store.write("job.json", b'{"submission": "theirs"}')
    with pytest.raises(SupersededError, match=f"^the run in {store.url} was submitted again, so this older job ends"):
        require_newest_submission(store, "ours")


def test_a_damaged_record_is_named_and_starting_over_helps(tmp_path: Path) -> None:
    store = Store(str(tmp_path))
    number, _ = claim(store, ())
    store.write(f"{ATTEMPTS}/{number:06d}.begun.json", b"{")
    with pytest.raises(StorageError, match=r"attempts/000001\.begun\.json is damaged .*start over with --fresh"):
        read_lineage(store)
    delete_run(store)
    assert read_lineage(store).starts == {2: 0}


@pytest.mark.usefixtures("process_group")
def test_an_older_attempt_deletes_no_checkpoint_of_a_newer_one_that_it_does_not_know(
    store: Store, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The older attempt is held up between reading the lineage and deleting, while the newer one begins and commits."""
    _, old = attempt_from(store, step=0)
    assert save(old, 100) is None
    newer: list[Checkpointer] = []

    def read_and_stall(its_store: Store) -> Lineage:
        lineage = read_lineage(its_store)
        if not newer:
            newer.append(attempt_from(store, step=100)[1])
            assert save(newer[0], 200) is None
        return lineage

    monkeypatch.setattr(checkpoint, "read_lineage", read_and_stall)
    save(old, 110)
    assert visible(store)[0] == (2, 200)


@pytest.mark.usefixtures("process_group")
def test_a_checkpoint_is_not_reported_as_failed_because_the_storage_fails_afterwards(tmp_path: Path) -> None:
    class FailsAfterwards(Store):
        """Storage that cannot be listed once a checkpoint has been committed."""

        def names(self, folder: str) -> set[str]:
            if any(name.endswith(COMMIT) for name in (entry.name for entry in super().list("checkpoints"))):
                raise StorageError("503 SlowDown")
            return super().names(folder)

    saved: list[int] = []
    reasons: list[str] = []
    store = FailsAfterwards(str(tmp_path))
    number, before = claim(store, ())
    callbacks = {"after_commit": lambda step, seconds: saved.append(step), "not_removed": reasons.append}
    checkpoints = Checkpointer(store, dist.group.WORLD, number, keep=2, before=before, **callbacks)
    checkpoints.begin(0)
    assert save(checkpoints, 10) is None
    assert (saved, reasons) == ([10], ["503 SlowDown"])


@dataclass
class Attempts:
    """Attempts of a run that start, train and go on training at any time, whatever others do. Nothing ends them."""

    store: Store
    reached: dict[int, int] = field(default_factory=dict)
    """Number of steps that each attempt has reached, by number."""
    claimed: dict[int, tuple[Lineage, int]] = field(default_factory=dict)
    """Lineage and restored step of each attempt that has not begun, by number."""
    rows: list[tuple[int, int]] = field(default_factory=list)
    """Attempt and step of each row of the ledger."""
    states: list[tuple[int, int]] = field(default_factory=list)
    """Age of each state that was saved somewhere."""

    def claim(self, choice: random.Random) -> None:
        """Start an attempt that finds only some of the states, and resumes from the newest of them."""
        number, before = claim(self.store, ())
        found = [age for age in self.states if before.includes_state(*age) and choice.random() < 0.7]
        self.claimed[number] = before, max(found, default=(0, 0))[1]

    def begin(self, choice: random.Random) -> None:
        if self.claimed:
            number = choice.choice(sorted(self.claimed))
            before, step = self.claimed.pop(number)
            begin(self.store, number, before, step, ())
            self.reached[number] = step

    def train(self, choice: random.Random) -> None:
        if self.reached:
            number = choice.choice(sorted(self.reached))
            start, self.reached[number] = self.reached[number], self.reached[number] + choice.randint(1, 9)
            self.rows += [(number, step) for step in range(start, self.reached[number])]
            self.states.append((number, self.reached[number]))

    def check(self) -> None:
        """Check that the ledger has each step of every state that belongs to the run once."""
        lineage = read_lineage(self.store)
        attempts, steps = np.array(self.rows, dtype=np.int64).reshape(-1, 2).T
        kept = sorted(steps[committed(attempts, steps, lineage)].tolist())
        assert kept == list(range(len(kept)))
        included = [age for age in self.states if lineage.includes_state(*age)]
        assert max((step for _, step in included), default=0) <= len(kept)
        # A later attempt's state is never of an earlier step.
        assert sorted(included) == sorted(included, key=lambda age: (age[1], age[0]))


@settings(max_examples=60)
@given(st.lists(st.sampled_from(["claim", "begin", "train"]), max_size=40), st.integers(0, 2**32))
def test_the_ledger_has_each_step_once_whatever_older_attempts_do(
    tmp_path_factory: pytest.TempPathFactory, actions: list[str], seed: int
) -> None:
    attempts, choice = Attempts(Store(str(tmp_path_factory.mktemp("run")))), random.Random(seed)
    for action in actions:
        {"claim": attempts.claim, "begin": attempts.begin, "train": attempts.train}[action](choice)
        attempts.check()


def test_everything_belongs_to_a_run_without_records(tmp_path: Path) -> None:
    assert read_lineage(Store(str(tmp_path))) == EVERYTHING
    assert EVERYTHING.includes_state(7, 100)
    assert EVERYTHING.includes_checkpoint("checkpoints/step-00000100-a7", 7)
    assert not replace(EVERYTHING, unrecorded=6).includes_state(7, 100)
