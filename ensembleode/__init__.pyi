from . import analysis as analysis, planning as planning, training as training
from .analysis import EnsembleSummary as EnsembleSummary
from .engines.compiled.xla.launch import KernelError as KernelError
from .engines.compiled.xla.ptxas import PtxasError as PtxasError
from .executors.distributed.local import worker_environment as worker_environment
from .executors.distributed.pools import (
    ClusterError as ClusterError,
    Traffic as Traffic,
)
from .ground.devices.cpu_devices import use_cpu_devices as use_cpu_devices
from .ground.version import __version__ as __version__
from .problem.callbacks import (
    CallbackSet as CallbackSet,
    ContinuousCallback as ContinuousCallback,
    DiscreteCallback as DiscreteCallback,
    Integrator as Integrator,
    LeftRootFind as LeftRootFind,
    NoRootFind as NoRootFind,
    PeriodicCallback as PeriodicCallback,
    PresetTimeCallback as PresetTimeCallback,
    RightRootFind as RightRootFind,
    terminate as terminate,
    TerminateSteadyState as TerminateSteadyState,
    VectorContinuousCallback as VectorContinuousCallback,
)
from .problem.correcting_callbacks import (
    ManifoldProjection as ManifoldProjection,
    PositiveDomain as PositiveDomain,
)
from .problem.ensemble import (
    EnsembleColumns as EnsembleColumns,
    EnsembleDistributed as EnsembleDistributed,
    EnsembleGPUArray as EnsembleGPUArray,
    EnsembleGPUKernel as EnsembleGPUKernel,
    EnsembleSerial as EnsembleSerial,
    EnsembleSplitThreads as EnsembleSplitThreads,
    EnsembleThreads as EnsembleThreads,
)
from .problem.initialization import (
    BrownFullBasicInit as BrownFullBasicInit,
    CheckInit as CheckInit,
)
from .problem.ode_function import ODEFunction as ODEFunction
from .problem.problem import (
    EnsembleContext as EnsembleContext,
    EnsembleProblem as EnsembleProblem,
    ODEProblem as ODEProblem,
    remake as remake,
)
from .problem.saving_callback import (
    Saved as Saved,
    SavingCallback as SavingCallback,
)
from .problem.jump_problem import JumpProblem as JumpProblem
from .problem.stochastic import (
    NoiseGrid as NoiseGrid,
    SDEProblem as SDEProblem,
    WienerProcess as WienerProcess,
)
from .problem.sensitivity import (
    BacksolveAdjoint as BacksolveAdjoint,
    DirectAdjoint as DirectAdjoint,
    ForwardDiffSensitivity as ForwardDiffSensitivity,
    GaussAdjoint as GaussAdjoint,
    InterpolatingAdjoint as InterpolatingAdjoint,
    RecursiveCheckpointAdjoint as RecursiveCheckpointAdjoint,
    ReplayAdjoint as ReplayAdjoint,
)
from .running.reductions import sum_reduction as sum_reduction
from .serve.client.client import (
    AsyncClient as AsyncClient,
    Client as Client,
    ServiceError as ServiceError,
)
from .solution.events import End as End, Events as Events
from .solution.solution import (
    EnsembleError as EnsembleError,
    EnsembleSolution as EnsembleSolution,
    ODESolution as ODESolution,
    ReturnCode as ReturnCode,
)
from .solution.stats import Stats as Stats
from .solvers import (
    AutoTsit5 as AutoTsit5,
    AutoVern6 as AutoVern6,
    AutoVern7 as AutoVern7,
    AutoVern8 as AutoVern8,
    AutoVern9 as AutoVern9,
    Bosh3 as Bosh3,
    BS5 as BS5,
    Direct as Direct,
    Dopri5 as Dopri5,
    Dopri8 as Dopri8,
    EM as EM,
    Euler as Euler,
    EulerHeun as EulerHeun,
    ExplicitRK as ExplicitRK,
    Heun as Heun,
    ImplicitEuler as ImplicitEuler,
    JuliaAlg as JuliaAlg,
    KenCarp3 as KenCarp3,
    KenCarp4 as KenCarp4,
    KenCarp5 as KenCarp5,
    Kvaerno3 as Kvaerno3,
    Kvaerno4 as Kvaerno4,
    Kvaerno5 as Kvaerno5,
    Midpoint as Midpoint,
    Ralston as Ralston,
    RK4 as RK4,
    RKMil as RKMil,
    Rodas4 as Rodas4,
    Rodas5P as Rodas5P,
    Rosenbrock23 as Rosenbrock23,
    SDESolver as SDESolver,
    SOSRA as SOSRA,
    SOSRI as SOSRI,
    SRA1 as SRA1,
    SRIW1 as SRIW1,
    SSPRK33 as SSPRK33,
    Tsit5 as Tsit5,
    Vern6 as Vern6,
    Vern7 as Vern7,
    Vern8 as Vern8,
    Vern9 as Vern9,
)
from .solvers.controllers import (
    AbstractController as AbstractController,
    IController as IController,
    PIController as PIController,
    PIDController as PIDController,
)
from .solvers.norms import (
    AbstractNorm as AbstractNorm,
    MaxNorm as MaxNorm,
    RMSNorm as RMSNorm,
)
from .solvers.tableau import Interpolant as Interpolant, Tableau as Tableau
from .solving import solve as solve
from .steady import steady_state as steady_state, SteadyState as SteadyState
from .store import open_ensemble as open_ensemble, StoreError as StoreError
from .tools.citation import citation as citation
from .tools.column_check import (
    check_columns as check_columns,
    ColumnReport as ColumnReport,
)
from .tools.export import (
    export as export,
    ExportedFunction as ExportedFunction,
    load_exported as load_exported,
)
from .tools.kernel_usage import (
    kernel_report as kernel_report,
    KernelReport as KernelReport,
)
from .tools.solve_ivp import IVPResult as IVPResult, solve_ivp as solve_ivp
from .training.checkpoints import (
    CheckpointError as CheckpointError,
    Checkpoints as Checkpoints,
)
from .training.collocation import collocate_data as collocate_data
from .training.fit import fit as fit
from .training.fit_result import FitResult as FitResult, FitState as FitState
from .training.least_squares import LevenbergMarquardt as LevenbergMarquardt
from .training.multiple_shooting import multiple_shooting as multiple_shooting
from .training.predict import predict as predict
from .training.processes import (
    initialize as initialize,
    ProcessLost as ProcessLost,
)
from .training.trackers import (
    MLflowLog as MLflowLog,
    TensorBoardLog as TensorBoardLog,
    WandbLog as WandbLog,
)
