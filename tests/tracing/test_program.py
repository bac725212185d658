"""Functions as hashable programs: which computations are the same, and which are not."""

import functools

import diffrax
import equinox as eqx
import hypothesis
import hypothesis.strategies as st
import jax
import jax.extend.core as jex
import jax.numpy as jnp
import numpy as np
import pytest

from ensembleode.tracing.program import custom_calls, custom_rules, is_tracer, Static, trace
from ensembleode.tracing.written_numbers import with_numbers_apart

from ..problems import network


settings = hypothesis.settings(deadline=None, derandomize=True)

X = jnp.array([0.5, -1.5, 2.0])
A = jnp.array([1.0, 2.0, 3.0])
B = jnp.array([4.0, 5.0, 6.0])


def program(fn, *args, rules=False):
    return trace(fn, *(args or (X,)), rules=rules)[0]


def same(first, second):
    """Whether two programs (or the like) are the same key, with hashes to match."""
    if first == second:
        assert hash(first) == hash(second)
        assert second == first
        return True
    assert second != first
    return False


#
# Numbers as constants
#

# Of `step` and where it begins.
LOOPS = [
    lambda step, x: jax.lax.scan(lambda y, _: (step(y), y.sum()), x, None, length=3)[0],
    lambda step, x: jax.lax.scan(lambda y, a: (step(y) + a, None), x, x + 2, reverse=True)[0],
    lambda step, x: jax.lax.while_loop(
        lambda c: c[1] < 7.3, lambda c: (step(c[0]), c[1] * 1.7), (x, jnp.ones(()))
    )[0],
    lambda step, x: jax.lax.fori_loop(0, 3, lambda i, y: step(y), x),
    lambda step, x: jax.lax.cond(x[0] > 0.7, step, lambda y: y - 0.7, x),
    lambda step, x: jax.lax.switch(x[1].astype(int), [jnp.sin, jnp.cos, step], x),
    lambda step, x: jax.checkpoint(step)(x),
]


@pytest.mark.quick_cases(1)
@pytest.mark.parametrize(
    "make",
    [
        lambda k: lambda x: k * x + 0.3,
        lambda k: lambda x: jnp.where(x > k, x / k, -x),
        lambda k: lambda x: jnp.maximum(x, k) - jax.jit(lambda y: y * k)(x),
        lambda k: lambda x: jax.nn.softplus(k * x),
        *(
            lambda k, loop=loop: lambda x: loop(lambda y: jnp.maximum(k * y, 1.3) - x, x)
            for loop in LOOPS
        ),
        lambda k: lambda x: LOOPS[0](lambda y: LOOPS[2](jax.jit(lambda z: z * k), y), x),
        lambda k: jax.vmap(lambda x: LOOPS[3](lambda y: k * y, x)),
    ],
)
def test_numbers_are_constants(make):
    """Of the same program, whatever they are; and it computes what it did."""
    apart = {k: with_numbers_apart(program(make(k), rules=True)) for k in (3.0, -0.7, 1e300)}
    first, *others = (one for one, _ in apart.values())
    assert all(same(first, other) for other in others)
    for k, (one, numbers) in apart.items():
        assert [str(v.aval.dtype) for v in one.jaxpr.constvars] == ["int64"]
        found = jax.jit(one.__call__)(numbers, X)
        np.testing.assert_array_equal(found, jax.jit(make(k))(X))


@pytest.mark.parametrize("k", [0.0, 1.0, -1.0, 2.0, 0.25, np.inf, np.nan])
def test_numbers_that_change_the_code_stay(k):
    one, numbers = with_numbers_apart(program(lambda x: k * x / k))
    assert (one, numbers) == (program(lambda x: k * x / k), [])


@pytest.mark.parametrize(
    "fn",
    [
        lambda x: x**3.3,
        lambda x: (jnp.float32(3.3) * x.astype(jnp.float32)).astype(x.dtype),
        lambda x: sum(x * (1.1 + i) for i in range(100)),
    ],
)
def test_numbers_that_stay_for_other_reasons(fn):
    """Exponents, those of other dtypes, and very many."""
    assert with_numbers_apart(program(fn))[1] == []


#
# Equality
#


