"""Command `undula data`."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

import click

from undula.cli.options import FILE, Commands, FiniteRange, counted, json_option, print_findings, print_json

if TYPE_CHECKING:
    from undula.data.prepare.corpora import Corpus
    from undula.data.stored.manifest import Manifest

F = TypeVar("F", bound=Callable[..., Any])


@click.group(cls=Commands, short_help="Make, index, convert and check data sets.")
def data() -> None:
    """Make, index, convert and check data sets: sharded Parquet with a manifest, on disk or on s3://."""


def _writing_options(row_group_mib: float) -> Callable[[F], F]:
    out = click.option("--out", required=True, metavar="URL", help="Path or s3:// URL of the data set.")
    shards = click.option(
        "--shards",
        type=click.IntRange(min=1),
        default=4,
        show_default=True,
        metavar="N",
        help="Number of Parquet files per split.",
    )
    row_group = click.option(
        "--row-group-mib",
        type=FiniteRange(min=0, min_open=True),
        default=row_group_mib,
        show_default=True,
        metavar="M",
        help="Size of a row group in memory, in MiB.",
    )
    return lambda command: out(shards(row_group(command)))


_corpus_options = _writing_options(row_group_mib=1.0)
_if_missing = click.option("--if-missing", is_flag=True, help="Do nothing if the data set exists and is complete.")


@data.command("stdlib-text", short_help="Make a data set of the source of Python's library, as bytes.")
@_corpus_options
@_if_missing
@click.option(
    "--context",
    type=click.IntRange(min=1),
    default=256,
    show_default=True,
    metavar="N",
    help="Number of bytes that a model sees at once.",
)
def stdlib_text(out: str, shards: int, row_group_mib: float, if_missing: bool, context: int) -> None:
    """Make a data set of the source of this Python's standard library, as bytes. This needs no network."""
    from undula.data.prepare.corpora import stdlib_text as corpus

    _write_corpus(lambda: corpus(context=context), out, shards, row_group_mib, if_missing)


@data.command(short_help="Make a data set of scikit-learn's handwritten digits.")
@_corpus_options
@_if_missing
def digits(out: str, shards: int, row_group_mib: float, if_missing: bool) -> None:
    """Make a data set of scikit-learn's handwritten digits. This needs no network."""
    from undula.data.prepare.corpora import digits as corpus

    _write_corpus(corpus, out, shards, row_group_mib, if_missing)


@data.command(short_help="Make a data set of CIFAR-10 from its binary archive.")
@click.option("--archive", type=FILE, required=True, metavar="FILE", help="cifar-10-binary.tar.gz, as published.")
@_corpus_options
@_if_missing
def cifar10(archive: Path, out: str, shards: int, row_group_mib: float, if_missing: bool) -> None:
    """Make a data set of CIFAR-10 from the binary archive that its authors publish."""
    from undula.data.prepare.corpora import cifar10 as corpus

    _write_corpus(lambda: corpus(archive), out, shards, row_group_mib, if_missing)


def _write_corpus(make: "Callable[[], Corpus]", out: str, shards: int, row_group_mib: float, if_missing: bool) -> None:
    from undula.data.prepare.corpora import SPLITS, is_complete
    from undula.data.stored.manifest import load_manifest

    if if_missing and is_complete(out):
        click.echo(f"{out} exists and is complete; nothing to do")
        return
    corpus = make()
    with _progress(f"writing {out}", corpus.num_rows) as advance:
        corpus.write(out, shards, int(row_group_mib * 2**20), advance)
    for split in SPLITS:
        _print_data_set(load_manifest(f"{out}/{split}"))


