"""What a solve returns: solutions, their events, statistics of their work, named dimensions."""

from ..ground.former_names import names_of


# Earlier versions pickled these classes by the name of this module.
_PICKLED = ("EngineChoice", "EnsembleError", "EnsembleSolution", "ODESolution")
__getattr__ = names_of(f"{__name__}.solution", _PICKLED)
