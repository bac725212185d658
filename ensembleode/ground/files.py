"""Files that are written whole or not at all."""

import contextlib
import errno
import os
import pathlib
import secrets
import shutil
import stat
import tempfile
from collections.abc import Iterable, Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any

from .logs import logger


@contextlib.contextmanager
def written_whole(
    path: str | os.PathLike, mode: str = "wb", synced: bool = True, permissions: int | None = None
) -> Iterator[Any]:
    """A file object for the new content of `path`, which replaces the old content when the block
    ends. If anything fails, `path` keeps its old content. If `path` is a symbolic link, the file
    that it points to is replaced.

    **Arguments:**

    - `mode`: `"wb"` for bytes, `"w"` for text in UTF-8.
    - `synced`: whether the content is on the disk at the end of the block, and not only in a cache.
    - `permissions`: those of the file. By default an existing file keeps its own, and a new one has
        those that `open` gives.

    **Raises:** `OSError` that names `path`, for example because the disk is full.
    """
    place = pathlib.Path(path).resolve()
    partial: str | None = None
    try:
        handle, partial = tempfile.mkstemp(".partial", f".{place.name}.", place.parent)
        encoding = None if "b" in mode else "utf-8"
        with open(handle, mode, encoding=encoding) as file:
            yield file
            file.flush()
            if synced:
                os.fsync(file.fileno())
        os.chmod(partial, _permissions(place) if permissions is None else permissions)
        os.replace(partial, place)
        if synced:
            _sync(place.parent)
    except BaseException as e:
        if partial is not None:
            with contextlib.suppress(OSError):
                os.unlink(partial)
        if isinstance(e, OSError):
            raise naming(e, path) from e
        raise


def check_writable(path: str | os.PathLike) -> None:
    """Find out, before hours of work, whether `written_whole` could write `path`.

    **Raises:** `OSError` that names `path`: the folder doesn't exist, or there is no permission, or
    no room.
    """
    place = pathlib.Path(path).resolve()
    try:
        if place.is_dir():
            raise IsADirectoryError(errno.EISDIR, "Is a directory")
        handle, partial = tempfile.mkstemp(".partial", f".{place.name}.", place.parent)
        os.close(handle)
        os.unlink(partial)
    except OSError as e:
        raise naming(e, path) from e


class LockedError(Exception):
    """Another process, or another thread of this one, has the lock."""


def locked(file: str | os.PathLike) -> Any:
    """Lock this file, and return the lock; it is held until its `release()`.

    On a file system without locks (NFS without its lock service, Lustre mounted without `flock`),
    filelock's own exception is raised.

    **Raises:** `LockedError`; `OSError` that names the file; `ImportError` without filelock.
    """
    import filelock

    lock = filelock.FileLock(os.fspath(file))
    try:
        lock.acquire(timeout=0)
    except filelock.Timeout as e:
        raise LockedError(os.fspath(file)) from e
    except NotImplementedError as e:  # filelock raises this where there are no locks
        raise OSError(errno.ENOLCK, str(e), os.fspath(file)) from e
    except OSError as e:
        raise naming(e, file) from e
    return lock


def naming(error: OSError, path: str | os.PathLike) -> OSError:
    """An error of the same class, whose message names `path`."""
    if error.errno is None:
        return type(error)(f"{os.fspath(path)}: {error}")
    return OSError(error.errno, error.strerror or os.strerror(error.errno), os.fspath(path))


def _permissions(place: pathlib.Path) -> int:
    """The permissions of the file at this place; if there is none, those that `open` would give to
    a new file."""
    try:
        return stat.S_IMODE(place.stat().st_mode)
    except FileNotFoundError:
        mask = os.umask(0)
        os.umask(mask)
        return 0o666 & ~mask


def make_folders(folder: pathlib.Path, within: pathlib.Path) -> None:
    """Make a folder inside of another one, with the folders in between.

    **Raises:** `FileNotFoundError` where the other folder doesn't exist; that one isn't made.
    """
    if folder != within and not folder.is_dir():
        make_folders(folder.parent, within)
        folder.mkdir(exist_ok=True)


def sync(paths: Iterable[pathlib.Path]) -> None:
    """Put files, and the names in folders, on the disk, many at the same time.

    **Raises:** `OSError` that names the file.
    """
    with ThreadPoolExecutor(_AT_ONCE) as pool:
        list(pool.map(_sync, paths))


_AT_ONCE = 16


def _sync(path: pathlib.Path) -> None:
    is_folder = path.is_dir()
    if is_folder and not hasattr(os, "O_DIRECTORY"):  # this system can't sync folders
        return
    handle = os.open(path, os.O_RDONLY if is_folder else os.O_RDWR)
    try:
        os.fsync(handle)
    except OSError as e:
        # Some network file systems can't sync folders.
        if not is_folder or e.errno in (errno.EIO, errno.ENOSPC, errno.EDQUOT):
            raise naming(e, path) from e
    finally:
        os.close(handle)


def set_aside(folder: pathlib.Path, suffix: str) -> pathlib.Path:
    """Rename a folder, in one operation, so that a half-deleted one isn't mistaken for a whole one.
    Its new name ends with the suffix."""
    aside = folder.with_name(f"{folder.name}.{secrets.token_hex(4)}{suffix}")
    os.replace(folder, aside)
    return aside


def remove_folder(folder: pathlib.Path) -> None:
    """Remove a folder, as far as that is possible; a warning says where it isn't."""
    shutil.rmtree(folder, ignore_errors=True)
    if folder.exists():
        logger.warning("%s can't be removed", folder)
