"""The engines, which integrate trajectories.

A new engine is a subclass of `engine.Engine` in a module here, with its place in `choice.ENGINES`.
"""

from .base.engine import Engine as Engine
from .choice import choose as choose, ENGINES as ENGINES
