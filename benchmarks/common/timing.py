"""The seconds that calls take, until their results are ready."""

import math
import time

import jax


def timed(call, *args, clock=time.perf_counter):
    """The seconds and the result of a call."""
    started = clock()
    result = jax.block_until_ready(call(*args))
    return clock() - started, result


def best_of(call, repeats, clock=time.perf_counter):
    """The least seconds, and the last result."""
    tries = [timed(call, clock=clock) for _ in range(repeats)]
    return min(seconds for seconds, _ in tries), tries[-1][1]


def in_turns(calls, most, *, least=1, budget=math.inf, share=math.inf, clock=time.perf_counter):
    """The seconds of each of the named calls, in rounds, so that a slow moment of the machine hits
    all of them.

    After `least` rounds, no round begins once `budget` seconds have passed, and a call that has
    taken `share` seconds takes part no more.
    """
    spent, started = {name: [] for name in calls}, time.perf_counter()
    for turn in range(most):
        if turn >= least and time.perf_counter() - started >= budget:
            break
        for name, call in calls.items():
            if turn < least or sum(spent[name]) < share:
                spent[name].append(timed(call, clock=clock)[0])
    return spent
