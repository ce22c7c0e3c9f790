"""Tests of the command line as a whole: help, mistakes, overrides, and the search for runs."""

import json
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import click
import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from outside import installed
from priced_run import write_priced_run
from ray.job_submission import JobDetails, JobStatus, JobType

from undula.cli.main import cli
from undula.cluster.local import free_ports
from undula.config.job import absolute_paths, as_tree, load_spec
from undula.data.planned import PlannedSamples
from undula.data.prepare.write import write_shards
from undula.driver import submit
from undula.driver.kept_output import KeptOutput
from undula.plan.keys import multiset_digest
from undula.plan.plan import Plan, PlanSpec
from undula.state.ledger import LedgerWriter
from undula.state.records import StepRow
from undula.storage import Store
from undula.testing.scenario import Outcome

Command = Callable[..., Any]
"""The fixture `undula`."""
JOB = Path(__file__).parents[3] / "jobs" / "language_model.yaml"


def commands(
    command: click.Command = cli, path: tuple[str, ...] = ()
) -> Iterator[tuple[tuple[str, ...], click.Command]]:
    """Yield every command below a group, with its name in full."""
    yield path, command
    for name, subcommand in below(command).items():
        yield from commands(subcommand, (*path, name))


def below(command: click.Command) -> dict[str, click.Command]:
    """Return the commands of a group by name; none for another command."""
    if not isinstance(command, click.Group):
        return {}
    context = click.Context(command)
    found = {name: command.get_command(context, name) for name in command.list_commands(context)}
    return {name: each for name, each in found.items() if each}


@pytest.mark.parametrize("path", [path for path, _ in commands()], ids=" ".join)
def test_every_command_and_option_has_help(undula: Command, path: tuple[str, ...]) -> None:
    shown = undula(*path, "--help")
    assert (shown.status, shown.err) == (0, "")
    assert shown.out.startswith("Usage: undula")
    command = dict(commands())[path]
    assert command.help
    for name, subcommand in below(command).items():
        assert f"  {name}" in shown.out
        assert not subcommand.get_short_help_str(61).endswith("..."), "80 columns cut it off"
    assert all(option.help for option in command.params if isinstance(option, click.Option))


def test_data_index_prints_json(undula: Command, tmp_path: Path) -> None:
    pq.write_table(pa.table({"x": [1, 2]}), tmp_path / "a.parquet")
    printed = json.loads(undula("data", "index", tmp_path, "--json").out)
    assert (printed["rows"], printed["columns"]) == (2, {"x": "int64"})


def test_data_index_says_how_many_files_it_skips(undula: Command, tmp_path: Path) -> None:
    for name in ("a", "_b", ".c"):
        pq.write_table(pa.table({"x": [1, 2]}), tmp_path / f"{name}.parquet")
    shown = undula("data", "index", tmp_path)
    assert shown.status == 0, shown.err
    assert "2 rows of x int64\n  1 file, 1 row group" in shown.out
    assert "skipped 2 Parquet files with _ or . at the beginning of a name" in shown.out


