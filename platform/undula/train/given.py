"""What the script and the job have given to a run beside its plan, recorded in the state, and compared with that when the run resumes.

A schedule or the script may change settings of the optimizer in training. What is compared is therefore what the script gave to
`run.optimizer()`, then and now. What has changed since is refused, or it is taken with an event. Within one submission the script is the
same, so that a change depends on the workers or the time: the run keeps what it began with, also with an event.

Also here: properties of a process that decide which bits a computation produces. Runs are equal bit for bit only where they are equal.
"""

import dataclasses
import json
import os
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from hashlib import sha256
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim.lr_scheduler import LRScheduler

from undula.errors import CheckpointError
from undula.state.events import WarningEvent
from undula.state.model_state import named_parameters, parameter_names
from undula.state.optimizer_state import COMPUTING, FITS, GROUPS
from undula.state.values import decode, encode
from undula.train.job import Job

RECORD = "given"
"""Name of the record in the state."""
NOT_SET = "not set"
MOST_NAMED = 6
"""Maximum number of changes that an event names."""
LOGICAL = ("schedule", "gradient", "deterministic")
"""Fields of a job that define the run beside the plan. A change is refused."""
FREE = ("engine", "compile", "sharding.gather", "sharding.offload", "validation", "stop", "checkpoint.keep_best")
"""Fields of a job that a resumed run may change, although they decide bits or the end of the run."""
SCHEDULED = ("max_lr", "initial_lr", "min_lr", "lr", "max_momentum", "base_momentum")
"""Settings of a group that a scheduler of torch derives from its own arguments."""
NEEDS_STATE = {"amsgrad": "Adam", "centered": "RMSprop", "momentum": "RMSprop"}
"""Settings that need state from the first step on if they are not zero, with the beginning of the names of classes for which they do."""


