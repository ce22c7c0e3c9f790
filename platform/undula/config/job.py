"""Spec of a training job, which is composed of the dataclasses of other packages. Jobs are loaded from YAML, printed, and compared."""

import dataclasses
import json
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cache
from pathlib import Path
from typing import Annotated, Any

from annotated_types import MinLen
from pydantic import TypeAdapter
from pydantic.dataclasses import dataclass as checked_dataclass

from undula.config.secrets import hide_secrets, same_value
from undula.config.yaml_file import Setting, flatten, load_file, validated
from undula.elastic.pure.spec import HorovodSpec, WorkersSpec
from undula.errors import STRICT, SpecError
from undula.masking.values import holds_declared
from undula.state.defaults import DEFAULT_RUNS, RUNS_VARIABLE, default_runs
from undula.telemetry.registry import TrackersSpec
from undula.train.job import JobSettings

LOGICAL = ("plan.", "precision.", "schedule.", "gradient.", "deterministic", "config.")
"""Keys that define the logical run. They cannot change when a run resumes."""


@checked_dataclass(frozen=True, config=STRICT)
class JobSpec(JobSettings):
    """A training job. `undula run JOB.yaml --print` shows every value with its origin."""

    runs: Annotated[str, MinLen(1)] = DEFAULT_RUNS
    """Path or s3:// URL of the folder that holds the run directories. All nodes must reach it."""
    workers: WorkersSpec = field(default_factory=WorkersSpec)
    """Number of workers, and the resources of each."""
    horovod: HorovodSpec = field(default_factory=HorovodSpec)
    """Settings of Horovod, for `engine: horovod`."""
    trackers: TrackersSpec = field(default_factory=TrackersSpec)
    """Experiment trackers that show the run beside TensorBoard. `trackers: {mlflow: {}}` uses MLflow with its defaults."""
    config: dict[str, Any] = field(default_factory=dict)
    """Settings of the script, which it reads from `run.config`."""

    def __post_init__(self) -> None:
        """Check values that must fit each other. The message of each error begins with the key that it is about."""
        if self.workers.max > self.plan.virtual_workers:
            raise ValueError(
                f"workers.max is {self.workers.max}, more than plan.virtual_workers ({self.plan.virtual_workers}), and a worker without "
                "a virtual worker has nothing to do; lower workers.max or raise plan.virtual_workers"
            )
        super().__post_init__()

    @property
    def run_url(self) -> str:
        """Path or URL of the run directory."""
        return f"{self.runs.rstrip('/')}/{self.name}"

    @property
    def buckets(self) -> list[str]:
        """S3 buckets that the job reads and writes."""
        urls = [self.run_url, *(part.url for part in self.data.mix or ()), self.data.train, self.data.validation]
        return [url.removeprefix("s3://").partition("/")[0] for url in urls if url and url.startswith("s3://")]


@dataclass(frozen=True)
class LoadedSpec:
    """JobSpec with the origins of its values."""

    spec: JobSpec
    config: Any
    """Settings of the script: an instance of the dataclass that the script declares, or a mapping if it declares none."""
    origins: Mapping[str, str]
    """Origin of each given value by dotted key: "job.yaml:12" or "command line"."""
    variables: Mapping[str, str] = field(default_factory=dict)
    """Environment variables to which values refer as ${env:NAME}. The job's processes need them, to mask their values."""

    def origin(self, key: str) -> str:
        """Return the origin of a dotted key's value, or else of the first given value below that key, for messages."""
        below = (origin for given, origin in self.origins.items() if given.startswith(f"{key}."))
        return self.origins.get(key) or next(below, "default")

    def with_workers(self, workers: WorkersSpec) -> "LoadedSpec":
        """Return the job with other workers. The origins stay the same."""
        return replace(self, spec=replace(self.spec, workers=workers))

    def tree(self) -> dict[str, Any]:
        """Return the resolved spec as plain dicts, lists and scalars, with the defaults of the script's settings. Secrets are hidden."""
        tree = as_tree(self.spec)
        if dataclasses.is_dataclass(self.config):
            tree["config"] = as_tree(self.config)
        return hide_secrets(tree)

    def to_yaml(self) -> str:
        """Return the resolved spec as YAML, with the origin of each value in a comment."""
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
    settings: Callable[[Mapping[str, Any]], Mapping[str, Setting]] = lambda _tree: {},
) -> LoadedSpec:
    """Load a job from its YAML file, with overrides on top.

    Args:
        file: YAML of a JobSpec.
        overrides: Overrides as `key.sub=value`, with the value written as in YAML.
        config_type: Dataclass of the script's settings. Without it, `config` remains a mapping.
        origin: Callback that returns the origin of an override from its key, for messages.
        settings: Callback that returns settings of the script itself by dotted key, given the tree of the file with its overrides.

    Raises:
        SpecError: The file is not a valid job. The message names the file and line, the key, the value, and the accepted values.
    """
    sections = {"config": config_type} if config_type else {}
    spec, where = load_file(
        JobSpec, file, overrides, "a job's YAML", "name, data", origin, _fix_of_unknown_key, settings, sections
    )
    if "runs" not in where.origins and default_runs() != DEFAULT_RUNS:
        spec, where = (
            replace(spec, runs=default_runs()),
            replace(where, origins={**where.origins, "runs": RUNS_VARIABLE}),
        )
    config: Any = _namespace(spec.config)
    if config_type is not None:
        config = validated(config_type, spec.config, ("config",), where)
    places = {
        "name": spec.name,
        "runs": spec.runs,
        "data.train": spec.data.train,
        "data.validation": spec.data.validation,
    }
    for key, value in {**places, "data.mix": " ".join(part.url for part in spec.data.mix or ())}.items():
        if value and holds_declared(value):
            raise SpecError(
                f"{where(key.split('.'))}: {key} has the value of a secret in it, and every record of the run shows it; give the variable "
                "with --env in place of --secret"
            )
    return LoadedSpec(spec, config, where.origins, where.variables)


