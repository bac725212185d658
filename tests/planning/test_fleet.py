"""Fleet files, right and wrong."""

import pytest
import yaml

from ensembleode import planning


def read(text, directory):
    path = directory / "fleet.yaml"
    path.write_text(text)
    return planning.read_fleet(path)


FLEET = """
- {name: gpu, count: 32, seconds: 185.3456, items: 65536, iterations: 2000}
- name: cpu
  count: 40
  unit_time: 0.1264
  hours_per_day: 16
"""


def test_fleet(tmp_path):
    """What is written is read."""
    fleet = read(FLEET, tmp_path)
    assert fleet == [
        planning.Kind("gpu", 32, seconds=185.3456, items=65536, iterations=2000),
        planning.Kind("cpu", 40, unit_time=0.1264, hours_per_day=16),
    ]
    assert read(yaml.safe_dump([kind.as_dict() for kind in fleet]), tmp_path) == fleet


def test_cost():
    gpu = planning.Kind("gpu", 1, seconds=200, items=50_000, iterations=2000)
    assert gpu.cost == pytest.approx(2e-6)
    assert planning.Kind("gpu", 1, unit_time=0.002).cost == pytest.approx(2e-6)


def test_numbers_that_yaml_has_as_text(tmp_path):
    (kind,) = read("- {name: a, count: 1e1, seconds: 1e2, items: 1e6, iterations: 1E3}", tmp_path)
    assert (kind.count, kind.seconds, kind.items, kind.iterations) == (10, 100.0, 1_000_000, 1000)


MEASURED = "seconds: 1, items: 1, iterations: 1"


# Each refers nine times to the one before it.
ALIASES = "- name: gpu\n  unit_time: 1\n  count:\n   - &a [1, 1, 1, 1, 1, 1, 1, 1, 1]\n" + "".join(
    f"   - &{x} [{', '.join([f'*{before}'] * 9)}]\n"
    for before, x in zip("abcdefgh", "bcdefghi", strict=True)
)


@pytest.mark.quick_cases(30)
@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("", "no list of kinds: begin each with a dash"),
        ("name: gpu", "no list of kinds"),
        ("[]", "the fleet is empty"),
        ("- gpu", "the kind number 1 must have name, count, and so on, got 'gpu'"),
        ("- {a: [}", "is not YAML: .*line 1"),
        (f"- {{count: 1, {MEASURED}}}", "the kind number 1 lacks name"),
        (f"- {{name: gpu, {MEASURED}}}", "the kind 'gpu' lacks count"),
        (f"- {{name: gpu, count: , {MEASURED}}}", "the kind 'gpu' lacks count"),
        ("- {name: gpu, count: 1}", "the kind 'gpu' lacks seconds, items, iterations: give"),
        ("- {name: gpu, count: 1, seconds: 3, items: 2}", "the kind 'gpu' lacks iterations: give"),
        (
            f"- {{name: gpu, count: 1, sec: 1, {MEASURED}}}",
            "'gpu' has the unknown field 'sec':",
        ),
        (f"- {{name: 7, count: 1, {MEASURED}}}", "must have a name, such as 'gpu', got 7"),
        (f"- {{name: gpu, count: -3, {MEASURED}}}", "'gpu': count must be a whole .* got -3"),
        (f"- {{name: gpu, count: 1.5, {MEASURED}}}", "'gpu': count must be a whole .* got 1.5"),
        (f"- {{name: gpu, count: yes, {MEASURED}}}", "'gpu': count must be a whole .* got True"),
        (f"- {{name: gpu, count: many, {MEASURED}}}", "count must be a whole .* got 'many'"),
        ("- {name: gpu, count: 1, unit_time: -0.1}", "unit_time must be a positive .* got -0.1"),
        ("- {name: gpu, count: 1, unit_time: .inf}", "unit_time must be a positive .* got inf"),
        ("- {name: gpu, count: 1, unit_time: 1, items: 3}", "has unit_time and items: give the"),
        (
            "- {name: gpu, count: 1, seconds: 0, items: 1, iterations: 1}",
            "'gpu': seconds must be a positive number, got 0",
        ),
        (
            "- {name: gpu, count: 1, seconds: 1, items: 0, iterations: 1}",
            "'gpu': items must be a whole number, 1 or more, got 0",
        ),
        (
            f"- {{name: gpu, count: 1, hours_per_day: 25, {MEASURED}}}",
            "'gpu': hours_per_day must be 24 at most, got 25",
        ),
        (f"- {{name: gpu, count: 1, hours_per_day: 0, {MEASURED}}}", "hours_per_day must be a pos"),
        ("- {name: gpu, count: 1, unit_time: 5.0e-324}", "unit_time must be from 1e-50 to 1e.50"),
        ("- {name: gpu, count: 1, unit_time: 1.0e+308}", "unit_time must be from 1e-50 to 1e.50"),
        (f"- {{name: gpu, count: {'9' * 70}, {MEASURED}}}", "1e.50 at most, got a number of more"),
        (f"- {{name: gpu, count: {'9' * 5000}, {MEASURED}}}", "is not YAML"),
        (f"- {{name: {'a' * 101}, count: 1, {MEASURED}}}", "one line of at most 100 characters"),
        (f'- {{name: "a\\e[2J", count: 1, {MEASURED}}}', r"one line of .* got 'a\\x1b\[2J'"),
        ("[" * 100_000, "nested too deeply"),
        (ALIASES, r"count must be a whole number, 1 or more, got .{,120}\.$"),
        (
            f"- {{name: a, count: 1, {MEASURED}}}\n- {{name: a, count: 1, {MEASURED}}}",
            "two kinds are called 'a'",
        ),
    ],
)
def test_bad_fleets(text, message, tmp_path):
    with pytest.raises(planning.PlanError, match=message) as raised:
        read(text, tmp_path)
    assert "fleet.yaml" in str(raised.value)
    assert "\n" not in str(raised.value)


def test_no_file(tmp_path):
    with pytest.raises(planning.PlanError, match=r"none\.yaml can't be read: No such file"):
        planning.read_fleet(tmp_path / "none.yaml")
    (tmp_path / "binary.yaml").write_bytes(b"\xff\xfe\x00\x01\x80")
    with pytest.raises(planning.PlanError, match=r"binary\.yaml"):
        planning.read_fleet(tmp_path / "binary.yaml")
