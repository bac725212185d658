"""Tables of problems by their sizes, each case in a process of its own."""

import argparse
import functools
import itertools

from .processes import apart, last_core
from .report import header, machine


_CACHES = ("JAX_COMPILATION_CACHE_DIR", "ENSEMBLEODE_CACHE_DIR")


def by_size(script, description, *, only, sizes, limit, columns, **more):
    """Parse the options, print the head of the table, and yield the cases: the name of the problem,
    its size, the numbers that `more` asks for, and `cold(*request)`, which has the script's worker
    do a request on the last core, without any code that was compiled before. The request is the
    name, these numbers, what `cold` is given, and the limit in seconds.

    **Arguments:** `only`, `sizes`: by default; `limit`: what the limit is for; `columns`: those
    after the name of the problem; `more`: further options that are lists of numbers, by default.
    """
    parser = argparse.ArgumentParser(description=description.partition("\n")[0])
    parser.add_argument("--only", default=only)
    parser.add_argument("--sizes", default=sizes)
    parser.add_argument("--limit", type=int, default=200, help=f"seconds for {limit}")
    for name, numbers in more.items():
        parser.add_argument(f"--{name}", default=numbers)
    options = parser.parse_args()
    core, about = last_core(), machine("ensembleode", "jax")
    print(f"{about['cpu']}, {about['cores']} cores, load {about['load']}; {about['versions']}\n")
    print(header(["", *columns], left=2))
    environment = dict.fromkeys(_CACHES, "") | {"JAX_PLATFORMS": "cpu"}

    def cold(*request):
        return apart(script, [*request, options.limit], cores=[core], environment=environment)

    lists = [getattr(options, x).split(",") for x in ("sizes", *more)]
    for name, *numbers in itertools.product(options.only.split(","), *lists):
        case = [name, *map(int, numbers)]
        yield *case, functools.partial(cold, *case)
