"""Files that nobody but the user can have written: whatever is wrong with one, it is not read."""

import os
import stat

import pytest

from ensembleode.ground.own_files import check_own_folder, make_own_folder, NotOwnError, read_own


pytestmark = pytest.mark.skipif(not hasattr(os, "geteuid"), reason="files have no owners here")
as_root = pytest.mark.skipif(
    not hasattr(os, "geteuid") or os.geteuid() != 0, reason="only root gives files away"
)
SOMEBODY = 12345
MINE = b"what I wrote"


@pytest.fixture
def folder(tmp_path):
    """A folder of one's own, with a file."""
    made = tmp_path / "kernels"
    make_own_folder(made)
    (made / "file").write_bytes(MINE)
    (made / "file").chmod(0o600)
    return made


@pytest.fixture(params=[0o000, 0o002, 0o022, 0o077])
def umask(request):
    before = os.umask(request.param)
    yield request.param
    os.umask(before)


@pytest.mark.parametrize("mode", range(0o1000))
def test_every_mode_of_a_file(folder, mode):
    (folder / "file").chmod(mode)
    if mode & 0o022:
        with pytest.raises(NotOwnError, match=r"other users may write to .*file"):
            read_own(folder, "file")
    elif mode & 0o400 or os.geteuid() == 0:
        assert read_own(folder, "file") == MINE
    else:
        with pytest.raises(PermissionError):
            read_own(folder, "file")


@pytest.mark.parametrize("mode", [0o720, 0o702, 0o770, 0o775, 0o777, 0o1777, 0o2770])
def test_a_folder_to_which_others_write(folder, mode):
    folder.chmod(mode)
    for use in (check_own_folder, lambda x: read_own(x, "file")):
        with pytest.raises(NotOwnError, match=r"other users may write to .*kernels \(`chmod go-w"):
            use(folder)


@pytest.mark.parametrize("mode", [0o700, 0o500, 0o750, 0o755, 0o2755])
def test_a_folder_that_others_only_read(folder, mode):
    folder.chmod(mode)
    assert read_own(folder, "file") == MINE


@as_root
@pytest.mark.parametrize("what", ["kernels", "file"])
@pytest.mark.parametrize("mode", [0o700, 0o777])
def test_what_belongs_to_somebody_else(folder, what, mode):
    given = folder if what == "kernels" else folder / what
    os.chown(given, SOMEBODY, -1)
    given.chmod(mode)
    with pytest.raises(NotOwnError, match=f"{what} belongs to another user"):
        read_own(folder, "file")


@as_root
@pytest.mark.parametrize("what", ["kernels", "file"])
def test_links_to_what_is_somebody_elses(folder, tmp_path, what):
    """A link is as trustworthy as what it points to, whosever the link is."""
    theirs = tmp_path / "theirs"
    theirs.mkdir(0o700)
    (theirs / "file").write_bytes(b"what they wrote")
    for path in (theirs / "file", theirs):
        os.chown(path, SOMEBODY, -1)
    link = folder / "file" if what == "file" else folder
    target = theirs / "file" if what == "file" else theirs
    (folder / "file").unlink()
    if what == "kernels":
        folder.rmdir()
    link.symlink_to(target)
    with pytest.raises(NotOwnError, match="belongs to another user"):
        read_own(folder, "file")
    moved = tmp_path / "moved"
    make_own_folder(moved)
    (moved / "file").write_bytes(MINE)
    link.unlink()
    link.symlink_to(moved if what == "kernels" else moved / "file")
    assert read_own(folder, "file") == MINE


def test_an_exchange_between_looking_and_reading(folder, tmp_path, monkeypatch):
    """What is looked at is what was opened: a folder put in its place isn't read."""
    other = tmp_path / "other"
    other.mkdir(0o777)
    (other / "file").write_bytes(b"what they wrote")
    seen = os.fstat

    def exchanged(handle):
        status = seen(handle)
        if stat.S_ISDIR(status.st_mode) and other.exists():
            folder.rename(tmp_path / "aside")
            other.rename(folder)
        return status

    monkeypatch.setattr(os, "fstat", exchanged)
    assert read_own(folder, "file") == MINE


@pytest.mark.parametrize("name", ["none", "folder", "dangling"])
def test_what_is_no_file(folder, name):
    (folder / "folder").mkdir(0o700)
    (folder / "dangling").symlink_to("nowhere")
    with pytest.raises(OSError, match=f"{name}|Is a directory"):
        read_own(folder, name)
    with pytest.raises(OSError, match="file"):
        read_own(folder / "file", "file")


def test_folders_are_made_for_oneself(tmp_path, umask):
    made = tmp_path / "a" / "b" / "c"
    make_own_folder(made)
    for path in (made, made.parent, made.parent.parent):
        assert stat.S_IMODE(path.stat().st_mode) == 0o700
    check_own_folder(made)
    tmp_path.chmod(0o775)
    make_own_folder(tmp_path)
    assert stat.S_IMODE(tmp_path.stat().st_mode) == 0o775
