"""What the endpoints take, field by field. A field that is not here is refused by name; a null counts as absent.

Beyond OpenAI's own fields there are vLLM's (top_k, min_p, repetition_penalty, ignore_eos, return_token_ids, ...) and
three of ours: `speculation`, `draft_details`, `spec_decode_metrics`.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Annotated, Any, ClassVar, Literal, cast

from pydantic import Field, model_validator

from draftproof.serve.asked.fields import FIRST, Strict
from draftproof.serve.asked.messages import Message
from draftproof.serve.errors import FieldError

MOST_STOPS, LONGEST_STOP = 16, 16_384  # stop strings of a request, and characters of each
MOST_STOP_IDS, MOST_BIASES = 1024, 1024
MOST_CHOICES = 128  # prompts times n
MOST_MESSAGES = 4096  # of a chat: a template takes its time for each
INT32, INT64 = 2**31 - 1, 2**63 - 1

# Accepted because they ask for nothing that this server would do: whom it is for, what to remember elsewhere.
HARMLESS = (
    "user", "metadata", "store", "service_tier", "safety_identifier", "prompt_cache_key", "modalities",
)  # fmt: skip
# OpenAI's and vLLM's, not done here: a null is as good as their absence, a value is refused with this hint.
REFUSED = {
    "functions": "give tools",
    "function_call": "give tool_choice",
    "audio": "this server answers text",
    "prediction": "drafts come from the server's own drafter",
    "web_search_options": "this server searches nothing",
    "moderation": "this server moderates nothing",
    "prompt_cache_options": "the prefix cache needs no hints",
    "prompt_cache_retention": "the prefix cache needs no hints",
    "verbosity": "say it in the prompt",
    "suffix": "insertion is not supported",
    "best_of": "ask for n choices and choose",
    "prompt_logprobs": "only the answer's log-probabilities are reported",
    "guided_json": "give response_format",
    "guided_regex": "give response_format with a schema",
    "guided_choice": "give response_format with an enum",
    "guided_grammar": "give response_format with a schema",
    "structured_outputs": "give response_format",
    "logits_processors": "use logit_bias",
    "chat_template": "start the server with --chat-template",
    "documents": "put them into a message",
    "continue_final_message": "use /v1/completions",
    "truncate_prompt_tokens": "shorten the prompt",
    "use_beam_search": "beam search has no drafts",
    "priority": "requests are served in the order of arrival",
}

Ids = Annotated[list[Annotated[int, Field(ge=0, le=INT32)]], FIRST]
Strings = Annotated[list[Annotated[str, Field(min_length=1, max_length=LONGEST_STOP)]], Field(max_length=MOST_STOPS)]
Level = Literal["summary", "detailed"]


class StreamOptions(Strict):
    include_usage: bool = False
    continuous_usage_stats: bool = False


class Speculation(Strict):
    """budget: drafted tokens that the target verifies in a step at most; none, a chain, or a number."""

    budget: Literal["none", "chain"] | Annotated[int, Field(ge=0, le=4096)]


class Sampled(Strict):
    """What chats and completions share. Sampling that is None is the model's own default."""

    refused: ClassVar[Mapping[str, str]] = REFUSED
    model: str | None = None
    max_tokens: int | None = Field(None, ge=1, le=INT32)
    temperature: float | None = Field(None, ge=0, le=100)
    top_p: float | None = Field(None, gt=0, le=1)
    top_k: int | None = Field(None, ge=-1, le=INT32, description="0 and -1 switch it off")
    min_p: float | None = Field(None, ge=0, le=1)
    repetition_penalty: float | None = Field(None, ge=0.01, le=100)
    presence_penalty: float = Field(0.0, ge=-2, le=2)
    frequency_penalty: float = Field(0.0, ge=-2, le=2)
    logit_bias: dict[str, Annotated[float, Field(ge=-100, le=100)]] = Field({}, max_length=MOST_BIASES)
    seed: int | None = Field(None, ge=-INT64 - 1, le=INT64)
    n: int = Field(1, ge=1, le=MOST_CHOICES)
    stop: Annotated[str, Field(max_length=LONGEST_STOP)] | Strings = Field([])
    stop_token_ids: Ids = Field([], max_length=MOST_STOP_IDS)
    ignore_eos: bool = False
    min_tokens: int = Field(0, ge=0, le=INT32)
    skip_special_tokens: bool = True
    stream: bool = False
    stream_options: StreamOptions | None = None
    return_token_ids: bool = False
    speculation: Speculation | None = None
    draft_details: bool = Field(False, description="with stream: what every step drafted and accepted")
    spec_decode_metrics: Level | None = Field(None, description="acceptance of this request, in `metrics`")
    user: str | None = None
    metadata: dict[str, str] = Field({})
    store: Literal[False] = False
    service_tier: Literal["auto", "default"] = "auto"
    safety_identifier: str | None = None
    prompt_cache_key: str | None = None

    @property
    def stops(self) -> tuple[str, ...]:
        return tuple(s for s in ([self.stop] if isinstance(self.stop, str) else self.stop) if s)

    @model_validator(mode="after")
    def _require_sense(self) -> Sampled:
        if self.stream_options is not None and not self.stream:
            raise FieldError("stream_options", "stream_options is only allowed when stream is true")
        if self.draft_details and not self.stream:
            raise FieldError("draft_details", "draft_details is only allowed when stream is true")
        if self.spec_decode_metrics and self.n > 1:
            raise FieldError("spec_decode_metrics", "spec_decode_metrics is only allowed when n is 1")
        usage = self.stream_options is not None and self.stream_options.include_usage
        if self.spec_decode_metrics and self.stream and not usage:
            raise FieldError("spec_decode_metrics", "spec_decode_metrics comes with stream_options.include_usage")
        return self


