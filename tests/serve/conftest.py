import pytest


pytest.importorskip("fastapi")

from .running import registry, Running


@pytest.fixture(scope="session")
def running(tmp_path_factory):
    """A service that keeps ensembles."""
    with Running(registry(), store=tmp_path_factory.mktemp("ensembles")) as running:
        yield running