def fresh_equations(a=None):
    """Makes every function anew at each call, as a loop of a user does."""
    return {
        "arithmetic": lambda x: 2.0 * x + jnp.sin(x),
        "scan": lambda x: jax.lax.scan(lambda c, _: (jnp.cos(c), c), x, None, length=3),
        "while": lambda x: jax.lax.while_loop(lambda c: c[0] < 3, lambda c: 2 * c, x),
        "cond": lambda x: jax.lax.cond(x[0] > 0, jnp.sin, jnp.cos, x),
        "jit": lambda x: jax.jit(lambda y: y + 1)(x),
        "vmap": lambda x: jax.vmap(lambda y: y**2)(x),
        "grad": lambda x: jax.grad(lambda y: jnp.sum(jnp.tanh(y)))(x),
        "checkpoint": lambda x: jax.checkpoint(jnp.sin)(x),
        "random": lambda x: x + jax.random.normal(jax.random.key(0), (3,)),
        "solve": lambda x: jnp.linalg.solve(jnp.diag(jnp.exp(x)), x),
        "pytree": lambda x: {"a": x, "b": (x, None)},
        "nan": lambda x: jnp.where(x > 0, x, jnp.nan),
    }


@pytest.mark.parametrize("name", fresh_equations())
def test_fresh_functions_of_the_same_computation_are_equal(name):
    first, second = (program(fresh_equations()[name]) for _ in range(2))
    assert same(first, second)


def test_every_other_computation_is_different():
    programs = {name: program(fn) for name, fn in fresh_equations().items()}
    assert len(set(programs.values())) == len(programs)


@pytest.mark.parametrize(
    ("first", "second"),
    [
        (lambda x: 2.0 * x, lambda x: 3.0 * x),
        (lambda x: jnp.sin(x), lambda x: jnp.cos(x)),
        (lambda x: x - 1.0, lambda x: 1.0 - x),
        (lambda x: (x, 2 * x), lambda x: (2 * x, x)),
        (lambda x: (x, x), lambda x: [x, x]),
        (lambda x: x, lambda x: (x,)),
        (lambda x: {"a": x}, lambda x: {"b": x}),
        (lambda x: x[:2], lambda x: x[1:]),
        (lambda x: x**2, lambda x: x**3),
        (lambda x: x.sum(), lambda x: x.sum(keepdims=True)),
        (lambda x: x + 0.0, lambda x: x + -0.0),
        (lambda x: 1, lambda x: 1.0),
        (lambda x: 1, lambda x: True),
        (lambda x: 1.0, lambda x: jnp.float32(1)),
        (lambda x: 1.0, lambda x: np.float64(1)),  # weakly typed and not
        (lambda x: jnp.int32(0), lambda x: jnp.int64(0)),
        (lambda x: x.astype(jnp.float32), lambda x: x.astype(jnp.float16)),
    ],
)
def test_different(first, second):
    assert not same(program(first), program(second))


def test_inputs_of_another_shape_or_dtype_are_different():
    inputs = [X, X[:2], X[None], X.astype(jnp.float32), X.astype(complex), 1.0, 1, X[0]]
    programs = [program(lambda x: 2 * x, x) for x in inputs]
    assert len(set(programs)) == len(inputs)
    assert same(programs[0], program(lambda x: 2 * x, 10 * X))
    assert same(programs[0], program(lambda x: 2 * x, jax.ShapeDtypeStruct((3,), float)))


def test_scans_of_another_length_are_different():
    def scan(length):
        return program(lambda x: jax.lax.scan(lambda c, _: (2 * c, None), x, None, length)[0])

    assert same(scan(3), scan(3))
    assert not same(scan(3), scan(4))


def test_other_nested_functions_are_different():
    def nested(fn):
        return {
            "jit": program(lambda x: jax.jit(fn)(x)),
            "jit of jit": program(lambda x: jax.jit(lambda y: jax.jit(fn)(y))(x)),
            "scan": program(lambda x: jax.lax.scan(lambda c, _: (fn(c), None), x, None, 2)[0]),
            "cond": program(lambda x: jax.lax.cond(x[0] > 0, fn, jnp.tanh, x)),
            "while": program(lambda x: jax.lax.while_loop(lambda c: c[0] < 0, fn, x)),
        }

    first, again, other = nested(lambda x: x + 1), nested(lambda x: x + 1), nested(lambda x: x + 2)
    for name in first:
        assert same(first[name], again[name])
        assert not same(first[name], other[name])


def test_the_name_of_an_inner_jit_does_not_matter():
    def one(x):
        return x + 1

    def two(x):
        return x + 1

    assert same(program(lambda x: jax.jit(one)(x)), program(lambda x: jax.jit(two)(x)))


