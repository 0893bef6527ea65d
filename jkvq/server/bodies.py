"""What the bodies of requests look like. What they may ask for is `jkvq.openai.body`'s to say."""

from typing import Annotated, Any, Literal

from pydantic import BaseModel, ConfigDict, Field

from jkvq.engine.sampling import MOST_TOPS
from jkvq.support.arguments import INT32

# Every token is looked at for all of them, between two tokens of everyone else.
_Stop = Annotated[str, Field(max_length=1000)]
_Stops = Annotated[list[_Stop], Field(max_length=16)]
_Tokens = Annotated[int, Field(ge=1, le=INT32)]
_AnyTokens = Annotated[int, Field(ge=0, le=INT32)]  # none at all go with echo
_Tops = Annotated[int, Field(ge=0, le=MOST_TOPS)]
_MOST_TEXTS = 128  # of one prompt
_FIRST = Field(fail_fast=True)  # what is wrong: a list of a million errors takes a while
_Texts = Annotated[list[str], _FIRST]
_Prompt = Annotated[list[int], _FIRST]


class _Body(BaseModel):
    """Types are as JSON has them; other fields are looked at later."""

    model_config = ConfigDict(strict=True, extra="allow")


class _Closed(_Body):
    """Other fields are refused."""

    model_config = ConfigDict(extra="forbid")


class StreamOptions(_Closed):
    """What a stream has besides the text."""

    include_usage: bool | None = None
    include_obfuscation: bool | None = None  # there is none, which changes no answer
    continuous_usage_stats: bool | None = None  # of vLLM's clients: the numbers come at the end


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
    name: str | None = None
    content: str | Annotated[list[ContentPart], _FIRST] | None = None
    tool_calls: list[dict[str, Any]] | None = None
    tool_call_id: str | None = None


class Function(_Closed):
    """A function that a chat may call."""

    name: Annotated[str, Field(pattern="^[a-zA-Z0-9_-]{1,64}$")]
    description: str | None = None
    parameters: dict[str, Any] | None = None
    strict: bool | None = None  # arguments always follow their schema


class Tool(_Closed):
    """What a chat may call: a function."""

    type: Literal["function"]
    function: Function


class Named(_Closed):
    """A function by its name."""

    name: str


class Chosen(_Closed):
    """The tool that must be called."""

    type: Literal["function"]
    function: Named


class NamedSchema(_Closed):
    """A schema that an answer follows, always strictly."""

    name: str | None = None
    description: str | None = None
    described: Annotated[dict[str, Any] | None, Field(alias="schema")] = None
    strict: bool | None = None


class ResponseFormat(_Closed):
    """What a chat's answer must look like."""

    type: Literal["text", "json_object", "json_schema"]
    json_schema: NamedSchema | None = None


class ChatBody(_Asked):
    """What /v1/chat/completions takes."""

    messages: Annotated[list[Message], _FIRST]
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

    prompt: str | _Texts | _Prompt | Annotated[list[_Prompt], _FIRST]
    max_tokens: _AnyTokens | None = None
    max_completion_tokens: _AnyTokens | None = None
    logprobs: _Tops | None = None
    echo: bool | None = None


class TokenizeBody(_Closed):
    """What /tokenize takes: a prompt as it is, or messages, which get the chat template."""

    model: str | None = None
    prompt: str | None = None
    messages: Annotated[list[Message], _FIRST] | None = None
    # Of vLLM's clients: what is done anyway
    add_special_tokens: Literal[True] | None = None
    add_generation_prompt: Literal[True] | None = None


def as_sent(body: _Body) -> dict[str, Any]:
    """A body's fields, none but those that were sent."""
    return body.model_dump(exclude_unset=True, by_alias=True)
