"""Command `undula run`."""

import sys
from pathlib import Path

import click

from undula.cli.options import (
    address_option,
    environment_options,
    job_arguments,
    mode_of,
    mode_options,
    project_option,
    runs_option,
    runtime_env_of,
    script_option,
    with_runs,
)


@click.command(short_help="Train a job on a Ray cluster and follow it.")
@job_arguments
@script_option
@project_option
@runs_option
@address_option
@environment_options
@mode_options
@click.option("--launcher", metavar="NAME", help="Start a cluster for the job with this launcher of another package.")
@click.option("--fresh", is_flag=True, help="Delete the run of this name and start over.")
@click.option(
    "--in-process",
    is_flag=True,
    help="Train in this process, as the only worker, without Ray: for debuggers and profilers.",
)
@click.option(
    "--smoke",
    is_flag=True,
    help="Do everything that the run will do once, on one worker, and say what the run will take.",
)
@click.option(
    "--print",
    "prints",
    is_flag=True,
    help="Check the job with its script's own settings, print every value with its origin, and exit.",
)
def run(
    job: Path,
    overrides: tuple[str, ...],
    script: Path | None,
    project: Path | None,
    runs: str | None,
    address: str | None,
    env: tuple[str, ...],
    secrets: tuple[str, ...],
    secret_files: tuple[Path, ...],
    runtime_env: Path | None,
    detach: bool,
    keep_alive: bool,
    launcher: str | None,
    fresh: bool,
    in_process: bool,
    smoke: bool,
    prints: bool,
) -> int:
    """Submit the script of JOB.yaml to a Ray cluster, and follow it until it ends.

    KEY.SUB=VALUE overrides a value of the YAML. A job with the name of an earlier run continues that run.
    Ctrl-C ends only this command, and the job trains on. If there is no cluster, a new local one is started for the job, and both end with
    this command.

    \b
    Examples:
      undula run jobs/language_model.yaml name=first plan.max_steps=100
      undula run jobs/language_model.yaml workers.max=8 --address http://HEAD:8265
      undula run jobs/language_model.yaml --detach
      undula run jobs/language_model.yaml --in-process --fresh
      undula run jobs/language_model.yaml --smoke
    """
    from undula.config.environment import having, job_environment
    from undula.config.job import load_spec, script_of
    from undula.driver.launchers import end_all_but_first
    from undula.driver.print_job import printed_by_script
    from undula.driver.project import refuse_without_entry
    from undula.driver.submission import cluster_of, run_in_this_process, run_submission, submission_of_job
    from undula.errors import SpecError
    from undula.masking.values import with_declared
    from undula.telemetry.live import LiveScreen

    if (launch := end_all_but_first()) and not (in_process or address or launcher):
        launch.require_cluster()
    overrides = with_runs(overrides, runs)
    ray_env = runtime_env_of(runtime_env)
    environment = job_environment(env, secrets, secret_files, ray_env.get("env_vars", {}))
    with having(environment):
        loaded = load_spec(job, overrides)
        if prints:
            click.echo(printed_by_script(script_of(job, script), job, overrides, project), nl=False)
            return 0
    mode = mode_of(detach, keep_alive)
    left_alone = {f"--{mode}": mode != "follow"}
    for option, is_given, others in (
        ("--smoke", smoke, {"--in-process": in_process, "--fresh": fresh, **left_alone}),
        ("--launcher", launcher, {"--in-process": in_process, "--address": address, **left_alone}),
        ("--in-process", in_process, {"--address": address, **left_alone}),
    ):
        if is_given and (other := next((name for name, value in others.items() if value), None)):
            raise SpecError(f"command line: {option} cannot be combined with {other}; remove one of them")
    environment = with_declared(environment, loaded.variables)
    refuse_without_entry(script_of(job, script))
    submission = submission_of_job(job, loaded, overrides, script, fresh, project).with_environment(
        environment, ray_env
    )
    if smoke:
        submission = submission.as_smoke_test()
    if launcher:
        with cluster_of(launcher, loaded) as address:
            return run_submission(submission, address, LiveScreen(sys.stdout), mode)
    if not in_process:
        return run_submission(submission, address, LiveScreen(sys.stdout), mode)
    return run_in_this_process(submission, "--in-process")
