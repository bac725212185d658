"""The contenders of gpu_ensembles.py."""

import contextlib
import sys
from collections.abc import Callable
from typing import Any, NamedTuple

import diffrax
import jax
import jax.numpy as jnp
import numpy as np
from common.contenders import by_diffrax, imported, Skip, solution
from common.peers import gradsolve_problem, gradsolve_public, has_warp
from common.tasks import lorenz_components
from gpu_cases import ARRAYS, Case, CUDA, DIFFRAX, KERNEL, TIMES, TORCH, WARP

import ensembleode as eo


MOST_STEPS = 4096


class Solved(NamedTuple):
    """What a contender computes: states `[trajectory, (time,) 3]`, or gradients `[trajectory]`; the
    steps of each trajectory, and which succeeded, where it says so."""

    states: Any
    steps: Any = None
    good: Any = None


class Contender(NamedTuple):
    """A case, as one of the contenders runs it.

    - `put`: the parameters to the device, done on return. `run`: the solve of what `put` gave; may
        return before it is done. `wait`: until it is. `fetch`: the states as NumPy.
    - `public`: from NumPy to NumPy; where None, these one after the other.
    - `note`: what a reader of the row should know.
    """

    run: Callable[[Any], Solved]
    put: Callable[[np.ndarray], Any]
    wait: Callable[[Any], Any]
    fetch: Callable[[Solved], np.ndarray]
    public: Callable[[np.ndarray], np.ndarray] | None = None
    note: str | None = None

    def end_to_end(self, rhos: np.ndarray) -> np.ndarray:
        if self.public is not None:
            return self.public(rhos)
        return self.fetch(self.wait(self.run(self.put(rhos))))


def on_gpu() -> bool:
    return jax.default_backend() == "gpu"


#
# The contenders of JAX
#


def in_jax(run: Callable, public: Callable | None = None, also: Any = ()) -> Contender:
    """Of a jitted function of the parameters, and of what else (`also`) it is given."""

    def put(rhos: np.ndarray) -> Any:
        return jax.block_until_ready(jax.device_put((rhos, *also)))

    return Contender(
        run=lambda inputs: run(*inputs),
        put=put,
        wait=jax.block_until_ready,
        fetch=lambda solved: np.asarray(solved.states),
        public=public,
    )


def gradient_of(solve: Callable[[Any], Solved]) -> Callable[[Any], Solved]:
    gradient = jax.grad(lambda rhos: jnp.sum(solve(rhos).states ** 2))
    return lambda rhos: Solved(gradient(rhos))


def ours(alg: eo.EnsembleGPUArray | eo.EnsembleGPUKernel) -> Callable[[Case], Contender]:
    def way(case: Case) -> Contender:
        task = case.task

        def solved(rhos: Any) -> eo.EnsembleSolution:
            options = {"first": {"p": task.p[0]}, "maxiters": MOST_STEPS}
            return solution(task, jnp.asarray(task.u0), rhos, alg, **options)

        def solve(rhos: Any) -> Solved:
            sim = solved(rhos)
            good = sim.retcode == eo.ReturnCode.Success.value
            return Solved(sim.u, sim.stats.naccept + sim.stats.nreject, good)

        if case.method.gradient:
            return in_jax(jax.jit(gradient_of(solve)))
        return in_jax(jax.jit(solve), lambda rhos: np.asarray(solved(jnp.asarray(rhos)).u))

    return way


def diffrax_by_hand(case: Case) -> Contender:
    def gives(sol: diffrax.Solution) -> Solved:
        good = sol.result == diffrax.RESULTS.successful
        return Solved(sol.ys, sol.stats["num_steps"], good)

    every = by_diffrax(case.task, max_steps=MOST_STEPS, gives=gives)

    def solve(rhos: Any) -> Solved:
        return every(jnp.asarray(case.task.u0), rhos)

    return in_jax(jax.jit(gradient_of(solve) if case.method.gradient else solve))


#
# gradsolve
#


def _device() -> str:
    return "cuda" if on_gpu() else "cpu"


def _gradsolve(case: Case, engine: str) -> tuple[np.ndarray, Callable]:
    """The initial states, of which it wants one each, and its public call."""
    method = case.method
    if not method.adaptive or method.saves or method.gradient:
        raise Skip("its fused kernels are adaptive, and give endpoints only")
    _, u0, _ = gradsolve_problem(case.task)
    solve = gradsolve_public(case.task, engine, _device())
    return u0, lambda rhos: solve(rhos).y_final


