"""The engines, which integrate trajectories.

A new engine is a subclass of `base.engine.Engine` in a folder here, listed in `choice.ENGINES`.
"""

from .base.engine import Engine as Engine
from .choice import choose as choose, ENGINES as ENGINES
