"""The steps of a fit in TensorBoard, Weights & Biases and MLflow, by the real packages, offline."""

import json
import math
import struct
import sys
import time

import pytest

import ensembleode as eo

from .test_fit import fit_line, line


# (Of their own dependencies.)
pytestmark = [
    pytest.mark.usefixtures("optax_mixes_dtypes"),
    pytest.mark.filterwarnings("ignore::DeprecationWarning", "ignore::FutureWarning"),
    pytest.mark.filterwarnings("ignore::ResourceWarning"),
]


def fitted(log):
    """What was told of the steps: step -> numbers."""
    told = {}
    options = {"batch_size": 4, "maxiters": 5, "validation": line(5)}
    fit_line(**options, log=[log, lambda s: told.update({s.step: s.numbers})])
    assert len(told) == 5
    assert "validation_loss" in told[3]
    return told


def check(found, told):
    """`found[name]` are the values of this name by their steps."""
    assert set(found) == {name for numbers in told.values() for name in numbers}
    for name, values in found.items():
        expected = {step: x[name] for step, x in told.items() if name in x}
        assert values.keys() == expected.keys()
        for step, value in expected.items():
            assert math.isclose(values[step], value, rel_tol=1e-6)  # (TensorBoard has float32.)


def test_tensorboard(tmp_path):
    event_accumulator = pytest.importorskip(
        "tensorboard.backend.event_processing.event_accumulator"
    )
    told = fitted(eo.TensorBoardLog(tmp_path))
    make_ndarray = pytest.importorskip("tensorboard.util.tensor_util").make_ndarray
    events = event_accumulator.EventAccumulator(str(tmp_path)).Reload()
    found = {
        name: {x.step: float(make_ndarray(x.tensor_proto)) for x in rows}
        for name in events.Tags()["tensors"]
        if (rows := events.Tensors(name))
    }
    check(found, told)


def test_wandb(tmp_path, monkeypatch):
    wandb = pytest.importorskip("wandb")
    monkeypatch.setenv("WANDB_SILENT", "true")
    with pytest.raises(ValueError, match=r"begin one by wandb\.init"):
        eo.WandbLog()
    run = wandb.init(mode="offline", dir=tmp_path, project="lines")
    told = fitted(eo.WandbLog())
    run.finish()
    (path,) = tmp_path.rglob("*.wandb")
    check(written_by_wandb(path), told)


def written_by_wandb(path):
    internal = pytest.importorskip("wandb.proto.wandb_internal_pb2")
    found, records = {}, []
    for _ in range(300):  # (Another process writes it.)
        records = [internal.Record.FromString(x) for x in records_of(path.read_bytes())]
        if records and records[-1].WhichOneof("record_type") == "exit":
            break
        time.sleep(0.1)
    for record in records:
        if record.WhichOneof("record_type") == "history":
            items = record.history.item
            row = {x.key or ".".join(x.nested_key): json.loads(x.value_json) for x in items}
            for name in row.keys() - {"_step", "_runtime", "_timestamp"}:
                found.setdefault(name, {})[row["_step"]] = row[name]
    return found


def records_of(file):
    """The records of a log in LevelDB's format, behind a header of seven bytes."""
    place, whole = 7, b""
    while place < len(file):
        if 2**15 - place % 2**15 < 7:  # (A block's rest has no room for the head of a record.)
            place += 2**15 - place % 2**15
            continue
        _, length, kind = struct.unpack_from("<IHB", file, place)
        whole += file[place + 7 : place + 7 + length]
        place += 7 + length
        if kind in (1, 4):  # all of it, or its last part
            yield whole
            whole = b""


def test_mlflow(tmp_path, monkeypatch):
    monkeypatch.setenv("MLFLOW_ALLOW_FILE_STORE", "true")
    monkeypatch.setenv("MLFLOW_DISABLE_TELEMETRY", "true")
    mlflow = pytest.importorskip("mlflow")
    mlflow.set_tracking_uri((tmp_path / "runs").as_uri())
    with mlflow.start_run() as run:
        log = eo.MLflowLog()
    told = fitted(log)
    client = mlflow.MlflowClient()
    history = {
        name: client.get_metric_history(run.info.run_id, name)
        for name in client.get_run(run.info.run_id).data.metrics
    }
    check({name: {x.step: x.value for x in rows} for name, rows in history.items()}, told)


@pytest.mark.parametrize(
    ("name", "package"),
    [("TensorBoardLog", "tensorboard"), ("WandbLog", "wandb"), ("MLflowLog", "mlflow")],
)
def test_without_the_package(name, package, monkeypatch):
    for module in [x for x in sys.modules if x.split(".")[0] == package]:
        monkeypatch.delitem(sys.modules, module)
    monkeypatch.setitem(sys.modules, package, None)
    monkeypatch.setitem(sys.modules, f"{package}.summary", None)
    with pytest.raises(ImportError, match=r"is not installed: pip install .*\[track\]"):
        getattr(eo, name)(*["folder"] * (name == "TensorBoardLog"))
