"""Contenders that need other package versions. They share a virtual environment on top of ours and have one script each."""

import os
import subprocess
import sys
import sysconfig
import venv
from pathlib import Path

HERE = Path(__file__).parent
FOLDER = HERE.parents[1] / "build" / "bench" / "foreign"
FOREIGN = {"MosaicML Streaming": "foreign_mosaic.py", "LitData": "foreign_litdata.py"}
LOCAL_ONLY = frozenset({"LitData"})
"""Contenders that only run on local data: LitData's index of Parquet on S3 needs s3fs, which needs another botocore than ours."""
_WITHOUT_DEPENDENCIES = (
    *("mosaicml-streaming==0.13.0", "litdata==0.2.76", "lightning-utilities==0.15.3", "obstore==0.12.1"),
    *("tifffile==2026.3.3", "polars==2.1.0", "polars-runtime-32==2.1.0", "zstd==1.5.7.2", "Brotli==1.2.1"),
    *("python-snappy==0.7.3", "cramjam==2.14.0", "xxhash==4.1.0", "tqdm==4.70.1", "pillow==13.0.0"),
    *("catalogue==2.0.10", "filelock==3.16.1"),
)
_STAND_INS = {
    # MosaicML Streaming imports these at its top, for data sets that are not read here.
    "torchvision/__init__.py": "",
    "torchvision/datasets.py": "class VisionDataset: ...\nclass CIFAR10: ...\nclass ImageFolder: ...\n",
    "torchvision/transforms/__init__.py": "",
    "torchvision/transforms/functional.py": "to_tensor = None\n",
    "transformers/__init__.py": "",
    "transformers/feature_extraction_utils.py": "class BatchFeature: ...\n",
    "transformers/tokenization_utils_base.py": "class BatchEncoding: ...\n",
    "transformers/models/__init__.py": "",
    "transformers/models/auto/__init__.py": "",
    "transformers/models/auto/tokenization_auto.py": "class AutoTokenizer: ...\n",
}


def prepare_foreign(folder: Path, url: str, names: list[str]) -> dict[str, Path]:
    """Convert the rows at `url` to each contender's format and return the folder with the data of each contender."""
    _make_environment()
    places = {}
    for name in names:
        places[name] = folder / f"{FOREIGN[name].removesuffix('.py')}-{abs(hash(url))}"
        _run(name, "write", url, str(places[name]))
    return places


def foreign_rate(name: str, place: Path, url: str, batch: int) -> float:
    """Return the rate of a whole pass in rows per second."""
    return float(_run(name, "read", url, str(place), str(batch)).split()[-1])


def torchft_path() -> Path:
    """Return a folder for PYTHONPATH that contains torchft."""
    place = FOLDER.parent / "torchft"
    if not (place / "ready").exists():
        install = [sys.executable, "-m", "pip", "install", "-qq", "--disable-pip-version-check", "--no-deps"]
        subprocess.run([*install, "--target", str(place), "--upgrade", "torchft==0.2.0"], check=True)
        # Imported at its top, used only where OpenTelemetry is asked for.
        stand_in = place / "opentelemetry" / "exporter" / "otlp" / "proto" / "http" / "_log_exporter.py"
        stand_in.parent.mkdir(parents=True, exist_ok=True)
        stand_in.write_text("OTLPLogExporter = None\n")
        (place / "ready").touch()
    return place


def _run(name: str, *arguments: str) -> str:
    command = [str(FOLDER / "bin" / "python"), "-W", "ignore", str(HERE / FOREIGN[name]), *arguments]
    env = {**os.environ, "S3_ENDPOINT_URL": os.environ["AWS_ENDPOINT_URL"], "PYTHONPATH": str(HERE)}
    done = subprocess.run(command, env=env, capture_output=True, text=True, check=False)
    if done.returncode:
        raise RuntimeError(f"{name}: {done.stderr[-2000:]}")
    return done.stdout


def _make_environment() -> None:
    if (FOLDER / "ready").exists():
        return
    print("installing the contenders, which takes a minute", file=sys.stderr)
    venv.create(FOLDER, with_pip=True, clear=True)
    install = [str(FOLDER / "bin" / "pip"), "install", "-qq", "--disable-pip-version-check", "--no-deps"]
    subprocess.run([*install, *_WITHOUT_DEPENDENCIES], check=True)
    packages = next((FOLDER / "lib").glob("python*")) / "site-packages"
    (packages / "zz_ours.pth").write_text(sysconfig.get_paths()["purelib"] + "\n")
    for name, text in _STAND_INS.items():
        (packages / name).parent.mkdir(parents=True, exist_ok=True)
        (packages / name).write_text(text)
    (FOLDER / "ready").touch()
