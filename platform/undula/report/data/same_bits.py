"""Whether runs must have the same bits, according to their records."""

from undula.report.data.run_record import RecordedRun
from undula.state.events import StartEvent, WarningEvent


def is_exact(run: RecordedRun) -> bool:
    """Return whether a run has the same bits wherever and however often its steps were computed."""
    starts = _starts(run)
    if settings_changes(run):
        return False
    is_mixed = any(isinstance(event, WarningEvent) and event.code == "mixed_machines" for event in run.events)
    return _is_deterministic(run) or (bool(starts) and all(start.same_bits for start in starts) and not is_mixed)


def is_elastic(run: RecordedRun) -> bool:
    """Return whether the batch of a run follows the number of its workers."""
    return bool(run.job.spec.get("plan", {}).get("batch") == "elastic")


def settings_changes(run: RecordedRun) -> list[str]:
    """Return descriptions of the settings that were changed while the run was interrupted, and with which it has gone on."""
    taken = [event for event in run.events if isinstance(event, WarningEvent) and event.code == "settings_taken"]
    return [f"from step {event.step} on, {event.detail}" for event in taken]


def _is_deterministic(run: RecordedRun) -> bool:
    return bool(run.job.spec.get("deterministic"))


def _starts(run: RecordedRun) -> list[StartEvent]:
    return [event for event in run.events if isinstance(event, StartEvent)]


def reason_for_other_bits(run: RecordedRun, other: RecordedRun) -> str | None:
    """Return why two runs need not have the same bits, as a clause; None if they must have them."""
    for each in (run, other):
        if not is_exact(each):
            return f"{each.job.name} does not promise equal bits (docs/concepts.md, Bit for bit)"
    if _is_deterministic(run) and _is_deterministic(other):
        return None
    here, there = (_starts(each)[-1].arithmetic if _starts(each) else {} for each in (run, other))
    for key in [*here, *(key for key in there if key not in here)]:
        if (mine := here.get(key, "not set")) != (others := there.get(key, "not set")):
            return f"{key} is {mine} in {run.job.name} and {others} in {other.job.name}"
    return None
