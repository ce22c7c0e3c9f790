"""Entry points of a job's script: `main` trains the job, and `study_main` conducts a study of the job."""

import argparse
import signal
import sys
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack, suppress
from pathlib import Path
from typing import Any

from ray.train import TrainingFailedError

from undula.config.environment import with_secrets
from undula.config.job import JobSpec, load_spec, script_of
from undula.config.yaml_file import Setting
from undula.driver.connection import (
    connected,
    prepare_to_pickle_the_script,
    private_environment_of_job,
)
from undula.driver.launch import LaunchSpec, TrainerName, launch, record_job
from undula.driver.preflight import Prepared, on_cluster, prepare
from undula.driver.script import note_begin, run_script
from undula.driver.trackers import Tracking, send_rest
from undula.elastic.pure.spec import WorkersSpec
from undula.elastic.ray.failures import is_superseded, refusal_of, summary, whole_story
from undula.errors import FAILED, INTERRUPTED, SpecError, StorageError, needs_extra, one_sentence
from undula.state.directory import delete_run, held
from undula.state.events import EndEvent, FailEvent, StopEvent, ValidationEvent
from undula.state.ledger import EventWriter, last_event, read_ledger, steps_done
from undula.storage import Store
from undula.study.load import load_study
from undula.telemetry.hub import EventRecorder, HubPublisher, start_hub
from undula.telemetry.live import live_view
from undula.telemetry.tracker import Tracker
from undula.train.run import Run


def main(
    train: Callable[[Run], None],
    config: type | None = None,
    argv: Sequence[str] | None = None,
    settings: Callable[[Mapping[str, Any]], Mapping[str, Setting]] = lambda _tree: {},
    trackers: Sequence[Tracker] = (),
) -> None:
    """Run a job script: check its YAML and overrides, train on the available Ray cluster, and print the result and the run directory.

    The process exits with a message of one sentence if the input is wrong (status 2) or the cluster cannot train it (3), and with status 1
    if training fails.

    Args:
        train: Training loop of the script. It runs in every worker.
        config: Dataclass of the script's own settings, which are under `config` in the YAML. Without it, they are a mapping.
        argv: Command line, by default that of this process: [--config JOB.yaml] [--print] [--fresh] [key.sub=value ...].
            JOB.yaml defaults to the file beside the script with the same name. With --study STUDY.yaml, the script conducts a study of
            the job instead.
        settings: Callback that returns settings of the script itself by dotted key, given the tree of the YAML with its overrides.
        trackers: Experiment trackers of your own, beside those of the job. A study does not use them.
    """
    note_begin()
    _end_on_sigterm()
    options = _parser().parse_intermixed_args(argv)
    with one_sentence(), private_environment_of_job(), ExitStack() as stack:
        overrides = with_secrets(options.overrides)
        if options.study:
            with needs_extra("study"):
                from undula.study.conduct import conduct
            conduct(train, config, options.study, overrides, options.fresh)
            return
        loaded = load_spec(options.config, overrides, config, settings=settings)
        if options.print:
            print(loaded.to_yaml(), end="")
            return
        _refuse_trainer(options.trainer, loaded.spec)
        prepared = prepare(loaded, train, options.fresh)
        store = prepared.store
        trackers = (*prepared.trackers, *trackers)
        if prepared.is_finished:
            with held(store):
                _print_unsent(send_rest(trackers, store))
            print(f"{store.url} is finished, so there is nothing to do; give --fresh to delete the run and start over")
            return
        stack.enter_context(held(store))
        stack.enter_context(connected())
        loaded = on_cluster(loaded)
        hub = start_hub(store)
        if options.fresh:
            delete_run(store)
        spec = record_job(loaded, prepared.plan, store, prepared.script_data)
        print(f"{store.url}: starting {_description(spec.workers)} ...", flush=True)
        with live_view(hub), Tracking(trackers, store, EventRecorder(store, HubPublisher(hub))) as tracking:
            error = _fit(train, spec, store, hub, options.trainer)
        _print_unsent(tracking.unsent)
        _print_result(prepared, error)
        if error:
            raise SystemExit(FAILED)


def _refuse_trainer(trainer: TrainerName, spec: JobSpec) -> None:
    """Refuse settings that Ray Train's own trainer does not support."""
    if trainer == "ray" and spec.engine == "horovod":
        raise SpecError("command line: --trainer ray cannot be combined with engine=horovod; remove one of them")
    if trainer == "ray" and not spec.workers.fleet.is_any:
        raise SpecError("command line: --trainer ray cannot be combined with workers.fleet; remove one of them")


