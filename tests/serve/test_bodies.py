"""From bodies to numbers, and the errors of bodies that are refused."""

import json
import math
import tracemalloc

import hypothesis
import hypothesis.strategies as st
import msgpack
import numpy as np
import pytest

from ensembleode.serve import bodies, requests
from ensembleode.serve.solving import Gradients

from .running import registry


ENTRY = registry()["lotka"]
NODE = registry()["node"]
BACK = registry()["back"]


def packed(x):
    x = np.asarray(x)
    return {"dtype": x.dtype.str, "shape": list(x.shape), "data": x.tobytes()}


def asked(entry=ENTRY, **body):
    return requests.query(entry, bodies.parsed(json.dumps(body).encode(), False))


def test_times():
    """Spacings of different spans, and backwards in time."""
    query = asked(tspan=[[0, 1], [0, 0.5]], saveat=0.4)
    np.testing.assert_array_equal(query.counts, [4, 3])
    np.testing.assert_allclose(query.times, [[0, 0.4, 0.8, 1.0], [0, 0.4, 0.5, math.nan]])
    np.testing.assert_array_equal(asked(BACK).times, [1.0, 0.0])
    np.testing.assert_array_equal(asked(BACK, saveat=[1, 0.5, 0]).times, [1.0, 0.5, 0.0])


WRONG = [
    # body, path, code
    ('{"u0": [1, NaN]}', "u0[1]", "invalid"),
    ('{"u0": [[1, 2], [Infinity, 2]]}', "u0[1][0]", "invalid"),
    ('{"u0": [1, 1e999]}', "u0[1]", "invalid"),
    ('{"u0": [1, true]}', "u0[1]", "invalid"),
    ('{"u0": [[1, 2], [1, "2"]]}', "u0[1][1]", "invalid"),
    ('{"u0": [[1, 2], [1, null]]}', "u0[1][1]", "invalid"),
    ('{"u0": [[1, 2], [1]]}', "u0[1]", "invalid"),
    ('{"u0": [1, 2, 3]}', "u0", "invalid"),
    ('{"u0": []}', "u0", "invalid"),
    ('{"u0": "1 2"}', "u0", "invalid"),
    ('{"u0": {"a": 1}}', "u0", "invalid"),
    ('{"u0": [[1, 2], [9, 1]]}', "u0[1][0]", "limit_u0"),
    ('{"u0": [' + "1" * 500 + ", 1]}", "u0[0]", "invalid"),
    ('{"p": [1, 1, 1, 7]}', "p[3]", "limit_p"),
    ('{"p": [1, 1, 1]}', "p", "invalid"),
    ('{"p": [[1, 1, 1, 1], [1, 1, 1, 1]], "u0": [[1, 1], [1, 1], [1, 1]]}', "p", "invalid"),
    ('{"tspan": [0, 0]}', "tspan", "invalid"),
    ('{"tspan": [[0, 1], [2, 2]]}', "tspan[1]", "invalid"),
    ('{"tspan": [0, 11]}', "tspan[1]", "limit_tspan"),
    ('{"tspan": 3}', "tspan", "invalid"),
    ('{"saveat": 0}', "saveat", "invalid"),
    ('{"saveat": -0.1}', "saveat", "invalid"),
    ('{"saveat": 1e-300}', "saveat", "limit_saveat"),
    ('{"saveat": ' + "9" * 400 + "}", "saveat", "invalid"),
    ('{"saveat": 0.01}', "saveat", "limit_saveat"),
    ('{"saveat": [0.5, 0.1]}', "saveat[1]", "invalid"),
    ('{"saveat": [0.5, 3]}', "saveat[1]", "invalid"),
    ('{"saveat": [[0.5, 1], [0.1, 0.2]]}', "saveat", "invalid"),
    ('{"saveat": []}', "saveat", "invalid"),
    ('{"saveat": "0.1"}', "saveat", "invalid"),
    ('{"saveat": [0.1, null]}', "saveat[1]", "invalid"),
    ('{"u0": [[1,1],[1,1]], "saveat": [[0.1, 0.2], [0.2, 0.1]]}', "saveat[1][1]", "invalid"),
    ('{"deadline_ms": 0}', "deadline_ms", "invalid"),
    ('{"deadline_ms": "1"}', "deadline_ms", "invalid"),
    ('{"deadline_ms": true}', "deadline_ms", "invalid"),
    ('{"maxiters": 5}', "maxiters", "invalid"),
    ("[1]", None, "invalid_body"),
    ("{", None, "invalid_body"),
    ("\xff", None, "invalid_body"),
    ("[" * 100_000, None, "invalid_body"),
    # Half a character, which is in no text that can be sent: in a name, and in a value.
    ('{"\\ud800": 1}', None, "invalid_body"),
    ('{"u0": ["\\uDfff"]}', None, "invalid_body"),
    ('{"u0": ["\\ud83d\\ude00", NaN]}', "u0[0]", "invalid"),
    ('{"u0": ' + "[" * 900 + "]" * 900 + "}", "u0", "invalid"),
    ('{"u0": ' + "[" * 900 + "true" + "]" * 900 + "}", None, "invalid"),
]


