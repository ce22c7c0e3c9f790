"""LitData's streaming of the same Parquet files: `write URL FOLDER` indexes them, then `read URL FOLDER BATCH`."""

import os
import shutil
import sys
import tempfile
from pathlib import Path

import litdata
from foreign_rate import rate
from litdata.streaming.item_loader import ParquetLoader

OPTIONS = {
    "endpoint_url": os.environ["AWS_ENDPOINT_URL"],
    "aws_access_key_id": os.environ["AWS_ACCESS_KEY_ID"],
    "aws_secret_access_key": os.environ["AWS_SECRET_ACCESS_KEY"],
    "region_name": os.environ["AWS_REGION"],
}


def options(url: str) -> dict[str, str]:
    return OPTIONS if url.startswith("s3://") else {}


def write(url: str, folder: str) -> None:
    litdata.index_parquet_dataset(url, folder, storage_options=options(url), num_workers=1)


def read(url: str, folder: str, batch: int) -> float:
    cache = tempfile.mkdtemp()
    try:
        dataset = litdata.StreamingDataset(
            url,
            cache_dir=cache,
            item_loader=ParquetLoader(),
            index_path=folder,
            storage_options=options(url),
            drop_last=False,
        )
        loader = litdata.StreamingDataLoader(dataset, batch_size=batch, collate_fn=len)
        return rate(iter(loader))
    finally:
        shutil.rmtree(cache, ignore_errors=True)


if __name__ == "__main__":
    if sys.argv[1] == "write":
        Path(sys.argv[3]).mkdir(parents=True, exist_ok=True)
        write(sys.argv[2], sys.argv[3])
    else:
        print(read(sys.argv[2], sys.argv[3], int(sys.argv[4])))
