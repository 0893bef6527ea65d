"""Errors as OpenAI's clients expect them, whatever went wrong."""

import json
import re
from collections.abc import Mapping
from typing import Any

from fastapi import FastAPI, Request, Response
from fastapi.exceptions import HTTPException, RequestValidationError
from starlette.exceptions import HTTPException as AnyHTTPException

from jkvq.engine.prompt import PromptTooLong
from jkvq.support.arguments import shown
from jkvq.support.errors import UserError

_KINDS = {401: "authentication_error", 429: "rate_limit_error"}
_FIELD = re.compile(r"(\w+)=")  # with which sentences begin that refuse one


class ApiError(HTTPException):
    """An answer that is an error.

    message: one sentence.
    param: the field of the body that is to blame.
    code: by which programs tell errors apart.
    """

    def __init__(
        self,
        status: int,
        message: str,
        *,
        param: str | None = None,
        code: str | None = None,
        headers: Mapping[str, str] | None = None,
    ):
        super().__init__(status, message, headers)
        self.param, self.code = param, code


def error_body(error: AnyHTTPException) -> dict[str, Any]:
    """The object that tells a client of an error."""
    server = "server_error" if error.status_code >= 500 else "invalid_request_error"
    return {
        "error": {
            "message": error.detail,
            "type": _KINDS.get(error.status_code, server),
            "param": getattr(error, "param", None),
            "code": getattr(error, "code", None),
        }
    }


def error_response(error: AnyHTTPException) -> Response:
    """The same as an answer."""
    # In ASCII: a chat template may repeat what a client has sent, which may be no valid Unicode.
    body = json.dumps(error_body(error))
    return Response(body, error.status_code, error.headers, "application/json")


def refused(error: UserError) -> ApiError:
    """What its author can mend."""
    field = _FIELD.match(str(error))
    code = "context_length_exceeded" if isinstance(error, PromptTooLong) else None
    return ApiError(400, str(error), param=field[1] if field else None, code=code)


def add_handlers(app: FastAPI) -> None:
    """Lets every error of an app have OpenAI's form."""

    @app.exception_handler(UserError)
    async def _(request: Request, error: UserError) -> Response:
        return error_response(refused(error))

    @app.exception_handler(RequestValidationError)
    async def _(request: Request, error: RequestValidationError) -> Response:
        return error_response(_malformed(error.body, error.errors()))

    @app.exception_handler(AnyHTTPException)
    async def _(request: Request, error: AnyHTTPException) -> Response:
        if not isinstance(error, ApiError):
            error = _unrouted(request, error)
        return error_response(error)

    @app.exception_handler(Exception)
    async def _(request: Request, error: Exception) -> Response:
        # Starlette raises it again for the log, at which uvicorn closes the connection.
        message = "the server failed at this request; its log says why"
        return error_response(ApiError(500, message, headers={"Connection": "close"}))


def _unrouted(request: Request, error: AnyHTTPException) -> ApiError:
    """What FastAPI has refused by itself."""
    place = shown(request.url.path)
    sentences = {
        404: f"there is nothing at {place}: see /openapi.json for what there is",
        405: f"{request.method} is no method of {place}: use {(error.headers or {}).get('Allow')}",
        400: "the body cannot be read as JSON: send an object, as application/json",
    }
    status = error.status_code
    return ApiError(status, sentences.get(status, error.detail), headers=error.headers)


def _malformed(body: Any, problems: Any) -> ApiError:
    """A body that is not what its endpoint takes: the first field that is wrong in it."""
    place, value = _found(body, problems[0]["loc"])
    alike = [each for each in problems if _found(body, each["loc"])[0] == place]
    kind = problems[0]["type"]
    param = place.split(".")[0].split("[")[0] or None
    if kind == "json_invalid":
        where = problems[0]["loc"][-1]
        message = f"the body is no JSON: {problems[0]['ctx']['error']} at character {where}"
    elif kind == "missing":
        needed = problems[0]["loc"][-1]
        param = param or str(needed)
        message = f"{place or 'the body'} has no {needed}, which is needed here"
        if needed == "body":
            param, message = None, "the request has no body: send a JSON object"
    elif isinstance(value, bytes):
        message = "the body was not sent as JSON: add the header Content-Type: application/json"
    elif not place:
        message = f"the body is {shown(value)}: send a JSON object, in valid Unicode"
    elif kind == "extra_forbidden":
        message = f"{place}={shown(value)}: jkvq does not have this; leave it out"
    else:
        allowed = (each["msg"].removeprefix("Input should be ") for each in alike)
        message = f"{place}={shown(value)}: {' or '.join(dict.fromkeys(allowed))}"
    return ApiError(400, message, param=param)


def _found(body: Any, location: tuple[str | int, ...]) -> tuple[str, Any]:
    """The place of an error as one writes it, such as messages[0].role, and what is there.

    Locations go on where the body does not: with fields that are missing and kinds of values.
    """
    place, value = "", body
    for part in location[1:]:
        if isinstance(value, dict) and part in value:
            place += f".{part}" if place else str(part)
            value = value[part]
        elif isinstance(value, list) and isinstance(part, int) and part < len(value):
            place += f"[{part}]"
            value = value[part]
        else:
            break
    return place, value