def test_the_command_line_starts_fast() -> None:
    """It imports nothing that only one command needs."""
    show = "from undula.cli.main import cli; cli(['--help'], standalone_mode=False)"
    check = (
        f"import sys; {show}; sys.exit(', '.join({{'pydantic', 'numpy', 'rich', 'yaml'}} & set(sys.modules)) or None)"
    )
    done = subprocess.run([sys.executable, "-c", check], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr


def test_a_run_imports_no_module_of_other_commands() -> None:
    show = "from undula.cli.main import cli; cli(['run', '--help'], standalone_mode=False)"
    check = f"import sys; {show}; print(*(name for name in sys.modules if name.startswith('undula.cli.')))"
    done = subprocess.run([sys.executable, "-c", check], capture_output=True, text=True, check=True)
    others = {"plan", "study", "show", "report", "doctor", "chaos", "bench", "convert"}
    assert others.isdisjoint(name.removeprefix("undula.cli.") for name in done.stdout.split())


@pytest.mark.parametrize(
    ("words", "status", "shown"),
    [
        (["greet"], 0, "hello\n"),
        (["broken"], 2, "undula: 'broken', which outside adds to undula.commands, cannot be imported: No module named"),
        (["run", "--help"], 0, "Usage: undula run [OPTIONS] JOB.yaml"),
    ],
)
def test_another_package_adds_commands(tmp_path: Path, words: list[str], status: int, shown: str) -> None:
    source = (
        "import click\n\n\n@click.command(short_help='Greet.')\ndef greet():\n    'Greet.'\n    click.echo('hello')\n"
    )
    commands = {"greet": "outside:greet", "broken": "nowhere:at_all", "run": "outside:greet"}
    environment = installed(tmp_path, "outside", source, "undula.commands", **commands)
    done = subprocess.run([sys.executable, "-m", "undula.cli", *words], capture_output=True, text=True, env=environment)
    assert done.returncode == status
    assert (done.stdout if status == 0 else done.stderr).startswith(shown)


def test_what_submits_a_job_or_looks_at_a_study_is_loaded_without_ray() -> None:
    """Ray reads a cluster's token when it is imported, and the local cluster has none before it starts."""
    modules = "undula.driver.submission, undula.study.submission, undula.study.status, undula.study.render.page"
    check = f"import sys, {modules}; sys.exit(', '.join({{'ray'}} & set(sys.modules)) or None)"
    done = subprocess.run([sys.executable, "-c", check], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr


@pytest.mark.parametrize(
    ("line", "sentence"),
    [
        ("run", "Missing argument 'JOB.yaml' (see undula run --help)"),
        ("run job.yaml --keep-aliv", "No such option '--keep-aliv'. Did you mean '--keep-alive'? (see undula run --help)"),
        ("rnu", "No such command 'rnu'. Did you mean 'run'? (see undula --help)"),
        ("run none.yaml", "cannot read none.yaml: No such file or directory"),
        (f"run {JOB} plan.seed", "command line: 'plan.seed' is not an override; write key.sub=value"),
        (f"run {JOB} plan.gobal_batch=3 --print", "command line: unknown key plan.gobal_batch: did you mean global_batch?"),
        (f"run {JOB} --detach --keep-alive", "command line: --detach ends this command, which --keep-alive needs; give one of them"),
        ("verify run --tolerance nan", "Invalid value for '--tolerance': nan is not a finite number (see undula verify --help)"),
        ("spot leave --notice nan", "Invalid value for '--notice': nan is not a finite number (see undula spot leave --help)"),
        ("spot watch --source fax", "command line: --source is fax; set it to one of aws, gcp, azure or file:PATH"),
        (f"chaos {JOB}", "command line: give either --trace FILE or --faults FILE"),
        ("show none --runs /none", "there is no run none in /none, and no folder none here; give the run's directory, or the folder of the "
         "runs with --runs"),
    ],
)  # fmt: skip
def test_a_mistake_is_one_sentence_and_status_2(undula: Command, line: str, sentence: str) -> None:
    done = undula(*line.split())
    assert (done.status, done.out, done.err) == (2, "", f"undula: {sentence}\n")


def test_without_a_command_the_help_is_shown(undula: Command) -> None:
    done = undula()
    assert done.status == 2
    assert "Commands:" in done.err


def test_ctrl_c_ends_a_command_with_status_130(undula: Command, monkeypatch: pytest.MonkeyPatch) -> None:
    def interrupted(*_: object, **__: object) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr("undula.report.render.terminal.print_runs", interrupted)
    done = undula("ls")
    assert (done.status, done.err.split()) == (130, ["stopped"])


@pytest.mark.parametrize(
    "line",
    [
        "{job} plan.seed=5 --print name=mixed",
        "--print {job} plan.seed=5 name=mixed",
        "{job} plan.seed=5 name=mixed --print --address http://none:1",
        "--address http://none:1 {job} plan.seed=1 --print plan.seed=5 --fresh name=mixed",
    ],
)
def test_overrides_and_options_can_be_mixed(undula: Command, line: str, monkeypatch: pytest.MonkeyPatch) -> None:
    def printed(script: Path, job: Path, overrides: tuple[str, ...], project: None) -> str:
        return load_spec(job, overrides).to_yaml()  # the script itself would take seconds to import torch and Ray

    monkeypatch.setattr("undula.driver.print_job.printed_by_script", printed)
    shown = undula("run", *line.format(job=JOB).split())
    assert shown.status == 0
    assert "\n  seed: 5 " in shown.out
    assert shown.out.startswith('name: "mixed"')


@pytest.fixture
def runs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Folder with a run, outside the working directory and the home directory."""
    monkeypatch.setenv("HOME", str(tmp_path / "home"))
    (tmp_path / "here").mkdir()
    monkeypatch.chdir(tmp_path / "here")
    write_priced_run(Store(str(tmp_path / "runs" / "spot-run")))
    return tmp_path / "runs"


def test_show_and_report_look_in_the_folder_of_the_runs(undula: Command, runs: Path) -> None:
    assert undula("show", "spot-run", "--json").status == 2
    shown = undula("show", "spot-run", "--json", "--runs", runs)
    assert (shown.status, json.loads(shown.out)["name"]) == (0, "spot-run")
    assert undula("report", "spot-run", "--runs", runs).out == f"{runs}/spot-run/report.html\n"
    assert (runs / "spot-run" / "report.html").exists()
    assert undula("report", "spot-run", "--runs", runs, "--out", "mine.html").out == "mine.html\n"
    assert Path("mine.html").read_bytes()[:15] == b"<!doctype html>"
    for options in ((runs,), ("--runs", runs)):
        assert [run["run"] for run in json.loads(undula("ls", *options, "--json").out)] == ["spot-run"]
    assert "give one of them" in undula("ls", runs, "--runs", runs).err


def test_undula_runs_is_the_default_folder_of_every_command(
    undula: Command, runs: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("UNDULA_RUNS", str(runs))
    assert json.loads(undula("show", "spot-run", "--json").out)["name"] == "spot-run"
    assert json.loads(undula("report", "spot-run", "--json").out) == {"report": f"{runs}/spot-run/report.html"}
    assert [run["run"] for run in json.loads(undula("ls", "--json").out)] == ["spot-run"]
    loaded = load_spec(JOB)
    assert (loaded.spec.runs, loaded.origin("runs")) == (str(runs), "UNDULA_RUNS")
    assert f'runs="{runs}"' in absolute_paths(loaded.spec), "the cluster may have another UNDULA_RUNS"
    job = runs.parent / "own.yaml"
    job.write_text("name: own\nruns: mine\ndata: {train: x}\n")
    assert load_spec(job).spec.runs == "mine", "what the job says comes first"


def test_ls_lists_runs_although_the_cluster_of_the_environment_is_down(
    undula: Command, runs: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (port,) = free_ports(1)
    down = f"http://127.0.0.1:{port}"
    monkeypatch.setenv("UNDULA_ADDRESS", down)
    listed = undula("ls", runs, "--json")
    assert [run["run"] for run in json.loads(listed.out)] == ["spot-run"]
    assert listed.status == 0
    assert listed.err.startswith(f"note: the cluster at {down} cannot be reached: ")
    assert undula("ls", runs, "--address", down).status == 3


def test_stop_leaves_a_run_of_the_same_name_in_another_folder_alone(
    undula: Command, runs: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    stopped: list[str] = []
    listed = [
        JobDetails(
            type=JobType.SUBMISSION,
            submission_id=name,
            status=JobStatus.RUNNING,
            entrypoint="python",
            metadata={submit.RUN: f"{folder}/first"},
        )
        for name, folder in (("mine", runs), ("theirs", "/home/them/runs"))
    ]
    api = type("Api", (), {"list_jobs": lambda _: listed, "get_address": lambda _: "http://head:8265"})()
    monkeypatch.setattr(submit, "connect", lambda dashboard: api)
    monkeypatch.setattr(submit, "stop", lambda api, job, limit_s: stopped.append(job) or True)
    options = ("--address", "http://head:8265", "--json")
    assert "give the directory of the run" in undula("stop", "first", *options).err
    assert json.loads(undula("stop", "first", "--runs", runs, *options).out) == {"stopped": ["mine"]}
    assert stopped == ["mine"]


def test_the_same_options_exist_where_they_make_sense() -> None:
    names = {
        " ".join(path): {option for parameter in command.params for option in parameter.opts}
        for path, command in commands()
        if not isinstance(command, click.Group)
    }
    of_runs = {"run", "logs", "stop", "chaos", "ls", "show", "verify", "report", "compare", "export", "doctor"}
    of_runs |= {"study run", "study status", "study report", "bench scaling"}
    of_clusters = {"run", "ls", "logs", "stop", "study run", "bench scaling"}
    assert {name for name, options in names.items() if "--runs" in options} == of_runs
    assert {name for name, options in names.items() if "--address" in options} == of_clusters
    assert of_runs - {"run", "logs", "study run"} <= {name for name, options in names.items() if "--json" in options}


def test_leave_fails_if_ray_does_not_accept_the_drain(undula: Command) -> None:
    done = undula("spot", "leave", "--cluster", "127.0.0.1:1", "--notice", "0.1", "--node", "a" * 56)
    assert done.status == 3
    assert (
        "the cluster at 127.0.0.1:1 has not accepted that this machine leaves, so its loss will be a crash" in done.err
    )


def test_verify_looks_for_both_runs_in_the_folder_of_the_runs(undula: Command, runs: Path) -> None:
    for name in ("one", "two"):
        write_planned_run(runs / name, runs.parent / "data")
    assert undula("verify", "one").status == 2
    shown = undula("verify", "one", "--against", "two", "--runs", runs, "--json")
    assert shown.status == 0, shown.err
    assert "4 steps as in run: the same samples" in shown.out


def test_chaos_ends_with_the_path_of_its_run(undula: Command, runs: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def run_scenario(*_: object) -> Outcome:
        write_planned_run(runs / "job-chaos", runs.parent / "data")
        return Outcome(done=(), steps=4, updates=4, steps_lost=0, outages=())

    monkeypatch.setattr("undula.testing.scenario.run_scenario", run_scenario)
    (runs.parent / "faults.txt").write_text("at step 2: sigkill worker 0")
    arguments = ("chaos", JOB, "--faults", runs.parent / "faults.txt", "name=job", f"runs={runs}")
    done = undula(*arguments)
    assert done.status == 0, done.err
    assert done.out.splitlines()[-2:] == [
        f"certificate: holds (undula verify {runs}/job-chaos)",
        f"run directory: {runs}/job-chaos",
    ]
    assert json.loads(undula(*arguments, "--json").out)["run"] == f"{runs}/job-chaos"


def test_chaos_refuses_workers_that_do_not_fit_on_its_nodes(undula: Command, runs: Path) -> None:
    (runs.parent / "faults.txt").write_text("at step 2: sigkill worker 0")
    done = undula("chaos", JOB, "--faults", runs.parent / "faults.txt", "workers.cpus=2")
    assert done.status == 2
    assert "workers.cpus is 2, but each node of `undula chaos` has 1 CPU, and a local cluster cannot grow" in done.err


def test_run_ends_with_the_path_of_its_run_if_its_driver_is_killed(
    undula: Command, runs: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    killed = type("Details", (), {"status": "FAILED", "driver_exit_code": -9})
    monkeypatch.setattr("undula.driver.submit.connect", lambda dashboard: None)
    monkeypatch.setattr("undula.driver.submit.start", lambda *_: None)
    monkeypatch.setattr("undula.driver.follow.follow_to_the_end", lambda *_, **__: killed)
    said = undula("run", JOB, "name=job", f"runs={runs}", "--address", "http://head:8265")
    assert said.status == 137
    assert said.out.splitlines()[-2:] == [
        f"run directory: {runs}/job",
        "submit it again under the name job to continue",
    ]


def test_logs_without_a_cluster_are_those_that_the_run_has_kept(
    undula: Command, runs: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("undula.cluster.local.cluster_at_hand", lambda: None)
    assert undula("logs", "spot-run", "--runs", runs).status == 3
    KeptOutput(Store(str(runs / "spot-run"))).finish("rank 0: hello\nfinished: no validation")
    shown = undula("logs", "spot-run", "--runs", runs)
    assert (shown.status, shown.out) == (0, "rank 0: hello\nfinished: no validation\n")
    assert shown.err.startswith("from the run directory, because no cluster has the log: no Ray cluster runs on this")
    assert undula("logs", "spot-run", "--runs", runs, "--follow").status == 3
    assert undula("logs", "none", "--runs", runs).status == 3


def write_planned_run(folder: Path, data: Path) -> None:
    """Write a run of four steps that follows its plan."""
    table = pa.table({"x": np.arange(24)})
    manifest = write_shards(Store(str(data)), [table], table.schema, 24, num_shards=1)
    spec = PlanSpec(global_batch=6, virtual_workers=2)
    plan = Plan(spec, 24)
    body = {
        "name": "run",
        "plan_digest": plan.digest(manifest.digest),
        "total_steps": plan.total_steps,
        "spec": {"plan": as_tree(spec), "data": {"train": manifest.url}},
    }
    store = Store(str(folder))
    store.write("job.json", json.dumps(body).encode())
    planned, ledger = PlannedSamples(manifest, plan), LedgerWriter(store, 1)
    for step in range(plan.total_steps):
        digest = multiset_digest(planned.step_ids(step))
        ledger.step(StepRow(1, step, 0, (step + 1) * 6, 6, 1, 1.0, 0.1, 0.1, 0.1, 0.1, 0.1, digest, float(step)))
    ledger.close()


def test_convert_deepspeed_writes_a_job_once(undula: Command, tmp_path: Path) -> None:
    (tmp_path / "ds.json").write_text(json.dumps({"train_batch_size": 64, "gradient_clipping": 1.0}))
    shown = undula("convert", "deepspeed", tmp_path / "ds.json", "--virtual-workers", 8)
    assert (shown.status, shown.err) == (0, "")
    job = tmp_path / "job.yaml"
    written = undula("convert", "deepspeed", tmp_path / "ds.json", "--virtual-workers", 8, "--out", job)
    assert (written.status, written.out, job.read_text()) == (0, f"{job}\n", shown.out)
    assert load_spec(job, ["name=run"]).spec.plan.virtual_workers == 8
    again = undula("convert", "deepspeed", tmp_path / "ds.json", "--out", job)
    problem = f"undula: command line: --out {job} exists, and is not overwritten; give another file\n"
    assert (again.status, again.out, again.err) == (2, "", problem)
    assert job.read_text() == shown.out
