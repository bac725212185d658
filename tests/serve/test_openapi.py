"""The OpenAPI document of the service; and random requests, valid or not, never make it fail."""

import re

import hypothesis
import msgpack
import pytest
import schemathesis
from schemathesis.checks import (
    content_type_conformance,
    negative_data_rejection,
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
    negative_data_rejection,
]
# What is said of things that are not of the kind that is wanted: what fits the schema is only
# refused for what depends on the problem, on other fields or on values.
OF_KIND = re.compile(
    "must be numbers|must be a number|no such field|is missing|must be an object|is not (JSON|Mess)"
    "|must be a spacing|a positive spacing|a positive number|a positive integer|must be an integer"
    "|low and high|has no deadline|list of counts|dtype must|not a valid|should be|nested too deep"
)
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
        # (To schemathesis 413 is no refusal.)
        checks = CHECKS[:-1] if response.status_code == 413 else CHECKS
        case.validate_response(response, checks=checks)
        # (The bytes of an array in MessagePack can't be said in a schema.)
        is_said = case.meta.generation.mode.is_positive and "msgpack" not in (case.media_type or "")
        if is_said and response.status_code in (400, 422):
            error = response.json()["error"]
            assert not OF_KIND.search(error["message"]), (error, case.body)


def test_what_is_allowed(running):
    """A method that a path has not is told which it has."""
    for path, allowed in (
        ("/v1/ensembles/x", "DELETE, GET"),
        ("/v1/ensembles/x/cancel", "POST"),
        ("/v1/problems/lotka", "GET"),
    ):
        response = running.client.put(path)
        assert (response.status_code, response.headers["allow"]) == (405, allowed)


@pytest.mark.slow
@SCHEMA.parametrize()
@hypothesis.settings(max_examples=300, **COMMON)
def test_no_server_error(case, running):
    check(case, running)
