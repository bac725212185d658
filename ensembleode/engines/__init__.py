"""How one trajectory, or one chunk of them, is integrated.

A new engine is a subclass of `engine.Engine`, in a module here, and its place in `choice.ENGINES`.
"""

from .choice import choose as choose, ENGINES as ENGINES
from .engine import Engine as Engine