def _fit(
    train: Callable[[Run], None], spec: LaunchSpec, store: Store, hub: Any, trainer: TrainerName
) -> Exception | None:
    """Train, and return the error with which training failed; None if it succeeded.

    Raises:
        UndulaError: The workers cannot train on a node of the cluster.
        SystemExit: The driver was stopped from outside. An event in the ledger records this.
    """
    prepare_to_pickle_the_script()
    _end_on_sigterm()  # Ray has replaced the handler when it connected
    try:
        launch(train, spec, store, hub, trainer)
    except TrainingFailedError as error:
        refusal = refusal_of(error)
        if not is_superseded(error):
            with suppress(StorageError):  # which may be the error itself
                EventWriter(store, "driver").event(FailEvent(summary(refusal or error)))
        if refusal:
            raise refusal from None
        return error
    except SystemExit:
        EventWriter(store, "driver").event(StopEvent())
        raise SystemExit(INTERRUPTED) from None  # Ray's handler of SIGINT would end the job with status 0
    return None


def _end_on_sigterm() -> None:
    """End this process with an exception on SIGTERM, so that blocks clean up: the secrets of a stopped job must not stay on the head."""
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(INTERRUPTED))


def study_main(argv: Sequence[str] | None = None) -> None:
    """Conduct a study: run the script of its job, whose `main` then trains the study's trials.

    The process exits with status 2 and a message of one sentence if the input is wrong.

    Args:
        argv: Command line, by default that of this process: STUDY.yaml [--fresh] [key=value ...]. The script must lie beside the job's
            YAML and have the same name.
    """
    study, *rest = [*(sys.argv[1:] if argv is None else argv), ""]
    with one_sentence():
        if not study or study.startswith("-"):
            raise SpecError("command line: the study is missing; give STUDY.yaml as the first argument")
        overrides = [argument for argument in rest if argument and not argument.startswith("-")]
        script = script_of(load_study(Path(study), with_secrets(overrides)).file)
        run_script(script, ["--study", study, *(argument for argument in rest if argument)])


def _description(workers: WorkersSpec) -> str:
    """Return the number of workers and of their GPUs in words, such as `1 to 2 workers with 1 GPU each` or `2 workers without a GPU`."""
    sizes = f"{workers.max}" if workers.min == workers.max else f"{workers.min} to {workers.max}"
    gpus, is_plural = workers.per_worker.get("GPU", 0), workers.max > 1
    having = f"with {gpus:g} GPU{'s' if gpus > 1 else ''}{' each' if is_plural else ''}" if gpus else "without a GPU"
    return f"{sizes} worker{'s' if is_plural else ''} {having}"


def _print_result(prepared: Prepared, error: Exception | None) -> None:
    """Print how training ended, the last validation loss, and the run directory."""
    if error:
        print(f"training failed:\n{whole_story(error)}", file=sys.stderr, flush=True)
    store = prepared.store
    ledger = read_ledger(store)
    done, total = steps_done(ledger.steps), prepared.plan.total_steps
    end = last_event(ledger.events, EndEvent)
    result = f"stopped after {done} of {total} steps"
    if done == total or (end and end.step == done):
        result = "finished" + (f" after {done} of {total} steps ({end.reason})" if end and end.reason else "")
    validation = last_event(ledger.events, ValidationEvent)
    loss = f"validation loss {validation.loss:.4f} at step {validation.step}" if validation else "no validation"
    print(f"{result}: {loss}\nrun directory: {store.url}\nundula show {store.url}", flush=True)


def _print_unsent(sentences: Sequence[str]) -> None:
    """Print what trackers lack."""
    for sentence in sentences:
        print(sentence, flush=True)


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(description="Train a job. Values of its YAML are overridden with key.sub=value.")
    beside = Path(sys.argv[0]).with_suffix(".yaml")
    parser.add_argument(
        "--config", type=Path, default=beside, metavar="JOB.yaml", help=f"YAML of the job (default: {beside})"
    )
    parser.add_argument(
        "--print", action="store_true", help="print the resolved job with the origin of each value, and exit"
    )
    text = "trainer that runs the loop; `ray` is Ray Train's own, for comparison (default: undula)"
    parser.add_argument("--trainer", choices=["undula", "ray"], default="undula", help=text)
    parser.add_argument(
        "--study", type=Path, metavar="STUDY.yaml", help="conduct a study of the job instead of training it"
    )
    parser.add_argument("--fresh", action="store_true", help="delete the run in the run directory and start over")
    parser.add_argument("overrides", nargs="*", metavar="key.sub=value", help="override a value of the YAML")
    return parser
