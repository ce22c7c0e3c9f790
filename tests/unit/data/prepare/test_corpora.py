"""Tests of the corpora: they have the exact bytes of their sources and the same split everywhere, and never run foreign code."""

import io
import pickle
import sys
import tarfile
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from undula.data.prepare.corpora import Corpus, cifar10, digits, is_complete, stdlib_text
from undula.data.stored.manifest import load_manifest
from undula.errors import StorageError, UndulaError
from undula.plan.keys import key64
from undula.storage import Store, open_store

RECORD_BYTES = 3073


def table(url: str) -> pa.Table:
    manifest = load_manifest(url)
    return pa.concat_tables([pq.read_table(open_store(url).open(file.name)) for file in manifest.files])


def arrays(url: str, column: str) -> np.ndarray:
    """Return a column of fixed-size lists; shape [samples, *sample shape]."""
    (shape,) = (found.shape for found in load_manifest(url).columns if found.name == column)
    return table(url)[column].combine_chunks().flatten().to_numpy().reshape(-1, *shape)


@pytest.fixture
def source(tmp_path: Path) -> Path:
    """Return a small tree of .py files and other files that do not belong to the corpus."""
    root = tmp_path / "source"
    texts = {f"package/file_{number}.py": f"# {number}\n".encode() * (number * 7 % 50 + 1) for number in range(60)}
    texts |= {"b.py": b"x = 1\n", "latin.py": b"# \xe9\xff\x00\n", "empty.py": b"", "a/z.py": b"z = 26\n"}
    others = ("site-packages/other.py", "a/__pycache__/z.py", "dist-packages/other.py", "notes.txt", "a/z.pyc")
    for name, text in {**texts, **dict.fromkeys(others, b"not part of it")}.items():
        (root / name).parent.mkdir(parents=True, exist_ok=True)
        (root / name).write_bytes(text)
    return root


