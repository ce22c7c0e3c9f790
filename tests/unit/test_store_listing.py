"""Tests of listings of a store: links on a disk, and files that are looked up by name."""

from collections.abc import Iterator
from pathlib import Path

import pytest
from s3_server import S3Proxy, serving

from undula.storage import Store, open_store, s3, s3_requests

NAMES = ["a/1.parquet", "a/2.parquet", "a//2.parquet", "a b/+%.parquet", "z/ü.parquet", "z/𐍈.parquet", "z/ﬁ.parquet"]


@pytest.fixture(params=["local", "s3"])
def store(request: pytest.FixtureRequest, tmp_path: Path) -> Store:
    return open_store(request.getfixturevalue("s3").url("data") if request.param == "s3" else str(tmp_path / "data"))


def names_of(store: Store) -> list[str]:
    return [entry.name for entry in store.list()]


def test_links_to_folders_and_files_are_followed(tmp_path: Path) -> None:
    elsewhere, store = open_store(str(tmp_path / "elsewhere")), open_store(str(tmp_path / "data"))
    for name in ("a.parquet", "deep/b.parquet"):
        elsewhere.write(name, b"x")
    store.write("c.parquet", b"xyz")
    (tmp_path / "data" / "linked").symlink_to(tmp_path / "elsewhere")
    (tmp_path / "data" / "again").symlink_to("../elsewhere/deep", target_is_directory=True)
    (tmp_path / "data" / "d.parquet").symlink_to(tmp_path / "elsewhere" / "a.parquet")
    found = ["again/b.parquet", "c.parquet", "d.parquet", "linked/a.parquet", "linked/deep/b.parquet"]
    assert names_of(store) == found
    assert [entry.name for entry in store.list("linked")] == found[3:]
    assert list(store.find(found)) == found
    assert {entry.name: entry for entry in store.list()} == store.find(found)


def test_the_folder_itself_can_be_a_link(tmp_path: Path) -> None:
    open_store(str(tmp_path / "data")).write("a.parquet", b"x")
    (tmp_path / "link").symlink_to("data")
    assert names_of(open_store(str(tmp_path / "link"))) == ["a.parquet"]


def test_links_without_an_end_are_not_followed(tmp_path: Path) -> None:
    store = open_store(str(tmp_path / "data"))
    store.write("one/a.parquet", b"x")
    store.write("two/b.parquet", b"x")
    (tmp_path / "data" / "one" / "up").symlink_to("..")
    (tmp_path / "data" / "one" / "self").symlink_to(".")
    (tmp_path / "data" / "broken").symlink_to("nowhere")
    # A link to the folder beside it is followed, and the link in that folder leads to a folder above both.
    assert names_of(store) == ["one/a.parquet", "two/b.parquet"]
    (tmp_path / "data" / "two" / "side").symlink_to("../one")
    assert names_of(store) == ["one/a.parquet", "two/b.parquet", "two/side/a.parquet"]


def test_files_are_found_by_name(store: Store) -> None:
    names = [name for name in NAMES if store.is_s3 or "//" not in name]
    for name in names:
        store.write(name, name.encode())
    found = store.find([*names, "missing.parquet", "a", "zz/missing.parquet"])
    assert found == {entry.name: entry for entry in store.list()}
    assert set(found) == set(names)
    assert store.find([]) == store.find(["b"]) == {}


@pytest.fixture
def proxy(s3_endpoint: str, request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> Iterator[S3Proxy]:
    request.getfixturevalue("s3")
    with serving(S3Proxy(s3_endpoint)) as server:
        monkeypatch.setenv("AWS_ENDPOINT_URL", server.url)
        s3.forget_clients()
        yield server
    s3.forget_clients()


def test_named_files_take_one_request_for_each_page(
    request: pytest.FixtureRequest, proxy: S3Proxy, monkeypatch: pytest.MonkeyPatch
) -> None:
    store = open_store(request.getfixturevalue("s3").url("data"))
    for name in (*NAMES, "a/1.notes", "y.notes"):
        store.write(name, b"")
    monkeypatch.setattr(s3_requests, "_KEYS_OF_PAGE", 3)
    proxy.authorizations.clear()
    assert set(store.find(NAMES)) == set(NAMES)
    assert len(proxy.authorizations) == 3
