"""Reverse mode of the time loop: its turns are recorded, and replayed backwards."""
