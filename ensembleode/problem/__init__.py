"""What users describe: problems, ensembles and their algorithms, callbacks, options."""

from .problem import (
    EnsembleContext as EnsembleContext,
    EnsembleProblem as EnsembleProblem,
    ODEProblem as ODEProblem,
    remake as remake,
)
