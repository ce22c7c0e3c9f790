"""JobSpec and LoadedStudy: one YAML for a job or a study, with overrides, checked whole; each value knows where it came from.

The parts belong to the packages that use them; this module only composes, loads and reports.
"""

import dataclasses
import difflib
import json
import re
import typing
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Annotated, Any

import yaml
from annotated_types import MinLen
from pydantic import StringConstraints, TypeAdapter, ValidationError
from pydantic.dataclasses import dataclass as checked_dataclass
from pydantic_core import ErrorDetails

from undula.data.spec import DataSpec
from undula.elastic.spec import HorovodSpec, WorkersSpec
from undula.errors import SpecError
from undula.plan.plan import STRICT, PlanSpec
from undula.plan.schedule import ScheduleSpec
from undula.run.job import EngineName, GradientSpec, Job, ValidationSpec
from undula.state.spec import CheckpointSpec
from undula.study.spec import StudySpec

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

    def job(self) -> Job:
        """What the workers need of the spec."""
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
        rows = [(key, json.dumps(value), self.origins.get(key, "default")) for key, value in flatten(self.tree())]
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


@dataclass(frozen=True)
class LoadedStudy:
    """A study, and the job that it trains, with the origin of each value of the study."""

    spec: StudySpec
    job: LoadedSpec
    origins: Mapping[str, str]


def load_spec(file: Path, overrides: Sequence[str] = (), config_type: type | None = None) -> LoadedSpec:
    """The job in a YAML file, with `key.sub=value` overrides on top.

    Args:
        file: YAML of a JobSpec.
        overrides: `key.sub=value`, the value written as in YAML.
        config_type: dataclass of the script's own settings; `config` stays a mapping without it.

    Raises:
        SpecError: one sentence with the file and line, the key, what was given and what is accepted.
    """
    spec, where = _load(JobSpec, file, overrides, "a job's YAML", "name, data")
    config: Any = _namespace(spec.config)
    if config_type is not None:
        _refuse_unknown_keys(spec.config, config_type, ("config",), where)
        config = _validated(config_type, spec.config, ("config",), where)
    return LoadedSpec(spec, config, where.origins)


def load_study(file: Path, overrides: Sequence[str] = ()) -> LoadedStudy:
    """The study in a YAML file, with `key.sub=value` overrides on top, and its job.

    Raises:
        SpecError: one sentence, as of `load_spec`, about the study or about its job.
    """
    spec, where = _load(StudySpec, file, overrides, "a study's YAML", "name, job, batches")
    job_file = file.parent / spec.job
    if not job_file.is_file():
        raise SpecError(
            f"{where(['job'])}: job is {json.dumps(spec.job)}, and there is no file {job_file}: give a job's YAML"
        )
    job = load_spec(job_file)
    virtual_workers = job.spec.plan.virtual_workers
    for batch in spec.batches:
        if batch % virtual_workers:
            raise SpecError(
                f"{where(['batches'])}: batches has {batch}, which plan.virtual_workers ({virtual_workers}) of {job_file} "
                "does not divide: give multiples of it"
            )
    return LoadedStudy(spec, job, where.origins)


def _load(owner: Any, file: Path, overrides: Sequence[str], what: str, keys: str) -> tuple[Any, "_Where"]:
    tree, origins = _read_yaml(file, what, keys)
    for override in overrides:
        _apply_override(tree, origins, override)
    where = _Where(file, origins)
    _refuse_unknown_keys(tree, owner, (), where)
    return _validated(owner, tree, (), where), where


def json_schema() -> dict[str, Any]:
    """JSON schema of a job's YAML, for editors."""
    schema = TypeAdapter(JobSpec).json_schema()
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


def flatten(tree: Mapping[str, Any], prefix: str = "") -> list[tuple[str, Any]]:
    """[("plan.seed", 0), ...]: the leaves of a tree by dotted key; an empty mapping is a leaf."""
    leaves = []
    for key, value in tree.items():
        if isinstance(value, Mapping) and value:
            leaves += flatten(value, f"{prefix}{key}.")
        else:
            leaves.append((f"{prefix}{key}", value))
    return leaves


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


class _Yaml12Loader(yaml.SafeLoader):
    """SafeLoader that reads 3e-4 as a number, as YAML 1.2 does and PyYAML's 1.1 does not."""


_Yaml12Loader.add_implicit_resolver(
    "tag:yaml.org,2002:float", re.compile(r"^[-+]?(\d+(\.\d*)?|\.\d+)[eE][-+]?\d+$"), list("-+0123456789.")
)


def _read_yaml(file: Path, what: str, keys: str) -> tuple[dict[str, Any], dict[str, str]]:
    try:
        text = file.read_text(encoding="utf-8")
        root = yaml.compose(text, Loader=_Yaml12Loader)
        tree = yaml.load(text, Loader=_Yaml12Loader)
    except OSError as error:
        raise SpecError(f"cannot read {file}: {error.strerror}") from error
    except UnicodeDecodeError as error:
        raise SpecError(f"{file} is not UTF-8 text: give {what}") from error
    except yaml.YAMLError as error:
        raise SpecError(f"{file} is not YAML: {' '.join(str(error).split())}") from error
    if tree is None:
        raise SpecError(f"{file} is empty: {what} is a mapping with the keys {keys}, ...")
    if not isinstance(tree, dict) or not isinstance(root, yaml.MappingNode):
        raise SpecError(f"{file} holds {type(tree).__name__}: {what} is a mapping with the keys {keys}, ...")
    try:
        return tree, dict(_origins(root, file, ""))
    except RecursionError:
        raise SpecError(f"{file} has an anchor that holds itself: {what} is a tree") from None


