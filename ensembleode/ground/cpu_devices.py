"""The CPU as several JAX devices, one for each core, which `EnsembleThreads` runs on.

JAX fixes their number when it starts its backend. So the number is set when both ensembleode and
JAX have been imported, in any order, unless it was set already (`jax_num_cpu_devices`, or
`--xla_force_host_platform_device_count` in `XLA_FLAGS`). The environment variable
`ENSEMBLEODE_NUM_THREADS` overrides the number; 0 leaves JAX's configuration alone. Nothing else is
configured globally by ensembleode.
"""

import contextlib
import os
import pathlib
import platform
import sys
from typing import Any

from .logs import warn_once


VARIABLE = "ENSEMBLEODE_NUM_THREADS"
_configured: int | None = None  # by `configure`
_share: int | None = None  # the number of cores that `share` has left to this process


def cores() -> int:
    """The number of cores that this process may use, which a CPU affinity may limit."""
    return _share or len(usable())


def usable() -> list[int]:
    """The numbers of these cores."""
    if hasattr(os, "sched_getaffinity"):
        return sorted(os.sched_getaffinity(0))
    return list(range(os.cpu_count() or 1))


def computer() -> str:
    """What tells this computer, or container, from others."""
    boot = pathlib.Path("/proc/sys/kernel/random/boot_id")
    return f"{platform.node()} {boot.read_text().strip() if boot.exists() else ''}"


def share(place: int, of: int) -> None:
    """Divide the cores of this process with the others that may use the same ones: this is the one
    at that `place`, from 0, `of` so many. Each gets equally many, and where there are fewer cores
    than processes, one. Nothing is done where it was said how many devices there are.

    **Raises:** `RuntimeError` where JAX has started already.
    """
    global _share
    import jax

    if of == 1 or _configured is None or jax.config.jax_num_cpu_devices != _configured:  # pyright: ignore
        return
    if os.environ.get(VARIABLE, "").strip():
        return
    every = usable()
    count = max(1, len(every) // of)
    first = place * count % len(every)
    jax.config.update("jax_num_cpu_devices", count)
    _share = count
    if hasattr(os, "sched_setaffinity"):
        for thread in os.listdir("/proc/self/task"):  # those of libraries, too
            with contextlib.suppress(ProcessLookupError):  # it has ended meanwhile
                os.sched_setaffinity(int(thread), every[first : first + count])


def wanted() -> int:
    """The number of CPU devices to configure; 0 to leave the number as it is.

    **Raises:** `ValueError` for an `ENSEMBLEODE_NUM_THREADS` that is not a count.
    """
    text = os.environ.get(VARIABLE, "").strip()
    if not text:
        return cores()
    if not text.isdecimal():
        raise ValueError(f"{VARIABLE} must be a whole number, 0 or more, got {text!r}.")
    return int(text)


def configure() -> None:
    """Configure the number of JAX's devices unless that has been done: now, or when JAX is
    imported."""
    global _configured
    count = wanted()
    if "jax" not in sys.modules:
        sys.meta_path.insert(0, _WhenJaxIsImported())
        return
    import jax

    from . import given_device  # noqa: F401

    chosen = getattr(jax.config, "jax_num_cpu_devices", -1)
    flags = os.environ.get("XLA_FLAGS", "")
    if count == 0 or chosen != -1 or "xla_force_host_platform_device_count" in flags:
        return
    # If JAX has started already, `devices` reports that when it matters.
    with contextlib.suppress(RuntimeError):
        jax.config.update("jax_num_cpu_devices", count)
        _configured = count


class _WhenJaxIsImported:
    """A finder of modules that notices when JAX is imported, leaves that to the other finders, and
    then configures JAX. (An environment variable would be inherited by processes that this one
    starts.)"""

    def find_spec(self, name: str, path: Any = None, target: Any = None) -> Any:
        """See `importlib.abc.MetaPathFinder`."""
        if name != "jax":
            return None
        after = sys.meta_path[sys.meta_path.index(self) + 1 :]
        spec = next(filter(None, (x.find_spec(name, path, target) for x in after)), None)
        if spec is not None and spec.loader is not None:
            execute = spec.loader.exec_module

            def execute_and_configure(module: Any) -> None:
                execute(module)
                sys.meta_path.remove(self)
                configure()

            spec.loader.exec_module = execute_and_configure
        return spec


def threads() -> int:
    """The number of threads of `EnsembleThreads()`, where it needs no devices for them."""
    return wanted() or cores()


def devices(n: int | None) -> list[Any]:
    """The first `n` CPU devices, or all if `n` is None.

    Warns once if there is only one device although there are more cores.

    **Raises:** `ValueError` when there are fewer than `n`.
    """
    import jax

    every = jax.local_devices(backend="cpu")
    if n is not None and n > len(every):
        raise ValueError(
            f"EnsembleThreads(n={n}) wants {n} CPU devices, and JAX has {len(every)}. Set "
            f"{VARIABLE}={n} in the environment, and import ensembleode before JAX computes "
            "anything."
        )
    if n is None and len(every) == 1 and wanted() > 1:
        warn_once(
            f"EnsembleThreads runs on one core of {cores()}, as JAX has one CPU device: it had "
            "started before ensembleode was imported, or is told so. Import ensembleode first, or "
            f"call jax.config.update('jax_num_cpu_devices', {cores()}) right after importing jax. "
            "EnsembleThreads(1) asks for one core."
        )
    return every[:n]
