"""Tests of a job's YAML: values are read correctly, and mistakes are refused in one sentence with the place, the key and the fix."""

from collections.abc import Callable
from dataclasses import dataclass, field, replace
from pathlib import Path

import jsonschema
import pytest

from undula.config.job import JobSpec, LoadedSpec, absolute_paths, as_tree, changed_key, json_schema, load_spec
from undula.config.yaml_file import flatten
from undula.driver.record import job_of
from undula.errors import SpecError

JOB = """\
name: job
data:
  train: /data/train
"""


@dataclass(frozen=True)
class Model:
    width: int = 64
    dropout: float = 0.0


@dataclass(frozen=True)
class Config:
    """Settings of a script."""

    rate: float
    model: Model = field(default_factory=Model)
    names: tuple[str, ...] = ()

    def __post_init__(self) -> None:
        if self.rate < 0:
            raise ValueError(f"rate is {self.rate}: give 0 or more")


@pytest.fixture
def file(tmp_path: Path) -> Path:
    return tmp_path / "job.yaml"


@pytest.fixture
def load(file: Path) -> Callable[..., LoadedSpec]:
    """Return a function that loads JOB with additional YAML at its end."""

    def loaded(more: str = "", *overrides: str, config_type: type | None = None) -> LoadedSpec:
        file.write_text(JOB + more)
        return load_spec(file, overrides, config_type)

    return loaded


@pytest.fixture
def refused(file: Path) -> Callable[..., str]:
    """Return a function that returns the message with which YAML is refused, without the folder of the file."""

    def sentence(text: str, *overrides: str, config_type: type | None = None) -> str:
        file.write_text(text)
        with pytest.raises(SpecError) as caught:
            load_spec(file, overrides, config_type)
        assert "\n" not in str(caught.value)
        return str(caught.value).replace(f"{file.parent}/", "")

    return sentence


Load = Callable[..., LoadedSpec]
Refused = Callable[..., str]


def test_missing_keys_get_their_defaults(load: Load) -> None:
    spec = load().spec
    assert spec == JobSpec(name="job", data={"train": "/data/train"})
    assert (spec.plan.global_batch, spec.plan.virtual_workers, spec.engine) == (64, 4, "torch")
    assert spec.run_url == "~/undula/runs/job"


def test_yaml_sets_values_of_every_kind(load: Load) -> None:
    spec = load(
        "plan: {global_batch: 128, shuffle: none, micro_batch: null}\n"
        "schedule: {base_lr: 0.5, decay: constant}\n"
        "workers: {gpus: 1, resources: {spot: 0.5}}\n"
        "runs: s3://bucket/runs/\n"
    ).spec
    assert (spec.plan.global_batch, spec.plan.shuffle, spec.plan.micro_batch) == (128, "none", None)
    assert (spec.schedule.base_lr, spec.schedule.decay) == (0.5, "constant")
    assert (spec.workers.gpus, spec.workers.resources) == (1.0, {"spot": 0.5})
    assert spec.run_url == "s3://bucket/runs/job"


@pytest.mark.parametrize(
    ("text", "value"), [("3e-4", 3e-4), ("1E-3", 1e-3), ("2e0", 2.0), (".5e-1", 0.05), ("1.e-2", 0.01)]
)
def test_exponents_are_numbers_as_in_yaml_1_2(load: Load, text: str, value: float) -> None:
    assert load(f"schedule: {{base_lr: {text}}}\n").spec.schedule.base_lr == value
    assert load("", f"schedule.base_lr={text}").spec.schedule.base_lr == value


def test_a_quoted_exponent_is_text(load: Load) -> None:
    assert load("config: {text: '3e-4'}\n").config.text == "3e-4"


def test_overrides_win_over_the_file_and_later_ones_over_earlier(load: Load) -> None:
    spec = load(
        "plan: {seed: 1, epochs: 2}\n", "plan.seed=2", "plan.seed=3", "data.columns=[text, label]", "name=other"
    ).spec
    assert (spec.plan.seed, spec.plan.epochs, spec.data.columns, spec.name) == (3, 2, ("text", "label"), "other")


