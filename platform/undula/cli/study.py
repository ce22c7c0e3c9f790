"""Command `undula study`."""

import difflib
import sys
import time
from pathlib import Path

import click

from undula.cli.options import (
    FILE,
    Commands,
    FiniteRange,
    address_option,
    environment_options,
    json_option,
    mode_of,
    mode_options,
    print_json,
    project_option,
    runs_option,
    runtime_env_of,
    script_option,
    with_runs,
)
from undula.errors import SpecError, needs_extra

INTERVAL_S = 5.0
"""Seconds between two refreshes of `status --follow`."""


class _RunByDefault(Commands):
    """Group of commands that runs `study STUDY.yaml ...` as `study run STUDY.yaml ...`."""

    def parse_args(self, ctx: click.Context, args: list[str]) -> list[str]:
        is_short = bool(args) and args[0] not in (*self.commands, *ctx.help_option_names)
        return super().parse_args(ctx, ["run", *args] if is_short else args)


@click.group(
    cls=_RunByDefault,
    short_help="Train a job at many batch sizes and learning rates.",
    subcommand_metavar="{STUDY.yaml | COMMAND} [ARGS]...",
)
def study() -> None:
    """Train a job at many batch sizes and learning rates, and report what the measurements support.

    \b
    `undula study STUDY.yaml` is short for `undula study run STUDY.yaml`:
      undula study jobs/lr_study_sgd.yaml seeds=[0,1,2]
      undula study status lr-study-sgd --follow
    """


@study.command(short_help="Train the trials of a study and follow them.")
@click.argument("file", type=FILE, metavar="STUDY.yaml")
@click.argument("overrides", nargs=-1, metavar="[KEY=VALUE]...")
@script_option
@project_option
@address_option
@environment_options
@runs_option
@mode_options
@click.option("--fresh", is_flag=True, help="Delete the study of this name and start over.")
def run(
    file: Path,
    overrides: tuple[str, ...],
    script: Path | None,
    project: Path | None,
    address: str | None,
    env: tuple[str, ...],
    secrets: tuple[str, ...],
    secret_files: tuple[Path, ...],
    runtime_env: Path | None,
    runs: str | None,
    detach: bool,
    keep_alive: bool,
    fresh: bool,
) -> int:
    """Submit a study to a Ray cluster, and follow it until it ends, which writes its report.

    KEY=VALUE overrides a value of STUDY.yaml, and overrides.KEY=VALUE overrides a value of its job. A study with the name of an earlier
    study continues that study. Ctrl-C ends only this command, unless it has started a local cluster for the study.
    """
    from undula.cluster.local import cluster_at_hand
    from undula.config.environment import having, job_environment
    from undula.driver.launchers import end_all_but_first
    from undula.driver.submission import run_submission
    from undula.masking.values import with_declared
    from undula.study.load import load_study
    from undula.study.status import report_if_done
    from undula.study.submission import submission_of_study
    from undula.telemetry.live import LiveScreen

    if (launch := end_all_but_first()) and not address:
        launch.require_cluster()
    _refuse_what_may_be_a_command(file)
    overrides = with_runs(overrides, runs, "overrides.runs")
    ray_env = runtime_env_of(runtime_env)
    environment = job_environment(env, secrets, secret_files, ray_env.get("env_vars", {}))
    with having(environment):
        loaded = load_study(file, overrides)
    # The nodes of an existing cluster may have other files than this machine, so only they can tell whether the study is done.
    if not (address or cluster_at_hand()) and (lines := report_if_done(loaded, fresh)):
        click.echo("\n".join(lines))
        return 0
    mode = mode_of(detach, keep_alive)
    environment = with_declared(environment, loaded.job.variables)
    submission = submission_of_study(file, loaded, overrides, script, fresh, project).with_environment(
        environment, ray_env
    )
    return run_submission(submission, address, LiveScreen(sys.stdout), mode)


def _refuse_what_may_be_a_command(file: Path) -> None:
    if not file.exists() and not file.suffix:
        close = difflib.get_close_matches(str(file), study.commands, n=1)
        fix = f"did you mean {close[0]}?" if close else f"give a study's YAML, or one of {', '.join(study.commands)}"
        raise SpecError(f"there is no file {file}, and no such command of `undula study`: {fix}")


@study.command(short_help="Show how far a study is.")
@click.argument("name", metavar="STUDY")
@runs_option
@click.option("--follow", is_flag=True, help="Refresh every few seconds until the study has ended.")
@json_option
def status(name: str, runs: str | None, follow: bool, as_json: bool) -> None:
    """Show how far a study is, and whether its driver is alive.

    STUDY is the study's name, or its directory as a path or an s3:// URL.
    """
    from undula.state.locate import locate_study
    from undula.study.status import read_status
    from undula.telemetry.live import LiveScreen

    store, screen = locate_study(name, runs), LiveScreen(sys.stdout)
    progress = read_status(store)
    if as_json:
        print_json(progress.as_json())
        return
    while True:
        for line in progress.table():
            screen.show(line)
        if progress.is_over or not follow:
            break
        time.sleep(INTERVAL_S)
        progress = read_status(store)
    screen.close()
    if progress.is_over and not progress.has_ended:
        click.echo(
            "the study's driver has died or is still starting; if it does not start, submit the study again to continue it"
        )


@study.command(short_help="Write the report of a study, also of an unfinished one.")
@click.argument("name", metavar="STUDY")
@runs_option
@click.option(
    "--worker-hour",
    type=FiniteRange(min=0),
    metavar="DOLLARS",
    help="Price of a worker per hour.  [default: the study's worker_hour]",
)
@json_option
def report(name: str, runs: str | None, worker_hour: float | None, as_json: bool) -> None:
    """Write the report of a study, also of an unfinished one: a page, its figures and a table of all trials.

    STUDY is the study's name, or its directory as a path or an s3:// URL.
    """
    from undula.state.locate import locate_study
    from undula.study.status import report_study

    lines = report_study(locate_study(name, runs), worker_hour)
    if as_json:
        *verdicts, _, page = lines
        print_json({"report": page.removeprefix("report: "), "verdicts": verdicts})
    else:
        click.echo("\n".join(lines))


@study.command("self-test", short_help="Check the arithmetic of studies against known numbers.")
@json_option
def self_test(as_json: bool) -> int:
    """Check the arithmetic of studies against known numbers and sampling. The exit status is 1 if a number is off."""
    with needs_extra("study"):
        from undula.study.self_test import self_test as run_checks
        from undula.study.self_test import table

    checks = list(run_checks())
    failed = sum(not check.passed for check in checks)
    if as_json:
        print_json([{**vars(check), "passed": check.passed} for check in checks])
    else:
        click.echo(table(checks))
        click.echo(f"{len(checks) - failed} passed, {failed} failed")
    return int(failed > 0)
