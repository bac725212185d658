"""What a solve returns: solutions, their events, statistics of their work, named dimensions."""

from .solution import (
    EngineChoice as EngineChoice,
    EnsembleError as EnsembleError,
    EnsembleSolution as EnsembleSolution,
    ODESolution as ODESolution,
)
