"""The cost of a large run: measure a step, describe the machines, estimate the hours."""

from .checks import PlanError as PlanError
from .estimation import (
    Assumption as Assumption,
    Estimate as Estimate,
    estimate as estimate,
    Share as Share,
)
from .fleet import Kind as Kind, read_fleet as read_fleet
from .measurement import (
    Fit as Fit,
    measure as measure,
    Measurement as Measurement,
    Timing as Timing,
)
