"""What users describe: problems, ensembles and their algorithms, callbacks, options."""

from ..ground.former_names import names_of


# (As earlier versions pickled them.)
_PICKLED = ("EnsembleContext", "EnsembleProblem", "ODEProblem", "remake", "_Rows")
__getattr__ = names_of(f"{__name__}.problem", _PICKLED)
