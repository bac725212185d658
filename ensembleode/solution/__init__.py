"""What a solve returns: solutions, their events, statistics of their work, named dimensions."""

from ..ground.former_names import names_of


# (As earlier versions pickled them.)
_PICKLED = ("EngineChoice", "EnsembleError", "EnsembleSolution", "ODESolution")
__getattr__ = names_of(f"{__name__}.solution", _PICKLED)
