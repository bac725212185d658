"""Files that are written whole or not at all."""

import contextlib
import errno
import os
import pathlib
import stat
import tempfile
from collections.abc import Iterable, Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any


@contextlib.contextmanager
def written_whole(path: str | os.PathLike, mode: str = "wb", synced: bool = True) -> Iterator[Any]:
    """A file object for the new content of `path`, which is in place when the block ends.

    Until then, and if anything fails, `path` holds what it held before. A symbolic link stays one:
    the file that it points to is replaced. What is written is on the disk, not only on its way,
    and an existing file keeps its permissions.

    **Arguments:**

    - `mode`: `"wb"` for bytes, `"w"` for text in UTF-8.
    - `synced`: False where `sync` puts it on the disk later.

    **Raises:** `OSError` that names `path`, such as for a full disk.
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
        os.chmod(partial, _permissions(place))
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
    """Find out, before hours of work, whether `path` could be written by `written_whole`.

    **Raises:** `OSError` that names `path`: there is no such folder, or no permission, or no room.
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


class Locked(Exception):
    """Another process, or another thread of this one, has the lock."""


def locked(file: str | os.PathLike) -> Any:
    """The lock that this file is, until its `release()`.

    Where a file system has no locks (NFS without its lock service, Lustre mounted without
    `flock`), what filelock says of it is raised.

    **Raises:** `Locked`; `OSError` that names the file; `ImportError` without filelock.
    """
    import filelock

    lock = filelock.FileLock(os.fspath(file))
    try:
        lock.acquire(timeout=0)
    except filelock.Timeout as e:
        raise Locked(os.fspath(file)) from e
    except NotImplementedError as e:  # (which is how filelock says that there are no locks)
        raise OSError(errno.ENOLCK, str(e), os.fspath(file)) from e
    except OSError as e:
        raise naming(e, file) from e
    return lock


def naming(error: OSError, path: str | os.PathLike) -> OSError:
    """The same error, of the same class, which says that it was `path` that failed."""
    if error.errno is None:
        return type(error)(f"{os.fspath(path)}: {error}")
    return OSError(error.errno, error.strerror or os.strerror(error.errno), os.fspath(path))


def _permissions(place: pathlib.Path) -> int:
    """Those of the file that is there, or else what `open` would give a new one."""
    try:
        return stat.S_IMODE(place.stat().st_mode)
    except FileNotFoundError:
        mask = os.umask(0)
        os.umask(mask)
        return 0o666 & ~mask


def make_folders(folder: pathlib.Path, within: pathlib.Path) -> None:
    """Make a folder within another, and those between.

    **Raises:** `FileNotFoundError` where the other isn't there: it isn't made.
    """
    if folder != within and not folder.is_dir():
        make_folders(folder.parent, within)
        folder.mkdir(exist_ok=True)


def sync(paths: Iterable[pathlib.Path]) -> None:
    """Put files, and the names in folders, on the disk: many at a time, as the disk takes as long
    for one as for dozens.

    **Raises:** `OSError` that names the file.
    """
    with ThreadPoolExecutor(_AT_ONCE) as pool:
        list(pool.map(_sync, paths))


_AT_ONCE = 16


def _sync(path: pathlib.Path) -> None:
    is_folder = path.is_dir()
    if is_folder and not hasattr(os, "O_DIRECTORY"):  # the system can't
        return
    handle = os.open(path, os.O_RDONLY if is_folder else os.O_RDWR)
    try:
        os.fsync(handle)
    except OSError as e:
        # (Some network file systems can't do this to a folder.)
        if not is_folder or e.errno in (errno.EIO, errno.ENOSPC, errno.EDQUOT):
            raise naming(e, path) from e
    finally:
        os.close(handle)
