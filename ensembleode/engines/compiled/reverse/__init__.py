"""Reverse mode of the time loop: turns are recorded, and replayed backwards."""
