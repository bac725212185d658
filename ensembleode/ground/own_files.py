"""Files that nobody but the user can have written: for content that is executed when it is read.

A file is the user's own if it belongs to them, nobody else may write to it, and the same holds for
its folder. Who may write to the folders above doesn't matter: the checks look at the opened file
and folder, so exchanging them in between gains nothing.

Windows has other permissions, and nothing is checked there: its folder for caches is the user's.
"""

import contextlib
import os
import pathlib
import stat
from collections.abc import Iterator


class NotOwnError(Exception):
    """Somebody else can write to a file or to its folder, or could have written it."""


def read_own(folder: pathlib.Path, name: str) -> bytes:
    """The content of a file of the user's own.

    **Raises:** `NotOwnError`; `OSError` if there is no such file, or it can't be read.
    """
    if not _HAS_OWNERS:
        return (folder / name).read_bytes()
    with _opened(folder, os.O_DIRECTORY) as within, _opened(name, within=within) as handle:
        _check(folder, within)
        _check(folder / name, handle)
        with open(handle, "rb", closefd=False) as file:
            return file.read()


def check_own_folder(folder: pathlib.Path) -> None:
    """Look at a folder before writing to it.

    **Raises:** `NotOwnError` for a folder that isn't the user's own; `OSError` if there is none.
    """
    if _HAS_OWNERS:
        with _opened(folder, os.O_DIRECTORY) as handle:
            _check(folder, handle)


def make_own_folder(folder: pathlib.Path) -> None:
    """Make a folder, and those above it that are missing, for the user alone, whatever the umask. A
    folder that exists stays as it is."""
    if not folder.is_dir():
        make_own_folder(folder.parent)
        folder.mkdir(mode=0o700, exist_ok=True)


_HAS_OWNERS = hasattr(os, "geteuid")


@contextlib.contextmanager
def _opened(
    path: str | pathlib.Path, flags: int = 0, *, within: int | None = None
) -> Iterator[int]:
    handle = os.open(path, os.O_RDONLY | flags, dir_fd=within)
    try:
        yield handle
    finally:
        os.close(handle)


def _check(path: pathlib.Path, handle: int) -> None:
    status = os.fstat(handle)
    if status.st_uid != os.geteuid():
        raise NotOwnError(f"{path} belongs to another user")
    if status.st_mode & (stat.S_IWGRP | stat.S_IWOTH):
        raise NotOwnError(f"other users may write to {path} (`chmod go-w` changes that)")
