"""Rate of reading sharded Parquet: our stream compared with a plain scan, Ray Data, MosaicML Streaming and LitData.

    make bench-data

Same rows, same machine, same S3 server (moto's, on loopback) or the same files in the page cache; interleaved rounds, medians. Rates are
of whole passes on a warm cluster, or of their first ten seconds, from before the first batch; the first batch after a resume is told apart.
"""

import argparse
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from contextlib import ExitStack
from importlib import import_module
from pathlib import Path
from typing import Any

import boto3
import numpy as np
import pyarrow as pa
import pyarrow.dataset
import pyarrow.parquet as pq
from pyarrow import fs

from tests.baselines.foreign import FOREIGN, LOCAL_ONLY, foreign_rate, prepare_foreign
from tests.baselines.foreign_rate import rate
from tests.baselines.result import print_and_write
from tests.s3_server import client_env, moto_server
from undula.cluster.local import local_cluster
from undula.data.prepare.write import array_column, array_field
from undula.data.stored.index import index
from undula.errors import needs_extra, one_sentence
from undula.plan.plan import PlanSpec
from undula.storage import Store, open_store

BATCH = 256
ROW_GROUP_BYTES = 12 * 2**20


def wide_floats(rows: int) -> pa.Table:
    """Return rows of 784 float32 values and a label, as MNIST has."""
    rng = np.random.default_rng(0)
    field = array_field("x", pa.float32(), (784,))
    return table({field: rng.random((rows, 784), dtype=np.float32)}, rows)


def tokens(rows: int) -> pa.Table:
    """Return sequences of 1024 tokens as int32."""
    rng = np.random.default_rng(0)
    field = array_field("x", pa.int32(), (1024,))
    return table({field: rng.integers(0, 50_000, (rows, 1024), dtype=np.int32)}, rows)


def small_images(rows: int) -> pa.Table:
    """Return rows of 3 x 32 x 32 bytes and a label, as CIFAR-10 has."""
    rng = np.random.default_rng(0)
    field = array_field("x", pa.uint8(), (3, 32, 32))
    return table({field: rng.integers(0, 256, (rows, 3, 32, 32), dtype=np.uint8)}, rows)


def table(arrays: dict[pa.Field, np.ndarray[Any, Any]], rows: int) -> pa.Table:
    columns = [array_column(field, values) for field, values in arrays.items()]
    schema = pa.schema([*arrays, ("label", pa.int64())])
    return pa.Table.from_arrays([*columns, pa.array(np.arange(rows))], schema=schema)


KINDS: dict[str, Callable[[int], pa.Table]] = {"floats": wide_floats, "tokens": tokens, "images": small_images}


