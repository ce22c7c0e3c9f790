"""The command line, `undula ...`: every command calls one function of the library."""

import argparse
import json
import signal
import sys
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Any

from rich.console import Console

from undula.chaos_command import add_chaos_arguments
from undula.cluster_command import add_cluster_arguments
from undula.doctor_command import add_doctor_arguments
from undula.errors import SpecError, one_sentence
from undula.price_options import add_price_arguments, price_finder
from undula.run_command import add_run_arguments
from undula.spot_command import add_leave_arguments, add_spot_arguments
from undula.storage import Store, open_store
from undula.study_command import add_study_commands, with_study_command

if TYPE_CHECKING:
    from undula.data.manifest import Manifest

DEFAULT_RUNS = "~/undula/runs"
CACHE = Path("~/.cache/undula")


def main(argv: Sequence[str] | None = None) -> None:
    """Entry point of the `undula` command."""
    parser = _parser()
    options, rest = parser.parse_known_args(with_study_command(sys.argv[1:] if argv is None else argv))
    # argparse takes overrides in one place only; here they may stand among the options.
    if rest and (not hasattr(options, "overrides") or any(text.startswith("-") for text in rest)):
        parser.error(f"unrecognized arguments: {' '.join(rest)}")
    if rest:
        options.overrides += rest
    # SIGTERM ends as Ctrl-C does, so that what was started is stopped.
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))
    try:
        with one_sentence():
            status = options.command(options)
    except KeyboardInterrupt:
        print("\nstopped", file=sys.stderr)
        status = 130
    sys.exit(status)


def _data(options: argparse.Namespace) -> int:
    from undula.data.corpora import is_complete
    from undula.data.manifest import load_manifest

    if options.if_missing and is_complete(options.out):
        return 0
    corpus = options.corpus(options)
    with _progress() as progress:
        task = progress.add_task(f"writing {options.out}", total=corpus.num_rows)
        row_group_bytes = int(options.row_group_mib * 2**20)
        corpus.write(options.out, options.shards, row_group_bytes, lambda rows: progress.advance(task, rows))
    for split in ("train", "validation"):
        _print_data_set(load_manifest(f"{options.out}/{split}"))
    return 0


def _index(options: argparse.Namespace) -> int:
    from undula.data.manifest import index

    with _progress() as progress:
        task = progress.add_task(f"reading footers below {options.url}", total=None)
        manifest = index(options.url, lambda files: progress.advance(task, files), options.out, options.anonymous)
    _print_data_set(manifest)
    return 0


def _convert(options: argparse.Namespace) -> int:
    from undula.data.convert import open_source, shuffled
    from undula.data.write import write_shards

    if open_store(options.source).path() == open_store(options.out).path():
        raise SpecError(f"{options.out} is what is read as well: give another --out, as what is there goes first")
    source = open_source(options.source, tuple(options.columns.split(",")) if options.columns else None)
    if options.shuffle is not None:
        source = shuffled(source, options.shuffle)
    with _progress() as progress:
        task = progress.add_task(f"writing {options.out}", total=source.num_rows)
        manifest = write_shards(
            open_store(options.out),
            source.tables(),
            source.schema,
            source.num_rows,
            options.shards,
            int(options.row_group_mib * 2**20),
            lambda rows: progress.advance(task, rows),
        )
    _print_data_set(manifest)
    return 0


def _check(options: argparse.Namespace) -> int:
    from undula.data.check import check
    from undula.data.manifest import load_manifest

    manifest = load_manifest(options.url)
    with _progress() as progress:
        task = progress.add_task(f"reading {options.url}", total=len(manifest.row_counts))
        findings = check(manifest, lambda row_groups: progress.advance(task, row_groups))
    if options.json:
        print(json.dumps([asdict(finding) for finding in findings], indent=1))
    else:
        _print_data_set(manifest)
        for finding in findings:
            print(f"{finding.severity}: {finding.message}")
        print(f"{len(findings) or 'no'} finding{'s' if len(findings) != 1 else ''}")
    return int(any(finding.severity == "error" for finding in findings))


def _print_data_set(manifest: "Manifest") -> None:
    columns = ", ".join(f"{column.name} {column.type}{list(column.shape) or ''}" for column in manifest.columns)
    print(f"{manifest.url}: {manifest.num_rows:,} rows of {columns}")
    print(f"  {len(manifest.files)} files, {len(manifest.row_counts)} row groups, digest {manifest.digest[:16]}")


def _progress() -> Any:
    from rich.progress import Progress

    return Progress(console=Console(stderr=True))


