"""Object code on disk, kept from one process to the next.

The files are in the folder `kernels` of the directory that the environment variable
`ENSEMBLEODE_CACHE_DIR` names, or else of the user's directory for caches (`~/.cache/ensembleode` on
Linux, `~/Library/Caches/ensembleode` on macOS, `%LOCALAPPDATA%\\ensembleode` on Windows). An empty
`ENSEMBLEODE_CACHE_DIR` turns the cache off. It may be deleted at any time.

The code in it is run. So a file is used only if it and the folder `kernels` belong to the user, and
nobody else may write to them, as they are made. If anything is wrong with them, code is compiled
anew.
"""

import contextlib
import hashlib
import os
import pathlib
import sys

from ....ground.files import written_whole
from ....ground.logs import logger
from ....ground.own_files import check_own_folder, make_own_folder, NotOwnError, read_own


VARIABLE = "ENSEMBLEODE_CACHE_DIR"

# The largest total size of all files in bytes; the least recently used ones are deleted.
MOST = 500 * 2**20
# The bytes written by this process after which the size of the folder is checked.
_EACH = 10 * 2**20
_MAGIC = b"ensembleode kernel 2\n"

_unseen = _EACH


def directory() -> pathlib.Path | None:
    """The folder of the files; None where nothing is kept."""
    chosen = os.environ.get(VARIABLE)
    if chosen is not None and not chosen.strip():
        return None
    try:
        named = _users() / "ensembleode" if chosen is None else pathlib.Path(chosen).expanduser()
        return named / "kernels"
    except RuntimeError:  # the user has no home directory
        return None


def _users() -> pathlib.Path:
    if sys.platform == "win32":
        local = os.environ.get("LOCALAPPDATA")
        return pathlib.Path(local) if local else pathlib.Path.home() / "AppData" / "Local"
    if sys.platform == "darwin":
        return pathlib.Path.home() / "Library" / "Caches"
    named = os.environ.get("XDG_CACHE_HOME", "")
    return pathlib.Path(named) if os.path.isabs(named) else pathlib.Path.home() / ".cache"


def load(key: str) -> bytes | None:
    """The object code saved under this key; None where there is none that can be trusted."""
    folder = directory()
    if folder is None:
        return None
    path = folder / f"{key}.o"
    try:
        content = read_own(folder, path.name)
    except NotOwnError as e:
        _refuse(folder, e)
        return None
    except OSError:
        return None
    digest, code = content[len(_MAGIC) :][:32], content[len(_MAGIC) + 32 :]
    if not content.startswith(_MAGIC) or _digest(key, code) != digest:
        logger.info("%s is damaged, or another kernel's, and is written anew.", path)
        return None
    with contextlib.suppress(OSError):  # a read-only folder isn't cleared, so needs no times
        os.utime(path)
    return code


def _digest(key: str, code: bytes) -> bytes:
    """The digest of object code and its key, as a file may have been renamed."""
    return hashlib.sha256(key.encode() + code).digest()


def save(key: str, code: bytes) -> None:
    """Save object code for `load`, if the disk allows it and the folder is the user's own."""
    global _unseen
    folder = directory()
    if folder is None:
        return
    try:
        make_own_folder(folder)
        check_own_folder(folder)
        # (Not synced: a file that a power cut damages is recognised.)
        with written_whole(folder / f"{key}.o", synced=False, permissions=0o600) as file:
            file.write(_MAGIC + _digest(key, code) + code)
        _unseen += len(code)
        if _unseen >= _EACH:
            _unseen = 0
            clear(folder, MOST)
    except NotOwnError as e:
        _refuse(folder, e)
    except OSError as e:
        logger.info("a compiled kernel is not kept for other processes: %s", e)


def _refuse(folder: pathlib.Path, why: NotOwnError) -> None:
    """One line in the log for each folder: its files are many."""
    if folder not in _refused:
        _refused.add(folder)
        logger.warning("machine code that is kept on disk is not run, but compiled anew: %s.", why)


_refused: set[pathlib.Path] = set()


def clear(folder: pathlib.Path, most: int) -> None:
    """Delete the least recently used files until at most `most` bytes are left."""
    files = []
    with os.scandir(folder) as entries:
        for entry in entries:
            # Files of a process that was killed while writing are included.
            if entry.name.endswith((".o", ".partial")):
                with contextlib.suppress(FileNotFoundError):  # another process has deleted it
                    status = entry.stat(follow_symlinks=False)
                    files.append((status.st_mtime, status.st_size, entry.path))
    total = sum(size for _, size, _ in files)
    for _, size, path in sorted(files):
        if total <= most:
            break
        with contextlib.suppress(OSError):
            os.unlink(path)
        total -= size
