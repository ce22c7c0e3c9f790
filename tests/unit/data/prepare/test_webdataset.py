"""Tests of WebDataset tars: each sample is a row, and odd members are refused by name."""

from pathlib import Path

import pytest
from source_files import refusal, rows, tar

from undula.data.prepare import webdataset
from undula.errors import ManifestError


def test_tars_have_one_row_per_sample(tmp_path: Path) -> None:
    for shard in range(2):
        members = [
            (f"train/{row:04d}.{ending}", data)
            for row in range(shard * 30, shard * 30 + 30)
            for ending, data in (("jpg", bytes([row, 255])), ("cls", b"%d" % (row % 10)), ("meta.json", b"{}"))
        ]
        tar(tmp_path / f"shard-{shard}.tar", *members)
    samples = rows(tmp_path)
    assert samples[31] == {"key": "train/0031", "jpg": bytes([31, 255]), "cls": 1, "meta_json": "{}"}
    assert len(samples) == 60


def test_a_missing_member_of_a_sample_is_refused_as_a_null(tmp_path: Path) -> None:
    tar(tmp_path / "a.tar", ("0.cls", b"1"), ("1.cls", b"2"), ("1.txt", b"two"))
    assert f"column 'txt' of {tmp_path} has a null in or near row 0" in refusal(tmp_path)
    assert rows(tmp_path, ("cls",)) == [{"cls": 1}, {"cls": 2}]


def test_a_member_that_first_appears_late_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(webdataset, "BATCH_SAMPLES", 2)
    tar(tmp_path / "a.tar", ("0.cls", b"1"), ("1.cls", b"2"), ("2.cls", b"3"), ("2.txt", b"three"))
    assert "sample '2' of" in (text := refusal(tmp_path))
    assert "has a member 'txt', which none of the first 2 samples has" in text


def test_members_of_a_tar_that_belong_to_no_sample_are_left_out(tmp_path: Path) -> None:
    members = [("README", b"about"), ("./a/._0.jpg", b"of macOS"), ("./a/0.JPG", b"x"), ("./a/0.Cls", b"7\n")]
    tar(tmp_path / "a.tar", *members)
    assert rows(tmp_path) == [{"key": "a/0", "jpg": b"x", "cls": 7}]


@pytest.mark.parametrize(
    ("members", "problem"),
    [
        ([("0.txt", b"a"), ("0.TXT", b"b")], "a.tar has a member '0.TXT' for the column 'txt', which it already has"),
        ([("0.key", b"a")], "a.tar has a member '0.key' for the column 'key', which is the name of the sample's own"),
        (
            [("0.cls", b"99999999999999999999")],
            "content of .*a.tar: 0.cls does not match its file extension: .*64 bits",
        ),
        ([("0.cls", b"cat")], r"content of .*a.tar: 0\.cls does not match its file extension"),
        ([("0.txt", b"\xff")], "content of .*a.tar: 0.txt does not match its file extension"),
    ],
)
def test_an_odd_member_of_a_tar_is_refused_by_name(
    tmp_path: Path, members: list[tuple[str, bytes]], problem: str
) -> None:
    tar(tmp_path / "a.tar", *members)
    with pytest.raises(ManifestError, match=problem):
        rows(tmp_path)


def test_a_tar_that_was_cut_is_refused(tmp_path: Path) -> None:
    tar(tmp_path / "a.tar", ("0.jpg", bytes(5000)), ("1.jpg", bytes(5000)))
    data = (tmp_path / "a.tar").read_bytes()
    (tmp_path / "a.tar").write_bytes(data[:8000])
    assert "a.tar is not an intact tar archive" in refusal(tmp_path)
