"""Object code on disk, from one process to the next.

It lies in the folder `kernels` of the directory that the environment variable
`ENSEMBLEODE_CACHE_DIR` names, or else of the user's own for caches (`~/.cache/ensembleode` on
Linux, `~/Library/Caches/ensembleode` on macOS, `%LOCALAPPDATA%\\ensembleode` on Windows). An empty
`ENSEMBLEODE_CACHE_DIR` turns it off. What lies there is run, so nobody else should be able to write
there. It may be deleted at any time.

Whatever is wrong with the directory or with a file in it, all that is lost is time.
"""

import contextlib
import hashlib
import os
import pathlib
import sys

from ...ground.files import written_whole
from ...ground.logs import logger


VARIABLE = "ENSEMBLEODE_CACHE_DIR"

# Bytes of all files together; what was used least recently is deleted beyond.
MOST = 500 * 2**20
# Bytes written by this process before the folder is looked through (again).
_EACH = 10 * 2**20
_MAGIC = b"ensembleode kernel 2\n"

_unseen = _EACH


def directory() -> pathlib.Path | None:
    """Where the files are; None where there are none."""
    chosen = os.environ.get(VARIABLE)
    if chosen is not None and not chosen.strip():
        return None
    try:
        named = _users() / "ensembleode" if chosen is None else pathlib.Path(chosen).expanduser()
        return named / "kernels"
    except RuntimeError:  # nobody's home
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
    """The object code that was saved under this key; None where there is none that is whole."""
    folder = directory()
    if folder is None:
        return None
    path = folder / f"{key}.o"
    try:
        content = path.read_bytes()
    except OSError:
        return None
    digest, code = content[len(_MAGIC) :][:32], content[len(_MAGIC) + 32 :]
    if not content.startswith(_MAGIC) or _digest(key, code) != digest:
        logger.info("%s is damaged, or another kernel's, and is written anew.", path)
        return None
    with contextlib.suppress(OSError):  # read-only: then it isn't cleared either
        os.utime(path)
    return code


def _digest(key: str, code: bytes) -> bytes:
    """The digest of object code and of its key, as a file may have been renamed."""
    return hashlib.sha256(key.encode() + code).digest()


def save(key: str, code: bytes) -> None:
    """Save object code for `load`, in this process and others, if the disk allows."""
    global _unseen
    folder = directory()
    if folder is None:
        return
    try:
        folder.mkdir(mode=0o700, parents=True, exist_ok=True)
        # (Nobody has to wait for the disk: what a power cut leaves of it is found to be damaged.)
        with written_whole(folder / f"{key}.o", synced=False) as file:
            file.write(_MAGIC + _digest(key, code) + code)
        _unseen += len(code)
        if _unseen >= _EACH:
            _unseen = 0
            clear(folder, MOST)
    except OSError as e:
        logger.info("a compiled kernel is not kept for other processes: %s", e)


def clear(folder: pathlib.Path, most: int) -> None:
    """Delete the files that were used least recently, until so many bytes are left at most."""
    files = []
    with os.scandir(folder) as entries:
        for entry in entries:
            # (With what a process that was killed has left behind.)
            if entry.name.endswith((".o", ".partial")):
                with contextlib.suppress(FileNotFoundError):  # by another process
                    status = entry.stat(follow_symlinks=False)
                    files.append((status.st_mtime, status.st_size, entry.path))
    total = sum(size for _, size, _ in files)
    for _, size, path in sorted(files):
        if total <= most:
            break
        with contextlib.suppress(OSError):
            os.unlink(path)
        total -= size
