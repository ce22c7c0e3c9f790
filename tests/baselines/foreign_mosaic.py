"""MosaicML Streaming on the rows of a Parquet data set, in its own format: `write URL FOLDER`, then `read URL FOLDER BATCH`."""

import shutil
import sys
import tempfile
from pathlib import Path

from foreign_rate import parquet_rows, rate, upload
from streaming import MDSWriter, StreamingDataset
from streaming.base.util import clean_stale_shared_memory
from torch.utils.data import DataLoader


def write(url: str, folder: str) -> None:
    columns = None
    writer = None
    for sample in parquet_rows(url):
        if writer is None:
            columns = {
                name: "int" if value.ndim == 0 else f"ndarray:{value.dtype}:{','.join(map(str, value.shape))}"
                for name, value in sample.items()
            }
            writer = MDSWriter(out=folder, columns=columns, size_limit=12 * 2**20)
        writer.write({name: int(value) if value.ndim == 0 else value for name, value in sample.items()})
    assert writer is not None
    writer.finish()
    if url.startswith("s3://"):
        upload(folder, f"{url}-mds")


def read(url: str, folder: str, batch: int) -> float:
    clean_stale_shared_memory()
    if not url.startswith("s3://"):
        return rate(
            len(b["label"]) for b in DataLoader(StreamingDataset(local=folder, batch_size=batch), batch_size=batch)
        )
    local = tempfile.mkdtemp()
    try:
        dataset = StreamingDataset(remote=f"{url}-mds", local=local, batch_size=batch)
        return rate(len(b["label"]) for b in DataLoader(dataset, batch_size=batch))
    finally:
        shutil.rmtree(local, ignore_errors=True)


if __name__ == "__main__":
    if sys.argv[1] == "write":
        shutil.rmtree(sys.argv[3], ignore_errors=True)
        write(sys.argv[2], str(Path(sys.argv[3])))
    else:
        print(read(sys.argv[2], sys.argv[3], int(sys.argv[4])))
