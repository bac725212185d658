"""The time loop of a kernel, and the events in it.

- `loop.py`, `turn.py`: the loop, and one turn of it. `queue.py`: which trajectory a lane takes
    next. `switch.py`, `parking.py`: methods that switch. `step_limits.py`: shortened steps.
- `callback_functions.py`, `quiet.py`, `balls.py`, `root_finding.py`, `events.py`: the functions of
    callbacks, where a condition can't cross zero, where it does, and what is done there.
"""
