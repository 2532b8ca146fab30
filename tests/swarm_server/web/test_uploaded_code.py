"""Uploaded training code: accepted and refused zip files, and unpacking that is complete or leaves
nothing."""

from __future__ import annotations

import io
import stat
import struct
import zipfile
from collections.abc import Callable
from pathlib import Path

import pytest

from fakevllm_server.web import uploaded_code
from fakevllm_server.web.uploaded_code import BadArchive, check, unpack

Fill = Callable[[zipfile.ZipFile], None]


def zipped(*names: str, fill: Fill | None = None, method: int = zipfile.ZIP_DEFLATED) -> bytes:
    buffer = io.BytesIO()
    with zipfile.ZipFile(buffer, "w", method) as archive:
        for name in names:
            archive.writestr(name, f"# {name}\n")
        if fill is not None:
            fill(archive)
    return buffer.getvalue()


def files_in(folder: Path) -> list[str]:
    return sorted(str(file.relative_to(folder)) for file in folder.rglob("*"))


def test_each_upload_is_unpacked_into_a_new_private_folder(tmp_path: Path) -> None:
    raw = zipped("ajet/__init__.py", "ajet/deep/er/x.py", "ajet/empty/")
    first, second = (unpack(raw, tmp_path / "code", "20261122-120000") for _ in range(2))
    assert first != second and first.name == "ajet"
    assert first.parent.name.startswith("20261122-120000-")
    assert files_in(first) == ["__init__.py", "deep", "deep/er", "deep/er/x.py", "empty"]
    assert (first / "deep/er/x.py").read_text() == "# ajet/deep/er/x.py\n"
    assert stat.S_IMODE(first.parent.stat().st_mode) == 0o700
    assert stat.S_IMODE((tmp_path / "code").stat().st_mode) == 0o700


@pytest.mark.parametrize(
    ("raw", "message"),
    [
        (b"", "Uploaded zip file is empty."),
        (b"no zip", "Uploaded file is not a valid zip file."),
        (zipped("ajet/x.py")[:-4], "Uploaded file is not a valid zip file."),
    ],
)
def test_a_file_that_is_not_a_zip_is_refused_in_the_protocols_words(
    tmp_path: Path, raw: bytes, message: str
) -> None:
    with pytest.raises(BadArchive) as refused:
        unpack(raw, tmp_path / "code", "now")
    assert str(refused.value) == message


@pytest.mark.parametrize(
    "name",
    [
        "/ajet/x.py",
        "../x.py",
        "ajet/../x.py",
        "ajet/../../x.py",
        "ajet//x.py",
        "ajet/./x.py",
        "ajet/..",
        "ajet\\..\\..\\x.py",
        "C:/ajet/x.py",
        "ajet/x\n.py",
        "ajet/" + "x" * 201,
        "other/x.py",
        "setup.py",
        "ajet",
        "ajetx/y.py",
        "AJET/x.py",
    ],
)
def test_a_member_outside_ajet_is_refused_and_nothing_is_written(tmp_path: Path, name: str) -> None:
    with pytest.raises(BadArchive):
        unpack(zipped("ajet/good.py", name), tmp_path / "code", "now")
    assert files_in(tmp_path) == []


def test_a_member_without_a_name_is_refused() -> None:
    with pytest.raises(BadArchive, match="Unsafe path"):
        check([zipfile.ZipInfo("")])


def test_a_name_with_a_null_character_is_refused(tmp_path: Path) -> None:
    raw = zipped("ajet/x.pyQ../y").replace(b"x.pyQ../y", b"x.py\0../y")
    with pytest.raises(BadArchive, match="Unsafe path"):
        unpack(raw, tmp_path, "now")


@pytest.mark.parametrize("kind", [stat.S_IFLNK, stat.S_IFIFO, stat.S_IFCHR])
def test_links_and_devices_are_refused(tmp_path: Path, kind: int) -> None:
    def fill(archive: zipfile.ZipFile) -> None:
        member = zipfile.ZipInfo("ajet/link")
        member.external_attr = (kind | 0o777) << 16
        archive.writestr(member, "/etc/passwd")

    with pytest.raises(BadArchive, match="is not a regular file or a folder"):
        unpack(zipped(fill=fill), tmp_path, "now")


@pytest.mark.parametrize("names", [("ajet/a", "ajet/a/b"), ("ajet/a/b", "ajet/a"), ("ajet/a",) * 2])
@pytest.mark.filterwarnings("ignore:Duplicate name")
def test_two_members_with_the_same_path_are_refused(tmp_path: Path, names: tuple[str, ...]) -> None:
    with pytest.raises(BadArchive, match="have the same path"):
        unpack(zipped(*names), tmp_path, "now")
    assert files_in(tmp_path) == []


@pytest.mark.parametrize("method", [zipfile.ZIP_BZIP2, zipfile.ZIP_LZMA])
def test_compression_methods_that_unpack_without_a_limit_are_refused(
    tmp_path: Path, method: int
) -> None:
    with pytest.raises(BadArchive, match="deflated or stored"):
        unpack(zipped("ajet/x.py", method=method), tmp_path, "now")


def test_a_zip_bomb_is_refused_before_anything_is_unpacked(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(uploaded_code, "MAX_UNPACKED_BYTES", 10_000)

    def fill(archive: zipfile.ZipFile) -> None:
        for number in range(11):
            archive.writestr(f"ajet/{number}", bytes(1000))

    with pytest.raises(BadArchive, match="unpacks to more than 10000 bytes"):
        unpack(zipped(fill=fill), tmp_path, "now")
    monkeypatch.setattr(uploaded_code, "MAX_MEMBERS", 10)
    with pytest.raises(BadArchive, match="more than 10 members"):
        unpack(zipped(fill=fill), tmp_path, "now")
    assert files_in(tmp_path) == []


def test_a_member_larger_than_its_declared_size_is_refused_and_leaves_nothing(
    tmp_path: Path,
) -> None:
    raw = bytearray(
        zipped("ajet/a.py", fill=lambda archive: archive.writestr("ajet/b.py", bytes(10**6)))
    )
    at = raw.rindex(b"PK\x01\x02")  # the last member's entry in the central directory
    assert struct.unpack_from("<I", raw, at + 24) == (10**6,)
    struct.pack_into("<I", raw, at + 24, 5)
    with pytest.raises(BadArchive, match="not a valid zip file"):
        unpack(bytes(raw), tmp_path / "code", "now")
    assert files_in(tmp_path) == ["code"]
