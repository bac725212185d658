"""What the service says of itself, and that nothing that fits it, or doesn't, is its failure."""

import hypothesis
import msgpack
import pytest
import schemathesis
from schemathesis.checks import (
    content_type_conformance,
    not_a_server_error,
    response_schema_conformance,
    status_code_conformance,
)

from ensembleode.serve import create_app

from .running import registry


@schemathesis.serializer("application/x-msgpack")
def as_msgpack(context, value):
    try:
        return msgpack.packb(value)
    except (OverflowError, TypeError, ValueError):  # which it doesn't hold
        return b"\xc1"


SCHEMA = schemathesis.openapi.from_dict(create_app(registry()).openapi())
CHECKS = [
    not_a_server_error,
    status_code_conformance,
    content_type_conformance,
    response_schema_conformance,
]
COMMON = {
    "deadline": None,
    "suppress_health_check": list(hypothesis.HealthCheck),
    "derandomize": True,
}


def test_what_is_documented():
    paths = SCHEMA.raw_schema["paths"]
    assert {f"{method} {path}" for path, x in paths.items() for method in x} == {
        "post /v1/problems/{name}/solve",
        "post /v1/problems/{name}/vjp",
        "post /v1/problems/{name}/ensembles",
        "get /v1/problems",
        "get /v1/problems/{name}",
        "get /v1/ensembles",
        "get /v1/ensembles/{id}",
        "delete /v1/ensembles/{id}",
        "post /v1/ensembles/{id}/cancel",
        "post /v1/ensembles/{id}/resume",
        "get /v1/ensembles/{id}/download",
        "get /healthz",
        "get /readyz",
        "get /metrics",
    }
    for path, methods in paths.items():
        for operation in methods.values():
            assert operation["summary"]
            if path.startswith("/v1/"):
                assert "401" in operation["responses"]
                assert operation["security"] == [{}, {"token": []}]


def check(case, running):
    if "name" in case.path_parameters and hash(repr(case.body)) % 4:
        # Few names that are made up are those of problems.
        case.path_parameters["name"] = "lotka"
    response = case.call(base_url=running.url)
    if response.status_code == 504:
        assert case.body["deadline_ms"] < 1000
    else:
        case.validate_response(response, checks=CHECKS)


@SCHEMA.parametrize()
@hypothesis.settings(max_examples=15, **COMMON)
def test_no_server_error(case, running):
    check(case, running)


@pytest.mark.slow
@SCHEMA.parametrize()
@hypothesis.settings(max_examples=300, **COMMON)
def test_no_server_error_at_length(case, running):
    check(case, running)
