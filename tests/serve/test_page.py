"""The page of the service, in headless Chromium."""

import json
import time

import jax.numpy as jnp
import pytest

import ensembleode as eo

from ..problems import lotka_volterra, mlp, network
from . import chromium
from .running import Running


pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(
        chromium.find() is None, reason=f"none of {', '.join(chromium.NAMES)} is on the PATH"
    ),
]

LINE = "document.querySelector('#plot .line')?.getAttribute('d')"
SWEPT = "document.querySelectorAll('#plot .ribbon').length === 4"
REFUSED = "document.querySelector('#alert').textContent"


def registry(*names):
    """Of one size of batches and of saved times, which is little to compile."""
    registry = eo.serve.Registry()
    u0, p = jnp.array([1.0, 1.0]), jnp.array([1.5, 1.0, 3.0, 1.0])
    limits = {"trajectories": 256, "saveat": 104, "maxiters": 1000}
    known = {
        "lotka": {
            "prob": eo.ODEProblem(lotka_volterra, u0, (0.0, 10.0), p),
            "labels": ["rabbits", "foxes"],
            "description": "Rabbits and foxes.",
            "limits": eo.serve.Limits(u0=(0.1, 5.0), p=(0.5, 4.0), tspan=(0.0, 20.0), **limits),
        },
        "neural": {
            "prob": eo.ODEProblem(mlp, jnp.array([2.0, 1 / 3]), (0.0, 1.5), network()),
            "limits": eo.serve.Limits(**limits),
        },
        "blowup": {
            "prob": eo.ODEProblem(squared, jnp.array([1.0]), (0.0, 2.0), jnp.array([0.4])),
            "limits": eo.serve.Limits(p=(0.1, 1.0), **limits),
        },
    }
    for name in names or known:
        prob = known[name].pop("prob")
        registry.add(name, prob, saveat=(prob.tspan[1] - prob.tspan[0]) / 100, **known[name])
    return registry


def squared(u, p, t):
    return p * u * u


@pytest.fixture(scope="module")
def service():
    with Running(registry(), max_batch=1) as running:
        yield running.url + "/"


@pytest.fixture(scope="module")
def port(tmp_path_factory):
    with chromium.browser(tmp_path_factory.mktemp("chromium")) as port:
        yield port


@pytest.fixture
def tab(port):
    """A tab, in which nothing may go wrong but what a test expects."""
    tab = chromium.Page(port)
    yield tab
    tab.close()


@pytest.fixture
def page(tab, service):
    """The page, with its first curve drawn."""
    tab.go(service)
    tab.wait(LINE, 120)  # compiling
    return tab


def focus(page, selector):
    page.run(f"document.querySelector({json.dumps(selector)}).focus()")


def value(page, selector):
    return page.run(f"document.querySelector({json.dumps(selector)}).value")


def enter(page, selector, text):
    """Type into a field."""
    focus(page, selector)
    page.type(text)


def sent(page):
    """The bodies of the page's requests."""
    asked = [e["params"] for e in page.events if e["method"] == "Network.requestWillBeSent"]
    return [json.loads(a["request"]["postData"]) for a in asked if "postData" in a["request"]]


def other_line(page, line):
    return page.wait(f"{LINE} !== {json.dumps(line)} && {LINE}")


def clean(page, url, *expected):
    """No errors but those expected, and no other host asked for anything."""
    assert all(any(text in problem for text in expected) for problem in page.problems), (
        page.problems
    )
    assert page.requests
    assert all(asked.startswith(url) for asked in page.requests), page.requests


def test_load(page, service):
    problems = page.run("[...document.querySelectorAll('#problems a')].map(a => a.textContent)")
    assert problems == ["lotka", "neural", "blowup"]
    assert page.run("document.querySelectorAll('#plot .line').length") == 2
    assert page.run("document.querySelector('#legend').textContent").startswith("rabbits")
    assert page.run("document.querySelector('#status').textContent").startswith("Success, 101 ")
    assert page.run("document.title").startswith("lotka")
    page.wait("document.querySelector('#load-note').textContent.startsWith('Means')")
    page.wait("/^[0-9.]+ ms/.test(document.querySelectorAll('#figures dd')[3].textContent)")
    clean(page, service)


