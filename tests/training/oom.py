"""A fit with less memory than its batch needs, as a script: the free memory is given in MiB."""

import json
import logging
import pathlib
import resource
import sys

import jax.numpy as jnp
import numpy as np
import optax

import ensembleode as eo


def loss(params, x):
    hidden = jnp.tanh(x[:, None] * params["first"][None])
    return jnp.sum(jnp.tanh(hidden @ params["second"]), axis=1) ** 2


def main(left, microbatch, n=100_000, width=256):
    logging.basicConfig(level=logging.INFO)
    params = {"first": jnp.ones(width), "second": 0.1 * jnp.eye(width)}
    x = np.linspace(0.0, 1.0, n)
    options = {"optimizer": optax.sgd(1e-6), "maxiters": 2, "progress": False}
    eo.fit(loss, params, x[:10], **options)
    if left:
        status = pathlib.Path("/proc/self/status").read_text().split()
        used = int(status[status.index("VmSize:") + 1]) * 1024
        resource.setrlimit(resource.RLIMIT_AS, (used + left * 2**20,) * 2)
    result = eo.fit(loss, params, x, microbatch=microbatch, **options)
    status = pathlib.Path("/proc/self/status").read_text().split()
    peak = int(status[status.index("VmHWM:") + 1]) / 1024
    print(json.dumps({"losses": result.losses.tolist(), "peak": peak}))


if __name__ == "__main__":
    main(*json.loads(sys.argv[1]))
