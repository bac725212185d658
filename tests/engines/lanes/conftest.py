import pytest


@pytest.fixture(autouse=True)
def _by_lanes(lanes_first):
    """What these tests leave to `engine="auto"`."""