@data.command(short_help="Write the manifest of existing Parquet files.")
@click.argument("url", metavar="URL")
@click.option("--out", metavar="FOLDER", help="Folder for the manifest, if the folder of the files is not writable.")
@click.option("--anonymous", is_flag=True, help="Read S3 without credentials, which public buckets allow.")
@json_option
def index(url: str, out: str | None, anonymous: bool, as_json: bool) -> None:
    """Write the manifest of the Parquet files below URL, which turns them into a data set.

    Files are left out if their name, or that of a folder below URL, begins with `_` or `.`.
    """
    from undula.data.prepare.formats import partitions_of
    from undula.data.stored.index import index_files, list_to_index

    listing = list_to_index(url, out, anonymous)
    with _progress(f"reading footers below {url}", len(listing.files)) as advance:
        manifest = index_files(listing, advance, out)
    _print_data_set(manifest, as_json)
    if as_json:
        return
    if listing.num_hidden:
        click.echo(f"  skipped {counted(listing.num_hidden, 'Parquet file')} with _ or . at the beginning of a name")
    partitions = dict.fromkeys(key for file in manifest.files for key in partitions_of(file.name))
    if missing := [key for key in partitions if key not in [column.name for column in manifest.columns]]:
        click.echo(f"  the folders {missing[0]}=... do not become a column; `undula data convert` makes one of them")


@data.command(short_help="Write a data set from files of another format.")
@click.argument("source", metavar="SOURCE")
@click.option("--columns", metavar="A,B,...", help="Columns to keep.  [default: all]")
@click.option("--shuffle", type=int, metavar="SEED", help="Shuffle all rows, in an order that depends on SEED.")
@_writing_options(row_group_mib=4.0)
@json_option
def convert(
    source: str, columns: str | None, shuffle: int | None, out: str, shards: int, row_group_mib: float, as_json: bool
) -> None:
    """Write a data set from SOURCE, the path or s3:// URL of a file or a folder.

    SOURCE can hold Parquet, CSV, JSON lines, WebDataset tars, or the output of datasets.save_to_disk.
    """
    from undula.data.prepare.shuffle import shuffled
    from undula.data.prepare.sources import open_source
    from undula.data.prepare.write import write_shards
    from undula.errors import SpecError
    from undula.storage import open_store

    store = open_store(out)
    if open_store(source).path() == store.path():
        raise SpecError(
            f"--out {out} is SOURCE itself, and the command would delete it before writing; give another --out"
        )
    opened = open_source(source, [name.strip() for name in columns.split(",")] if columns else None)
    if shuffle is not None:
        opened = shuffled(opened, shuffle)
    with _progress(f"writing {out}", opened.num_rows) as advance:
        size = int(row_group_mib * 2**20)
        manifest = write_shards(store, opened.tables(), opened.schema, opened.num_rows, shards, size, advance)
    _print_data_set(manifest, as_json)


@data.command(short_help="Read a data set and report what would stop or slow training.")
@click.argument("url", metavar="URL")
@json_option
def check(url: str, as_json: bool) -> int:
    """Read every row group of a data set, and report what would stop or slow down training. The exit status is 1 if there are errors."""
    from undula.data.prepare.check import check as examine
    from undula.data.stored.manifest import load_manifest

    manifest = load_manifest(url)
    with _progress(f"reading {url}", len(manifest.row_counts)) as advance:
        findings = examine(manifest, advance)
    if not as_json:
        _print_data_set(manifest)
    return print_findings(findings, as_json)


def _print_data_set(manifest: "Manifest", as_json: bool = False) -> None:
    if as_json:
        facts = {
            "url": manifest.url,
            "digest": manifest.digest,
            "rows": manifest.num_rows,
            "files": len(manifest.files),
        }
        print_json({**facts, "columns": {column.name: column.type for column in manifest.columns}})
        return
    columns = ", ".join(f"{column.name} {column.type}{list(column.shape) or ''}" for column in manifest.columns)
    click.echo(f"{manifest.url}: {manifest.num_rows:,} rows of {columns}")
    files, groups = counted(len(manifest.files), "file"), counted(len(manifest.row_counts), "row group")
    click.echo(f"  {files}, {groups}, digest {manifest.digest[:16]}")


@contextmanager
def _progress(text: str, total: int | None) -> Iterator[Callable[[int], None]]:
    """Show a progress bar on stderr, and yield a function that advances it."""
    from rich.console import Console
    from rich.progress import Progress

    with Progress(console=Console(stderr=True)) as progress:
        task = progress.add_task(text, total=total)
        yield lambda count: progress.advance(task, count)