def test_an_override_of_what_an_alias_repeats_changes_one_place(load: Load) -> None:
    config = load("config:\n  encoder: &b {width: 64}\n  decoder: *b\n", "config.encoder.width=128").config
    assert (config.encoder.width, config.decoder.width) == (128, 64)


def test_a_key_with_a_dash_can_be_overridden(load: Load) -> None:
    assert load("config: {my-key: 1}\n", "config.my-key=2").config["my-key"] == 2


def test_override_may_hold_an_equals_sign(load: Load) -> None:
    assert load("", "config.query=a=b").config.query == "a=b"


def test_each_value_has_an_origin(load: Load, file: Path) -> None:
    loaded = load("plan:\n  seed: 1\n  epochs: 2\n", "plan.epochs=3", "config.model={width: 8}")
    assert loaded.origins["name"] == f"{file}:1"
    assert loaded.origins["data.train"] == f"{file}:3"
    assert loaded.origins["plan.seed"] == f"{file}:5"
    assert loaded.origins["plan.epochs"] == "command line"
    assert loaded.origins["config.model.width"] == "command line"
    assert "plan.window" not in loaded.origins
    lines = {line.split(":")[0].strip(): line.rpartition("# ")[2] for line in loaded.to_yaml().splitlines()}
    assert (lines["seed"], lines["epochs"], lines["window"]) == (f"{file}:5", "command line", "default")


def test_printed_spec_loads_as_the_same_spec(load: Load, file: Path) -> None:
    more = "workers: {resources: {spot: 1}, hang_limit_s: 2}\nconfig: {a: {b: {c: [1, 'x: y']}}, d: null, e: 3e-4}\n"
    printed = load(more, "plan.seed=5")
    file.write_text(printed.to_yaml())
    assert load_spec(file).spec == printed.spec