@dataclass(frozen=True)
class Given:
    """What the script and the job have given.

    Args:
        record: What the state records of it, as JSON.
        optimizer: Optimizer of the run.
        settings: Settings of each group as the script gave them.
        names: Names of the parameters of each group.
    """

    record: dict[str, Any]
    optimizer: torch.optim.Optimizer
    settings: Sequence[Mapping[str, Any]]
    names: Sequence[Sequence[str]]
    kept: dict[str, Any] = field(default_factory=dict)
    """Record of a restored state, in so far as the run keeps it."""

    @classmethod
    def of(cls, job: Job, model: nn.Module, optimizer: torch.optim.Optimizer, scheduler: LRScheduler | None) -> "Given":
        """Take what a script has given to `run.optimizer()`, before the run or a step changes it."""
        settings = [_settings_of(group) for group in optimizer.param_groups]
        names = parameter_names(model)
        record = {
            "submission": job.submission,
            "job": dict(_fields_of(job)),
            "frozen": [name for name, parameter in named_parameters(model) if not parameter.requires_grad],
            "optimizer": _class_of(optimizer),
            "groups": [
                {"count": len(group["params"]), "settings": encode(f"{GROUPS}.{number}", own, {})}
                for number, (group, own) in enumerate(zip(optimizer.param_groups, map(_plain, settings), strict=True))
            ],
            "parts": [],
            "scheduler": scheduler and {"class": _class_of(scheduler), "state": _state_of(scheduler)},
        }
        members = [[names.get(parameter, "") for parameter in group["params"]] for group in optimizer.param_groups]
        return cls(record, optimizer, settings, members)

    def add_parts(self, names: Sequence[str]) -> None:
        """Record the names of the parts that other packages add to the steps."""
        self.record["parts"] = sorted(names)

    def values(self) -> dict[str, Any]:
        """Return the record by its name in the state of the run."""
        return {RECORD: {**self.record, **self.kept}}

    def check(self, values: Mapping[str, Any]) -> None:
        """Check that a saved state fits what is given now.

        Args:
            values: Values of the saved state. States of former versions have no record, and are not checked.

        Raises:
            CheckpointError: It does not.
        """
        if (saved := values.get(RECORD)) is None:
            return
        if gap := next(self._gaps(saved, values[GROUPS]), None):
            raise CheckpointError(f"the run was saved with {gap}; {FITS}")

    def resume(self, values: Mapping[str, Any], others: Sequence[str], step: int) -> Iterator[WarningEvent]:
        """Continue with the state that was restored: take what the script has changed, or keep what the state has.

        Args:
            values: Values of the state.
            others: Descriptions of what else the script has changed.
            step: Number of steps that the state includes.

        Yields:
            Events about what is taken and what is kept, for the run's records.
        """
        if (saved := values.get(RECORD)) is None:
            return
        taken, kept = [*_free_changes(saved, self.record), *others], []
        for number, key, then, given in _group_gaps(saved, self.record):
            change = f"{key} of parameter group {number} was {then} and is {given}"
            if self._is_new(saved) or key in COMPUTING:
                taken.append(change)
                _take(self.optimizer.param_groups[number], key, then, self.settings[number])
            else:
                kept.append(change)
        if kept:
            self.kept["groups"] = saved["groups"]
        if not self._is_new(saved) and (gap := next(_scheduler_gaps(saved, self.record), None)):
            kept.append("{} and is {}".format(*gap))
            self.kept["scheduler"] = saved["scheduler"]
        if taken:
            yield WarningEvent("settings_taken", _listed(taken), step=step)
        if kept:
            yield WarningEvent("settings_kept", _listed(kept), step=step)

    @property
    def digest(self) -> str:
        """Digest of what the script has given, which must be equal on all ranks."""
        of_script = {key: self.record[key] for key in ("frozen", "optimizer", "groups", "parts", "scheduler")}
        return sha256(json.dumps(of_script, sort_keys=True).encode()).hexdigest()

    def gap_to(self, rank: int, record: Mapping[str, Any]) -> str:
        """Return a difference to what another rank was given, as a sentence."""
        both = record, self.record
        gaps = [
            f"{key} of parameter group {number} is {one} and {other}" for number, key, one, other in _group_gaps(*both)
        ]
        gaps += ["{} and {}".format(*gap) for gap in _scheduler_gaps(*both)]
        if record["parts"] != self.record["parts"]:
            gaps.append(f"{_parts_of(record)} and {_parts_of(self.record)}; install the packages on all nodes")
        gap = next(iter(gaps), "the optimizers, their groups or the frozen parameters are others")
        return (
            f"the script gives other settings on rank {rank} than on another one, with which their weights would come apart: {gap}; give "
            "the same to run.model() and run.optimizer() on all ranks"
        )

    def _is_new(self, saved: Mapping[str, Any]) -> bool:
        """Return whether the run may have been submitted again since a state was saved, with another script."""
        return not self.record["submission"] or saved["submission"] != self.record["submission"]

    def _gaps(self, saved: Mapping[str, Any], groups: Sequence[Mapping[str, Any]]) -> Iterator[str]:
        """Yield what a saved state has and what there is now, where a run cannot go on."""
        now = self.record
        if saved["optimizer"] != now["optimizer"]:
            yield f"the optimizer {saved['optimizer']}, and run.optimizer() got {now['optimizer']}"
        kinds = [(each["scheduler"] or {}).get("class", "no scheduler") for each in (saved, now)]
        if kinds[0] != kinds[1]:
            yield f"{kinds[0]}, and run.optimizer() got {kinds[1]}"
        if saved.get("parts", []) != now["parts"]:
            yield f"{_parts_of(saved)}, and a worker has {_parts_of(now)}"
        if not self._is_new(saved):
            return
        for key, value in now["job"].items():
            if key.startswith(LOGICAL) and key in saved["job"] and saved["job"][key] != value:
                yield f"{key}={json.dumps(saved['job'][key])}, and the job has {json.dumps(value)}"
        if (count := len(saved["groups"])) != len(self.names):
            yield f"{_counted(count)}, and the optimizer has {len(self.names)}"
        for number, (before, names) in enumerate(zip(saved["groups"], self.names, strict=False)):
            # Training only adds groups and parameters, at the end.
            members = groups[number]["parameters"][: before["count"]]
            if odd := [name for name in names if name not in set(members)]:
                yield f"parameter group {number} without {odd[0]!r}, which it has in the script"
            if odd := [name for name in members if name not in set(names)]:
                yield f"{odd[0]!r} in parameter group {number}, which lacks it in the script"
            yield from self._gaps_of_group(number, decode(before["settings"], {}), saved)
        yield from ("{}, and the script gives {}".format(*gap) for gap in _scheduler_gaps(saved, now))

    def _gaps_of_group(self, number: int, before: Mapping[str, Any], saved: Mapping[str, Any]) -> Iterator[str]:
        now, kind = _plain(self.settings[number]), type(self.optimizer).__name__
        for key in SCHEDULED if saved["scheduler"] else ():
            if before.get(key) != now.get(key):
                yield (
                    f"{key}={before.get(key)} of parameter group {number}, and the script with its scheduler gives {now.get(key)}"
                )
        for key, owner in NEEDS_STATE.items():
            if kind.startswith(owner) and now.get(key) and not before.get(key):
                yield (
                    f"{key}={before.get(key)} of parameter group {number} and so without the state that {key}={now[key]} needs, which the "
                    "script gives"
                )