@pytest.mark.parametrize("width", [2, 17, 100])
def test_text_is_all_files_joined_by_zero_bytes(source: Path, tmp_path: Path, width: int) -> None:
    corpus = stdlib_text(context=width - 1, root=source)
    corpus.write(str(tmp_path / "out"), num_shards=2, row_group_bytes=512)
    names = sorted(
        file.relative_to(source).as_posix()
        for file in source.rglob("*.py")
        if not {"site-packages", "dist-packages", "__pycache__"} & set(file.parts)
    )
    assert len(names) == 64
    for split, held_out in (("train", False), ("validation", True)):
        chosen = [name for name in names if (key64("validation", name) % 20 == 0) == held_out]
        assert chosen
        text = b"\0".join((source / name).read_bytes() for name in chosen)
        written = arrays(str(tmp_path / "out" / split), "text")
        assert written.shape == (len(text) // width, width)
        assert written.tobytes() == text[: len(text) // width * width]


def test_the_standard_library_is_the_default_corpus(tmp_path: Path) -> None:
    corpus = stdlib_text()
    seen: list[int] = []
    corpus.write(str(tmp_path), advance=seen.append)
    train, validation = (load_manifest(str(tmp_path / split)) for split in ("train", "validation"))
    assert (train.num_rows, validation.num_rows) == (corpus.train.num_rows, corpus.validation.num_rows)
    assert sum(seen) == corpus.num_rows
    assert train.num_rows > 50_000
    assert 0.01 < validation.num_rows / corpus.num_rows < 0.2
    assert train.columns == validation.columns
    assert [(column.name, column.type, column.shape) for column in train.columns] == [("text", "uint8", (257,))]


def test_context_must_hold_a_token() -> None:
    with pytest.raises(UndulaError, match="context is 0"):
        stdlib_text(context=0)


def test_folder_without_text_is_refused(tmp_path: Path) -> None:
    with pytest.raises(UndulaError, match="0 rows"):
        stdlib_text(root=tmp_path / "nowhere").write(str(tmp_path / "out"))


def test_digits_are_scikit_learns(tmp_path: Path) -> None:
    from sklearn.datasets import load_digits

    digits().write(str(tmp_path), num_shards=3)
    bunch = load_digits()
    held_out = np.array([key64("validation", number) % 5 == 0 for number in range(1797)])
    assert 300 < held_out.sum() < 420
    for split, chosen in (("train", ~held_out), ("validation", held_out)):
        images = arrays(str(tmp_path / split), "image")
        assert images.shape == (chosen.sum(), 1, 8, 8)
        assert images.max() == 255
        assert np.array_equal(np.rint(images[:, 0] / (255 / 16)), bunch.images[chosen])
        assert table(str(tmp_path / split))["label"].to_pylist() == bunch.target[chosen].tolist()


def test_digits_without_scikit_learn_say_what_to_install(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "sklearn.datasets", None)
    with pytest.raises(UndulaError, match=r"pip install scikit-learn$"):
        digits()


def make_archive(path: Path, members: dict[str, bytes]) -> Path:
    with tarfile.open(path, "w:gz") as tar:
        for name, data in members.items():
            info = tarfile.TarInfo(name)
            info.size = len(data)
            tar.addfile(info, io.BytesIO(data))
    return path


def records(num_rows: int, seed: int) -> np.ndarray:
    """Return CIFAR-10 records, each a label and an image; shape [rows, 3073]."""
    data = np.random.default_rng(seed).integers(0, 256, (num_rows, RECORD_BYTES), dtype=np.uint8)
    data[:, 0] %= 10
    return data


def binary_archive(path: Path) -> Path:
    names = {f"cifar-10-batches-bin/data_batch_{number}.bin": records(700, number) for number in (2, 1, 3)}
    names["cifar-10-batches-bin/test_batch.bin"] = records(50, 9)
    readme = {"cifar-10-batches-bin/readme.html": b"<html>", "cifar-10-batches-bin/batches.meta.txt": b"airplane\n"}
    return make_archive(path, {name: data.tobytes() for name, data in names.items()} | readme)


def test_cifar10_keeps_every_image_and_label(tmp_path: Path) -> None:
    corpus = cifar10(binary_archive(tmp_path / "cifar-10-binary.tar.gz"))
    assert (corpus.train.num_rows, corpus.validation.num_rows) == (2100, 50)
    corpus.write(str(tmp_path / "out"), num_shards=4, row_group_bytes=100 * RECORD_BYTES)
    sources = {"train": [records(700, number) for number in (1, 2, 3)], "validation": [records(50, 9)]}
    for split, parts in sources.items():
        expected = np.concatenate(parts)
        images = arrays(str(tmp_path / "out" / split), "image")
        assert images.shape == (len(expected), 3, 32, 32)
        assert np.array_equal(images.reshape(len(expected), -1), expected[:, 1:])
        assert table(str(tmp_path / "out" / split))["label"].to_pylist() == expected[:, 0].tolist()


class Trap:
    """Object whose pickle creates a file when it is loaded."""

    def __init__(self, path: Path):
        self.path = path

    def __reduce__(self) -> tuple[Callable[[Path], object], tuple[Path]]:
        return (Path.touch, (self.path,))


def test_an_archive_of_pickles_is_refused_without_loading_them(tmp_path: Path) -> None:
    trap = pickle.dumps(Trap(tmp_path / "code ran"))
    names = [*(f"data_batch_{number}" for number in range(1, 6)), "test_batch", "batches.meta"]
    archive = make_archive(tmp_path / "cifar-10-python.tar.gz", {f"cifar-10-batches-py/{name}": trap for name in names})
    with pytest.raises(StorageError, match=rf"^{archive} contains pickles, .*use cifar-10-binary\.tar\.gz"):
        cifar10(archive)
    assert not (tmp_path / "code ran").exists()


def test_member_outside_the_folder_is_never_written(tmp_path: Path) -> None:
    members = {"../data_batch_1.bin": records(3, 0).tobytes(), "/test_batch.bin": records(2, 1).tobytes()}
    archive = make_archive(tmp_path / "archives.tar.gz", members)
    cifar10(archive).write(str(tmp_path / "out"), num_shards=1)
    assert not (tmp_path.parent / "data_batch_1.bin").exists()
    assert not Path("/test_batch.bin").exists()
    assert load_manifest(str(tmp_path / "out" / "train")).num_rows == 3


@pytest.mark.parametrize(
    ("members", "message"),
    [
        (
            {"data_batch_1.bin": bytes(RECORD_BYTES - 1), "test_batch.bin": bytes(RECORD_BYTES)},
            "not a multiple of 3073",
        ),
        ({"data_batch_1.bin": bytes(RECORD_BYTES)}, "no test_batch.bin"),
        ({"readme.html": b""}, "no data_batch_"),
    ],
)
def test_an_archive_without_cifar10_is_refused(tmp_path: Path, members: dict[str, bytes], message: str) -> None:
    with pytest.raises(StorageError, match=message):
        cifar10(make_archive(tmp_path / "archive.tar.gz", members))


def test_label_beyond_nine_is_refused(tmp_path: Path) -> None:
    data = records(5, 0)
    data[3, 0] = 10
    members = {"data_batch_1.bin": data.tobytes(), "test_batch.bin": records(5, 1).tobytes()}
    archive = make_archive(tmp_path / "archive.tar.gz", members)
    with pytest.raises(StorageError, match=r"^data_batch_1.bin in .* has a label 10"):
        cifar10(archive).write(str(tmp_path / "out"))
    assert not is_complete(str(tmp_path / "out"))


def test_broken_archive_is_named(tmp_path: Path) -> None:
    archive = binary_archive(tmp_path / "whole.tar.gz")
    cut = tmp_path / "cut.tar.gz"
    cut.write_bytes(archive.read_bytes()[:100_000])
    text = tmp_path / "text.tar.gz"
    text.write_text("not an archive")
    for broken in (cut, text, tmp_path / "nowhere.tar.gz", tmp_path):
        with pytest.raises(StorageError, match=f"^cannot read {broken}: \\S") as caught:
            cifar10(broken).write(str(tmp_path / "out"))
        assert "\n" not in str(caught.value)


@pytest.fixture
def out(store: Store) -> str:
    return store.url


def small(source: Path) -> Corpus:
    return stdlib_text(context=16, root=source)


def test_a_corpus_is_complete_once_both_data_sets_are(source: Path, out: str) -> None:
    assert not is_complete(out)
    small(source).write(out)
    assert is_complete(out)
    small(source).write(out)
    assert is_complete(out)
    open_store(out).delete("validation/part-00000.parquet")
    assert not is_complete(out)


def test_a_partly_overwritten_corpus_is_not_complete(source: Path, out: str) -> None:
    small(source).write(out)
    wider = stdlib_text(context=20, root=source)

    def interrupt(rows: int) -> None:
        nonlocal written
        written += rows
        if written > wider.train.num_rows:  # the training data is whole, and the validation data is on its way
            raise KeyboardInterrupt

    written = 0
    with pytest.raises(KeyboardInterrupt):
        wider.write(out, advance=interrupt)
    assert load_manifest(f"{out}/train").columns[0].shape == (21,)
    assert not is_complete(out)


def test_overwriting_never_leaves_a_new_data_set_beside_an_old_one(source: Path, out: str) -> None:
    small(source).write(out)
    manifests: list[str] = []

    def look(rows: int) -> None:
        manifests.extend(entry.name for entry in open_store(out).list() if entry.name.endswith("_manifest.json"))

    small(source).write(out, num_shards=1, advance=look)
    assert set(manifests) == {"train/_manifest.json"}  # once the training data is whole; never validation's


def test_the_same_source_has_the_same_digest_anywhere(source: Path, tmp_path: Path, out: str) -> None:
    small(source).write(out)
    small(source).write(str(tmp_path / "again"))
    assert load_manifest(f"{out}/train").digest == load_manifest(str(tmp_path / "again" / "train")).digest


def test_an_invalid_option_does_not_delete_the_previous_data_set(source: Path, out: str) -> None:
    stdlib_text(context=4, root=source).write(out)
    with pytest.raises(UndulaError, match="0 shards"):
        stdlib_text(context=4, root=source).write(out, num_shards=0)
    assert is_complete(out)
