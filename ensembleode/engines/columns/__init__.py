"""`EnsembleColumns` in compiled code: the trajectories are the columns of a matrix, and share the
time and the step size.

- `step.py`: the kernel that tries a step. `loop.py`: the time loop. `stops.py`: its position among
    the known times.
- `solves.py`: solves from start to end, and their derivatives.
"""

from .solves import solve as solve