def test_the_name_may_be_what_a_primitive_computes():
    """In a primitive of the user's own, say."""
    primitive = jex.Primitive("by_name")
    primitive.def_abstract_eval(lambda x, **_: x)

    def call(name):
        return program(lambda x: primitive.bind(x, name=name))

    assert same(call("sin"), call("sin"))
    assert not same(call("sin"), call("cos"))


#
# Closed-over values
#


@pytest.mark.parametrize("closed", [jnp.asarray, np.asarray], ids=["jax", "numpy"])
def test_closed_over_arrays_are_inputs(closed):
    def close_over(a):
        a = closed(a)
        return trace(lambda x: a * x, X)

    (first, first_consts), (second, second_consts) = close_over(A), close_over(B)
    assert same(first, second)
    np.testing.assert_array_equal(first(first_consts, X), A * X)
    np.testing.assert_array_equal(first(second_consts, X), B * X)
    assert not same(first, close_over(B[:1])[0])


def test_closed_over_in_a_scan_or_a_map():
    def scan(a):
        return lambda x: jax.lax.scan(lambda c, _: (a * c, None), x, None, length=2)[0]

    def mapped(a):
        return lambda x: jax.vmap(lambda y: a * y)(x)

    for make in (scan, mapped):
        first, _ = trace(make(A), X)
        second, consts = trace(make(B), X)
        assert same(first, second)
        np.testing.assert_array_equal(first(consts, X), make(B)(X))


def in_a_jit(a):
    return lambda x: jax.jit(lambda y: a * y)(x)


def in_a_jit_in_a_jit(a):
    return lambda x: jax.jit(lambda y: jax.jit(lambda z: a * z)(y) + 1.0)(x)


def in_two_jits(a):
    return lambda x: jax.jit(lambda y: a * y)(x) + jax.jit(lambda y: a + y)(jnp.sin(x))


def in_a_jit_beside_others(a):
    """All that may stand beside it: loops, custom rules, several results, literals."""

    def fn(x):
        x = jax.nn.softplus(jax.jit(lambda y: a * y)(x))
        x, y = jax.lax.scan(lambda c, _: (jnp.sin(c), c[0]), x, None, length=2)
        x = jax.lax.cond(y[0] > 0.1, jnp.cos, jnp.tanh, x) + y[1]
        return 2.0 * x, y

    return fn


@pytest.mark.quick_cases(1)
@pytest.mark.parametrize("make", [in_a_jit, in_a_jit_in_a_jit, in_two_jits, in_a_jit_beside_others])
def test_an_inner_jit_that_closes_over_an_array(make):
    """Its array is an input, too."""
    first, _ = trace(make(A), X)
    second, consts = trace(make(B), X)
    assert same(first, second)
    assert consts
    jax.tree.map(
        functools.partial(np.testing.assert_allclose, rtol=1e-14),
        first(consts, X),
        make(B)(X),
    )


def test_an_inner_jit_inside_a_loop_is_compared_by_value():
    """It is not lifted: another value is another program, and never a stale one."""

    def make(a):
        return lambda x: jax.lax.scan(lambda c, _: (in_a_jit(a)(c), None), x, None, length=2)[0]

    (first, consts), (again, _), (other, _) = (trace(make(a), X) for a in (A, A + 0, B))
    assert same(first, again)
    assert not same(first, other)
    np.testing.assert_array_equal(first(consts, X), A * A * X)


def test_a_function_of_scipy_with_constants_inside():
    first, consts = trace(lambda x: jax.scipy.linalg.expm(jnp.diag(x)), X)
    np.testing.assert_allclose(np.diag(first(consts, X)), np.exp(X), rtol=1e-12)


def test_closed_over_tracers_are_inputs():
    """So that it works inside the user's jit and grad, with the program of an eager call."""
    eager, _ = trace(lambda x: A * x, X)
    seen = {}

    @jax.jit
    def inside(a):
        seen["program"], consts = trace(lambda x: a * x, X)
        seen["traced"] = [is_tracer(c) for c in consts]
        return seen["program"](consts, X)

    np.testing.assert_array_equal(inside(B), B * X)
    assert seen["traced"] == [True]
    assert same(seen["program"], eager)

    def loss(a):
        fn, consts = trace(lambda x: a**2 * x, X)
        return fn(consts, X).sum()

    np.testing.assert_allclose(jax.grad(loss)(A), 2 * A * X)


