"""Every error that aioenv raises or reports, and what each becomes on the wire.

AioenvError
├── CallerError             the request can't be served as it stands; sending it again won't help
│   ├── BadRequest          400  not JSON, a wrong type, a missing key, a bad id, an unknown parameter
│   ├── UnknownEnv          404
│   ├── UnknownTask         404
│   ├── UnknownInstance     404
│   ├── InstanceConflict    409  the id is in use for another task, env or params
│   ├── InstanceGone        410  it lived here and ended; the message says why
│   └── TooLarge            413
├── EnvError                500  env code raised; the instance lives on; the message is its traceback
├── Busy                    503  nothing wrong with the request: send it again after `retry_after` seconds
│   ├── AtCapacity
│   ├── Starting
│   └── Draining
├── StepTimeout             504  this very call passed its limit; its world was killed
├── InternalError           500  aioenv's own fault: please report it
└── CallFailed              raised by the client only, when it was asked to raise instead of falling back
"""

from __future__ import annotations

from typing import Any


class AioenvError(Exception):
    """Base of all errors here. `str(error)` is the text that a person reads.

    Its place on the wire: `status` (HTTP; None for what never was a reply), `code` (the protocol's name for it),
    `retryable` (the same request may succeed later) and `instance_gone` (the instance will never answer again).
    """

    status: int | None = 500
    code: str = "internal_error"
    retryable: bool = False
    instance_gone: bool = False

    def payload(self) -> dict[str, Any]:
        """The JSON body of a failed reply, as protocol and client know it."""
        message = str(self)
        return {
            "success": False,
            "detail": message,
            "error": {
                "code": self.code,
                "message": message,
                "retryable": self.retryable,
                "instance_gone": self.instance_gone,
            },
        }


class CallerError(AioenvError):
    status = 400
    code = "bad_request"


class BadRequest(CallerError):
    pass


class UnknownEnv(CallerError):
    status = 404
    code = "unknown_env"


class UnknownTask(CallerError):
    status = 404
    code = "unknown_task"


class UnknownInstance(CallerError):
    status = 404
    code = "unknown_instance"


class InstanceConflict(CallerError):
    status = 409
    code = "instance_conflict"


class InstanceGone(CallerError):
    status = 410
    code = "instance_gone"
    instance_gone = True


class TooLarge(CallerError):
    status = 413
    code = "too_large"


class EnvError(AioenvError):
    code = "env_error"


class Busy(AioenvError):
    """The service can't take the call now; `retry_after` is in seconds."""

    status = 503
    code = "at_capacity"
    retryable = True

    def __init__(self, message: str, retry_after: int = 5) -> None:
        super().__init__(message)
        self.retry_after = retry_after


class AtCapacity(Busy):
    pass


class Starting(Busy):
    code = "starting"


class Draining(Busy):
    code = "draining"


class StepTimeout(AioenvError):
    status = 504
    code = "step_timeout"
    instance_gone = True


class InternalError(AioenvError):
    pass


class CallFailed(AioenvError):
    """A client call that failed for good (`EnvClient(on_error="raise")`).

    `code`, `retryable` and `instance_gone` are the server's, or the client's own for what never reached it;
    `status` is None where no HTTP reply came.
    """

    def __init__(
        self,
        message: str,
        *,
        code: str,
        status: int | None = None,
        retryable: bool = False,
        instance_gone: bool = False,
        tries: int = 1,
        seconds: float = 0.0,
    ) -> None:
        super().__init__(message)
        self.message = message
        self.code = code
        self.status = status
        self.retryable = retryable
        self.instance_gone = instance_gone
        self.tries = tries
        self.seconds = seconds

    def __reduce__(self) -> tuple[Any, ...]:
        # Trainers send exceptions between processes; the default forgets keyword arguments.
        return _call_failed, (self.message, {**self.__dict__})


def _call_failed(message: str, details: dict[str, Any]) -> CallFailed:
    return CallFailed(**{**details, "message": message})
