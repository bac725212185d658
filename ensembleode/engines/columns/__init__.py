"""`EnsembleColumns` by compiled code: the columns of a matrix, with one time and one step size for
all.

- `loop.py`: the time loop. `stops.py`: its position among the known times.
- `solves.py`: the columns from start to end, whose steps are calls of `compiled/column_step.py`;
    and their derivatives.
"""

from .solves import solve as solve