def test_sliders(page, service):
    line = page.run(LINE)
    page.drag("#p-0-slider", 0.3, 0.8)
    line = other_line(page, line)
    assert 2.5 < float(value(page, "#p-0")) < 3.8
    # By keys, too.
    focus(page, "#u0-1-slider")
    before = float(value(page, "#u0-1"))
    page.press("ArrowRight", "ArrowRight")
    line = other_line(page, line)
    assert before < float(value(page, "#u0-1")) < before + 0.2
    # A typed number moves its slider.
    enter(page, "#p-2", "2")
    other_line(page, line)
    assert float(value(page, "#p-2-slider")) == 2
    page.click("[type=reset]")
    page.wait("document.querySelector('#p-2').value === '3'")
    assert [float(value(page, f"#p-{i}")) for i in range(4)] == [1.5, 1, 3, 1]
    clean(page, service)


def test_only_the_last_answer_counts(page, service):
    """Answers that come late, and in another order."""
    page.run("""(() => {
        const asked = window.fetch;
        window.bodies = [];
        window.fetch = async (path, options) => {
            if (!String(path).includes("solve")) return asked(path, options);
            const late = window.bodies.push(options.body) === 1;
            const { signal, ...rest } = options; // as if cancelling came too late
            const answer = await asked(path, rest);
            await new Promise((wake) => setTimeout(wake, late ? 1500 : 0));
            return answer;
        };
    })()""")
    line = page.run(LINE)
    enter(page, "#p-0", "3")
    page.wait("window.bodies.length === 1")
    enter(page, "#p-0", "1.2")
    second = other_line(page, line)
    time.sleep(2)
    assert page.run(LINE) == second
    assert page.run("window.bodies.map((b) => JSON.parse(b).p[0])") == [3, 1.2]
    # Many changes are few requests.
    for i in range(20):
        enter(page, "#p-0", f"1.{i}")
    other_line(page, second)
    page.wait("JSON.parse(window.bodies.at(-1)).p[0] === 1.19")
    assert page.run("window.bodies.length") < 12
    clean(page, service)


def test_sweep(page, service):
    focus(page, "#sweep")
    page.press(" ")
    page.wait(SWEPT)
    body = sent(page)[-1]
    assert len(body["p"]) == 200
    assert body["p"][0] == [0.5, 1, 3, 1]
    assert body["p"][-1] == [4, 1, 3, 1]
    assert "Sweep: 200 trajectories" in page.run("document.querySelector('#status').textContent")
    # All of them by some percent: at first there is no spread, then the quantiles are in order.
    page.run(
        "document.querySelector('#vary').value = 'p:all',"
        "document.querySelector('#vary').dispatchEvent(new Event('input', {bubbles: true}))"
    )
    page.wait("!document.querySelector('#percent').closest('.field').hidden")
    enter(page, "#percent", "20")
    page.click("#data summary")
    page.wait("document.querySelectorAll('#table tbody tr').length === 101")
    time.sleep(1)
    rows = page.run(
        "[...document.querySelectorAll('#table tbody tr')]"
        ".map((row) => [...row.children].map((cell) => Number(cell.textContent)))"
    )
    assert len(rows[0]) == 1 + 2 * 6
    assert rows[0][1:7] == [1] * 6
    for row in rows[1:]:
        for quantiles in (row[2:7], row[8:13]):
            assert quantiles == sorted(quantiles)
    assert rows[50][2] < rows[50][4] < rows[50][6]
    focus(page, "#sweep")
    page.press(" ")
    page.wait("!document.querySelector('#plot .ribbon')")
    clean(page, service)


def test_errors(page, service):
    line = page.run(LINE)
    enter(page, "#p-1", "9")
    assert "p[1]" in page.wait(REFUSED)
    assert page.run("document.querySelector('#alert').role") == "alert"
    invalid = "[...document.querySelectorAll('[aria-invalid=true]')].map((e) => e.id)"
    assert page.run(invalid) == ["p-1", "p-1-slider"]
    assert page.run("document.querySelector('#plot').classList.contains('stale')")
    assert page.run(LINE) == line
    # The message leads to the field.
    page.click("#alert a")
    assert page.run("document.activeElement.id") == "p-1"
    # What is no number at all isn't sent.
    enter(page, "#p-1", "")
    page.wait(f"{REFUSED}.includes('not a number')")
    enter(page, "#p-1", "1.1")
    page.wait(f"{REFUSED} === ''")
    assert page.run(invalid) == []
    enter(page, "#t1", "50")
    page.wait(f"{REFUSED} !== ''")
    assert "t1" in page.run(invalid)
    enter(page, "#t1", "12")
    page.wait(f"{REFUSED} === ''")
    # Of a sweep: the curve is drawn all the same.
    page.click("#sweep")
    page.wait(SWEPT)
    enter(page, "#sweep-to", "6")
    page.wait(f"{REFUSED}.includes('Sweep')")
    assert page.run(invalid) == ["sweep-to"]
    assert page.run("document.querySelectorAll('#plot .line').length") == 2
    enter(page, "#sweep-to", "3")
    page.wait(SWEPT)
    enter(page, "#count", "500")
    page.wait(f"{REFUSED}.includes('limited to 256')")
    assert page.run(invalid) == ["count"]
    clean(page, service, "status of 4")