@pytest.mark.parametrize(
    ("more", "overrides", "sentence"),
    [
        ("plam: {seed: 1}\n", (), "job.yaml:4: unknown key plam: did you mean plan?"),
        ("plan:\n  sede: 1\n", (), "job.yaml:5: unknown key plan.sede: did you mean seed?"),
        ("", ("plan.sede=1",), "command line: unknown key plan.sede: did you mean seed?"),
        ("", ("valdation.every_steps=3",), "command line: unknown key valdation: did you mean validation?"),
        ("checkpoint: {zzz: 1}\n", (), "job.yaml:4: unknown key checkpoint.zzz: known keys: every_steps, keep"),
        ("1: 2\n", (), "job.yaml:4: unknown key 1: known keys: "),
        ("plan: {seed: x}\n", (), 'job.yaml:4: plan.seed is "x": it should be a valid integer'),
        ("stop: {patience: 3}\n", (), "job.yaml:4: stop needs validations, but data.validation is missing; set it, or"),
        ("checkpoint: {keep_best: {}}\n", (), "job.yaml:4: checkpoint.keep_best needs validations, but data.validation"),
        ("plan: {seed: 1.0}\n", (), "job.yaml:4: plan.seed is 1.0: it should be a valid integer"),
        ("plan: {seed: '1'}\n", (), 'job.yaml:4: plan.seed is "1": it should be a valid integer'),
        ("plan: {seed: true}\n", (), "job.yaml:4: plan.seed is true: it should be a valid integer"),
        ("", ("plan.seed=a",), 'command line: plan.seed is "a": it should be a valid integer'),
        ("", ("plan.epochs=0",), "command line: plan.epochs is 0: it should be greater than 0"),
        ("", ("plan.epochs=",), "command line: plan.epochs is null: it should be a valid integer"),
        ("plan: 3\n", (), "job.yaml:4: plan is 3: it should be a mapping"),
        ("plan:\n", (), "job.yaml:4: plan is null: it should be a mapping"),
        ("", ("schedule.base_lr=0",), "command line: schedule.base_lr is 0: it should be greater than 0"),
        ("", ("schedule.base_lr=.nan",), "command line: schedule.base_lr is NaN: it should be "),
        ("engine: gloo\n", (), "job.yaml:4: engine is \"gloo\": it should be 'torch'"),
        ("plan: {shuffle: all}\n", (), "job.yaml:4: plan.shuffle is \"all\": it should be 'none', 'row_groups' or 'window'"),
        ("", ("name=a/b",), 'command line: name is "a/b": it should have only letters, digits'),
        ("", ("name=..",), 'command line: name is "..": it should have only letters, digits'),
        ("runs: ''\n", (), 'job.yaml:4: runs is "": '),
        ("", ("data.columns=text",), 'command line: data.columns is "text": it should be '),
        ("plan:\n  global_batch: 10\n", (),
         "job.yaml:5: plan.global_batch is 10, which is not a multiple of virtual_workers (4); set it to 8 or 12"),
        ("", ("plan.global_batch=10",), "command line: plan.global_batch is 10, which is not a multiple of virtual_workers (4)"),
        ("", ("workers.min=3",), "command line: workers.min is 3, which is larger than max (1); lower min or raise max"),
        ("workers: {max: 5}\n", (), "job.yaml:4: workers.max is 5, more than plan.virtual_workers (4), and"),
        ("schedule: {decay: step}\n", (),
         "job.yaml:4: schedule.decay_at is missing, but decay=step needs it; set it to fractions of the run, such as [0.5, 0.75]"),
        ("schedule: {warmup_samples: 5}\n", ("schedule.warmup_epochs=1",),
         "command line: schedule.warmup_epochs and warmup_samples both set the length of the warmup; remove one of them"),
        ("schedule: {batch_rule: surge, base_batch: 32}\n", ("plan.virtual_workers=1",),
         "job.yaml:4: schedule.batch_rule=surge needs at least two micro-batches per step, but a step has one; raise "
         "plan.virtual_workers or lower plan.micro_batch"),
        ("gradient: {noise_every_steps: 5, reduce: adasum}\n", (),
         "job.yaml:4: gradient.noise_every_steps, or a schedule.batch_rule that measures noise, cannot be combined with "
         "gradient.reduce=adasum; remove one of them"),
        ("gradient: {reduce: adasum}\n", ("gradient.compression=fp16",),
         "command line: gradient.compression cannot be combined with gradient.reduce=adasum; remove one of them"),
        ("gradient:\n  reduce: adasum\n  compression: bf16\n", (),
         "job.yaml:6: gradient.compression cannot be combined with gradient.reduce=adasum; remove one of them"),
        ("precision: {compute: fp16, loss_scale: 1000}\n", (),
         "job.yaml:4: precision.loss_scale is 1000, which is not a power of two, so that scaling would round the gradients; set it to "
         "1024 or to dynamic"),
        ("precision: {compute: bf16}\n", ("precision.loss_scale=1024",),
         "command line: precision.loss_scale is 1024, but compute is bf16, and only compute=fp16 scales the loss; remove loss_scale"),
        ("precision:\n  compute: fp8\n", (), "job.yaml:5: precision.compute is \"fp8\": it should be 'fp32', 'bf16' or 'fp16'"),
        ("", ("precision.loss_scale=auto",), 'command line: precision.loss_scale is "auto": it should be '),
        ("activations: {keep: selective, offload: true}\n", (),
         "job.yaml:4: activations.offload=true cannot be combined with keep=selective, which keeps results of operations on the device; "
         "set keep to all, none or sqrt"),
        ("activations: {units: [blocks.*]}\n", (),
         "job.yaml:4: activations.units has no effect if everything is kept; set keep or offload, or remove units"),
        ("", ("activations.keep=every_0",), 'command line: activations.keep is "every_0": it should match pattern'),
        ("activations: {keep: selective}\n", ("compile=true",),
         "job.yaml:4: activations.keep=selective cannot be combined with compile=true, which leaves no single operations to keep; set "
         "activations.keep=none, or remove one of them"),
        ("schedule: {batch_rule: legw, warmup_steps: 9}\n", ("plan.batch=elastic",),
         "job.yaml:4: schedule.batch_rule=legw makes the warmup longer by the factor of the batch, which plan.batch=elastic changes on "),
        ("config: {day: 2024-01-01}\n", (), "job.yaml:4: config.day is not text, a number, a list or a mapping; quote it"),
        ("", ("plan.batch_size=8",),
         "command line: unknown key plan.batch_size: set plan.global_batch, the samples of a step on all workers, and "
         "plan.micro_batch, those that a worker computes at once"),
        ("batch_size: 8\n", (), "job.yaml:4: unknown key batch_size: set plan.global_batch, "),
        ("", ("script=job.py",), "command line: unknown key script: give it to the command as the option --script FILE"),
        ("fresh: true\n", (), "job.yaml:4: unknown key fresh: give it to the command as the option --fresh"),
        ("", ("plan.seed",), "command line: 'plan.seed' is not an override; write key.sub=value"),
        ("config: {width: 64}", ("config.widht=8",), "command line: unknown key config.widht: did you mean width?"),
        ("", ("=1",), "command line: '=1' is not an override; write key.sub=value"),
        ("", ("plan..seed=1",), "command line: 'plan..seed=1' is not an override; write key.sub=value"),
        ("", ("--fresh",), "command line: '--fresh' is not an override; write key.sub=value"),
        ("", ("plan.seed=[",), "command line: the value of plan.seed is not YAML: '['"),
        ("", ("config.day=2024-13-45",), "command line: the value of config.day is neither a date nor a number, but looks like one: "),
        ("", ("name.first=1",), "command line: name.first cannot be set: name is 'job'"),
    ],
)  # fmt: skip
def test_each_mistake_is_refused_in_one_sentence(
    refused: Refused, more: str, overrides: tuple[str, ...], sentence: str
) -> None:
    assert refused(JOB + more, *overrides).startswith(sentence)