def _take(group: dict[str, Any], key: str, then: Any, given: Mapping[str, Any]) -> None:
    """Set a setting of a group to what the script gives. Of a tuple, only what has changed is set: a scheduler may move the rest."""
    if key not in given:
        group.pop(key, None)
        return
    now, present = given[key], group.get(key)
    if all(isinstance(each, tuple) and len(each) == len(now) for each in (now, then, present)):
        now = tuple(
            new if new != old else held
            for new, old, held in zip(now, then, present, strict=True)  # type: ignore[arg-type]
        )
    group[key] = now


def _free_changes(saved: Mapping[str, Any], now: Mapping[str, Any]) -> Iterator[str]:
    """Yield what has changed of the job and the model, and is taken."""
    for key, value in now["job"].items():
        if not key.startswith(LOGICAL) and key in saved["job"] and saved["job"][key] != value:
            yield f"{key} was {json.dumps(saved['job'][key])} and is {json.dumps(value)}"
    for names, others, change in (
        (now["frozen"], saved["frozen"], "is frozen and was not"),
        (saved["frozen"], now["frozen"], "was frozen and is not"),
    ):
        if odd := [name for name in names if name not in set(others)]:
            more = f", with {len(odd) - 1} others," if odd[1:] else ""
            yield f"the parameter {odd[0]!r}{more} {change}"


def _group_gaps(saved: Mapping[str, Any], now: Mapping[str, Any]) -> Iterator[tuple[int, str, Any, Any]]:
    """Yield the settings of groups that have changed: number of the group, key, and both values."""
    for number, groups in enumerate(zip(saved["groups"], now["groups"], strict=False)):
        before, after = (decode(group["settings"], {}) for group in groups)
        for key in sorted(before.keys() | after.keys()):
            then, given = before.get(key, NOT_SET), after.get(key, NOT_SET)
            if then != given:
                yield number, key, then, given


def _scheduler_gaps(saved: Mapping[str, Any], now: Mapping[str, Any]) -> Iterator[tuple[str, Any]]:
    """Yield the arguments of the scheduler that have changed: a description of what was saved, and what there is now."""
    then, given = (dict(decode(each["scheduler"]["state"], {})) if each["scheduler"] else {} for each in (saved, now))
    for key, value in given.items():
        if key in then and then[key] != value:
            yield f"{key}={then[key]} of {now['scheduler']['class']}", value


def _fields_of(job: Job) -> Iterator[tuple[str, Any]]:
    """Yield the settings of a job that decide its steps beside the plan, by dotted key, as JSON."""
    for key in (*LOGICAL, *FREE):
        section, _, name = key.partition(".")
        value = getattr(getattr(job, section), name) if name else getattr(job, section)
        if key in ("schedule", "gradient", "validation"):
            yield from ((f"{key}.{each}", _json(item)) for each, item in dataclasses.asdict(value).items())
        else:
            yield key, _json(value)