#
# Derivative rules
#


def custom_jvp(factor):
    @jax.custom_jvp
    def sine(x):
        return jnp.sin(x)

    sine.defjvp(lambda primals, tangents: (jnp.sin(primals[0]), factor * tangents[0]))
    return sine


def custom_vjp(factor):
    @jax.custom_vjp
    def sine(x):
        return jnp.sin(x)

    sine.defvjp(lambda x: (jnp.sin(x), None), lambda _, ct: (factor * ct,))
    return sine


def as_it_is(fn):
    return fn


def in_a_scan(fn):
    return lambda x: jax.lax.scan(lambda c, _: (fn(c), None), x, None, length=2)[0]


def in_inner_jits(fn):
    return lambda x: jax.jit(lambda y: jax.jit(fn)(y))(x)


def in_a_cond(fn):
    return lambda x: jax.lax.cond(x[0] > 0, fn, jnp.cos, x)


@pytest.mark.parametrize("place", [as_it_is, in_a_scan, in_inner_jits, in_a_cond])
@pytest.mark.parametrize("make", [custom_jvp, custom_vjp])
def test_derivative_rules(make, place):
    first, again, other = (place(make(factor)) for factor in (2.0, 2.0, 3.0))
    assert same(program(first), program(other))
    assert same(program(first, rules=True), program(again, rules=True))
    assert not same(program(first, rules=True), program(other, rules=True))


@pytest.mark.parametrize("make", [custom_jvp, custom_vjp])
def test_the_rule_is_used(make):
    fn, consts = trace(make(2.0), X, rules=True)
    np.testing.assert_allclose(fn(consts, X), np.sin(X))
    np.testing.assert_array_equal(jax.grad(lambda x: fn(consts, x).sum())(X), [2.0, 2.0, 2.0])


@pytest.mark.parametrize(
    "name",
    [
        "tanh",
        "sigmoid",
        "silu",
        "gelu",
        "elu",
        "selu",
        "softmax",
        "relu",
        "softplus",
        "log_sigmoid",
        "relu6",
        "mish",
    ],
)
def test_fresh_traces_of_an_activation_are_equal(name):
    """Else every solve of a neural ODE would compile."""
    activation = getattr(jax.nn, name)
    first, second = (program(lambda x: activation(x), rules=True) for _ in range(2))
    assert same(first, second)


@pytest.mark.parametrize("net", [network(), eqx.nn.MLP(2, 2, 4, 1, key=jax.random.key(1))])
def test_networks_of_other_weights_are_equal(net):
    """Smooth ones, and those of relu."""
    other = jax.tree.map(lambda x: 2 * x if eqx.is_array(x) else x, net)
    assert same(*(program(x, X[:2], rules=True) for x in (net, other)))


def with_rule(primal, slope):
    fn = jax.custom_jvp(primal)
    fn.defjvp(lambda primals, tangents: (fn(*primals), slope(*primals) * tangents[0]))
    return fn


def scaled(factor):
    return with_rule(lambda x: x, lambda x: factor)


def two_with_one_primal(factor):
    first, second = scaled(2.0), scaled(factor)
    return with_rule(jnp.sin, lambda x: first(x) + second(x))


def seven_in_a_rule(factor):
    inside = [with_rule(lambda x, i=i: i * x, lambda x: 1.0 + 0 * x) for i in range(6)]
    inside.append(with_rule(jnp.cosh, lambda x: factor))
    return with_rule(jnp.sin, lambda x: sum(fn(x) for fn in inside))


def a_chain(factor, order=0):
    """Of functions whose rules call others, endlessly."""
    slope = scaled(factor) if order == 6 else lambda x: a_chain(factor, order + 1)(x)
    return with_rule(lambda x: (order + 1) * x, slope)


def a_linear_solve(factor):
    import lineax

    def slope(x):
        operator = lineax.JacobianLinearOperator(lambda y, args: factor * y + y**3, x)
        return lineax.linear_solve(operator, x).value

    return with_rule(jnp.sin, slope)


def a_chain_with_equations(factor, order=0):
    """Each rule closes over an equation of a trace, as those of nested root finders do."""
    scaling = jax.make_jaxpr(lambda x: factor * x)(X).eqns[0]

    def slope(x):
        if order < 6:
            return a_chain_with_equations(factor, order + 1)(x)
        (by,) = (x for x in scaling.invars if isinstance(x, jex.Literal))
        return by.val * x

    return with_rule(lambda x: (order + 1) * x, slope)


