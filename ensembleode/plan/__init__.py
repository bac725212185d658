"""What is decided before a solve is compiled, and the arrays that go into it.

- `plan.py`: what decides a compiled program, and the results of that program.
- `trajectory_numbers.py`: the numbers of trajectories, as arrays. `given.py`: the initial states
    and parameters that the user gave, kept for the solution.
- `events.py`: callbacks as programs. `saving.py`, `known_times.py`: the times that are saved, and
    those on which steps end.
- `rate.py`, `implicit_form.py`, `extended_state.py`: what is made of the field. `real_numbers.py`:
    complex parameters as pairs.
"""
