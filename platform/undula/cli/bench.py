"""Command `undula bench`."""

import os
import sys
from pathlib import Path
from typing import TYPE_CHECKING

import click

from undula.cli.options import (
    FILE,
    Commands,
    FiniteRange,
    address_option,
    environment_options,
    job_arguments,
    json_option,
    positive_numbers,
    print_json,
    project_option,
    runs_option,
    runtime_env_of,
    script_option,
    with_runs,
)

if TYPE_CHECKING:
    from undula.report.data.run_record import RecordedRun
    from undula.report.data.scaling import Round
    from undula.testing.scaling_runs import Bench


@click.group(cls=Commands, short_help="Measure a job on this machine or on a cluster.")
def bench() -> None:
    """Measure a job on this machine or on a cluster.

    \b
    Example:
      undula bench scaling jobs/language_model.yaml --workers 1,2 --page scaling.html
    """


@bench.command(short_help="Measure how a job scales with its workers.")
@job_arguments
@click.option("--workers", default="1,2", show_default=True, metavar="N,N...", help="Numbers of workers.")
@click.option(
    "--weak",
    is_flag=True,
    help="Give each worker the work of the YAML: plan.global_batch and plan.virtual_workers grow with the workers.",
)
@click.option("--rounds", type=click.IntRange(1), default=3, show_default=True, metavar="N", help="Number of rounds.")
@click.option(
    "--steps", type=click.IntRange(2), default=60, show_default=True, metavar="N", help="Measured steps of each run."
)
@click.option(
    "--warmup",
    type=click.IntRange(1),
    default=20,
    show_default=True,
    metavar="N",
    help="Steps before them, which do not count.",
)
@click.option(
    "--against",
    metavar="COMMAND",
    help="Shell command that trains the same in another way, in the same rounds. It has {workers}, {steps}, {out} and perhaps "
    "{global_batch} (docs/planning.md).",
)
@click.option(
    "--rates",
    type=FILE,
    metavar="FILE",
    help="Also show the throughput that follows from rates that `undula doctor --measure FILE` has measured.",
)
@click.option("--page", metavar="FILE", help="Also write an HTML page: a path or an s3:// URL.")
@click.option(
    "--limit",
    type=FiniteRange(min=0, min_open=True),
    default=3600.0,
    show_default=True,
    metavar="S",
    help="Seconds after which a training is stopped.",
)
@script_option
@project_option
@runs_option
@address_option
@environment_options
@json_option
def scaling(
    job: Path,
    overrides: tuple[str, ...],
    workers: str,
    weak: bool,
    rounds: int,
    steps: int,
    warmup: int,
    against: str | None,
    rates: Path | None,
    page: str | None,
    limit: float,
    script: Path | None,
    project: Path | None,
    runs: str | None,
    address: str | None,
    env: tuple[str, ...],
    secrets: tuple[str, ...],
    secret_files: tuple[Path, ...],
    runtime_env: Path | None,
    as_json: bool,
) -> int:
    """Run JOB.yaml for some steps on each number of workers, in rounds, and report throughput, efficiency, where it is lost, and whether
    all runs are the same training.

    Each training is a run of its own in the folder NAME-bench, as with `undula run`. It neither validates nor saves within its measured
    steps. The exit status is 1 if runs differ that promise to be equal.

    \b
    Examples:
      undula bench scaling jobs/language_model.yaml --workers 1,2,4 --page scaling.html
      undula bench scaling jobs/language_model.yaml --workers 1,2 --weak
    """
    from undula.config.environment import having, job_environment
    from undula.config.job import load_spec, script_of
    from undula.driver.plan_job import expected_rates, measured_in
    from undula.report.data.sameness import sameness
    from undula.report.data.scaling import environment, is_oversubscribed, scaling_of
    from undula.report.render.scaling_page import render_scaling
    from undula.report.render.scaling_text import print_scaling
    from undula.storage import write_file
    from undula.testing.scaling_runs import Bench

    sizes = tuple(dict.fromkeys(positive_numbers(workers, "--workers")))
    overrides = with_runs(overrides, runs)
    public = runtime_env_of(runtime_env).get("env_vars", {})
    with having(job_environment(env, secrets, secret_files, public)):
        loaded = load_spec(job, overrides)
        options = ("--script", str(script_of(job, script)), *_options(project, env, secrets, secret_files, runtime_env))
        plan = Bench(job, loaded, overrides, options, sizes, rounds, warmup + steps, weak, limit, address, against)
        plan.check()
        expected = {}
        if rates:
            expected = expected_rates(job, overrides, sizes, weak, measured_in(rates), script, project)
    records, found, others, stopped = _measure(plan, warmup)
    crowded = sorted({size for size, record in records if is_oversubscribed(record)})
    facts = environment([record for _, record in records])
    report = scaling_of(loaded.spec.name, weak, steps, found, crowded, facts, others, expected)
    same = None if weak or len(records) < 2 else sameness(records)
    if as_json:
        tree = {"same": same and same.as_json(), "against": against, "runs": plan.url, "page": page}
        print_json({**report.as_json(), **tree})
    else:
        print_scaling(report, same, against)
        click.echo(f"runs: {plan.url}")
    if page:  # after the report, which would be lost if the page cannot be written
        write_file(page, render_scaling(report, same, against).encode())
        click.echo(page, err=as_json)
    if stopped is not None:
        raise stopped
    return int(same is not None and same.difference is not None)