def _origins(node: yaml.MappingNode, file: Path, prefix: str) -> list[tuple[str, str]]:
    found = []
    given: set[str] = set()
    for key, value in node.value:
        path = f"{prefix}{key.value}"
        if path in given:
            raise SpecError(f"{file}:{key.start_mark.line + 1}: {path} is given twice: keep one")
        given.add(path)
        found.append((path, f"{file}:{key.start_mark.line + 1}"))
        if isinstance(value, yaml.MappingNode):
            found += _origins(value, file, f"{path}.")
    return found


def _apply_override(tree: dict[str, Any], origins: dict[str, str], override: str) -> None:
    key, equals, text = override.partition("=")
    if not equals or not re.fullmatch(r"\w+(\.\w+)*", key):
        raise SpecError(f"command line: {override!r} is not an override: write key.sub=value")
    try:
        value = yaml.load(text, Loader=_Yaml12Loader)
    except yaml.YAMLError:
        raise SpecError(f"command line: the value of {key} is not YAML: {text!r}") from None
    *parents, leaf = key.split(".")
    branch = tree
    for depth, parent in enumerate(parents):
        branch = branch.setdefault(parent, {})
        if not isinstance(branch, dict):
            raise SpecError(f"command line: {key} cannot be set: {'.'.join(parents[: depth + 1])} is {branch!r}")
    branch[leaf] = value
    for path in [path for path in origins if path.startswith(f"{key}.")]:
        del origins[path]
    origins[key] = "command line"
    for path, _ in flatten(value, f"{key}.") if isinstance(value, dict) else []:
        origins[path] = "command line"


@dataclass(frozen=True)
class _Where:
    file: Path
    origins: Mapping[str, str]

    def __call__(self, path: Sequence[str]) -> str:
        """Where a key was given, or the nearest key above it."""
        for length in range(len(path), 0, -1):
            if origin := self.origins.get(".".join(path[:length])):
                return origin
        return str(self.file)


def _refuse_unknown_keys(tree: Any, owner: Any, path: tuple[str, ...], where: _Where) -> None:
    if not (isinstance(tree, Mapping) and dataclasses.is_dataclass(owner)):
        return
    known = typing.get_type_hints(owner)
    for key, value in tree.items():
        here = (*path, str(key))
        if key not in known:
            close = difflib.get_close_matches(str(key), known, n=1, cutoff=0.5)
            mend = f"did you mean {close[0]}?" if close else f"known here: {', '.join(sorted(known))}"
            raise SpecError(f"{where(here)}: unknown key {'.'.join(here)}: {mend}")
        for part in _dataclasses_in(known[key]):
            for item in value if isinstance(value, list) else [value]:
                _refuse_unknown_keys(item, part, here, where)


def _dataclasses_in(annotation: Any) -> list[Any]:
    """The dataclasses that a value of this type may hold: `Layer | None` and `tuple[Layer, ...]` hold Layer."""
    if dataclasses.is_dataclass(annotation):
        return [annotation]
    return [found for part in typing.get_args(annotation) for found in _dataclasses_in(part)]


def _validated(owner: Any, tree: Any, path: tuple[str, ...], where: _Where) -> Any:
    try:
        text = json.dumps(tree)
    except (TypeError, ValueError):
        odd = next((key for key, value in flatten(tree) if not _is_json(value)), "a key")
        raise SpecError(
            f"{where(odd.split('.'))}: {odd} is not text, a number, a list or a mapping: quote it"
        ) from None
    try:
        return TypeAdapter(owner).validate_json(text, strict=True)
    except ValidationError as error:
        first, *others = error.errors(include_url=False)
        more = f" (and {len(others)} more)" if others else ""
        raise SpecError(_sentence(first, path, where) + more) from None


def _is_json(value: Any) -> bool:
    try:
        json.dumps(value)
    except (TypeError, ValueError):
        return False
    return True


def _sentence(error: ErrorDetails, path: tuple[str, ...], where: _Where) -> str:
    here = (*path, *(str(part) for part in error["loc"] if not str(part).startswith(("function-", "constrained-"))))
    if error["type"] == "value_error":
        message = error["msg"].removeprefix("Value error, ")  # begins with the key it is about
        about = (*here, *(message.split() or ["nothing"])[0].split("."))
        return f"{where(about)}: {''.join(f'{part}.' for part in here)}{message}"
    if error["type"].startswith("missing"):
        return f"{where(here[:-1])}: {'.'.join(here)} is missing: it must be given"
    accepted = error["msg"].replace("Input should be", "it should be").replace("String should", "it should")
    accepted = accepted.replace("an object", "a mapping")
    return f"{where(here)}: {'.'.join(here)} is {json.dumps(error['input'])}: {accepted}"


def absolute_paths(spec: JobSpec) -> list[str]:
    """Overrides that make relative paths absolute: the job runs in another directory than this one."""
    paths = {"runs": spec.runs, "data.train": spec.data.train, "data.validation": spec.data.validation}
    given = [f"{key}={_absolute(path)}" for key, path in paths.items() if path is not None and path != _absolute(path)]
    mix = [{"url": _absolute(part.url), "weight": part.weight} for part in spec.data.mix or ()]
    return [*given, f"data.mix={json.dumps(mix)}"] if mix else given


def _absolute(path: str) -> str:
    return path if path.startswith(("/", "~", "s3://")) else str(Path(path).absolute())
