"""What the bodies of requests look like. What they may ask for is `jkvq.openai.body`'s to say."""

from typing import Annotated, Any, Literal

from pydantic import BaseModel, ConfigDict, Field

from jkvq.engine.sampling import MOST_TOPS
from jkvq.support.arguments import INT32

# Every token is looked at for all of them, between two tokens of everyone else.
_Stop = Annotated[str, Field(max_length=1000)]
_Stops = Annotated[list[_Stop], Field(max_length=16)]
_Tokens = Annotated[int, Field(ge=1, le=INT32)]
_Tops = Annotated[int, Field(ge=0, le=MOST_TOPS)]
_MOST_TEXTS = 128  # of one prompt


class _Body(BaseModel):
    """Types are as JSON has them; other fields are looked at later."""

    model_config = ConfigDict(strict=True, extra="allow")


class StreamOptions(_Body):
    """What a stream has besides the text."""

    include_usage: bool | None = None


class _Asked(_Body):
    """What both kinds of requests may have."""

    model: str | None = None
    n: Annotated[int, Field(ge=1, le=_MOST_TEXTS)] | None = None
    stop: _Stop | _Stops | None = None
    seed: int | None = None
    temperature: float | None = None
    top_p: float | None = None
    top_k: int | None = None
    min_p: float | None = None
    repetition_penalty: float | None = None
    frequency_penalty: float | None = None
    presence_penalty: float | None = None
    logit_bias: dict[str, float] | None = None
    ignore_eos: bool | None = None
    stream: bool | None = None
    stream_options: StreamOptions | None = None


class ContentPart(_Body):
    """A part of a message."""

    type: str
    text: str | None = None


class Message(_Body):
    """A message of a conversation."""

    role: str
    content: str | list[ContentPart] | None = None
    tool_calls: list[dict[str, Any]] | None = None
    tool_call_id: str | None = None


class Function(_Body):
    """A function that a chat may call."""

    name: Annotated[str, Field(pattern="^[a-zA-Z0-9_-]{1,64}$")]
    description: str | None = None
    parameters: dict[str, Any] | None = None


class Tool(_Body):
    """What a chat may call: a function."""

    type: Literal["function"]
    function: Function


class Named(_Body):
    """A function by its name."""

    name: str


class Chosen(_Body):
    """The tool that must be called."""

    type: Literal["function"]
    function: Named


class ResponseFormat(_Body):
    """What a chat's answer must look like."""

    type: Literal["text", "json_object", "json_schema"]
    json_schema: dict[str, Any] | None = None


class ChatBody(_Asked):
    """What /v1/chat/completions takes."""

    messages: list[Message]
    max_tokens: _Tokens | None = None
    max_completion_tokens: _Tokens | None = None
    logprobs: bool | None = None
    top_logprobs: _Tops | None = None
    response_format: ResponseFormat | None = None
    tools: Annotated[list[Tool], Field(max_length=128)] | None = None
    tool_choice: Literal["none", "auto", "required"] | Chosen | None = None
    parallel_tool_calls: bool | None = None


class CompletionBody(_Asked):
    """What /v1/completions takes."""

    prompt: str | list[str] | list[int] | list[list[int]]
    max_tokens: Annotated[int, Field(ge=0, le=INT32)] | None = None
    logprobs: _Tops | None = None
    echo: bool | None = None


class TokenizeBody(_Body):
    """What /tokenize takes: a prompt as it is, or messages, which get the chat template."""

    model: str | None = None
    prompt: str | None = None
    messages: list[Message] | None = None


def as_sent(body: _Body) -> dict[str, Any]:
    """A body's fields, none but those that were sent."""
    return body.model_dump(exclude_unset=True)