def _measure(
    plan: "Bench", warmup: int
) -> "tuple[list[tuple[int, RecordedRun]], list[Round], list[Round], BaseException | None]":
    """Train, show the progress, and return the runs with their numbers of workers, their measurements, those of the other program, and the
    error or Ctrl-C that ended the trainings early but after the first one of the job."""
    from undula.errors import UndulaError
    from undula.report.data.run_record import read_run
    from undula.report.data.scaling import measured, of_other
    from undula.report.render.scaling_text import left_text, load_warning, round_line
    from undula.telemetry.live import LiveScreen
    from undula.testing.scaling_runs import OtherSteps

    screen, is_terminal = LiveScreen(sys.stderr), sys.stderr.isatty()
    records, found, others, wall_s = [], [], [], list[float]()
    if plan.address is None and (warning := load_warning(os.getloadavg()[0], os.cpu_count() or 1)):
        screen.show(warning)
    screen.show(
        f"{plan.count} trainings of {plan.steps} steps each, one after another, each of which starts for itself"
    )
    try:
        for trained in plan.trainings(screen.show if is_terminal else lambda line: None):
            workers, number, steps = trained.workers, trained.number, trained.steps
            if isinstance(steps, OtherSteps):
                latest = of_other(steps.seconds, steps.samples, workers, number, warmup)
                others.append(latest)
            else:
                records.append((workers, read_run(steps)))
                latest = measured(records[-1][1], workers, number, warmup)
                found.append(latest)
            wall_s.append(trained.wall_s)
            screen.show(round_line(latest, plan.rounds, trained.wall_s) + left_text(wall_s, plan.count))
    except (KeyboardInterrupt, UndulaError) as stopped:
        if not found:
            raise
        screen.show(f"stopped after {len(wall_s)} of {plan.count} trainings, of which this is the report:")
        return records, found, others, stopped
    finally:
        screen.close()
    return records, found, others, None


def _options(
    project: Path | None,
    env: tuple[str, ...],
    secrets: tuple[str, ...],
    secret_files: tuple[Path, ...],
    runtime_env: Path | None,
) -> list[str]:
    """Return options of `undula run` as arguments."""
    given = [("--project", project), ("--runtime-env", runtime_env)]
    given += [("--secret-file", file) for file in secret_files]
    texts = [*(("--env", each) for each in env), *(("--secret", each) for each in secrets)]
    return [part for name, value in [*given, *texts] if value is not None for part in (name, str(value))]