@pytest.mark.parametrize(
    ("text", "sentence"),
    [
        ("data: {train: /x}\n", "job.yaml: name is missing; add it"),
        ("name: job\ndata: {train: /x, mix: [{url: /y, weight: 1}, {url: /z, weight: 1}]}\n",
         "job.yaml:2: data.train and data.mix are both set; set one of them"),
        ("name: job\ndata: {validation: /x}\n", "job.yaml:2: data.validation is set, but data.train and data.mix are missing; "),
        ("name: job\ndata: {columns: [x]}\n", "job.yaml:2: data.columns is set, but data.train and data.mix are missing; "),
        ("- name: job\n", "job.yaml holds list: a job's YAML is a mapping"),
        ("", "job.yaml is empty: a job's YAML is a mapping"),
        ("a: b: c\n", "job.yaml is not YAML: "),
        ("name: job\n--- \nname: two\n", "job.yaml is not YAML: "),
        ("name: !!python/object/apply:os.getcwd []\n", "job.yaml is not YAML: "),
        ("? [a, b]\n: c\n", "job.yaml is not YAML: "),
    ],
)  # fmt: skip
def test_a_file_that_is_not_a_job_is_refused(refused: Refused, text: str, sentence: str) -> None:
    assert refused(text).startswith(sentence)


def test_several_mistakes_are_counted(refused: Refused) -> None:
    assert refused(JOB, "plan.seed=a", "plan.epochs=b", "workers.cpus=c").endswith(" (and 2 more)")


def test_a_file_that_cannot_be_read_is_named(file: Path) -> None:
    with pytest.raises(SpecError, match=f"^cannot read {file}: No such file or directory$"):
        load_spec(file)
    file.write_bytes(b"name: \xff\xfe")
    with pytest.raises(SpecError, match=f"^{file} is not UTF-8 text"):
        load_spec(file)


@pytest.mark.parametrize("text", ["import undula\nundula.main(train)\n", "train(x, {a: b: c})\n"])
def test_a_script_in_place_of_its_yaml_is_refused_with_the_yaml_beside_it(file: Path, text: str) -> None:
    script = file.with_name("after.py")
    script.write_text(text)
    with pytest.raises(SpecError, match=f"^{script} is not YAML; give a job's YAML$"):
        load_spec(script)
    yaml = file.with_name("after.yaml")
    yaml.write_text(JOB)
    with pytest.raises(SpecError, match=f"^{script} is not YAML; give {yaml}, which lies beside it$"):
        load_spec(script)


