"""Parts of a benchmark in processes of their own."""

import json
import os
import subprocess
import sys


def last_core():
    """The one to hold a process to, where the system can."""
    return max(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else None


def apart(script, request, *, cores=None, environment=None):
    """What `script --worker REQUEST` says as JSON in its last line; held to cores, if given."""

    def hold():
        if cores is not None and hasattr(os, "sched_setaffinity"):
            os.sched_setaffinity(0, cores)

    # Some libraries greet on stderr, so that is shown only when something is wrong.
    done = subprocess.run(
        [sys.executable, script, "--worker", json.dumps(request)],
        capture_output=True,
        text=True,
        env={**os.environ, **(environment or {})},
        preexec_fn=hold,
    )
    if done.returncode:
        sys.exit(done.stderr or f"{script} ended with {done.returncode}")
    return json.loads(done.stdout.splitlines()[-1])