def write_plain(store: Store, data: pa.Table, files: int = 8) -> None:
    """Write plain uncompressed Parquet files and their manifest."""
    per_group = max(ROW_GROUP_BYTES // (data.nbytes // data.num_rows), 1)
    for number in range(files):
        start, stop = number * data.num_rows // files, (number + 1) * data.num_rows // files
        part = data.slice(start, stop - start)
        if not store.is_s3:
            Path(store.path()).mkdir(parents=True, exist_ok=True)
        pq.write_table(
            part, store.path(f"part-{number:05d}.parquet"), filesystem=store.filesystem,
            compression="none", use_dictionary=False, row_group_size=per_group,
        )  # fmt: skip
    index(store.url)


def arrows_own(store: Store) -> fs.FileSystem:
    """Return the file system that others use. Ours goes through Python."""
    is_s3 = store.is_s3
    return fs.S3FileSystem(endpoint_override=os.environ["AWS_ENDPOINT_URL"]) if is_s3 else fs.LocalFileSystem()


def scan(url: str) -> float:
    """Measure a plain pyarrow scan of whole record batches."""
    store = open_store(url)
    fragments = pyarrow.dataset.ParquetFragmentScanOptions(pre_buffer=True)
    found = pyarrow.dataset.dataset(
        store.path(), format="parquet", filesystem=arrows_own(store), exclude_invalid_files=True
    )
    return rate(batch.num_rows for batch in found.to_batches(fragment_scan_options=fragments))


def undula_stream(url: str) -> float:
    """Measure our stream with rows shuffled in windows; Ray Data tasks read all of it."""
    from undula.data import stream

    plan = PlanSpec(global_batch=BATCH, virtual_workers=1, last_step="drop")
    return rate(len(batch["label"]) for batch in stream(url, plan, head_mib=0))


def ray_data(url: str) -> float:
    """Measure what Ray's documentation recommends for training, unshuffled: read_parquet, streaming_split, iter_torch_batches."""
    import ray.data

    store = open_store(url)
    files = [store.path(entry.name) for entry in store.list() if entry.name.endswith(".parquet")]
    dataset = ray.data.read_parquet(files, filesystem=arrows_own(store))
    (split,) = dataset.streaming_split(1, equal=True)
    return rate(len(batch["label"]) for batch in split.iter_torch_batches(batch_size=BATCH))


def resume_seconds(url: str, rows: int) -> float:
    """Return the time in seconds from loading a position to its first batch on a warm cluster; the slowest of several positions."""
    from undula.data import stream

    seconds = []
    for part in (0.0, 0.13, 0.52, 0.98):
        source = stream(url, PlanSpec(global_batch=BATCH, virtual_workers=1, last_step="drop"))
        source.load_state_dict({**source.state_dict(), "step": int(rows // BATCH * part)})
        batches = iter(source)
        began = time.perf_counter()
        next(batches)
        seconds.append(time.perf_counter() - began)
        batches.close()
    return max(seconds)


def warm(contender: Callable[[str], float], url: str) -> float:
    """Return the rate of a second pass. During the first pass, Ray starts processes again and allocators take memory again."""
    contender(url)
    return contender(url)


def one_round(url: str, kind: str, rows: int, row_bytes: float, foreign: dict[str, Path]) -> dict[str, float]:
    scanned, ours, theirs = warm(scan, url), warm(undula_stream, url), {"Ray Data": warm(ray_data, url)}
    resumed = resume_seconds(url, rows)
    theirs |= {name: foreign_rate(name, folder, url, BATCH) for name, folder in foreign.items()}
    figures = {"scan, rows/s": scanned, "undula, rows/s": ours, "undula, MiB/s": ours * row_bytes / 2**20}
    figures |= {f"{name}, rows/s": value for name, value in theirs.items()}
    figures |= {"undula / scan": ours / scanned}
    figures |= {f"undula / {name}": ours / value for name, value in theirs.items()}
    return figures | {"resume to first batch, s": resumed}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--mib", type=int, default=768, help="size of each data set")
    parser.add_argument("--kinds", nargs="*", default=list(KINDS), choices=list(KINDS))
    parser.add_argument("--places", nargs="*", default=["local", "s3"], choices=["local", "s3"])
    parser.add_argument("--without", nargs="*", default=[], choices=list(FOREIGN), help="contenders to leave out")
    options = parser.parse_args()
    with one_sentence(), needs_extra("dev"):
        import_module("moto.server")
    sets = [(kind, place) for kind in options.kinds for place in options.places]
    if len(sets) == 1:
        measure(*sets[0], options)
    for kind, place in sets if len(sets) > 1 else []:
        # A process for each: moto's server grows slower with what it has held, and Ray connects to one cluster.
        own = ["--kinds", kind, "--places", place]
        subprocess.run([sys.executable, "-m", "tests.baselines.bench_data", *sys.argv[1:], *own], check=True)


def measure(kind: str, place: str, options: argparse.Namespace) -> None:
    rows = int(options.mib * 2**20 / (KINDS[kind](8).nbytes / 8)) // BATCH * BATCH
    data = KINDS[kind](rows)
    with tempfile.TemporaryDirectory() as folder, moto_server() as endpoint, ExitStack() as stack:
        os.environ |= client_env(endpoint)
        boto3.client("s3", region_name="us-east-1").create_bucket(Bucket="bench")
        cluster = stack.enter_context(local_cluster(num_cpus=2))
        os.environ |= cluster.env
        stack.callback(disconnect)
        connect(cluster.address)
        url = f"s3://bench/{kind}" if place == "s3" else f"{folder}/{kind}"
        write_plain(open_store(url), data)
        skipped = {*options.without, *(LOCAL_ONLY if place == "s3" else ())}
        foreign = prepare_foreign(Path(folder), url, [name for name in FOREIGN if name not in skipped])
        rounds = [one_round(url, kind, rows, data.nbytes / rows, foreign) for _ in range(options.rounds)]
        print_and_write(f"data-{kind}-{place}", rounds)


def connect(address: str) -> None:
    import logging

    import ray

    ray.init(address=address, log_to_driver=False, logging_level=logging.ERROR)
    for name in ("ray", "ray.data"):
        logging.getLogger(name).setLevel(logging.ERROR)
    import ray.data

    ray.data.DataContext.get_current().enable_progress_bars = False


def disconnect() -> None:
    import ray

    ray.shutdown()


if __name__ == "__main__":
    main()