def _stdlib_text(options: argparse.Namespace) -> Any:
    from undula.data.corpora import stdlib_text

    return stdlib_text(context=options.context)


def _digits(options: argparse.Namespace) -> Any:
    from undula.data.corpora import digits

    return digits()


def _cifar10(options: argparse.Namespace) -> Any:
    from undula.data.corpora import cifar10

    return cifar10(options.archive)


def _ls(options: argparse.Namespace) -> int:
    from undula.report.render.terminal import print_runs

    print_runs(open_store(options.runs), options.json)
    return 0


def _show(options: argparse.Namespace) -> int:
    from undula.report.render.terminal import print_run

    print_run(_run_store(options.run), options.json, price_finder(options))
    return 0


def _verify(options: argparse.Namespace) -> int:
    from undula.report.data.certificate import certify, data_of
    from undula.report.data.run_record import read_run

    run = read_run(_run_store(options.run))
    against = read_run(_run_store(options.against)) if options.against else None
    found = certify(run, data_of(run), against, options.tolerance)
    if options.json:
        print(json.dumps(found.as_json(), indent=1))
    else:
        lines = [("proved", text) for text in found.proved] + [("not proved", text) for text in found.not_proved]
        for verdict, text in [*lines, *([("DIFFERENT", found.difference)] if found.difference else [])]:
            print(f"{verdict:>10}  {text}")
    return 0 if found.holds else 1


def _report(options: argparse.Namespace) -> int:
    from undula.report.render.page import write_report

    print(write_report(_run_store(options.run), price_finder(options)))
    return 0


def _run_store(run: str) -> Store:
    """The directory of a run: its path, or its name where it lies with the others."""
    beside = open_store(f"{DEFAULT_RUNS}/{run}")
    return beside if "/" not in run and not Path(run).exists() and beside.exists() else open_store(run)


def _build_horovod(options: argparse.Namespace) -> int:
    from undula.build_horovod import build_horovod

    build_horovod(options.cache)
    return 0


def _schema(options: argparse.Namespace) -> int:
    from undula.config.job import JobSpec, json_schema
    from undula.reference import markdown
    from undula.study.spec import StudySpec

    schema = json_schema(StudySpec if options.study else JobSpec)
    print(markdown() if options.markdown else json.dumps(schema, indent=1) + "\n", end="")
    return 0


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="undula", description="Elastic training on Ray.")
    commands = parser.add_subparsers(required=True, metavar="COMMAND")

    text = "submit a job to the Ray cluster at hand, or to a local one, and follow it"
    add_run_arguments(commands.add_parser("run", help=text))

    _add_data_commands(
        commands.add_parser("data", help="make or index a data set").add_subparsers(required=True, metavar="WHAT")
    )

    runs = commands.add_parser("ls", help="list runs")
    runs.add_argument("runs", nargs="?", default=DEFAULT_RUNS, help=f"path or s3:// URL (default: {DEFAULT_RUNS})")
    runs.add_argument("--json", action="store_true")
    runs.set_defaults(command=_ls)

    show = commands.add_parser("show", help="show a run: figures, curves, events")
    show.add_argument("run", metavar="RUN", help="a run's name, as `undula ls` shows it, or its directory")
    show.add_argument("--json", action="store_true")
    add_price_arguments(show)
    show.set_defaults(command=_show)

    verify = commands.add_parser(
        "verify",
        help="prove from its ledger that a run is the one its plan says; exit status 1 at the first difference",
    )
    verify.add_argument("run", metavar="RUN", help="a run's name, as `undula ls` shows it, or its directory")
    verify.add_argument("--against", metavar="RUN", help="a run of the same plan that it must equal")
    text = "largest relative difference of a step's loss (default: 1e-5)"
    verify.add_argument("--tolerance", type=float, default=1e-5, metavar="X", help=text)
    verify.add_argument("--json", action="store_true")
    verify.set_defaults(command=_verify)

    add_chaos_arguments(
        commands.add_parser(
            "chaos", help="run a job on a local cluster whose nodes come and go, and tell what became of it"
        )
    )

    _add_cluster_commands(commands)

    text = "say what is wrong with a running cluster, before a job holds its GPUs; exit status 1 where something fails"
    add_doctor_arguments(commands.add_parser("doctor", help=text), DEFAULT_RUNS)

    report = commands.add_parser("report", help="write report.html into a run directory")
    report.add_argument("run", metavar="RUN", help="a run's name, as `undula ls` shows it, or its directory")
    add_price_arguments(report)
    report.set_defaults(command=_report)

    text = "train a job at many batch sizes and learning rates, and say what the data support"
    study = commands.add_parser(
        "study",
        help=text,
        usage="undula study [-h] STUDY.yaml [key=value ...] [--fresh] | status | report | self-test ...",
    )
    add_study_commands(study.add_subparsers(required=True, metavar="WHAT", prog="undula study"), DEFAULT_RUNS)

    horovod = commands.add_parser(
        "build-horovod", help="build Horovod for the torch that is installed, and install it; for engine: horovod"
    )
    text = f"folder that keeps what was built (default: {CACHE})"
    horovod.add_argument("--cache", type=Path, default=CACHE.expanduser(), metavar="FOLDER", help=text)
    horovod.set_defaults(command=_build_horovod)

    schema = commands.add_parser("schema", help="print the JSON schema of JOB.yaml, for editors")
    schema.add_argument("--study", action="store_true", help="of STUDY.yaml")
    schema.add_argument("--markdown", action="store_true", help="print the configuration reference of both instead")
    schema.set_defaults(command=_schema)
    return parser


