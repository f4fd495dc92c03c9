"""Every error Triolet raises on purpose, in one tree.

Each error knows the HTTP ``status`` and the ``code`` a client sees, the request
parameter at fault (``param``, ``None`` where no single one is), and how long to
wait before another try (``retry_after_s``, ``None`` where another try is no use).
It is mapped to HTTP and to stream events once, in :mod:`triolet.server`.

The tree::

    TrioletError
    ├── ClientError                400  the request is at fault
    │   ├── InvalidRequestError    400  invalid_request
    │   ├── ContextLengthError     400  context_length_exceeded
    │   ├── AuthenticationError    401  invalid_api_key
    │   ├── NotFoundError          404  not_found
    │   ├── ModelNotFoundError     404  model_not_found
    │   ├── MethodNotAllowedError  405  method_not_allowed
    │   ├── BodyTooLargeError      413  body_too_large
    │   └── MediaTypeError         415  unsupported_media_type
    ├── CapacityError              503  the server cannot take the request now
    │   ├── QueueFullError         429  queue_full
    │   ├── NotReadyError          503  not_ready
    │   ├── DrainingError          503  draining
    │   └── EngineDownError        503  engine_down
    ├── CancelledRequestError      499  a running request was ended from outside
    │   └── RequestTimeoutError    504  timeout
    ├── EngineError                500  engine_error
    ├── OutputError                500  output_error
    └── StartupError               500  the server cannot start
        ├── ConfigError            500  config_error
        ├── ModelLoadError         500  model_load_failed
        └── UnsupportedModelError  500  model_unsupported
"""

from __future__ import annotations

from typing import ClassVar


class TrioletError(Exception):
    """Base of all errors that a user may see; ``message`` says what to do."""

    status: ClassVar[int] = 500
    code: ClassVar[str] = "internal_error"
    #: OpenAI's coarse error class, the ``type`` of an error body.
    type: ClassVar[str] = "server_error"

    def __init__(
        self,
        message: str,
        *,
        param: str | None = None,
        retry_after_s: float | None = None,
    ) -> None:
        super().__init__(message)
        self.message = message
        self.param = param
        self.retry_after_s = retry_after_s


class ClientError(TrioletError):
    """The request is at fault; the same request will fail again."""

    status = 400
    code = "invalid_request"
    type = "invalid_request_error"


class InvalidRequestError(ClientError):
    """A field is malformed, out of range, or not supported."""


class ContextLengthError(ClientError):
    """Prompt and ``max_tokens`` together exceed the model's context."""

    code = "context_length_exceeded"


class AuthenticationError(ClientError):
    """No API key, or a wrong one."""

    status = 401
    code = "invalid_api_key"
    type = "authentication_error"


class NotFoundError(ClientError):
    """No such route or object, or not yours to see."""

    status = 404
    code = "not_found"
    type = "not_found_error"


class ModelNotFoundError(NotFoundError):
    """The ``model`` field names none of the served models."""

    code = "model_not_found"


class MethodNotAllowedError(ClientError):
    """The route exists, but not for this method."""

    status = 405
    code = "method_not_allowed"


class BodyTooLargeError(ClientError):
    """The request body exceeds ``--max-body-size``."""

    status = 413
    code = "body_too_large"


class MediaTypeError(ClientError):
    """The request body is declared as something other than JSON."""

    status = 415
    code = "unsupported_media_type"


class CapacityError(TrioletError):
    """The server cannot take the request now; the same request may succeed later."""

    status = 503
    code = "unavailable"
    type = "service_unavailable_error"


class QueueFullError(CapacityError):
    """As many requests wait as the server is allowed to hold."""

    status = 429
    code = "queue_full"
    type = "rate_limit_error"


class NotReadyError(CapacityError):
    """The model is still loading."""

    code = "not_ready"


class DrainingError(CapacityError):
    """The server is shutting down and takes no new requests."""

    code = "draining"


class EngineDownError(CapacityError):
    """The engine has stopped and will not come back in this process."""

    code = "engine_down"


class CancelledRequestError(TrioletError):
    """A running request was ended from outside; ``code`` is the cause."""

    status = 499
    code = "cancelled"
    type = "request_cancelled_error"

    def __init__(self, message: str, *, cause: str) -> None:
        super().__init__(message)
        # The cause is the code on the wire: a client tells "shutdown" from "slow_client".
        self.code = cause  # type: ignore[misc]


class RequestTimeoutError(CancelledRequestError):
    """The deadline of the request passed."""

    status = 504

    def __init__(self, message: str) -> None:
        super().__init__(message, cause="timeout")


class EngineError(TrioletError):
    """The engine failed while it computed this request."""

    code = "engine_error"


class OutputError(TrioletError):
    """The tokens of this request could not be turned into text."""

    code = "output_error"


class StartupError(TrioletError):
    """The server cannot start as it was asked to."""

    code = "startup_error"


class ConfigError(StartupError):
    """A setting is impossible, alone or together with another."""

    code = "config_error"


class ModelLoadError(StartupError):
    """The model's files are missing, broken, or do not fit."""

    code = "model_load_failed"


class UnsupportedModelError(StartupError):
    """The engine would compute this architecture wrongly, so it refuses it."""

    code = "model_unsupported"