@pytest.mark.parametrize(
    "make",
    [two_with_one_primal, seven_in_a_rule, a_chain, a_linear_solve, a_chain_with_equations],
    ids=lambda x: x.__name__,
)
def test_rules_are_compared_at_any_depth(make):
    first, again, other = (program(make(factor), rules=True) for factor in (2.0, 2.0, 3.0))
    assert same(first, again)
    assert not same(first, other)


def test_nested_rules_do_not_grow_exponentially():
    """Each function is called twice by the rule of the one around it, and by its own."""
    fn = jnp.sin
    for i in range(12):
        fn = with_rule(lambda x, i=i: (i + 2.0) * x, lambda x, fn=fn: fn(x) * fn(x))
    jaxpr = program(fn).jaxpr
    assert len(list(custom_rules(jaxpr, custom_calls))) < 20


@pytest.mark.parametrize(
    "fn",
    [
        lambda x: jax.lax.while_loop(lambda c: c[0] < 3, lambda c: 1 + jax.nn.relu(c), x),
        lambda x: eqx.internal.nondifferentiable(2 * x),
        lambda x: jax.nn.relu(jax.pure_callback(np.sin, x, x)),
    ],
    ids=["while loop", "nondifferentiable", "callback"],
)
def test_what_has_no_reverse_derivative_can_be_traced(fn):
    """It can be solved, if not differentiated."""
    traced, consts = trace(fn, X, rules=True)
    np.testing.assert_allclose(traced(consts, X), fn(X))


def test_depends_on():
    fn = program(lambda a, b, c: (a, a * b, 2.0, {"d": c, "e": jnp.sin(a) + c}), 1.0, 1.0, 1.0)
    assert fn.depends_on([True, False, False]) == [True, True, False, False, True]
    assert fn.depends_on([False, True, False]) == [False, True, False, False, False]
    assert fn.depends_on([False, False, True]) == [False, False, False, True, True]
    assert fn.depends_on([False] * 3) == [False] * 5
    assert fn.depends_on([True] * 3) == [True, True, False, True, True]


def test_depends_on_through_inner_jits():
    """Output by output."""
    inner = jax.jit(lambda a, b: (2 * a, 3 * b))
    outer = jax.jit(lambda a, b: inner(b, a))
    fn = program(lambda a, b: outer(a, b), 1.0, 1.0)
    assert fn.depends_on([True, False]) == [False, True]
    assert fn.depends_on([False, True]) == [True, False]


def test_depends_on_no_constant():
    fn = program(lambda x: (A * A, A * x))
    assert fn.depends_on([True]) == [False, True]


def test_depends_on_through_loops_and_branches():
    """Never too little: what goes in may come out."""

    def loop(a, b):
        (a, _), _ = jax.lax.scan(lambda c, _: ((c[1], c[0]), None), (a, b), None, length=3)
        return a

    for fn in (
        loop,
        lambda a, b: jax.lax.cond(b > 0, jnp.sin, jnp.cos, a),
        lambda a, b: jax.lax.while_loop(lambda c: c < b, lambda c: c + 1, a),
        lambda a, b: jnp.where(b > 0, a, 1.0),
    ):
        assert program(fn, 1.0, 1.0).depends_on([False, True]) == [True]


def polynomial(x, y):
    return {"sum": (x + 2 * y).sum(), "parts": (jnp.sin(x) * y, A[1:] * x)}


def control(x, y):
    (x, y), ys = jax.lax.scan(lambda c, a: ((a * c[1], c[0] + 1), c[0][0]), (x, y), A)
    x = jax.lax.cond(x[0] > y[0], jnp.cos, lambda z: z - 1, x)
    return jnp.where(x > 0, x, -y), jax.jit(jnp.cumsum)(ys)


def smooth(x, y):
    return jax.grad(lambda z: jnp.sum(jax.nn.softplus(z) * jnp.tanh(y)))(x)


@pytest.mark.quick_cases(1)
@pytest.mark.parametrize("fn", [polynomial, control, smooth])
def test_evaluates_to_the_function(fn):
    traced, consts = trace(fn, X[:2], X[:2])
    function, evaluated = jax.jit(fn), jax.jit(functools.partial(traced, consts))

    @settings
    @hypothesis.given(numbers=st.lists(st.floats(-5, 5), min_size=4, max_size=4))
    def check(numbers):
        x, y = np.array(numbers).reshape(2, 2)
        got, expected = evaluated(x, y), function(x, y)
        assert jax.tree.structure(got) == jax.tree.structure(expected)
        jax.tree.map(functools.partial(np.testing.assert_allclose, rtol=1e-12), got, expected)

    check()