def gradsolve_warp(case: Case) -> Contender:
    """Below its public call, which goes by way of the host."""
    u0, public = _gradsolve(case, "warp_ode")
    if not has_warp():
        raise Skip("warp-lang is not installed")
    engine, method = imported("gradsolve.warp.warp_ode"), case.method
    conf = np.array([0.0, 1.0, method.rtol, method.atol, method.dt], case.dtype)
    if not on_gpu():
        names = ("t0", "t1", "rtol", "atol", "dt0")
        options = dict(zip(names, map(float, conf), strict=True))
        options |= {"max_steps": MOST_STEPS, "record": 0, "precision": case.dtype}

        def on_host(rhos: np.ndarray) -> Solved:
            states, accepted, rejected, status, _ = engine._launch(u0, rhos, **options)
            return Solved(states, accepted + rejected, status == 0)

        same = jax.block_until_ready
        return Contender(on_host, lambda rhos: rhos, same, lambda x: x.states, public)
    runner = engine._ffi_runner(case.n, MOST_STEPS, 0, case.dtype)

    def solve(rhos: Any, u0: Any, conf: Any) -> Solved:
        states, accepted, rejected, status, _ = runner(u0, rhos, conf)
        return Solved(states, accepted + rejected, status == 0)

    return in_jax(jax.jit(solve), public, (u0, conf))


def gradsolve_cuda(case: Case) -> Contender:
    u0, public = _gradsolve(case, "cuda_tsit5")
    if not imported("gradsolve.cuda.cuda_tsit5")._CUDA_AVAILABLE:
        raise Skip("nvcc is not on the PATH")
    bridge = imported("gradsolve.cuda._ffi_bridge")

    def solve(rhos: Any, u0: Any) -> Solved:
        with contextlib.redirect_stdout(sys.stderr):  # nvcc's report of registers
            runner = bridge.make_runner("lorenz", 3, case.dtype, _device())
        states, _ = runner(u0, rhos, 1.0, case.method.rtol, case.method.atol, MOST_STEPS)
        return Solved(states.T)  # (it counts only the steps that it accepts)

    return in_jax(jax.jit(solve), public, (np.ascontiguousarray(u0.T),))


#
# torchdiffeq
#


def by_torch(case: Case) -> Contender:
    torch, method = imported("torch"), case.method
    odeint = imported("torchdiffeq").odeint
    if method.gradient:
        raise Skip("forwards only")
    if on_gpu() and not torch.cuda.is_available():
        raise Skip("its torch finds no GPU")
    device = torch.device(_device())
    real = getattr(torch, case.dtype)
    u0 = torch.tensor(case.task.u0, dtype=real, device=device)
    times = torch.tensor(TIMES if method.saves else [0.0, 1.0], dtype=real, device=device)
    options: dict[str, Any] = {"method": "rk4", "options": {"step_size": method.dt}}
    if method.adaptive:
        options = {"rtol": method.rtol, "atol": method.atol, "method": "dopri5"}
        options["options"] = {"first_step": method.dt, "max_num_steps": MOST_STEPS}

    def solve(rhos: Any, u0: Any) -> Any:
        def field(t: Any, u: Any) -> Any:
            return torch.stack(lorenz_components(u.unbind(-1), rhos), -1)

        states = odeint(field, u0, times, **options)
        return states if method.saves else states[-1]

    def together(rhos: Any) -> Solved:
        states = solve(rhos, u0.expand(len(rhos), 3))
        return Solved(states.movedim(1, 0) if method.saves else states)

    def mapped(rhos: Any) -> Solved:
        return Solved(torch.func.vmap(solve, in_dims=(0, None))(rhos, u0))

    def wait(x: Any) -> Any:
        if on_gpu():
            torch.cuda.synchronize()
        return x

    def put(rhos: np.ndarray) -> Any:
        return wait(torch.from_numpy(rhos).to(device))

    note, run = "Dopri5; one step size for all", together
    if not method.adaptive:
        note, run = "RK4; vmap", mapped
        if why := refusal(lambda: mapped(put(case.task.p[:2]))):
            note, run = f"RK4; states [N, 3], as vmap refuses it: {why}", together
    # (Nothing records a graph: no input asks for a gradient.)
    return Contender(run, put, wait, lambda solved: solved.states.cpu().numpy(), note=note)


def refusal(call: Callable[[], Any]) -> str | None:
    try:
        call()
    except Exception as error:
        return first_line(error)
    return None


def first_line(error: BaseException) -> str:
    lines = str(error).strip().splitlines()
    return f"{type(error).__name__}: {lines[0][:120] if lines else ''}"


WAYS: dict[str, Callable[[Case], Contender]] = {
    KERNEL: ours(eo.EnsembleGPUKernel()),
    ARRAYS: ours(eo.EnsembleGPUArray()),
    DIFFRAX: diffrax_by_hand,
    WARP: gradsolve_warp,
    CUDA: gradsolve_cuda,
    TORCH: by_torch,
}
