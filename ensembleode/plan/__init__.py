"""What is fixed before a solve is compiled, and the arrays that are its inputs.

- `plan.py`: what decides a compiled program, and the results of that program.
- `trajectory_numbers.py`: the numbers of trajectories, as arrays. `given.py`: the initial states
    and parameters that the user gave, kept for the solution.
- `events.py`: callbacks as programs. `saving.py`: the times that are saved. `known_times.py`: those
    on which steps end.
- `rate.py`, `implicit_form.py`, `extended_state.py`: programs that are made from the field.
    `real_numbers.py`: complex parameters as pairs.
"""
