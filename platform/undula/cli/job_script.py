"""A job from its first line to its last: spec -> plan -> train -> report."""

import argparse
import json
import runpy
import signal
import sys
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from dataclasses import replace
from functools import partial
from pathlib import Path

from ray.train import TrainingFailedError
from ray.train.v2.api.data_parallel_trainer import DataParallelTrainer

from undula.config.job import JobSpec, load_spec, script_of
from undula.driver.connection import INTERRUPTED, connected, ship_modules_beside_the_script
from undula.driver.preflight import Prepared, describe, prepare
from undula.elastic.pure.fleet import Work
from undula.elastic.pure.spec import WorkersSpec
from undula.elastic.ray.failures import whole_story
from undula.elastic.ray.horovod import HorovodConfig
from undula.elastic.ray.trainer import elastic_trainer, ray_trainer
from undula.elastic.worker import Worker, open_data
from undula.errors import SpecError, needs_extra, one_sentence
from undula.state.directory import JOB_FILE, delete_run, held, identity
from undula.state.ledger import EventWriter, last_event, read_ledger, steps_done
from undula.state.records import Event
from undula.study.load import load_study
from undula.telemetry.hub import HubPublisher, TellEverywhere, start_hub
from undula.telemetry.live import live_view
from undula.train.job import Job
from undula.train.run import Run


def main(train: Callable[[Run], None], config: type | None = None, argv: Sequence[str] | None = None) -> None:
    """Run a job script: read its YAML and overrides, check them, train on the Ray cluster at hand, and say where the result is.

    Args:
        train: the training loop; runs in every worker.
        config: dataclass of the script's own settings, the YAML's `config`; without it they are a mapping.
        argv: command line, by default this process's: [--config JOB.yaml] [--print] [--fresh] [key.sub=value ...].
            JOB.yaml defaults to the file beside the script with its name. With --study STUDY.yaml it is a study of the job that is run.

    Exits with status 2 and one sentence for a mistake in the input, and with 1 when training fails.
    """
    options = _parser().parse_intermixed_args(argv)
    with one_sentence(), ExitStack() as stack:
        if options.study:
            with needs_extra("study"):
                from undula.study.conduct import conduct
            conduct(train, config, options.study, options.overrides, options.fresh)
            return
        loaded = load_spec(options.config, options.overrides, config)
        if options.print:
            print(loaded.to_yaml(), end="")
            return
        if options.trainer == "ray" and loaded.spec.engine == "horovod":
            raise SpecError("command line: --trainer ray has no Horovod: leave out one of it and engine: horovod")
        if options.trainer == "ray" and not loaded.spec.workers.fleet.is_any:
            raise SpecError("command line: --trainer ray asks for any node: leave out one of it and workers.fleet")
        prepared = prepare(loaded, train, options.fresh)
        if prepared.is_finished:
            print(f"{prepared.store.url} is finished: nothing to do; --fresh starts over")
            return
        stack.enter_context(held(prepared.store))
        stack.enter_context(connected())
        hub = start_hub(prepared.store)
        if options.fresh:
            delete_run(prepared.store)
        record = {**describe(loaded, prepared.plan), **identity(prepared.store)}
        prepared.store.write(JOB_FILE, json.dumps(record, indent=1).encode())
        print(f"{prepared.store.url}: starting {_range(loaded.spec.workers)} ...", flush=True)
        with live_view(hub):
            job = replace(loaded.job(), run_id=record["id"])
            work = Work(prepared.plan.total_steps, record["began"])
            error = _fit(train, job, loaded.spec, prepared, work, HubPublisher(hub), options.trainer)
        _say_result(prepared, error)
        if error:
            raise SystemExit(1)


def _fit(
    train: Callable[[Run], None],
    job: Job,
    spec: JobSpec,
    prepared: Prepared,
    work: Work,
    publish: HubPublisher,
    trainer_name: str,
) -> Exception | None:
    on_event = TellEverywhere(prepared.store, publish)
    worker = Worker(train, job, publish)
    trainer: DataParallelTrainer
    if trainer_name == "ray":
        trainer = ray_trainer(worker, spec.workers, prepared.store, on_event)
    else:
        horovod = HorovodConfig(**vars(spec.horovod)) if spec.engine == "horovod" else None
        trainer = elastic_trainer(
            worker, horovod, spec.workers, work, prepared.store, on_event, prepare=partial(open_data, job)
        )
    ship_modules_beside_the_script()
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(INTERRUPTED))
    try:
        trainer.fit()
    except TrainingFailedError as error:
        return error
    except SystemExit:
        EventWriter(prepared.store, "driver").event(Event("stop", "stopped from outside"))
        raise SystemExit(INTERRUPTED) from None  # Ray's handler of SIGINT would end the job as a success
    return None


def study_main(argv: Sequence[str] | None = None) -> None:
    """Conduct a study: run the script of its job, which `main` then trains as often as the study says.

    Args:
        argv: command line, by default this process's: STUDY.yaml [--fresh] [key=value ...]. The script lies beside the job's YAML, with
            its name.

    Exits with status 2 and one sentence for a mistake in the input.
    """
    study, *rest = [*(sys.argv[1:] if argv is None else argv), ""]
    with one_sentence():
        if not study or study.startswith("-"):
            raise SpecError("command line: no study: give STUDY.yaml")
        overrides = [argument for argument in rest if argument and not argument.startswith("-")]
        script = script_of(load_study(Path(study), overrides).file)
    sys.path.insert(0, str(script.parent))  # as if it had been started by its name
    sys.argv = [str(script), "--study", study, *(argument for argument in rest if argument)]
    runpy.run_path(str(script), run_name="__main__")


def _range(workers: WorkersSpec) -> str:
    """`2 workers`, `1 to 2 workers`."""
    sizes = f"{workers.max}" if workers.min == workers.max else f"{workers.min} to {workers.max}"
    return f"{sizes} worker{'s' if workers.max > 1 else ''}"


def _say_result(prepared: Prepared, error: Exception | None) -> None:
    if error:
        print(f"training failed:\n{whole_story(error)}", file=sys.stderr, flush=True)
    store = prepared.store
    ledger = read_ledger(store)
    done, total = steps_done(ledger.steps), prepared.plan.total_steps
    result = "finished" if done == total else f"stopped after {done} of {total} steps"
    validation = last_event(ledger.events, "validation")
    loss = (
        f"validation loss {validation['data']['loss']:.4f} at step {validation['step']}"
        if validation
        else "no validation"
    )
    print(f"{result}: {loss}\nrun directory: {store.url}\nundula show {store.url}", flush=True)


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(description="Train. Overrides of the YAML are written key.sub=value.")
    beside = Path(sys.argv[0]).with_suffix(".yaml")
    parser.add_argument("--config", type=Path, default=beside, metavar="JOB.yaml", help=f"the job (default: {beside})")
    parser.add_argument(
        "--print", action="store_true", help="print the resolved job, with where each value came from, and exit"
    )
    text = "whose trainer runs the loop: for comparison, Ray Train's own (default: undula)"
    parser.add_argument("--trainer", choices=["undula", "ray"], default="undula", help=text)
    parser.add_argument(
        "--study", type=Path, metavar="STUDY.yaml", help="train the trials of a study of the job instead"
    )
    parser.add_argument("--fresh", action="store_true", help="delete the run in the run directory and start over")
    parser.add_argument("overrides", nargs="*", metavar="key.sub=value", help="override a value of the YAML")
    return parser
