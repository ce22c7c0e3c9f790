"""Goals for the means that a validation returns: which checkpoint is best, and when a run stops early. Pure."""

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Annotated, Any, Literal, get_args

from annotated_types import Gt, MinLen
from pydantic.dataclasses import dataclass as checked_dataclass

from undula.errors import STRICT

LOSS = "loss"
"""Name of the mean that every validation has."""
Mode = Literal["min", "max"]
_ENTRY = "validation"
"""Name of the results in the state of a run."""


@checked_dataclass(frozen=True, config=STRICT)
class GoalSpec:
    """Mean of a validation that a run improves."""

    metric: Annotated[str, MinLen(1)] = LOSS
    """Name of the mean: `loss`, or another one that the script's validation function returns."""
    mode: Mode = "min"
    """Whether lower (`min`) or higher (`max`) values are better."""


@checked_dataclass(frozen=True, config=STRICT)
class StopSpec:
    """End of a run before its last step, once a mean of the validations has stopped improving."""

    patience: Annotated[int, Gt(0)]
    """Number of successive validations without a new best value after which the run stops. The validation before the first step does not
    count."""
    metric: Annotated[str, MinLen(1)] = LOSS
    """Name of the mean: `loss`, or another one that the script's validation function returns."""
    mode: Mode = "min"
    """Whether lower (`min`) or higher (`max`) values are better."""

    @property
    def goal(self) -> GoalSpec:
        return GoalSpec(self.metric, self.mode)


@dataclass(frozen=True)
class Best:
    """Best value of a mean so far."""

    step: int | None
    """Number of committed steps at its validation; None if no value was finite."""
    value: float | None
    since: int
    """Number of validations after it."""


class ValidationResults:
    """The newest result of a run's validations and the best ones, and whether the run stops, which belong to the state of the run.

    Every rank has the same results. They hold the best values for every goal, so that a resumed run can have another goal. A validation
    before the first step is not included, because the weights do not come from training.
    """

    def __init__(self) -> None:
        self._entry: dict[str, Any] = {}

    def values(self) -> dict[str, Any]:
        """Return the results as JSON, under their name in the state of the run; nothing if there is none."""
        return {_ENTRY: self._entry} if self._entry else {}

    def restore(self, values: Mapping[str, Any]) -> None:
        """Take over the results of a state that `values` describes; states of older versions have none."""
        self._entry = dict(values.get(_ENTRY, {}))

    @property
    def step(self) -> int | None:
        """Number of committed steps at the newest validation; None if there was none."""
        return self._entry.get("step")

    @property
    def means(self) -> Mapping[str, float]:
        """Means of the newest validation, by name."""
        return self._entry.get("means", {})  # type: ignore[no-any-return]

    def add(self, step: int, means: Mapping[str, float]) -> None:
        """Add the result of a validation after `step` steps. A result that is there already is kept."""
        if step == 0 or step == self.step:
            return
        former = self._entry.get("best", {})
        best = {
            name: {mode: _updated(former.get(name, {}).get(mode), mode, step, mean) for mode in get_args(Mode)}
            for name, mean in means.items()
        }
        self._entry = {**self._entry, "step": step, "means": dict(means), "best": {**former, **best}}

    def stop(self, reason: str) -> None:
        """Record that the script ends the run before its last step, and for which reason."""
        self._entry = {**self._entry, "stopped": reason}

    def best(self, goal: GoalSpec) -> Best | None:
        """Return the best value; None if no validation has returned that mean."""
        kept = self._entry.get("best", {}).get(goal.metric)
        return Best(*kept[goal.mode]) if kept else None

    def is_best(self, goal: GoalSpec | None, step: int) -> bool:
        """Return whether the best value so far is that of the validation after `step` steps."""
        best = self.best(goal) if goal else None
        return best is not None and best.step == step

    def reason_to_stop(self, stop: StopSpec | None) -> str:
        """Return the reason for which a run stops now, as a sentence without its full stop; empty if it goes on."""
        if reason := self._entry.get("stopped"):
            return str(reason)
        best = self.best(stop.goal) if stop else None
        if stop is None or best is None or best.since < stop.patience:
            return ""
        last = f"the last {best.since} validations" if best.since > 1 else "the last validation"
        if best.step is None:
            return f"{stop.metric} was not finite in {last}"
        return (
            f"{stop.metric} has not improved in {last}, and its best value is {best.value:.6g}, after step {best.step}"
        )


def best_of(results: Mapping[str, ValidationResults], goal: GoalSpec) -> str | None:
    """Return the name of the state whose newest validation has the best value; None if no state was validated with a finite value.

    Args:
        results: Results of the states that were validated after their last step, by the name of the state.
        goal: The mean, and which values are better.
    """
    sign = 1.0 if goal.mode == "min" else -1.0
    values = {name: result.means.get(goal.metric, math.nan) for name, result in results.items()}
    finite = {name: sign * value for name, value in values.items() if math.isfinite(value)}
    return min(finite, key=lambda name: (finite[name], results[name].step)) if finite else None


def _updated(former: list[Any] | None, mode: Mode, step: int, value: float) -> list[Any]:
    """Return the best value after one more validation, as a list of the fields of Best."""
    _, best, since = former or (None, None, 0)
    is_better = math.isfinite(value) and (best is None or (value < best if mode == "min" else value > best))
    return [step, value, 0] if is_better else [former[0] if former else None, best, since + 1]
