"""Entry point of a job's script: `main` trains the job."""

import argparse
import sys
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from undula import extensions
from undula.config.environment import with_secrets
from undula.config.job import load_spec
from undula.config.yaml_file import Setting
from undula.driver.launchers import end_all_but_first
from undula.driver.script import begin_call, note_begin, refuse_process_group
from undula.errors import SpecError, end_on_sigterm, needs_extra, one_sentence
from undula.masking.output import mask_output
from undula.telemetry.tracker import Tracker

if TYPE_CHECKING:
    from undula.driver.training import (
        TrainFunction,  # torch and Ray take seconds to import, and commands of a script need neither
    )

INSTEAD = "undula.instead"
"""Name of this table in messages. No other package adds to it, because each entry has an option of its own."""
OWN_INSTEAD = {
    "study": "undula.study.conduct:conduct",
    "count": "undula.driver.count_job:print_count",
    "smoke": "undula.driver.smoke:smoke_job",
}
"""What a script can do with its job instead of training it, by the option that asks for it."""


def main(
    train: "TrainFunction",
    config: type | None = None,
    argv: Sequence[str] | None = None,
    settings: Callable[[Mapping[str, Any]], Mapping[str, Setting]] = lambda _tree: {},
    trackers: Sequence[Tracker] = (),
) -> None:
    """Run a job script: check its YAML and overrides, train on the available Ray cluster or in this process, and print the result and the
    run directory.

    The process exits with a message of one sentence if the input is wrong (status 2) or the cluster cannot train it (3), and with status 1
    if training fails.

    Args:
        train: Training loop of the script. It runs in every worker.
        config: Dataclass of the script's own settings, which are under `config` in the YAML. Without it, they are a mapping.
        argv: Command line, by default that of this process: [--config JOB.yaml] [--print] [--smoke] [--fresh] [--in-process]
            [key.sub=value ...].
            JOB.yaml defaults to the file beside the script with the same name. With --study STUDY.yaml, the script conducts a study of
            the job instead.
        settings: Callback that returns settings of the script itself by dotted key, given the tree of the YAML with its overrides.
        trackers: Experiment trackers of your own, beside those of the job. A study does not use them.
    """
    note_begin()
    mask_output()
    if not begin_call(train):
        return
    launch = end_all_but_first()
    options = _parser().parse_intermixed_args(argv)
    with one_sentence():
        refuse_process_group()
        if not options.in_process:
            if launch:
                launch.require_cluster()
            _main_on_cluster(train, config, options, settings, trackers)
            return
        if options.study:
            raise SpecError("command line: --in-process cannot be combined with --study; remove one of them")
        if options.smoke:
            raise SpecError("command line: --in-process cannot be combined with --smoke; remove one of them")
        from undula.driver.in_process import in_process
        from undula.driver.training import train_job

        loaded = load_spec(options.config, with_secrets(options.overrides), config, settings=settings)
        train_job(loaded, train, in_process, options.fresh, trackers)


def _main_on_cluster(
    train: "TrainFunction",
    config: type | None,
    options: argparse.Namespace,
    settings: Callable[[Mapping[str, Any]], Mapping[str, Setting]],
    trackers: Sequence[Tracker],
) -> None:
    from undula.driver.cluster import on_cluster
    from undula.driver.connection import private_environment_of_job
    from undula.driver.training import train_job

    end_on_sigterm()
    with private_environment_of_job():
        overrides = with_secrets(options.overrides)
        if options.study:
            with needs_extra("study"):
                conduct = extensions.load(INSTEAD, OWN_INSTEAD, "study")
            conduct(train, config, options.study, overrides, options.fresh)
            return
        loaded = load_spec(options.config, overrides, config, settings=settings)
        if options.print:
            print(loaded.to_yaml(), end="")
            return
        if name := "count" if options.count else "smoke" if options.smoke else "":
            extensions.load(INSTEAD, OWN_INSTEAD, name)(loaded, train)
            return
        train_job(loaded, train, on_cluster(loaded, options.trainer), options.fresh, trackers)


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(description="Train a job. Values of its YAML are overridden with key.sub=value.")
    beside = Path(sys.argv[0]).with_suffix(".yaml")
    parser.add_argument(
        "--config", type=Path, default=beside, metavar="JOB.yaml", help=f"YAML of the job (default: {beside})"
    )
    parser.add_argument(
        "--print", action="store_true", help="print the resolved job with the origin of each value, and exit"
    )
    parser.add_argument("--count", action="store_true", help=argparse.SUPPRESS)  # for `undula plan`
    text = "trainer that runs the loop; `ray` is Ray Train's own, for comparison (default: undula)"
    parser.add_argument("--trainer", choices=["undula", "ray"], default="undula", help=text)
    parser.add_argument(
        "--in-process", action="store_true", help="train in this process, as the only worker, without Ray"
    )
    parser.add_argument(
        "--study", type=Path, metavar="STUDY.yaml", help="conduct a study of the job instead of training it"
    )
    parser.add_argument(
        "--smoke", action="store_true", help="go through all parts of a run once, and say what the run will take"
    )
    parser.add_argument("--fresh", action="store_true", help="delete the run in the run directory and start over")
    # torch.distributed.launch and deepspeed add it.
    parser.add_argument("--local-rank", "--local_rank", help=argparse.SUPPRESS)
    parser.add_argument("overrides", nargs="*", metavar="key.sub=value", help="override a value of the YAML")
    return parser
