"""The time loop of a kernel, with its events.

- `loop.py`, `turn.py`: the loop, and one turn of it. `ends.py`: how trajectories end, and what is
    written of them. `queue.py`: which trajectory a lane takes next. `switch.py`, `parking.py`:
    methods that switch. `step_limits.py`: shortened steps.
- `callback_functions.py`: conditions and affects. `quiet.py`, `balls.py`: steps in which no
    condition crosses zero. `root_finding.py`: where one does. `events.py`: what happens there.
"""
