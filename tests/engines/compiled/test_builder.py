"""Which results the builder computes only once, and where."""

import itertools

import pytest

from ensembleode.engines.compiled.builder import BOOL, Builder, F64
from ensembleode.engines.compiled.functions import FUNCTIONS
from ensembleode.engines.compiled.module import Module


@pytest.fixture
def builder():
    """Of a function of `%x` and `%on`, four lanes wide."""
    module = Module(4)
    with module.function("f", ["<4 x double> %x", "i1 %on"]) as b:
        yield b
        b.return_()


def count(b: Builder, text: str) -> int:
    return sum(text in line for line in b.lines)


def test_an_instruction_is_written_once(builder):
    b = builder
    x = b.parameter("%x", F64, 4)
    assert (x / 2.0).name == (x / 2.0).name
    assert count(b, "fdiv") == 1


def test_memory_is_read_again(builder):
    b = builder
    variable = b.variable(F64, b.parameter("%x", F64, 4))
    before = variable.get()
    variable.set(before + 1.0)
    assert variable.get().name != before.name


def in_if(b, on, inside):
    b.if_(on, inside)


def in_else(b, on, inside):
    b.if_(on, lambda: None, inside)


def in_while(b, on, inside):
    b.while_(lambda: on, inside)


def in_condition(b, on, inside):
    b.while_(lambda: (inside(), on)[1], lambda: None)


def in_do_while(b, on, inside):
    b.do_while(lambda: (inside(), on)[1])


def in_for(b, on, inside):
    del on
    b.for_(3, lambda i: inside())


BLOCKS = [in_if, in_else, in_while, in_condition, in_do_while, in_for]


@pytest.mark.parametrize(("first", "second"), list(itertools.product(BLOCKS, BLOCKS)))
def test_a_block_knows_what_is_around_it_and_nobody_what_is_in_it(builder, first, second):
    b = builder
    x, on = b.parameter("%x", F64, 4), b.parameter("%on", BOOL)
    around = x / 2.0
    names = []

    def inside():
        assert (x / 2.0).name == around.name
        names.append((x / 3.0).name)

    first(b, on, inside)
    second(b, on, inside)
    names.append((x / 3.0).name)
    assert len(set(names)) == 3


def test_what_is_inserted_knows_nothing_of_what_comes_after_it(builder):
    b = builder
    x = b.parameter("%x", F64, 4)
    here = b.position
    later = x / 2.0
    with b.inserting(here):
        earlier = x / 2.0
    first, second = (line for line in b.lines if "fdiv" in line)
    assert first.split()[0] == earlier.name
    assert second.split()[0] == later.name == (x / 2.0).name


def test_a_product_that_is_not_to_be_fused_remains_so(builder):
    """Whether or not the same product is there already, to be fused."""
    b = builder
    x = b.parameter("%x", F64, 4)
    fused = x * x
    alone = b.binary("fmul", x, x)
    assert alone.name == fused.name
    assert alone.factors is None
    assert fused.factors is not None


@pytest.mark.parametrize("names", [("sin", "cos"), ("cos", "sin", "tan")])
def test_functions_of_an_angle_share_its_reduction(builder, names):
    b = builder
    x = b.parameter("%x", F64, 4)
    for name in names:
        FUNCTIONS[name](b, x)
    assert count(b, "call void @reduce_large_angle") == 1
