"""EarlyStopping and ModelCheckpoint of a script, whose work a run does by `stop` and `checkpoint.keep_best` of its job."""

from collections.abc import Collection, Mapping
from dataclasses import asdict
from typing import Any

from undula.adapters.refusals import CALLBACKS
from undula.train.run import Run

STOP, KEEP_BEST = "stop", "checkpoint.keep_best"
DEFAULTS = {"metric": "loss", "mode": "min"}
SAME_METRICS = {"loss", "val_loss"}
"""Names of the same mean."""
LIMITS = {"min_delta": 0.0, "stopping_threshold": None, "divergence_threshold": None}
"""Arguments of EarlyStopping that a run does not have, with the values that have no effect."""

Goals = Mapping[str, Mapping[str, Any] | None]
"""Values of the job's goals by key; None for a goal that the user has set to null. It has no other goals."""


def goals_of_settings(given: Mapping[str, Any]) -> Goals:
    """Return the goals of a job's YAML, whose values are given by dotted key."""
    goals: dict[str, Mapping[str, Any] | None] = {}
    for key in (STOP, KEEP_BEST):
        own = {name.removeprefix(f"{key}."): value for name, value in given.items() if name.startswith(f"{key}.")}
        if own or key in given:
            goals[key] = None if not own and given[key] is None else {**DEFAULTS, **own}
    return goals


def goals_of_run(run: Run) -> Goals | None:
    """Return the goals of a run's job in the driver; None on a rank, because the driver has checked them."""
    goals: dict[str, Mapping[str, Any] | None] = {}
    is_driver = False

    def take(given: Collection[str]) -> None:
        nonlocal is_driver
        is_driver = True
        for key, goal in run.goals.items():
            if goal or key in given:
                goals[key] = asdict(goal) if goal else None

    run.preflight(take)
    return goals if is_driver else None


def problem_with(callback: Any, goals: Goals | None) -> str | None:
    """Return why a run does not take an EarlyStopping or a ModelCheckpoint, as a sentence; None if the job does its work.

    Args:
        callback: The callback.
        goals: Goals of the job; None if they are known to be those of the script.
    """
    name, is_stop = type(callback).__name__, hasattr(callback, "patience")
    got = f"fit() got the callback {name}"
    if getattr(callback, "monitor", None) is None:
        return f"{got}, which a run does not take; {CALLBACKS['Checkpoint']}"
    own = {"metric": callback.monitor, "mode": callback.mode}
    if is_stop:
        own["patience"] = callback.patience
        limit = next((limit for limit, neutral in LIMITS.items() if getattr(callback, limit) != neutral), None)
        if limit:
            value = getattr(callback, limit)
            value = abs(value) if limit == "min_delta" else value  # Lightning negates it if lower values are better
            return f"{got} with {limit}={value}, which a run does not have; remove {limit}"
    elif callback.save_top_k != 1:
        return f"{got} with save_top_k={callback.save_top_k}, but a run keeps one best checkpoint; set save_top_k=1"
    key = STOP if is_stop else KEEP_BEST
    if type(callback).__module__.partition(".")[0] not in ("lightning", "pytorch_lightning"):
        return f"{got}, whose own methods a run does not call; set {key} in the job's YAML, {_text(own)}, and remove the callback"
    if goals is None:
        return None
    if key not in goals:
        return f"{got}, which a run does not take; set {key} in the job's YAML: {_text(own)}"
    goal = goals[key]
    if goal is None or _comparable(goal) == _comparable(own):
        return None
    return f"{got} with {_text(own)}, but {key} of the job is {_text(goal)}; make them equal, or remove the callback"


def _comparable(values: Mapping[str, Any]) -> dict[str, Any]:
    return {**values, "metric": "loss" if values["metric"] in SAME_METRICS else values["metric"]}


def _text(values: Mapping[str, Any]) -> str:
    """Return values as YAML."""
    return f"{{{', '.join(f'{key}: {values[key]}' for key in ('metric', 'mode', 'patience') if key in values)}}}"