@pytest.mark.parametrize(("body", "path", "code"), WRONG, ids=[x[0][:30] for x in WRONG])
def test_the_path_of_what_is_wrong(body, path, code):
    with pytest.raises(bodies.RefusedRequest) as raised:
        requests.query(ENTRY, bodies.parsed(body.encode("latin-1"), False))
    unreadable = code == "invalid_body" and body != "[1]"
    assert raised.value.status == (400 if unreadable else 422)
    assert raised.value.code == code
    if "true" not in body or path is not None:
        assert raised.value.path == path


@pytest.mark.parametrize(
    ("array", "path"),
    [
        (packed(np.array([1.0, np.nan])), "u0[1]"),
        (packed(np.array([1 + 1j, 1])), "u0.dtype"),
        (packed(np.array([True, False])), "u0.dtype"),
        (packed(np.array(["a", "b"])), "u0.dtype"),
        (packed(np.array([1.0, 2.0], ">f8")), "u0.dtype"),
        (packed(np.array([1.0, 2.0])) | {"dtype": "O"}, "u0.dtype"),
        (packed(np.array([1.0, 2.0])) | {"shape": [3]}, "u0.data"),
        (packed(np.array([1.0, 2.0])) | {"shape": [-2]}, "u0.shape"),
        (packed(np.array([1.0, 2.0])) | {"shape": [2**62, 2**62]}, "u0.data"),
        (packed(np.array([1.0, 2.0])) | {"data": "12"}, "u0.data"),
        ({"dtype": "<f8", "shape": [0, 2**62], "data": b""}, "u0.shape"),
        ({"dtype": "<f8", "shape": [2**62, 0, 2**62], "data": b""}, "u0.shape"),
        (packed(np.array([1.0, 2.0])) | {"more": 1}, "u0"),
        ([1.0, True], "u0[1]"),
        (b"1234", "u0"),
    ],
)
def test_binary_arrays_that_are_wrong(array, path):
    body = msgpack.packb({"u0": array})
    with pytest.raises(bodies.RefusedRequest) as raised:
        requests.query(ENTRY, bodies.parsed(body, True))
    assert (raised.value.status, raised.value.path) == (422, path)


def test_binary_bodies_that_are_wrong():
    for body in (b"", b"\xc1", b"\x91" * 5000, msgpack.packb({1: 2}), msgpack.packb([1])):
        with pytest.raises(bodies.RefusedRequest):
            bodies.parsed(body, True)


# Parts of packed arrays, of which few fit together.
sizes = st.integers(-1, 3) | st.sampled_from([2**31, 2**62, 2**63 - 1, True, None, "2"])


def of_shape(dtype, shape):
    """As many bytes as it says, where these are few."""
    size = math.prod(shape) * bodies.DTYPES[dtype].itemsize
    return {"dtype": dtype, "shape": shape, "data": bytes(size if size < 2**10 else 8)}


packed_arrays = st.one_of(
    st.builds(
        of_shape,
        st.sampled_from(sorted(bodies.DTYPES)),
        st.lists(st.sampled_from([0, 1, 2, 2**31, 2**62, 2**63 - 1]), max_size=17),
    ),
    st.lists(st.floats(0.2, 3.0), min_size=1, max_size=4).map(packed),
    st.lists(st.integers(0, 3), min_size=1, max_size=3).map(lambda shape: packed(np.ones(shape))),
    st.fixed_dictionaries(
        {
            "dtype": st.sampled_from([*bodies.DTYPES, ">f8", "O", "<c16", "x" * 300, 3, None]),
            "shape": st.lists(sizes, max_size=18) | st.integers(0, 4),
            "data": st.binary(max_size=33) | st.sampled_from([b"", bytes(16), "12", None]),
        },
        optional={"more": st.none()},
    ),
)
scalars = st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=3)
values = st.recursive(
    scalars | st.lists(st.floats(0.2, 3.0), min_size=2, max_size=4) | packed_arrays,
    lambda x: st.lists(x, max_size=4) | st.dictionaries(st.text(max_size=5), x, max_size=3),
    max_leaves=12,
)
drawn_bodies = st.fixed_dictionaries(
    {}, optional=dict.fromkeys(("u0", "p", "tspan", "saveat", "deadline_ms", "x"), values)
)


def refused_or_numbers(text, binary, entry):
    """What becomes of the bytes of a body: a refusal that can be sent, or numbers that can be
    solved. Returns whether they were taken."""
    try:
        query = requests.query(entry, bodies.parsed(text, binary))
    except bodies.RefusedRequest as e:
        query = e
    if isinstance(query, bodies.RefusedRequest):
        assert 400 <= query.status < 500
        assert json.loads(bodies.encoded(query.body(), False))["error"]["message"]
        return False
    numbers = query.numbers
    assert numbers.u0.shape == (query.n, *entry.shape)
    assert numbers.times.shape == (query.n, query.rows)
    assert numbers.t0.shape == numbers.t1.shape == (query.n,)
    assert numbers.p is None or numbers.p.shape == (query.n, entry.p.size)
    assert all(x.dtype == entry.dtype for x in (numbers.u0, numbers.t0, numbers.times))
    assert all(np.isfinite(x).all() for x in (numbers.u0, numbers.t0, numbers.t1))
    assert 1 <= query.n <= entry.limits.trajectories
    assert 1 <= query.rows <= entry.limits.saveat
    return True


