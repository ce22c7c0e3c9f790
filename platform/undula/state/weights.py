"""Weights of a run outside of its training: loaded into a plain model, from a checkpoint that the user chooses."""

from collections.abc import Collection, Sequence
from itertools import chain
from typing import Literal, TypeAlias

from torch import Tensor, nn

from undula.errors import CheckpointError, SpecError
from undula.state.checkpoint_files import read_pieces, table_of
from undula.state.commit import Commit, best_commit, find_commits
from undula.state.directory import job_record
from undula.state.goals import GoalSpec
from undula.state.locate import locate_run
from undula.state.model_state import MODEL, check_shapes, load_model_state, model_shapes, model_targets
from undula.state.pieces import TensorSpec, empty_tensor, piece_of
from undula.storage import Store

Which: TypeAlias = Literal["best", "last"] | int
"""Choice of a checkpoint: the one with the best validation, the newest one, or the one after so many steps."""


def load_weights(model: nn.Module, run: str, which: Which = "last", *, runs: str | None = None) -> int:
    """Load the weights of a run into a model, without the state of the optimizer. No pickle is read, and no second copy is made.

    Args:
        model: Model of the class that the run trained, with the same settings. Its weights are replaced in place, on their devices. It may
            be sharded by `fully_shard`, also when the run's was not, and the other way round.
        run: Name of the run, or its directory as a path or an s3:// URL.
        which: Checkpoint: "best", "last" or a number of steps. "best" is the one with the best validation, by the job's
            checkpoint.keep_best or, if that is not set, by the lowest loss.
        runs: Folder in which a name is looked up; by default the working directory and then ~/undula/runs.

    Returns:
        The number of steps after which the run had these weights.

    Raises:
        SpecError: A tensor of the model is on the meta device.
        RunError: There is no such run.
        CheckpointError: There is no such checkpoint, it is damaged, or it is from another model.
    """
    tensors = chain(model.named_parameters(), model.named_buffers())
    if on_meta := [name for name, tensor in tensors if tensor.is_meta]:
        raise SpecError(
            f"{on_meta[0]} of the model is on the meta device, which holds no values; call model.to_empty(device=...) before load_weights"
        )
    store = locate_run(run, runs)
    commit = chosen_checkpoint(store, which)
    table, source = table_of(commit), f"{store.url}/{commit.folder}"
    shapes = {name: spec.shape for name, spec in table.items()}
    check_shapes(model_shapes(model), shapes, source, "pass the model that the run trained, with the same settings")
    targets = model_targets(model, table)
    read_pieces(store, commit, {name: piece_of(tensor) for name, tensor in targets.items()})
    load_model_state(model, {**targets, **commit.values})
    return commit.step


def read_weights(store: Store, step: int, names: Collection[str]) -> dict[str, Tensor]:
    """Return whole tensors of a run's model from a checkpoint, in host memory.

    Args:
        store: Run directory.
        step: Number of steps of the checkpoint.
        names: Names of the tensors in the model's `state_dict()`.

    Raises:
        CheckpointError: There is no such checkpoint, it is damaged, or it is from another model.
    """
    if not names:
        return {}
    commit = chosen_checkpoint(store, step)
    table = table_of(commit)
    tensors = {name: empty_tensor(TensorSpec(table[MODEL + name].dtype, table[MODEL + name].shape)) for name in names}
    read_pieces(store, commit, {MODEL + name: piece_of(tensor) for name, tensor in tensors.items()})
    return tensors


def chosen_checkpoint(store: Store, which: Which) -> Commit:
    """Return a checkpoint of a run, after checking that all of its files are intact.

    Args:
        store: Run directory.
        which: The best checkpoint, the newest one, or a number of steps.

    Raises:
        CheckpointError: There is no such checkpoint, or it is damaged.
    """
    commits, damaged = find_commits(store)
    steps = sorted({commit.step for commit in commits})
    chosen = [commit for commit in commits if which in ("last", commit.step)]
    if which == "best" and commits:
        chosen = [_best(store, commits)]
    if not chosen:
        has = f"has checkpoints of the steps {', '.join(map(str, steps))}" if steps else "has no checkpoint yet"
        unreadable = f" ({'; '.join(damaged.values())})" if damaged else ""
        wanted = "" if which in ("last", "best") else f", and none of step {which}"
        raise CheckpointError(f"{store.url} {has}{wanted}{unreadable}; name a step that it has")
    commit = chosen[0]
    if damage := commit.damage(store, sorted(commit.files)):
        others = ", ".join(str(step) for step in steps if step != commit.step)
        raise CheckpointError(f"{damage}; name another step" + (f" ({others})" if others else ""))
    return commit


def _best(store: Store, commits: Sequence[Commit]) -> Commit:
    """Return the checkpoint of the best validation of the run."""
    recorded = job_record(store).get("spec", {}).get("checkpoint", {}).get("keep_best")
    goal = GoalSpec(**(recorded or {}))
    by = f"by {goal.metric} ({goal.mode})"
    best, kept = commits[0].results.best(goal), best_commit(commits, goal)
    if best is None or best.step is None:
        raise CheckpointError(
            f"{store.url} has no validation that could be the best one {by}; use the last checkpoint or a step"
        )
    if kept is None or kept.step != best.step:
        steps = ", ".join(map(str, sorted({commit.step for commit in commits})))
        lost = "could not be written" if recorded is not None else "was not kept"
        advice = "" if recorded is not None else "set checkpoint.keep_best before a run, or "
        raise CheckpointError(
            f"the best validation of {store.url} {by} is that of step {best.step}, whose checkpoint {lost} (it has {steps}); {advice}use "
            "the last checkpoint or a step"
        )
    return kept


def parsed_which(text: str) -> Which:
    """Return the choice of a checkpoint that a user has typed.

    Raises:
        SpecError: It is none.
    """
    if text == "last":
        return "last"
    if text == "best":
        return "best"
    if text.isdecimal():
        return int(text)
    raise SpecError(f"{text!r} names no checkpoint; write best, last or a number of steps")
