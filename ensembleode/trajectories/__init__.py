"""From an ensemble's problems to arrays.

- `trajectories.py`: a `prob_func` as arrays. `trajectory_maker.py` makes the numbers of one
    trajectory. It is traced (`traced_prob_func.py`), with NumPy arrays lifted if necessary, or else
    called for each trajectory (`called_prob_func.py`).
- `arguments.py`: the arguments of `solve`. `saved_values.py`: the values of a `SavingCallback`.
"""