def test_failed_trajectories(tab, service):
    """u' = p u^2 from 1 is infinite at 1 / p."""
    tab.go(service + "#/blowup")
    tab.wait(LINE, 120)
    assert not tab.run("document.querySelector('#failures').textContent")
    enter(tab, "#p-0", "0.8")
    said = tab.wait("document.querySelector('#failures').textContent")
    assert said.startswith("The solver gave up after t = 1.24")
    assert tab.run("document.querySelectorAll('#plot .end').length") == 1
    enter(tab, "#p-0", "0.3")
    tab.wait("document.querySelector('#failures').textContent === ''")
    tab.click("#sweep")
    said = tab.wait("document.querySelector('#failures').textContent")
    # p from 0.1 to 1 in 200 steps: those above a half.
    assert said.startswith("111 of 200 trajectories of the sweep failed")
    tab.wait("document.querySelectorAll('#plot .ribbon').length === 2")
    clean(tab, service)


def test_neural_network(tab, service):
    """No limits, hence no sliders; the weights stay where they are."""
    tab.go(service + "#/neural")
    tab.wait(LINE, 120)
    assert tab.run("document.querySelectorAll('#values [type=range]').length") == 0
    assert "as registered" in tab.run("document.querySelector('#p').textContent")
    line = tab.run(LINE)
    assert not {"u0", "p", "tspan", "saveat"} & sent(tab)[-1].keys()
    enter(tab, "#u0-0", "1")
    other_line(tab, line)
    # Numbers are seen in few digits, and sent in all.
    assert value(tab, "#u0-1") == "0.33333"
    assert sent(tab)[-1] == {"u0": [1, 1 / 3]}
    tab.click("#sweep")
    tab.wait(SWEPT)
    # Another problem is another form.
    tab.click("#problems a[href='#/lotka']")
    tab.wait("document.querySelector('#p-3-slider') && document.title.startsWith('lotka')")
    clean(tab, service)


def test_read_out(page, service):
    time_at = "document.querySelector('#time').textContent"
    page.hover("#plot", 0.5)
    middle = page.wait(f"{time_at} !== 't = 10' && {time_at}")
    assert 4 < float(middle.removeprefix("t = ")) < 6
    focus(page, "#at")
    page.press("Home")
    assert page.run(time_at) == "t = 0"
    page.press("ArrowRight")
    assert page.run(time_at) == "t = 0.1"
    spoken = page.run("document.querySelector('#at').getAttribute('aria-valuetext')")
    assert spoken.startswith("t = 0.1: rabbits 1.0")
    # A component can be hidden.
    focus(page, "#legend button")
    page.press("Enter")
    assert page.run("document.querySelectorAll('#plot .line').length") == 1
    assert page.run("document.querySelector('#legend button').ariaPressed") == "false"
    clean(page, service)


def test_keyboard(page, service):
    """Tab reaches everything, in the order of the page, and the focus is seen."""
    page.click("#sweep")
    page.wait(SWEPT)
    page.run("document.activeElement.blur(), scrollTo(0, 0)")
    page.run("document.querySelector('.skip').focus()")
    reached = []
    for _ in range(60):
        page.press("Tab")
        name, outlined = page.run(
            "[document.activeElement.id || document.activeElement.textContent.trim(),"
            " getComputedStyle(document.activeElement).outlineStyle !== 'none'"
            " || document.activeElement.matches('#problems a')]"
        )
        if page.run("document.activeElement === document.body") or name in reached:
            break
        assert outlined, name
        reached.append(name)
    every = page.run(
        "[...document.querySelectorAll('main input, main select, main button, main summary')]"
        ".filter((e) => e.checkVisibility()).map((e) => e.id || e.textContent.trim())"
    )
    assert [name for name in reached if name in every] == every
    clean(page, service)


