"""Errors of other servers, in our tree."""

from __future__ import annotations

import pytest

from triolet.client.errors import (
    BrokenStreamError,
    Fault,
    RefusedError,
    UnreachableError,
    read_fault,
    read_refusal,
    read_retry_after,
)
from triolet.errors import TrioletError


@pytest.mark.parametrize("error", [BrokenStreamError, RefusedError, UnreachableError])
def test_they_are_of_the_one_tree(error):
    assert issubclass(error, TrioletError)


@pytest.mark.parametrize(
    ("body", "fault"),
    [
        (
            {"error": {"message": "m", "type": "t", "param": "p", "code": "c"}},
            Fault("m", code="c", type="t", param="p"),
        ),
        ({"error": {"message": "m", "code": 503}}, Fault("m", code="503", status=503)),
        ({"error": {"code": None}}, Fault("The server gave no reason.")),
        ({"error": "words", "error_type": "overloaded"}, Fault("words", type="overloaded")),
        (
            {"object": "error", "message": "m", "type": "BadRequestError", "code": 400},
            Fault("m", code="400", type="BadRequestError", status=400),
        ),
        ({"type": "error", "message": "m", "code": "x"}, Fault("m", code="x", type="error")),
        ({"detail": "Not Found"}, Fault("Not Found")),
        ({"detail": [{"loc": ["n"]}]}, Fault('[{"loc": ["n"]}]')),
        ({"choices": [], "error": None}, None),
        ({"choices": [], "error": ""}, None),
        ({"choices": [], "error": {}}, None),
        ({"choices": [], "detail": "x"}, None),
        ([], None),
        (None, None),
    ],
)
def test_error_bodies_are_read_in_every_dialect(body, fault):
    assert read_fault(body) == fault


def test_a_refusal_says_what_the_server_said():
    error = read_refusal(
        429,
        {"x-request-id": "r1", "retry-after": "7"},
        b'{"error": {"message": "Full.", "type": "rate_limit_error", "code": "queue_full"}}',
    )

    assert str(error) == "Full."
    assert (error.status, error.code, error.type) == (429, "queue_full", "rate_limit_error")
    assert (error.request_id, error.retry_after_s) == ("r1", 7.0)
    assert RefusedError.status == 500  # the class is as it was


@pytest.mark.parametrize("body", [b"", b"<html>Bad \xff Gateway</html>", b"[]", b'"x"'])
def test_a_refusal_without_json_has_status_and_body_in_its_message(body):
    error = read_refusal(502, {}, body)

    assert "status 502" in error.message
    assert error.code == "http_502"
    assert ("an empty body" in error.message) == (not body)


@pytest.mark.parametrize(
    ("headers", "seconds"),
    [
        ({}, None),
        ({"retry-after": "1.5"}, 1.5),
        ({"retry-after": "-1"}, None),
        ({"retry-after": "inf"}, None),
        ({"retry-after-ms": "250", "retry-after": "9"}, 0.25),
        (
            {
                "retry-after": "Wed, 21 Oct 2026 07:28:10 GMT",
                "date": "Wed, 21 Oct 2026 07:28:00 GMT",
            },
            10.0,
        ),
        ({"retry-after": "Wed, 21 Oct 2026 07:28:10 GMT"}, None),
        ({"retry-after": "soon", "date": "Wed, 21 Oct 2026 07:28:00 GMT"}, None),
    ],
)
def test_the_wait_before_another_try(headers, seconds):
    assert read_retry_after(headers) == seconds