class Function(Strict):
    name: str = Field(min_length=1, max_length=256)
    description: str | None = None
    parameters: dict[str, Any] | None = None
    strict_: bool = Field(False, alias="strict")


class Tool(Strict):
    type: Literal["function"]
    function: Function


class Named(Strict):
    name: str


class NamedTool(Strict):
    type: Literal["function"]
    function: Named


class JsonSchema(Strict):
    name: str
    description: str | None = None
    schema_: dict[str, Any] | None = Field(None, alias="schema")
    strict_: bool = Field(False, alias="strict")


class TextFormat(Strict):
    type: Literal["text", "json_object"]


class SchemaFormat(Strict):
    type: Literal["json_schema"]
    json_schema: JsonSchema


class ChatRequest(Sampled):
    messages: Annotated[list[Message], FIRST] = Field(min_length=1, max_length=MOST_MESSAGES)
    max_completion_tokens: int | None = Field(None, ge=1, le=INT32)
    logprobs: bool = False
    top_logprobs: int | None = Field(None, ge=0, le=20)
    response_format: Annotated[TextFormat | SchemaFormat, Field(discriminator="type")] | None = None
    tools: list[Tool] = Field([], max_length=128)
    tool_choice: Literal["auto", "none", "required"] | NamedTool | None = None
    parallel_tool_calls: bool = True
    chat_template_kwargs: dict[str, Any] = Field({})
    reasoning_effort: str | None = None
    include_reasoning: bool = True
    modalities: Annotated[list[Literal["text"]], FIRST] = Field(["text"])

    @model_validator(mode="after")
    def _require_unambiguous(self) -> ChatRequest:
        if self.max_tokens and self.max_completion_tokens and self.max_tokens != self.max_completion_tokens:
            raise FieldError("max_completion_tokens", "max_tokens and max_completion_tokens differ: give one of them")
        if self.top_logprobs is not None and not self.logprobs:
            raise FieldError("top_logprobs", "top_logprobs is only allowed when logprobs is true")
        names = [tool.function.name for tool in self.tools]
        if len(set(names)) < len(names):
            raise FieldError("tools", "two tools have the same name")
        if self.tool_choice not in (None, "none") and not self.tools:
            raise FieldError("tool_choice", "tool_choice is only allowed when tools are given")
        if isinstance(self.tool_choice, NamedTool) and self.tool_choice.function.name not in names:
            raise FieldError("tool_choice", "tool_choice names a function that is none of the tools")
        return self


class CompletionRequest(Sampled):
    prompt: str | Ids | Annotated[list[str], FIRST] | Annotated[list[Ids], FIRST]
    logprobs: int | None = Field(None, ge=0, le=20)
    echo: Literal[False] = False
    add_special_tokens: bool = True

    @property
    def prompts(self) -> list[str | list[int]]:
        single = isinstance(self.prompt, str) or (self.prompt and isinstance(self.prompt[0], int))
        return cast(list[str | list[int]], [self.prompt] if single else self.prompt)

    @model_validator(mode="after")
    def _require_prompts(self) -> CompletionRequest:
        if not self.prompt:
            raise FieldError("prompt", "prompt is empty")
        if len(self.prompts) * self.n > MOST_CHOICES:
            raise FieldError("n", f"prompts times n may be {MOST_CHOICES} at most")
        if self.spec_decode_metrics and len(self.prompts) > 1:
            raise FieldError("spec_decode_metrics", "spec_decode_metrics is only allowed with one prompt")
        return self


class TokenizeRequest(Strict):
    """Either a prompt, or messages with what a chat's template takes."""

    model: str | None = None
    prompt: str | None = None
    messages: Annotated[list[Message], FIRST] | None = Field(None, min_length=1, max_length=MOST_MESSAGES)
    tools: list[Tool] = Field([], max_length=128)
    add_generation_prompt: bool = True
    add_special_tokens: bool | None = Field(None, description="default: true for a prompt, false for messages")
    chat_template_kwargs: dict[str, Any] = Field({})
    return_token_strs: bool = False

    @model_validator(mode="after")
    def _require_one(self) -> TokenizeRequest:
        if (self.prompt is None) == (self.messages is None):
            raise FieldError("prompt", "give either prompt or messages")
        if self.prompt is not None and self.model_fields_set & {
            "tools", "add_generation_prompt", "chat_template_kwargs"
        }:  # fmt: skip
            raise FieldError("tools", "tools, add_generation_prompt and chat_template_kwargs belong to messages")
        return self


class DetokenizeRequest(Strict):
    model: str | None = None
    tokens: Ids