def test_names(page, service):
    """Every control has a name, and the page has its landmarks."""
    page.click("#sweep")
    page.wait(SWEPT)
    page.click("#data summary")
    page.wait("document.querySelector('#table tr') !== null")
    found = page.named()
    controls = {"slider", "spinbutton", "textbox", "checkbox", "combobox", "button", "link"}
    named = [(role, name) for role, name in found if role in controls]
    assert len(named) > 25
    assert all(name for _, name in named), named
    for control in [("slider", "rabbits"), ("spinbutton", "rabbits"), ("slider", "Values at")]:
        assert control in named
    roles = {role for role, _ in found}
    assert {"main", "banner", "navigation", "form", "region", "alert", "status", "table"} <= roles
    assert any(role == "image" and name.startswith("Median") for role, name in found)
    identifiers = page.run("[...document.querySelectorAll('[id]')].map((e) => e.id)")
    assert len(identifiers) == len(set(identifiers))
    clean(page, service)


@pytest.mark.parametrize("width", [360, 800, 1400])
def test_fits(page, service, width):
    page.resize(width, 700)
    assert page.run("document.documentElement.scrollWidth") <= width
    page.wait(f"document.querySelector('#plot').viewBox.baseVal.width <= {width}")
    # No label of the axes is cut.
    cut = page.run(
        "[...document.querySelectorAll('#plot text')].filter((e) => {"
        "  const [a, b] = [e, e.ownerSVGElement].map((x) => x.getBoundingClientRect());"
        "  return a.left < b.left || a.right > b.right || a.top < b.top - 1 || a.bottom > b.bottom;"
        "}).map((e) => e.textContent)"
    )
    assert cut == []
    clean(page, service)


@pytest.mark.parametrize("scheme", ["light", "dark"])
def test_contrast(page, service, scheme):
    """Text has a contrast of 4.5 to what is behind it, a line one of 3."""
    page.prefer(scheme)
    variables = page.run(
        "Object.fromEntries(['back', 'panel', 'text', 'quiet', 'accent', 'bad-back',"
        " ...[0, 1, 2, 3, 4, 5].map((i) => `c${i}`)].map((name) => {"
        "  document.body.style.outlineColor = `var(--${name})`;"
        "  return [name, getComputedStyle(document.body).outlineColor];"
        "}))"
    )
    colors = {name: luminance(color) for name, color in variables.items()}
    for text, behind in [
        ("text", "back"),
        ("text", "panel"),
        ("text", "bad-back"),
        ("quiet", "back"),
        ("quiet", "panel"),
        ("accent", "back"),
        ("accent", "panel"),
    ]:
        assert contrast(colors[text], colors[behind]) >= 4.5, (text, behind)
    for i in range(6):
        assert contrast(colors[f"c{i}"], colors["back"]) >= 3, i
    assert page.run("getComputedStyle(document.body).backgroundColor") == (
        "rgb(255, 255, 255)" if scheme == "light" else "rgb(20, 23, 27)"
    )
    clean(page, service)


def luminance(color: str) -> float:
    """As WCAG has it, of a colour like rgb(255, 255, 255)."""
    rgb = [int(x) / 255 for x in color.removeprefix("rgb(").removesuffix(")").split(",")]
    linear = [x / 12.92 if x <= 0.04045 else ((x + 0.055) / 1.055) ** 2.4 for x in rgb]
    return 0.2126 * linear[0] + 0.7152 * linear[1] + 0.0722 * linear[2]


def contrast(a: float, b: float) -> float:
    return (max(a, b) + 0.05) / (min(a, b) + 0.05)


def test_token(tab):
    with Running(registry("lotka"), max_batch=1, tokens=["sesame"]) as guarded:
        url = guarded.url + "/"
        tab.go(url)
        tab.wait("!document.querySelector('#token-form').hidden")
        assert tab.run("document.activeElement.id") == "token"
        tab.type("open")
        tab.press("Enter")
        tab.wait(f"{REFUSED}.includes('refused')")
        enter(tab, "#token", "sesame")
        tab.press("Enter")
        tab.wait(LINE, 120)
        assert tab.run("document.querySelector('#token-form').hidden")
        # Kept over a reload, in this tab alone.
        tab.go(url)
        tab.wait(LINE)
        assert tab.run("Object.values(sessionStorage)") == ["sesame"]
        assert tab.run("localStorage.length") == 0
        assert not any("sesame" in asked for asked in tab.requests)
        clean(tab, url, "status of 401")
