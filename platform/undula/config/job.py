"""JobSpec and LoadedStudy: one YAML for a job or a study, with overrides, checked whole; each value knows where it came from.

The parts belong to the packages that use them; this module only composes, loads and reports.
"""

import dataclasses
import json
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Annotated, Any

from annotated_types import MinLen
from pydantic import StringConstraints, TypeAdapter
from pydantic.dataclasses import dataclass as checked_dataclass

from undula.config.yaml_file import flatten, load_file, refuse_unknown_keys, validated
from undula.data.spec import DataSpec
from undula.elastic.pure.spec import HorovodSpec, WorkersSpec
from undula.errors import SpecError
from undula.parallel.spec import EngineName, GradientSpec
from undula.plan.plan import STRICT, PlanSpec
from undula.plan.schedule import ScheduleSpec
from undula.state.spec import CheckpointSpec
from undula.train.job import Job, ValidationSpec

LOGICAL = ("plan.", "schedule.", "gradient.", "deterministic", "config.")
"""Keys that make the logical run: they cannot change while it is under way."""
Name = Annotated[str, StringConstraints(pattern=r"^[A-Za-z0-9][A-Za-z0-9._-]*$")]


@checked_dataclass(frozen=True, config=STRICT)
class JobSpec:
    """A training job. `undula run JOB.yaml --print` shows every value and where it came from."""

    name: Name
    """Names the run directory below `runs`. The same name goes on where the run stood."""
    data: DataSpec
    """What the job reads."""
    runs: Annotated[str, MinLen(1)] = "~/undula/runs"
    """Path or s3:// URL that holds the run directories; all nodes must reach it."""
    engine: EngineName = "torch"
    """What reduces the gradients: torch DistributedDataParallel, or Horovod, which `undula build-horovod` installs."""
    plan: PlanSpec = field(default_factory=PlanSpec)
    """What each step consumes."""
    schedule: ScheduleSpec = field(default_factory=ScheduleSpec)
    """How the learning rate moves."""
    gradient: GradientSpec = field(default_factory=GradientSpec)
    """What happens to the gradient before the optimizer sees it."""
    validation: ValidationSpec = field(default_factory=ValidationSpec)
    """When and on how much the job validates."""
    checkpoint: CheckpointSpec = field(default_factory=CheckpointSpec)
    """When checkpoints are taken and how many are kept."""
    deterministic: bool = False
    """Bit for bit the same weights after every step at any sequence of world sizes, on nodes with one kind of CPU or GPU: gradients are
    summed exactly, and torch may use deterministic algorithms alone. Costs 16 bytes a parameter, and time."""
    workers: WorkersSpec = field(default_factory=WorkersSpec)
    """How many workers, and what each needs."""
    horovod: HorovodSpec = field(default_factory=HorovodSpec)
    """How Horovod's ranks find each other and pass on what they have, with `engine: horovod`."""
    config: dict[str, Any] = field(default_factory=dict)
    """The job's own settings: the script reads them as run.config."""

    def __post_init__(self) -> None:
        if self.workers.max > self.plan.virtual_workers:
            raise ValueError(
                f"workers.max is {self.workers.max}, more than plan.virtual_workers ({self.plan.virtual_workers}): "
                "a worker without a virtual worker has nothing to do; raise one or lower the other"
            )
        for key, value in (("reduce", self.gradient.reduce), ("compression", self.gradient.compression)):
            if self.deterministic and value in ("adasum", "fp16"):
                raise ValueError(
                    f"gradient.{key} is {value}, which deterministic: true does not have: leave out one of them"
                )
        if self.gradient.reduce == "adasum" and self.gradient.compression != "none":
            raise ValueError("gradient.compression is fp16, which Adasum does not have: leave out one of them")
        if self.gradient.noise_every_steps or self.schedule.is_measured(self.plan):
            self._check_measured()

    def _check_measured(self) -> None:
        """The gradient noise scale shows in how micro-batches' gradients differ from their mean."""
        is_ruled = self.schedule.is_measured(self.plan)
        key, value = (
            ("schedule.batch_rule", self.schedule.batch_rule) if is_ruled else ("gradient.noise_every_steps", "given")
        )
        if self.gradient.reduce == "adasum":
            raise ValueError(
                f"{key} is {value}, which takes a mean of gradients, and Adasum is none: leave out one of them"
            )
        if (
            self.plan.virtual_workers == 1
            and (self.plan.micro_batch or self.plan.global_batch) >= self.plan.global_batch
        ):
            raise ValueError(
                f"{key} is {value}, which takes two micro-batches or more, and a step is one: raise plan.virtual_workers, or lower "
                "plan.micro_batch"
            )

    @property
    def run_url(self) -> str:
        return f"{self.runs.rstrip('/')}/{self.name}"


