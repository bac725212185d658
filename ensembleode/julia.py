"""The Julia process of `engine="julia"`: how it runs, and whether it can run.

It is started by the first solve that needs it, or by [`start`][ensembleode.julia.start] with other
settings. `install` and `status` do the same as `ensembleode julia install` and
`ensembleode julia status`.
"""

from .engines.julia.environment import JuliaError as JuliaError, status as status
from .engines.julia.installing import install as install
from .engines.julia.session import close as close, start as start