def test_a_program_is_a_static_argument(compiles):
    """What it is for: fresh functions and new arrays compile once."""

    @functools.partial(jax.jit, static_argnums=0)
    def run(fn, consts, x):
        return fn(consts, x)

    jax.block_until_ready((A * X, B * X, 2 * A, 2 * X))
    compiles.count = 0
    for a in (A, B, 2 * A):
        fn, consts = trace(lambda x, a=a: jnp.sinh(a * x), X)
        np.testing.assert_allclose(run(fn, consts, X), np.sinh(a * X))
    assert compiles.count == 1


def test_static():
    assert same(Static(1), Static(1))
    assert same(Static((1, [2.0, None])), Static((1, [2.0, None])))
    assert same(Static(A), Static(jnp.array(A)))
    values = [
        1,
        1.0,
        True,
        "1",
        None,
        (1,),
        [1],
        np.float32(1),
        A,
        B,
        A[:2],
        A.astype(int),
        jnp.sin,
    ]
    assert len({Static(v) for v in values}) == len(values)


def test_static_of_diffrax_objects():
    def controller(rtol=1e-3, **options):
        return Static(diffrax.PIDController(rtol=rtol, atol=1e-6, **options))

    assert same(controller(), controller())
    assert same(controller(pcoeff=0.3), controller(pcoeff=0.3))
    others = [
        controller(),
        controller(rtol=1e-4),
        controller(pcoeff=0.3),
        controller(dtmin=1e-3),
        controller(rtol=np.array([1e-3, 1e-4])),
        controller(rtol=np.array([1e-3, 1e-5])),
        Static(diffrax.Tsit5()),
        Static(diffrax.Dopri5()),
        Static(diffrax.ConstantStepSize()),
        Static(diffrax.StepTo(ts=[0.0, 1.0])),
        Static(diffrax.StepTo(ts=[0.0, 0.5])),
    ]
    assert len(set(others)) == len(others)
    assert same(Static(diffrax.Kvaerno5()), Static(diffrax.Kvaerno5()))


def test_static_with_a_tracer_raises():
    with pytest.raises(TypeError, match="holds a traced value; it must be made of Python numbers"):
        jax.jit(lambda rtol: Static(diffrax.PIDController(rtol=rtol, atol=1e-6)))(1e-3)


AROUND = {
    "nothing": lambda f: f,
    "jit": jax.jit,
    "scan": lambda f: lambda x: jax.lax.scan(lambda _, x: (0, f(x)), 0, x[None])[1][0],
    "cond": lambda f: lambda x: jax.lax.cond(x[0, 0] > 0, f, lambda x: x[:, 0], x),
    "checkpoint": jax.checkpoint,
    "jit in scan": lambda f: AROUND["scan"](jax.jit(f)),
}


@pytest.mark.quick_cases(5)
@pytest.mark.parametrize("around", AROUND)
@pytest.mark.parametrize(
    ("op", "start", "by_hand"),
    [
        (jax.lax.add, 5.0, lambda x: 5.0 + jnp.sum(x, axis=1)),
        (jax.lax.mul, 3.0, lambda x: 3.0 * jnp.prod(x, axis=1)),
        (jax.lax.max, 0.4, lambda x: jnp.maximum(0.4, jnp.max(x, axis=1))),
        (jax.lax.min, 0.4, lambda x: jnp.minimum(0.4, jnp.min(x, axis=1))),
    ],
)
def test_reductions_from_an_initial_value(op, start, by_hand, around):
    """They have their derivatives, of which JAX forgets the initial value."""

    def reduced(x):
        return jax.lax.reduce(x**2, start, op, (1,))

    program, consts = trace(AROUND[around](reduced), jnp.ones((2, 3)))
    x = jnp.array([[0.3, 0.5, 0.2], [0.9, 0.7, 1.1]])
    for found, expected in zip(
        jax.jvp(lambda x: program(consts, x), (x,), (jnp.cos(x),)),
        jax.jvp(lambda x: by_hand(x**2), (x,), (jnp.cos(x),)),
        strict=True,
    ):
        np.testing.assert_allclose(found, expected, rtol=1e-12)
