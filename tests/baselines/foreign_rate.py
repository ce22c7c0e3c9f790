"""Shared code of the contenders' scripts. It runs in their virtual environment and imports none of our packages."""

import json
import os
import time
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

import boto3
import numpy as np
import pyarrow.dataset
from pyarrow import fs


def rate(batches: Iterable[int], most_s: float = 10.0) -> float:
    """Return the rate in rows per second of a pass, or of its first `most_s` seconds, given the number of rows of each batch."""
    began = time.perf_counter()
    total = 0
    for rows in batches:
        total += rows
        if time.perf_counter() - began > most_s:
            break
    return total / (time.perf_counter() - began)


def parquet_rows(url: str) -> Iterator[dict[str, np.ndarray[Any, Any]]]:
    """Yield the rows of a data set, as arrays of the sample's shape by column name."""
    is_s3 = url.startswith("s3://")
    filesystem = fs.S3FileSystem(endpoint_override=os.environ["AWS_ENDPOINT_URL"]) if is_s3 else fs.LocalFileSystem()
    data = pyarrow.dataset.dataset(
        url.removeprefix("s3://"), format="parquet", filesystem=filesystem, exclude_invalid_files=True
    )
    shapes = {field.name: tuple(json.loads((field.metadata or {}).get(b"shape", b"[]"))) for field in data.schema}
    for batch in data.to_batches():
        columns = {
            name: (batch[name].flatten() if shape else batch[name]).to_numpy().reshape(-1, *shape)
            for name, shape in shapes.items()
        }
        for row in range(batch.num_rows):
            yield {name: np.asarray(values[row]) for name, values in columns.items()}


def upload(folder: str, url: str) -> None:
    client = boto3.client("s3", endpoint_url=os.environ["AWS_ENDPOINT_URL"])
    bucket, _, prefix = url.removeprefix("s3://").partition("/")
    for file in Path(folder).iterdir():
        client.upload_file(str(file), bucket, f"{prefix}/{file.name}")