def _json(value: Any) -> Any:
    value = dataclasses.asdict(value) if dataclasses.is_dataclass(value) and not isinstance(value, type) else value
    return json.loads(json.dumps(value))


def _settings_of(group: Mapping[str, Any]) -> dict[str, Any]:
    return {
        key: value.detach().clone() if isinstance(value, Tensor) else value
        for key, value in group.items()
        if key != "params"
    }


def _plain(settings: Mapping[str, Any]) -> dict[str, Any]:
    """Return settings with numbers in place of tensors, so that they can be compared. Tensors of a count have no values."""
    return {key: value.tolist() if type(value) is Tensor else value for key, value in settings.items()}


def _state_of(scheduler: LRScheduler) -> Any:
    return encode("schedule.scheduler", scheduler.state_dict(), {})


def _class_of(value: object) -> str:
    """Return the class of a value with its library, but not the module, in which a version of the library may have it elsewhere."""
    library = type(value).__module__.partition(".")[0]
    return f"{type(value).__qualname__} of {'the script' if library == '__main__' else library}"


def _listed(changes: Sequence[str]) -> str:
    more = [f"and {len(changes) - MOST_NAMED} more"] if len(changes) > MOST_NAMED else []
    return "; ".join([*changes[:MOST_NAMED], *more])


def _parts_of(record: Mapping[str, Any]) -> str:
    names = record.get("parts")
    return f"the parts {', '.join(names)} of other packages" if names else "no part of another package"


def _counted(count: int) -> str:
    return f"{count} parameter group{'' if count == 1 else 's'}"


Arithmetic = Mapping[str, str]
"""Properties by name."""


STATE = "arithmetic"
"""Name under which the state of a run records the properties of the group that computed it."""


CPU_INFO = Path("/proc/cpuinfo")


VARIABLES = ("MKL_", "ATEN_CPU_CAPABILITY", "DNNL_MAX_CPU_ISA", "ONEDNN_MAX_CPU_ISA", "NVIDIA_TF32_OVERRIDE")
"""Beginnings of the names of environment variables that choose kernels."""


def arithmetic_of(
    device: torch.device, compiled: str | None = None, is_offloaded: bool = False, gathered: str | None = None
) -> Arithmetic:
    """Return the properties of this process.

    Args:
        device: Device on which it trains.
        compiled: Parts of the model that torch compiles; None for none.
        is_offloaded: Whether the state of the optimizer is in host memory.
        gathered: Format in which parameters are gathered; None for their own.
    """
    properties = {
        "torch": str(torch.__version__),
        "the CPU": f"{_cpu()} ({torch.backends.cpu.get_cpu_capability()})",
        "the number of threads": str(torch.get_num_threads()),
        **{name: value for name, value in sorted(os.environ.items()) if name.startswith(VARIABLES)},
    }
    if compiled:
        properties["what torch compiles"] = compiled
    if is_offloaded:
        properties["what computes on the CPU"] = "the optimizer"
    if gathered:
        properties["the format of gathered parameters"] = gathered
    if device.type == "cuda":
        properties["the GPU"] = torch.cuda.get_device_name(device)
    return properties


def difference(known: Sequence[Arithmetic], places: tuple[str, str] = ("for one worker", "for another")) -> str | None:
    """Return the first property in which processes or groups differ, with two of its values; None if all are equal.

    Args:
        known: Properties of the processes or groups.
        places: Description of the first one and of the others.
    """
    first, *others = known
    for other in others:
        for name in [*first, *(name for name in other if name not in first)]:
            if first.get(name) != other.get(name):
                mine, others_own = first.get(name, "not set"), other.get(name, "not set")
                return f"{name} is {mine} {places[0]} and {others_own} {places[1]}"
    return None


def _cpu() -> str:
    try:
        model = re.search(r"^model name\s*:\s*(.*)$", CPU_INFO.read_text(), re.MULTILINE)
    except OSError:  # not on Linux
        model = None
    return model[1] if model else "unknown"