def test_config_without_a_type_reads_as_attributes(load: Load) -> None:
    config = load("config: {model: {width: 8}, rate: 1}\n").config
    assert (config.model.width, config["rate"]) == (8, 1)
    with pytest.raises(AttributeError, match="config has no key 'depth'; it has model, rate"):
        _ = config.depth


def test_config_takes_the_type_that_the_script_declares(load: Load) -> None:
    config = load("config: {rate: 1, model: {width: 8}, names: [a, b]}\n", "config.rate=2", config_type=Config).config
    assert config == Config(rate=2.0, model=Model(width=8), names=("a", "b"))
    assert isinstance(config.rate, float)


@pytest.mark.parametrize(
    ("config", "overrides", "sentence"),
    [
        ("{rate: 1, modle: {}}", (), "job.yaml:4: unknown key config.modle: did you mean model?"),
        ("{rate: 1, model: {widht: 3}}", (), "job.yaml:4: unknown key config.model.widht: did you mean width?"),
        ("{rate: x}", (), 'job.yaml:4: config.rate is "x": it should be a valid number'),
        (
            "{rate: 1}",
            ("config.model.width=x",),
            'command line: config.model.width is "x": it should be a valid integer',
        ),
        ("{}", (), "job.yaml:4: config.rate is missing; add it"),
        ("{rate: -1}", (), "job.yaml:4: config.rate is -1.0: give 0 or more"),
        ("{rate: 1, names: a}", (), 'job.yaml:4: config.names is "a": it should be '),
    ],
)
def test_config_that_does_not_fit_its_type_is_refused(
    refused: Refused, config: str, overrides: tuple[str, ...], sentence: str
) -> None:
    assert refused(f"{JOB}config: {config}\n", *overrides, config_type=Config).startswith(sentence)


def test_schema_for_editors_accepts_every_resolved_spec_and_refuses_others(load: Load) -> None:
    schema = json_schema()
    jsonschema.Draft202012Validator.check_schema(schema)
    validator = jsonschema.Draft202012Validator(schema)
    for more in (
        "",
        "config: {a: [1]}\nplan: {micro_batch: 4}\nworkers: {resources: {spot: 1}}\ngradient: {max_norm: 1}\n",
    ):
        validator.validate(as_tree(load(more).spec))
    for wrong in (
        {"data": {"train": "x"}},
        {"name": "a/b", "data": {"train": "x"}},
        {"name": "a", "data": {"train": "x"}, "plam": {}},
    ):
        assert not validator.is_valid(wrong)


def test_the_schema_describes_each_key() -> None:
    schema = json_schema()
    for section in (schema, *schema["$defs"].values()):
        for name, key in section["properties"].items():
            part = schema["$defs"].get(key.get("$ref", "").rpartition("/")[2], {})
            assert key.get("description") or part.get("description"), name
    assert schema["properties"]["name"]["description"].startswith("Name of the run directory")


def test_flatten_returns_every_leaf() -> None:
    assert flatten({"a": {"b": 1, "c": {}}, "d": [2]}) == [("a.b", 1), ("a.c", {}), ("d", [2])]


def test_workers_get_no_settings_of_the_cluster(load: Load) -> None:
    job = job_of(load("config: {rate: 1}\n", config_type=Config), "id")
    assert job.run_url == "~/undula/runs/job"
    assert job.config == Config(rate=1.0)
    assert not hasattr(job, "workers")


@dataclass(frozen=True)
class Layer:
    size: int = 1


@dataclass(frozen=True)
class Nested:
    one: Layer | None = None
    many: tuple[Layer, ...] = ()

    def __post_init__(self) -> None:
        if len(self.many) > 2:
            raise ValueError


