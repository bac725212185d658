"""From an ensemble's problems to arrays.

- `trajectories.py`: a `prob_func` as arrays. `trajectory_maker.py` makes one of the trajectories:
    traced (`traced_prob_func.py`), with NumPy arrays lifted, or called for each
    (`called_prob_func.py`).
- `arguments.py`: the arguments of `solve`. `saved_values.py`: the values of a `SavingCallback`.
"""