def as_json(x):
    """Where JSON has no such thing, what it has instead."""
    return x.decode("latin-1") if isinstance(x, bytes) else str(x)


@pytest.mark.slow
@hypothesis.settings(max_examples=400, deadline=None)
@hypothesis.given(drawn_bodies, st.sampled_from([ENTRY, NODE, BACK]))
def test_whatever_comes_is_refused_or_numbers(body, entry):
    for binary in (False, True):
        try:
            text = msgpack.packb(body) if binary else json.dumps(body, default=as_json).encode()
        except (OverflowError, UnicodeEncodeError):
            continue
        refused_or_numbers(text, binary, entry)


RIGHT = {
    "u0": [[1.0, 2.0], [2.0, 1.0]],
    "p": [1.0, 1.0, 1.0, 1.0],
    "tspan": [0, 1.5],
    "saveat": [0.5, 1.0],
    "deadline_ms": 100,
}
WHOLE = {
    False: [json.dumps(RIGHT).encode()],
    True: [
        msgpack.packb(RIGHT),
        msgpack.packb({k: packed(np.array(x, float)) for k, x in RIGHT.items() if k[0] != "d"}),
    ],
}
edits = st.lists(
    st.tuples(
        st.integers(0, 400),
        st.integers(0, 9),
        st.binary(max_size=6) | st.sampled_from([b"[", b"]", b"1e999", b"\xdd\xff\xff\xff\xff"]),
    ),
    max_size=3,
)


@pytest.mark.slow
@hypothesis.settings(max_examples=600, deadline=None)
@hypothesis.given(st.data(), st.booleans(), edits)
def test_whatever_bytes_come(data, binary, edits):
    """Those of bodies that are right, some of them replaced."""
    body = data.draw(st.sampled_from(WHOLE[binary]))
    for start, gone, new in edits:
        start %= len(body) + 1
        body = body[:start] + new + body[start + gone :]
    taken = refused_or_numbers(body, binary, ENTRY)
    assert taken or edits


def nested(depth, width, inner):
    """Lists of lists, as they are in MessagePack."""
    return inner if depth == 0 else nested(depth - 1, width, b"\xdc" + width + inner * 2**12)


U0 = b"\x81\xa2u0"
# By what they are full of: functions, as each makes 16 MiB.
BODIES = {
    "lists": lambda: U0 + b"\xdd" + (2**22 - 1).to_bytes(4, "big") + b"\x90" * (2**22 - 1),
    "objects": lambda: U0 + b"\xdd" + (2**22 - 1).to_bytes(4, "big") + b"\x80" * (2**22 - 1),
    "nested lists": lambda: U0 + nested(2, (2**12).to_bytes(2, "big"), b"\x90")[: 2**24],
    "numbers": lambda: U0 + b"\xdd" + (2**24).to_bytes(4, "big") + b"\x01" * 2**24,
    "lists in JSON": lambda: b'{"u0": [' + b"[]," * 2**21 + b"[]]}",
    "objects in JSON": lambda: b'{"u0": [' + b"{}," * 2**21 + b"{}]}",
}


@pytest.mark.slow
@pytest.mark.parametrize("full_of", BODIES)
def test_a_body_does_not_become_much_more(full_of):
    """Of 16 MiB of empty lists there was more than a gigabyte when they were read."""
    body, binary = BODIES[full_of](), "JSON" not in full_of
    tracemalloc.start()
    try:
        with pytest.raises(bodies.RefusedRequest) as raised:
            bodies.parsed(body, binary)
        _, most = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    assert raised.value.status in (400, 413, 422)
    assert most < 200 * 2**20


def test_an_answer_has_its_limit():
    limited = registry(answer=1000)["lotka"]
    for most, pulls, size in ((6, False, "1008 bytes"), (20, True, "bytes")):
        requests.check_answer(
            limited, requests.query(limited, {"u0": [[1, 1]] * most}), pulls=pulls
        )
        more = requests.query(limited, {"u0": [[1, 1]] * (most + 1)})
        with pytest.raises(bodies.RefusedRequest, match=size):
            requests.check_answer(limited, more, pulls=pulls)


def test_gradients_have_the_shapes_of_what_was_sent():
    gradients = Gradients(np.ones((2, 2)), np.ones((2, 4)), np.ones(2, np.int8))
    both = requests.pulled(asked(u0=[[1, 1], [1, 1]]), gradients, 0, 0)
    assert both["u0"].shape == (2, 2)
    np.testing.assert_array_equal(both["p"], [2.0] * 4)
    both = requests.pulled(asked(p=[[1, 1, 1, 1]] * 2), gradients, 0, 0)
    assert both["p"].shape == (2, 4)
    np.testing.assert_array_equal(both["u0"], [2.0, 2.0])