@dataclass(frozen=True)
class LoadedSpec:
    """A JobSpec with the origin of each value: `path.to.key` -> "job.yaml:12", "command line" or "default"."""

    spec: JobSpec
    config: Any
    """`spec.config`, as the script's own type where it declares one."""
    origins: Mapping[str, str]

    def origin(self, key: str) -> str:
        """The origin of a dotted key's value, for messages."""
        return self.origins.get(key, "default")

    def job(self) -> Job:
        """The part of the spec that the workers need."""
        spec = self.spec
        return Job(
            name=spec.name,
            run_url=spec.run_url,
            data=spec.data,
            plan=spec.plan,
            schedule=spec.schedule,
            gradient=spec.gradient,
            validation=spec.validation,
            checkpoint=spec.checkpoint,
            deterministic=spec.deterministic,
            config=self.config,
            engine=spec.engine,
        )

    def tree(self) -> dict[str, Any]:
        """The resolved spec as plain dicts, lists and scalars, the script's own defaults included, secrets hidden."""
        tree = as_tree(self.spec)
        if dataclasses.is_dataclass(self.config):
            tree["config"] = as_tree(self.config)
        return hide_secrets(tree)

    def to_yaml(self) -> str:
        """The resolved spec as YAML, each value with its origin in a comment."""
        rows = [(key, json.dumps(value), self.origin(key)) for key, value in flatten(self.tree())]
        lines: list[str] = []
        shown: tuple[str, ...] = ()
        for key, text, origin in rows:
            *parents, leaf = key.split(".")
            for depth, parent in enumerate(parents):
                if shown[: depth + 1] != tuple(parents[: depth + 1]):
                    lines.append(f"{'  ' * depth}{parent}:")
            shown = tuple(parents)
            lines.append(f"{'  ' * len(parents) + leaf}: {text}".ljust(56) + f"  # {origin}")
        return "\n".join(lines) + "\n"


def load_spec(
    file: Path,
    overrides: Sequence[str] = (),
    config_type: type | None = None,
    origin: Callable[[str], str] = lambda _key: "command line",
) -> LoadedSpec:
    """The job in a YAML file, with `key.sub=value` overrides on top.

    Args:
        file: YAML of a JobSpec.
        overrides: `key.sub=value`, the value written as in YAML.
        config_type: dataclass of the script's own settings; `config` stays a mapping without it.
        origin: of an override with such a key, for messages.

    Raises:
        SpecError: one sentence with the file and line, the key, what was given and what is accepted.
    """
    spec, where = load_file(JobSpec, file, overrides, "a job's YAML", "name, data", origin, _mend_of_job)
    config: Any = _namespace(spec.config)
    if config_type is not None:
        refuse_unknown_keys(spec.config, config_type, ("config",), where)
        config = validated(config_type, spec.config, ("config",), where)
    return LoadedSpec(spec, config, where.origins)


def _mend_of_job(tree: Mapping[str, Any], key: str) -> str | None:
    """What to do about a key that a job does not have."""
    if "job" in tree and "batches" in tree:
        return "this is a study's YAML, which `undula study` trains"
    return None


def changed_key(before: Mapping[str, Any], now: Mapping[str, Any]) -> tuple[str, Any, Any] | None:
    """The first key of the logical run whose value differs between two resolved jobs, with both values."""
    old, new = dict(flatten(before)), dict(flatten(now))
    for key in sorted(old.keys() | new.keys()):
        if key.startswith(LOGICAL) and old.get(key) != new.get(key):
            return key, old.get(key), new.get(key)
    return None


def as_overrides(values: Mapping[str, Any]) -> list[str]:
    """`key.sub=value` for each value by dotted key."""
    return [f"{key}={json.dumps(value)}" for key, value in values.items()]


def json_schema(of: type = JobSpec) -> dict[str, Any]:
    """JSON schema of a job's YAML, or of a study's (StudySpec), for editors."""
    schema = TypeAdapter(of).json_schema()
    return {"$schema": "https://json-schema.org/draft/2020-12/schema", **schema}


def as_tree(spec: Any) -> dict[str, Any]:
    """A spec as plain dicts, lists and scalars."""
    return json.loads(TypeAdapter(type(spec)).dump_json(spec))  # type: ignore[no-any-return]


def hide_secrets(tree: Mapping[str, Any]) -> dict[str, Any]:
    """A tree without the texts whose keys name a secret."""
    shown: dict[str, Any] = {}
    for key, value in tree.items():
        is_secret = isinstance(value, str) and _SECRET_KEY.search(str(key))
        shown[str(key)] = "(hidden)" if is_secret else hide_secrets(value) if isinstance(value, Mapping) else value
    return shown


_SECRET_KEY = re.compile(r"(^|_)(password|passwd|secret|token|credentials?|(api|access|private)_?key)$", re.IGNORECASE)


class Namespace(dict[str, Any]):
    """A mapping whose keys read as attributes: `run.config.model.width`."""

    def __getattr__(self, name: str) -> Any:
        try:
            return self[name]
        except KeyError:
            raise AttributeError(f"config has no key {name!r}; it has {', '.join(self) or 'none'}") from None


def _namespace(value: Any) -> Any:
    if isinstance(value, Mapping):
        return Namespace({key: _namespace(item) for key, item in value.items()})
    return value


def script_of(job: Path, given: Path | None = None) -> Path:
    """The script of a job's YAML: beside it, with its name, where none is given; SpecError where there is none."""
    script = given or job.with_suffix(".py")
    if not script.is_file():
        raise SpecError(f"there is no script {script}: give it with --script, or lay it beside {job} with its name")
    return script.absolute()


def absolute_paths(spec: JobSpec) -> list[str]:
    """Overrides that make relative paths absolute: the job runs in another directory than this one."""
    paths = {"runs": spec.runs, "data.train": spec.data.train, "data.validation": spec.data.validation}
    given = [f"{key}={_absolute(path)}" for key, path in paths.items() if path is not None and path != _absolute(path)]
    mix = [{"url": _absolute(part.url), "weight": part.weight} for part in spec.data.mix or ()]
    return [*given, f"data.mix={json.dumps(mix)}"] if mix else given


def _absolute(path: str) -> str:
    return path if path.startswith(("/", "~", "s3://")) else str(Path(path).absolute())
