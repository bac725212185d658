"""Jaxprs, looked through and evaluated equation by equation, some of these in another way."""

import functools
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import jax
import jax.core
import jax.extend.core as jex
import jax.numpy as jnp
import jax.tree_util as jtu
from jax.extend import source_info_util
from jax.extend.core import ClosedJaxpr, Jaxpr, JaxprEqn


# The primitives that call, repeat or choose jaxprs, for `bound_again`.
WITHIN = ("jit", "scan", "while", "cond", "remat2", "checkpoint")


def equations(jaxpr: ClosedJaxpr | Jaxpr) -> Iterator:
    """The equations of a jaxpr (closed or not) at any depth, each before the equations inside
    it."""
    for eqn in getattr(jaxpr, "jaxpr", jaxpr).eqns:
        yield eqn
        for inner in filter(is_jaxpr, params_of(eqn)):
            yield from equations(inner)


def params_of(eqn: JaxprEqn) -> list:
    """The parameters of an equation, in which jaxprs (closed or not) are leaves."""
    return jtu.tree_leaves(list(eqn.params.values()), is_leaf=is_jaxpr)


def is_jaxpr(x: Any) -> bool:
    return isinstance(x, jex.Jaxpr | jex.ClosedJaxpr)


def scan_parts(eqn: JaxprEqn) -> tuple[int, int]:
    """How many operands of a scan are constants, and how many are carried. Arrays that are scanned
    over, or stacked, have one more axis outside than inside."""

    def same(outside: Any, inside: Any) -> int:
        pairs = zip(outside, inside, strict=True)
        return sum(len(o.aval.shape) == len(i.aval.shape) for o, i in pairs)

    body = eqn.params["jaxpr"].jaxpr
    n_carry = same(eqn.outvars, body.outvars)
    return same(eqn.invars, body.invars) - n_carry, n_carry


def evaluated(
    jaxpr: ClosedJaxpr | Jaxpr, *args: Any, consts: Sequence = (), instead: Callable
) -> list:
    """Evaluate a jaxpr (closed or not) equation by equation. An equation is bound as it is, unless
    `instead(eqn, ins)` returns outputs for it."""
    consts = consts or getattr(jaxpr, "consts", ())
    jaxpr = getattr(jaxpr, "jaxpr", jaxpr)
    env = dict(zip([*jaxpr.constvars, *jaxpr.invars], [*consts, *args], strict=True))

    def read(atom):
        return atom.val if isinstance(atom, jex.Literal) else env[atom]

    for eqn in jaxpr.eqns:
        with source_info_util.user_context(eqn.source_info.traceback):
            outs = instead(eqn, [read(x) for x in eqn.invars])
        if outs is not None:
            env.update(zip(eqn.outvars, outs, strict=True))
            continue
        ins = [v for v in eqn.invars if not isinstance(v, jex.Literal)]
        outs = [v for v in eqn.outvars if not isinstance(v, jex.DropVar)]
        alone = jaxpr.replace(constvars=[], invars=ins, outvars=outs, eqns=[eqn])
        env.update(zip(outs, jax.core.eval_jaxpr(alone, [], *map(read, ins)), strict=True))
    return [read(v) for v in jaxpr.outvars]


def evaluated_at_any_depth(
    jaxpr: ClosedJaxpr | Jaxpr,
    *args: Any,
    consts: Sequence = (),
    which: Callable[[JaxprEqn], bool],
    instead: Callable[[JaxprEqn, Sequence, Callable], list],
) -> list:
    """As `evaluated`, also in the calls, loops and branches of a jaxpr: `instead(eqn, ins, run)`
    returns the outputs of those equations `which(eqn)` is true of. `run(jaxpr, *args)` evaluates a
    jaxpr in such an equation in the same way."""

    def run(jaxpr: ClosedJaxpr | Jaxpr, *args: Any, consts: Sequence = ()) -> list:
        consts = list(map(jnp.asarray, consts or getattr(jaxpr, "consts", ())))
        return evaluated(jaxpr, *args, consts=consts, instead=outputs)

    def outputs(eqn: JaxprEqn, ins: Sequence) -> list | None:
        if which(eqn):
            return instead(eqn, ins, run)
        inside = (e for x in filter(is_jaxpr, params_of(eqn)) for e in equations(x))
        if eqn.primitive.name in WITHIN and any(map(which, inside)):
            return list(bound_again(eqn, ins, run))
        return None

    return run(jaxpr, *args, consts=consts)


def closes_over_arrays(eqn: JaxprEqn) -> bool:
    """Whether an equation is an inner jit, or has one in it, that closes over arrays."""
    if eqn.primitive.name != "jit":
        return False
    inner = eqn.params["jaxpr"]
    return bool(inner.consts) or any(closes_over_arrays(e) for e in inner.jaxpr.eqns)


def inlined(eqn: JaxprEqn, ins: Sequence) -> list | None:
    """For `evaluated`: the outputs of an inner jit that closed over arrays; None for other
    equations."""
    if not closes_over_arrays(eqn):
        return None
    inner = eqn.params["jaxpr"]
    return evaluated(inner, *ins, consts=list(map(jnp.asarray, inner.consts)), instead=inlined)


def bound_again(eqn: JaxprEqn, ins: Sequence, run: Callable) -> Sequence:
    """The results of a call, a loop or a branch, with `run(jaxpr, *args)` in place of the jaxprs in
    it."""
    params = eqn.params

    def arrays(xs: Sequence) -> list:
        return jax.tree.map(jnp.asarray, list(xs))

    def within(name: str) -> Callable:
        return functools.partial(run, params[name])

    match eqn.primitive.name:
        case "jit":
            return within("jaxpr")(*ins)
        case "scan":
            n_consts, n_carry = scan_parts(eqn)
            consts, ins = ins[:n_consts], ins[n_consts:]

            def body(carry: Sequence, xs: Sequence) -> tuple[Sequence, Sequence]:
                outs = within("jaxpr")(*consts, *carry, *xs)
                return outs[:n_carry], outs[n_carry:]

            how = {name: params[name] for name in ("length", "reverse", "unroll")}
            carry, stacked = jax.lax.scan(body, arrays(ins[:n_carry]), arrays(ins[n_carry:]), **how)
            return *carry, *stacked
        case "while":
            first = params["cond_nconsts"]
            last = first + params["body_nconsts"]
            return jax.lax.while_loop(
                lambda carry: within("cond_jaxpr")(*ins[:first], *carry)[0],
                lambda carry: within("body_jaxpr")(*ins[first:last], *carry),
                arrays(ins[last:]),
            )
        case "cond":
            branches = [functools.partial(run, branch) for branch in params["branches"]]
            return jax.lax.switch(ins[0], branches, *arrays(ins[1:]))
    how = {name: params[name] for name in ("prevent_cse", "policy")}
    return jax.checkpoint(within("jaxpr"), **how)(*ins)