def _add_cluster_commands(commands: Any) -> None:
    cluster = commands.add_parser("cluster", help="what concerns a cluster's configuration")
    cluster_commands = cluster.add_subparsers(required=True, metavar="WHAT")
    text = "say what is wrong with a cluster.yaml that `ray up` takes; exit status 1 on errors"
    add_cluster_arguments(cluster_commands.add_parser("check", help=text))

    spot = commands.add_parser("spot", help="what concerns this machine as a spot node of a cluster")
    spot_commands = spot.add_subparsers(required=True, metavar="WHAT")
    add_spot_arguments(
        spot_commands.add_parser("watch", help="have Ray drain this machine's nodes when its cloud gives notice")
    )
    text = "have Ray drain this machine's nodes now, and wait until they have left: for a pod's preStop"
    add_leave_arguments(spot_commands.add_parser("leave", help=text))


def _add_writing(parser: argparse.ArgumentParser, row_group_mib: float) -> None:
    parser.add_argument("--out", required=True, metavar="URL", help="path or s3:// URL of the data set")
    parser.add_argument("--shards", type=int, default=4, metavar="N", help="Parquet files of a split (default: 4)")
    text = f"size of a row group in memory (default: {row_group_mib:g})"
    parser.add_argument("--row-group-mib", type=float, default=row_group_mib, metavar="M", help=text)


def _add_data_commands(commands: Any) -> None:
    makers = {
        "stdlib-text": (_stdlib_text, "the source of this Python's standard library, as bytes"),
        "digits": (_digits, "scikit-learn's handwritten digits"),
        "cifar10": (_cifar10, "CIFAR-10, from its binary archive"),
    }
    for name, (make, text) in makers.items():
        parser = commands.add_parser(name, help=text)
        _add_writing(parser, row_group_mib=1.0)
        parser.add_argument("--if-missing", action="store_true", help="do nothing where it is there already, and whole")
        parser.set_defaults(command=_data, corpus=make)
        if name == "stdlib-text":
            parser.add_argument(
                "--context", type=int, default=256, help="bytes that a model sees at once (default: 256)"
            )
        if name == "cifar10":
            parser.add_argument("--archive", type=Path, required=True, help="cifar-10-binary.tar.gz, as published")
    index = commands.add_parser("index", help="write the manifest of Parquet files that are there")
    index.add_argument("url", metavar="URL")
    index.add_argument(
        "--out", metavar="FOLDER", help="where the manifest goes, for files that lie where nobody may write"
    )
    index.add_argument("--anonymous", action="store_true", help="read S3 without credentials, as public buckets allow")
    index.set_defaults(command=_index)
    convert = commands.add_parser(
        "convert",
        help="write a data set from Parquet, CSV, JSON lines, WebDataset tars, or a folder of datasets.save_to_disk",
    )
    convert.add_argument("source", metavar="SOURCE", help="path or s3:// URL of a file or folder")
    convert.add_argument("--columns", metavar="A,B,...", help="columns to keep (default: all)")
    convert.add_argument("--shuffle", type=int, metavar="SEED", help="shuffle all rows, in an order drawn from SEED")
    _add_writing(convert, row_group_mib=4.0)
    convert.set_defaults(command=_convert)
    check = commands.add_parser(
        "check", help="read every row group and tell what would stop or slow a training; exit status 1 on errors"
    )
    check.add_argument("url", metavar="URL")
    check.add_argument("--json", action="store_true")
    check.set_defaults(command=_check)


if __name__ == "__main__":
    main()