def _fix_of_unknown_key(tree: Mapping[str, Any], key: str) -> str | None:
    """Return the fix for a file that is a study's YAML, or for the usual name of a setting that a job divides in two; otherwise None."""
    if "job" in tree and "batches" in tree:
        return "this is a study's YAML; start it with `undula study`"
    if key in ("batch_size", "plan.batch_size"):
        return "set plan.global_batch, the samples of a step on all workers, and plan.micro_batch, those that a worker computes at once"
    return None


def changed_key(
    before: Mapping[str, Any], now: Mapping[str, Any], among: Collection[str] | None = None
) -> tuple[str, Any, Any] | None:
    """Return the first key of the logical run whose value differs between two resolved jobs, and both values; None if none differs.

    Secrets are compared by their digests. Jobs of former versions lack keys, which have the value by which these versions trained.

    Args:
        before, now: The jobs as trees.
        among: Keys that are compared; None for all.
    """
    old, new = ({**_defaults(), **dict(flatten(hide_secrets(tree)))} for tree in (before, now))
    for key in sorted(old.keys() | new.keys() if among is None else among):
        if key.startswith(LOGICAL) and not same_value(old.get(key), new.get(key)):
            return key, old.get(key), new.get(key)
    return None


def as_overrides(values: Mapping[str, Any]) -> list[str]:
    """Return overrides that set values by dotted key."""
    return [f"{key}={json.dumps(value)}" for key, value in values.items()]


def json_schema(of: type = JobSpec) -> dict[str, Any]:
    """Return the JSON schema of a job's YAML, or of the YAML of another spec, for editors."""
    schema = TypeAdapter(of).json_schema()
    for base in of.__mro__:  # pydantic reads docstrings of the class itself only
        for name, key in getattr(base, "__pydantic_fields__", {}).items():
            if key.description:
                schema["properties"][name].setdefault("description", key.description)
    return {"$schema": "https://json-schema.org/draft/2020-12/schema", **schema}


def as_tree(spec: Any) -> dict[str, Any]:
    """Return a spec as plain dicts, lists and scalars."""
    return json.loads(TypeAdapter(type(spec)).dump_json(spec))  # type: ignore[no-any-return]


@cache
def _defaults() -> dict[str, Any]:
    """Return the default of each key by dotted key, as JSON."""
    return dict(flatten(as_tree(JobSpec("defaults"))))


class Namespace(dict[str, Any]):
    """Mapping whose keys can be read as attributes, as in `run.config.model.width`."""

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
    """Return the absolute path of a job's script: the given one, or else the file beside the job's YAML with the same name.

    Raises:
        SpecError: There is no such file.
    """
    script = given or job.with_suffix(".py")
    if not script.is_file():
        raise SpecError(
            f"there is no script {script}; give one with --script, or put it beside {job} under the same name"
        )
    return script.absolute()


def absolute_paths(spec: JobSpec) -> list[str]:
    """Return overrides that make a job's relative paths absolute, because the job runs in another working directory.

    The folder of the runs is always among them if it is not the usual one, because the cluster may have another UNDULA_RUNS.
    """
    paths = {"runs": spec.runs, "data.train": spec.data.train, "data.validation": spec.data.validation}
    keeps = {key for key, path in paths.items() if path and path != _absolute(path)}
    keeps |= {"runs"} if spec.runs != DEFAULT_RUNS else set()
    given = as_overrides({key: _absolute(path) for key, path in paths.items() if path and key in keeps})
    mix = [{"url": _absolute(part.url), "weight": part.weight} for part in spec.data.mix or ()]
    return [*given, f"data.mix={json.dumps(mix)}"] if mix else given


def _absolute(path: str) -> str:
    return path if path.startswith(("/", "~", "s3://")) else str(Path(path).absolute())
