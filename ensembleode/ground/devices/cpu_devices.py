"""The cores of this process, and the CPU as several JAX devices.

JAX has one CPU device unless it is told otherwise before it starts: by `use_cpu_devices`, by its
own option `jax_num_cpu_devices`, or by `--xla_force_host_platform_device_count` in `XLA_FLAGS`. The
environment variable `ENSEMBLEODE_NUM_THREADS` is the number of threads of `EnsembleThreads()`, and
of devices of `use_cpu_devices()`, in place of one for each core.
"""

import contextlib
import os
import pathlib
import platform

from ..logs import log_once


VARIABLE = "ENSEMBLEODE_NUM_THREADS"
_share: int | None = None  # the number of cores that `share` has given to this process


def cores() -> int:
    """The number of cores that this process may use, which a CPU affinity may limit."""
    return _share or len(usable())


def usable() -> list[int]:
    """The numbers of these cores."""
    if hasattr(os, "sched_getaffinity"):
        return sorted(os.sched_getaffinity(0))
    return list(range(os.cpu_count() or 1))


def computer() -> str:
    """A value that identifies this computer, or this container."""
    boot = pathlib.Path("/proc/sys/kernel/random/boot_id")
    return f"{platform.node()} {boot.read_text().strip() if boot.exists() else ''}"


def use_cpu_devices(n: int | None = None) -> None:
    """Let JAX have several CPU devices. Call it right after the imports.

    The compiled engine has threads of its own and needs none. `EnsembleThreads` with the diffrax
    engine, and `fit(dist=True)` on a CPU, run on these devices.

    **Arguments:** `n`: their number; by default `ENSEMBLEODE_NUM_THREADS`, or one for each core
    that this process may use.

    **Raises:** `RuntimeError` where JAX has started already, with another number of devices;
    `ValueError` for an `n` that is not a count.

    >>> import ensembleode as eo, jax
    >>> eo.use_cpu_devices(4)  # doctest: +SKIP
    >>> len(jax.devices("cpu"))  # doctest: +SKIP
    4
    """
    import jax

    count = threads() if n is None else n
    if isinstance(count, bool) or not isinstance(count, int) or count < 1:
        raise ValueError(f"n must be a whole number, 1 or more, got {n!r}.")
    try:
        jax.config.update("jax_num_cpu_devices", count)
    except RuntimeError as e:
        if (there := len(jax.local_devices(backend="cpu"))) != count:
            raise RuntimeError(
                f"use_cpu_devices({count}) comes too late: JAX has started already, with {there}. "
                "Call it right after the imports, before JAX computes anything or is asked for its "
                "devices."
            ) from e


def are_chosen() -> bool:
    """Whether JAX was told how many CPU devices it has."""
    import jax

    flags = os.environ.get("XLA_FLAGS", "")
    chosen = getattr(jax.config, "jax_num_cpu_devices", -1)
    return chosen != -1 or "xla_force_host_platform_device_count" in flags


def share(place: int = 0, of: int = 1) -> None:
    """Divide the cores between the processes that use them: `of` is the number of processes, and
    `place`, from 0, that of this one. Each gets equally many cores, at least one, and JAX has as
    many devices. Nothing is divided where the user has set the number of devices or threads.

    **Raises:** `RuntimeError` where JAX has started already.
    """
    global _share
    import jax

    if are_chosen():
        return
    if os.environ.get(VARIABLE, "").strip():
        jax.config.update("jax_num_cpu_devices", threads())
        return
    every = usable()
    count = max(1, len(every) // of)
    first = place * count % len(every)
    jax.config.update("jax_num_cpu_devices", count)
    _share = count
    if of > 1 and hasattr(os, "sched_setaffinity"):
        for thread in os.listdir("/proc/self/task"):  # those of libraries, too
            with contextlib.suppress(ProcessLookupError):  # it has ended meanwhile
                os.sched_setaffinity(int(thread), every[first : first + count])


def threads() -> int:
    """The number of threads of `EnsembleThreads()`.

    **Raises:** `ValueError` for an `ENSEMBLEODE_NUM_THREADS` that is not a count.
    """
    text = os.environ.get(VARIABLE, "").strip()
    if not text:
        return cores()
    if not text.isdecimal():
        raise ValueError(f"{VARIABLE} must be a whole number, 0 or more, got {text!r}.")
    return int(text) or cores()


def devices(n: int | None) -> list:
    """The first `n` CPU devices, or all if `n` is None.

    Says once if there is only one device although there are more cores.

    **Raises:** `ValueError` when there are fewer than `n`.
    """
    import jax

    every = jax.local_devices(backend="cpu")
    if n is not None and n > len(every):
        raise ValueError(
            f"EnsembleThreads(n={n}) wants {n} CPU devices, and JAX has {len(every)}. Call "
            f"eo.use_cpu_devices({n}) right after the imports."
        )
    if n is None and len(every) == 1 and threads() > 1 and not are_chosen():
        log_once(
            f"the diffrax engine runs on one core of {cores()}, as JAX has one CPU device: "
            "eo.use_cpu_devices(), right after the imports, gives it one for each core."
        )
    return every[:n]
