"""A file is written as a whole, or keeps its old content; errors name the file."""

import errno
import io
import os
import tempfile

import pytest

from ensembleode.ground.files import check_writable, written_whole


def names(folder):
    return sorted(os.listdir(folder))


@pytest.mark.parametrize("before", [None, b"good"])
@pytest.mark.parametrize("step", ["mkstemp", "write", "fsync", "chmod", "replace"])
@pytest.mark.parametrize("number", [errno.ENOSPC, errno.EIO], ids=["ENOSPC", "EIO"])
def test_nothing_is_lost(tmp_path, monkeypatch, before, step, number):
    """Whichever call of the operating system fails."""
    path = tmp_path / "a.bin"
    if before is not None:
        path.write_bytes(before)

    def fails(*args, **options):
        raise OSError(number, os.strerror(number))

    there = names(tmp_path)
    with monkeypatch.context() as patch:
        if step == "mkstemp":
            patch.setattr(tempfile, "mkstemp", fails)
        elif step != "write":
            patch.setattr(os, step, fails)
        with pytest.raises(OSError, match=os.strerror(number)) as caught, written_whole(path) as f:
            f.write(b"new") if step != "write" else fails()
    assert caught.value.errno == number
    assert caught.value.filename == str(path)
    assert names(tmp_path) == there
    assert before is None or path.read_bytes() == before


def test_what_is_written(tmp_path):
    path = tmp_path / "a.txt"
    with written_whole(path, "w") as file:
        file.write("Grüße\n")
        assert not path.exists()
    assert path.read_bytes() == "Grüße\n".encode()
    mask = os.umask(0)
    os.umask(mask)
    assert path.stat().st_mode & 0o777 == 0o666 & ~mask
    path.chmod(0o640)
    (tmp_path / "link").symlink_to(path)
    with written_whole(tmp_path / "link") as file:
        file.write(b"1")
    assert (tmp_path / "link").is_symlink()
    assert path.read_bytes() == b"1"
    assert path.stat().st_mode & 0o777 == 0o640
    with written_whole(path, permissions=0o600) as file:
        file.write(b"1")
    assert path.stat().st_mode & 0o777 == 0o600
    with pytest.raises(KeyError, match="of the writer"), written_whole(path) as file:
        raise KeyError(file.write(b"2"), "of the writer")
    with pytest.raises(io.UnsupportedOperation), written_whole(path) as file:
        file.read()
    assert path.read_bytes() == b"1"
    assert names(tmp_path) == ["a.txt", "link"]


def test_it_is_known_before(tmp_path):
    check_writable(tmp_path / "new")
    assert names(tmp_path) == []
    with pytest.raises(FileNotFoundError, match=r"nowhere/a\.eqx"):
        check_writable(tmp_path / "nowhere" / "a.eqx")
    with pytest.raises(IsADirectoryError, match="Is a directory"):
        check_writable(tmp_path)
