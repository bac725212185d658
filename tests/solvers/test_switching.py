"""The rule by which two methods are switched, in NumPy; and what is said of such methods."""

import dataclasses

import numpy as np
import pytest

import ensembleode as eo
from ensembleode.engines.julia.methods import description
from ensembleode.solvers.arithmetic import NUMBERS
from ensembleode.solvers.controllers import PIController
from ensembleode.solvers.switching import StepCounts, SwitchingController

from .test_rosenbrock import moving


AUTOMATIC = [eo.AutoTsit5, eo.AutoVern6, eo.AutoVern7, eo.AutoVern8, eo.AutoVern9]
ALG = eo.AutoTsit5(eo.Rosenbrock23())


def chosen(ratios, alg=ALG, h=1.0):
    """The modes and sizes of attempts whose rate is so many times that of the boundary."""
    is_stiff, count, modes, sizes = np.array(False), np.array(0), [], []
    for x in ratios:
        method = alg.method.in_mode(is_stiff)
        slopes = np.array(0.0), np.array(method.rule.boundary * x)
        stretches = (np.array(0.5), np.array(1.0)), slopes
        looks_stiff = method.looks_stiff(NUMBERS, stretches, np.array(h))
        choice = method.choose(NUMBERS, count, looks_stiff, np.array(h), np.array(True))
        is_stiff, count = choice.is_stiff, choice.count
        modes.append(bool(is_stiff))
        sizes.append(float(choice.h))
    return modes, sizes


def test_eleven_in_a_row_that_look_stiff():
    modes, sizes = chosen([1.0] * 10 + [0.5] + [1.0] * 11 + [1.0] * 2)
    assert modes == [False] * 21 + [True] * 3
    assert sizes == [1.0] * 21 + [2.0] + [1.0] * 2


def test_four_in_a_row_that_do_not_and_back_again():
    modes, sizes = chosen([1.0] * 11 + [0.5] * 3 + [1.0] + [0.5] * 4 + [1.0] * 11)
    assert modes == [False] * 10 + [True] * 8 + [False] * 11 + [True]
    assert [i for i, x in enumerate(sizes) if x != 1] == [10, 18, 29]
    assert sizes[18] == 0.5


def test_what_is_nan_looks_stiff_and_what_rests_does_not():
    assert chosen([np.nan] * 12)[0] == [False] * 10 + [True] * 2
    still = (np.array(0.0),), (np.array(0.0),)
    assert not ALG.method.looks_stiff(NUMBERS, still, np.array(1.0))


def test_who_makes_no_attempt_does_not_switch():
    method = ALG.method.in_mode(np.array(False))
    numbers = np.array(10), np.array(True), np.array(1.0)
    choice = method.choose(NUMBERS, *numbers, np.array(False))
    assert not choice.switched
    assert choice.count == 10


def test_tolerances_of_ones_own():
    alg = eo.AutoTsit5(
        eo.Rodas5P(), maxstiffstep=2, maxnonstiffstep=1, nonstifftol=0.5, stifftol=0.3, dtfac=4
    )
    modes, sizes = chosen([0.6] * 3 + [0.4] * 3 + [0.2] * 2, alg)
    assert modes == [False] * 2 + [True] * 5 + [False]
    assert (sizes[2], sizes[7]) == (4.0, 0.25)


@pytest.mark.parametrize("cls", AUTOMATIC)
def test_the_rate_of_a_linear_system(cls):
    """From stages, and from the Jacobian: of one equation both are the eigenvalue."""
    eqs, y, one = moving()[0], (np.float64(1),), np.float64(1)
    eqs = dataclasses.replace(
        eqs,
        f=lambda y, t: (-50 * y[0],),
        linearise=lambda y, t: (np.array([[-50.0]]), None),
        row_sums=lambda matrix: tuple(np.abs(matrix).sum(1)),
    )
    both = cls(eo.Rosenbrock23()).method
    for is_stiff in (False, True):
        method = both.in_mode(np.array(is_stiff))
        attempt = method.step(NUMBERS, eqs, y, method.init(NUMBERS, eqs, y, one), one, one / 99)
        (states,), (slopes,) = attempt.last
        np.testing.assert_allclose(slopes / states, 50.0, rtol=1e-8)


