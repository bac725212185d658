"""Other libraries on stiff problems of `ivp_test_set`: functions of a problem and its constants
`[trajectories, constants]`, that give `solve(reltol, abstol)` with the ends."""

import numpy as np

from .contenders import imported


def printed(problem, u, p):
    """The components of a field as text, which languages like C's read; `u` and `p` are how they
    call components and constants, by number."""
    k, n = len(problem.u0), len(problem.constants)
    names = [[_Text(of.format(i)) for i in range(m)] for of, m in ((u, k), (p, n))]
    return [_text(x) for x in problem.components(*names, _Text("t"))]


class _Text:
    def __init__(self, text):
        self.text = text

    def __neg__(self):
        return _Text(f"(-{self.text})")

    def __pow__(self, power):
        return _Text(f"({' * '.join([self.text] * power)})")


def _operation(sign, *, swapped):
    def apply(x, y):
        first, second = (y, x) if swapped else (x, y)
        return _Text(f"({_text(first)} {sign} {_text(second)})")

    return apply


for _name, _sign in (("add", "+"), ("sub", "-"), ("mul", "*"), ("truediv", "/")):
    setattr(_Text, f"__{_name}__", _operation(_sign, swapped=False))
    setattr(_Text, f"__r{_name}__", _operation(_sign, swapped=True))


def _text(x):
    return x.text if isinstance(x, _Text) else repr(float(x))


def numbalsoda(problem, constants):
    """LSODA in C, with a right-hand side and a loop over the trajectories by Numba."""
    numba, lsoda = imported("numba"), imported("numbalsoda")
    lines = [f"    du[{i}] = {x}" for i, x in enumerate(printed(problem, "u[{}]", "p[{}]"))]
    names = {}
    exec("\n".join(["def rhs(t, u, du, p):", *lines]), names)
    rhs = numba.cfunc(lsoda.lsoda_sig)(names["rhs"])
    one = lsoda.lsoda

    @numba.njit
    def every(address, u0, constants, times, reltol, abstol, ends):
        for i in range(len(constants)):
            us, succeeded = one(address, u0, times, constants[i], reltol, abstol, 10**6)
            ends[i] = np.nan
            if succeeded:
                ends[i] = us[-1]

    u0, times = np.array(problem.u0, float), np.array([0.0, problem.end])

    def solve(reltol, abstol):
        ends = np.empty((len(constants), len(u0)))
        every(rhs.address, u0, constants, times, reltol, abstol, ends)
        return ends

    return solve


def pydiffsol(problem, constants, *, method):
    """In Rust, one trajectory after the other, with a right-hand side and a Jacobian by LLVM."""
    diffsol = imported("pydiffsol")
    inputs = ", ".join(f"p{i} = {x!r}" for i, x in enumerate(map(float, problem.constants)))
    starts = ", ".join(f"y{i} = {x!r}" for i, x in enumerate(map(float, problem.u0)))
    slopes = ", ".join(printed(problem, "y{}", "p{}"))
    code = f"in_i {{ {inputs} }}\nu_i {{ {starts} }}\nF_i {{ {slopes} }}"
    ode = diffsol.Ode(code, ode_solver=getattr(diffsol, method))
    times = np.array([problem.end])

    def one(p):
        try:
            return ode.solve_dense(p, times).ys[:, -1]
        except Exception:  # (It raises what it likes where a trajectory fails: that has no end.)
            return np.full(len(problem.u0), np.nan)

    def solve(reltol, abstol):
        ode.rtol, ode.atol = reltol, abstol
        return np.array([one(p) for p in constants])

    return solve


def scipy(problem, constants, *, method):
    """`solve_ivp`, one trajectory after the other."""
    solve_ivp = imported("scipy.integrate").solve_ivp

    def one(p, reltol, abstol):
        options = {"method": method, "rtol": reltol, "atol": abstol}
        u0, span = np.array(problem.u0, float), (0.0, problem.end)
        sol = solve_ivp(lambda t, u: problem.components(u.tolist(), p, t), span, u0, **options)
        return sol.y[:, -1] if sol.success else np.full(len(u0), np.nan)

    def solve(reltol, abstol):
        return np.array([one(p, reltol, abstol) for p in constants.tolist()])

    return solve
