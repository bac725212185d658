"""What users describe: problems, ensembles and their algorithms, callbacks, options."""

# (Earlier versions pickled the first of these names, too.)
from .problem import (
    _Rows as _Rows,
    EnsembleContext as EnsembleContext,
    EnsembleProblem as EnsembleProblem,
    ODEProblem as ODEProblem,
    remake as remake,
)
