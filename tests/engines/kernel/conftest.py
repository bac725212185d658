"""Kernels run on the host's CPU, as if it were a GPU."""

import pytest

from ensembleode.engines.kernel import launch
from ensembleode.executors import kernel

from .host import COMPILER, host_call


@pytest.fixture
def on_host(monkeypatch):
    if COMPILER is None:
        pytest.skip("no C++ compiler (g++ or clang++)")
    monkeypatch.setattr(kernel, "computes_on_gpu", lambda: True)
    monkeypatch.setattr(launch, "check", lambda: None)
    monkeypatch.setattr(launch, "launcher", lambda: host_call)