@pytest.mark.parametrize(
    ("text", "sentence"),
    [
        ("config: {one: {siz: 2}}", "unknown key config.one.siz: did you mean size?"),
        ("config: {many: [{size: 2}, {siz: 2}]}", "unknown key config.many.siz: did you mean size?"),
        ("config: {many: [{}, {}, {}]}", "job.yaml:3: config."),
        ("config: {many: [2024-01-01]}", "config.many is not text, a number, a list or a mapping; quote it"),
        ("config: {2024-01-01: 1}", "unknown key config.2024-01-01: known keys: many, one"),
        ("config: {a: 1, a: 2}", "job.yaml:3: config.a is given twice; keep one"),
        ("config: &a {b: *a}", "has an anchor that contains itself, or is nested too deeply; remove that"),
        (
            f"config: {'[' * 3000}{']' * 3000}",
            "has an anchor that contains itself, or is nested too deeply; remove that",
        ),
        (
            "config: {day: 2024-02-30}",
            "has a value that is neither a date nor a number, but looks like one: day is out of range",
        ),
        (
            f"config: {{many: {'1' * 5000}}}",
            "has a value that is neither a date nor a number, but looks like one: Exceeds the limit",
        ),
        ("schedule: {base_lr: .inf}", "schedule.base_lr is"),
        ("workers: {gpus: two}", "workers.gpus is \"two\": it should be a valid number or 'auto'"),
        ("workers: {gpus: -1}", "workers.gpus is -1: it should be greater than or equal to 0 or 'auto'"),
        ("workers: {gpus: 1.5}", "workers.gpus is 1.5, but Ray can only divide a single GPU; set a whole number"),
        (
            "workers: {max: 2, gpus: 0.5}",
            "workers.gpus is 0.5, but NCCL refuses two workers on the same GPU, and max is 2; set gpus to",
        ),
        ("workers: {resources: {GPU: 1}}", "resources has GPU; set gpus instead"),
        ("workers: {resources: {tpu: -1}}", "resources.tpu is -1; set an amount of at least 0"),
        ("plan: {global_batch: 2, virtual_workers: 4}", "is not a multiple of virtual_workers (4); set it to 4"),
    ],
)
def test_unusual_input_is_refused_in_one_sentence(refused: Refused, text: str, sentence: str) -> None:
    assert sentence in refused(f"name: job\ndata: {{train: x}}\n{text}\n", config_type=Nested)


def test_a_single_worker_may_share_a_gpu_with_other_processes(load: Load) -> None:
    assert load("workers: {gpus: 0.5}\n").spec.workers.per_worker == {"CPU": 1.0, "GPU": 0.5}


def test_a_worker_has_a_gpu_by_default_where_the_cluster_has_any(load: Load) -> None:
    workers = load().spec.workers
    assert workers.on_cluster(has_gpus=True).per_worker == {"CPU": 1.0, "GPU": 1.0}
    assert workers.on_cluster(has_gpus=False).per_worker == {"CPU": 1.0}
    assert load("workers: {gpus: 0}\n").spec.workers.on_cluster(has_gpus=True).per_worker == {"CPU": 1.0}


def test_an_override_of_a_section_is_the_origin_of_all_its_values(load: Load) -> None:
    loaded = load("plan: {seed: 1, window: 2}\n", "plan={seed: 3}")
    assert loaded.origins["plan.seed"] == "command line"
    assert "plan.window" not in loaded.origins


def test_relative_paths_with_any_characters_become_absolute(load: Load) -> None:
    loaded = load("runs: 'my #runs'\n")
    (override,) = absolute_paths(replace(loaded.spec, data=replace(loaded.spec.data, train="/data")))
    assert load("", override).spec.runs == str(Path("my #runs").absolute())


def test_a_job_of_a_version_without_a_key_resumes_unless_the_key_is_set(load: Load) -> None:
    former = load().tree()
    del former["gradient"]["noise_every_steps"], former["precision"]
    assert changed_key(former, load().tree()) is None
    assert changed_key(former, load("gradient: {noise_every_steps: 2}\n").tree()) == (
        "gradient.noise_every_steps",
        0,
        2,
    )


def test_names_of_network_interfaces_are_lists(load: Callable[..., LoadedSpec]) -> None:
    spec = load("workers: {interfaces: [ib1, ib0]}\nengine: horovod\nhorovod: {nics: [eth1, eth0]}\n").spec
    assert spec.workers.interfaces == ("ib1", "ib0")
    assert spec.horovod is not None
    assert spec.horovod.nics == ("eth1", "eth0")