@pytest.mark.parametrize("stiff", [eo.Rosenbrock23(), eo.Rodas4(), eo.Rodas5P()])
@pytest.mark.parametrize("cls", AUTOMATIC)
def test_a_step_is_that_of_one_of_the_two(cls, stiff):
    alg, (eqs, solution), t, h = cls(stiff), moving(), 0.3, 0.1
    eqs = dataclasses.replace(eqs, row_sums=lambda matrix: tuple(np.abs(matrix).sum(1)))
    y, both = solution(t), alg.method
    for method, is_stiff in ((alg.nonstiff.method, False), (stiff.method, True)):
        alone = method.step(NUMBERS, eqs, y, method.init(NUMBERS, eqs, y, t), t, h)
        switching = both.in_mode(np.array(is_stiff))
        attempt = switching.step(NUMBERS, eqs, y, both.init(NUMBERS, eqs, y, t), t, h)
        np.testing.assert_array_equal(attempt.y2, alone.y2)
        np.testing.assert_array_equal(attempt.error[0], alone.error[0])
        states = []
        for x, made in ((method, alone), (switching, attempt)):
            dense = x.dense(NUMBERS, eqs, y, made.dense, t, h)
            states.append(x.interpolate(NUMBERS, y, dense, h, 0.4))
        np.testing.assert_array_equal(*states)
        found = both.made_by(NUMBERS, eqs, y, t, h, alone.y2)
        assert found.is_stiff == is_stiff


def test_each_method_has_its_own_control():
    controllers = PIController().for_method(5, 4), PIController().for_method(2, 3).for_implicit()
    both = SwitchingController(*controllers)
    squared, h = np.array(0.01), np.array(0.5)
    memory = tuple(np.array(x, np.float32) for x in both.initial_memory())
    assert len(memory) == 2
    for is_stiff in (False, True):
        told = np.array(True), np.array(False)
        now = both.in_mode(np.array(is_stiff))
        next_h, after = now.next_step(NUMBERS, h, squared, memory, *told)
        i = int(is_stiff)
        alone = controllers[i].next_step(NUMBERS, h, squared, memory[i : i + 1], *told)
        assert next_h == alone[0]
        assert after[i] == alone[1][0]
        assert after[1 - i] == memory[1 - i]
        assert now.accepts(NUMBERS, squared, memory)


def test_what_is_counted():
    method = ALG.method
    assert method.evaluations(StepCounts(10)) == 61
    # (After each switch what is carried is made anew.)
    assert method.evaluations(StepCounts(10, 4, 1)) == 6 * 6 + 1 + 4 * 2 + 1
    assert method.evaluations(StepCounts(10, 4, 2)) == 6 * 6 + 1 + 4 * 2 + 2
    assert eo.AutoTsit5(eo.Rodas5P()).method.evaluations(StepCounts(10, 4, 2)) == 6 * 6 + 4 * 8 + 2
    assert tuple(method.linear_algebra(StepCounts(10, 4, 1))) == (4, 4, 12)


def test_what_is_said_of_them():
    for cls in AUTOMATIC:
        alg = cls(eo.Rodas5P())
        assert alg.implicit
        assert alg.order == alg.nonstiff.order
        assert alg.engines == ("compiled", "julia")
        assert alg == cls(eo.Rodas5P())
        assert hash(alg.method) == hash(cls(eo.Rodas5P()).method)


def test_julia_has_the_same():
    assert description(ALG) == eo.JuliaAlg("AutoTsit5(Rosenbrock23())").description
    alg = eo.AutoVern7(eo.Rodas5P(), maxstiffstep=5, dtfac=3.0)
    text = "AutoVern7(Rodas5P(), maxstiffstep=5, dtfac=3.0)"
    assert description(alg) == eo.JuliaAlg(text).description


def test_what_is_no_pair():
    with pytest.raises(TypeError, match=r"AutoTsit5\(eo\.Rosenbrock23\(\)\), got Kvaerno5"):
        eo.AutoTsit5(eo.Kvaerno5())
    with pytest.raises(TypeError, match=r"maxstiffstep of AutoTsit5 must be an integer"):
        eo.AutoTsit5(eo.Rodas5P(), maxstiffstep=1.5)
    with pytest.raises(ValueError, match=r"maxnonstiffstep of AutoVern9 must be 0 or more"):
        eo.AutoVern9(eo.Rodas5P(), maxnonstiffstep=-1)
    with pytest.raises(ValueError, match=r"dtfac of AutoTsit5 must be positive"):
        eo.AutoTsit5(eo.Rodas5P(), dtfac=0)
    with pytest.raises(TypeError, match=r"stifftol of AutoTsit5 must be a number"):
        eo.AutoTsit5(eo.Rodas5P(), stifftol="0.9")
