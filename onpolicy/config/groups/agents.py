"""Who acts in an episode, and what becomes of one that fails."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Annotated, Literal

from fallback_correction.ranges import ReadBy, at_least
from onpolicy.config.kinds import Count, Seconds
from onpolicy.config.rules import Against, Facts


def has_agent(run: Facts | AgentConfig) -> bool:
    """Whether anybody but the policy decides what an episode is made of."""
    return bool(run.custom_generate_function_path) or has_gateway(run)


def has_gateway(run: Facts | AgentConfig) -> bool:
    """Whether agents act through the gateway."""
    return bool(run.custom_agent_function_path)


BY_AGENT = ReadBy("--custom-generate-function-path or --custom-agent-function-path", has_agent)
BY_GATEWAY = ReadBy("--custom-agent-function-path", has_gateway)


@dataclass(frozen=True, kw_only=True)
class AgentConfig:
    custom_generate_function_path: str = ""
    """Own function that rolls prompts out: package.module.function or path/to/file.py:function, an
    `async def function(turns, prompt)` (docs/agents.md)."""

    custom_agent_function_path: Annotated[
        str,
        Against(lambda run: bool(run.custom_generate_function_path),
            "each of the two rolls all prompts out",
            "Give one of them."),
    ] = ""  # fmt: skip
    """Own agent that rolls prompts out: package.module.function or path/to/file.py:function, a
    `def function(base_url, api_key, prompt)`, async or not, which acts through a client of OpenAI's or
    Anthropic's and returns a reward, or nothing (docs/agents.md)."""

    gateway_host: Annotated[str, BY_GATEWAY] = "127.0.0.1"
    """Address that the gateway listens at, for agents that run elsewhere; whoever reaches it needs the
    key of a session."""

    gateway_model_name: Annotated[str, BY_GATEWAY] = "policy"
    """What agents call the model."""

    gateway_parallel_answers: Annotated[Count, BY_GATEWAY] = 64
    """Most answers of one episode that are sampled at the same time; an agent that asks for more gets
    the error 429."""

    tool_call_parser: Annotated[str, BY_GATEWAY] = ""
    """Parser of SGLang's that finds tool calls in answers, by the name that its --tool-call-parser has.
    Without one a request with tools is refused."""

    reasoning_parser: Annotated[str, BY_GATEWAY] = ""
    """Parser of SGLang's that finds reasoning in answers, by the name in its --reasoning-parser."""

    chat_drift: Annotated[Literal["new", "keep", "refuse"], BY_GATEWAY] = "new"
    """What becomes of a chat whose past the chat template writes anew. new: a new trajectory begins at
    the first token that differs. keep: the tokens stay, and what is new follows them. refuse: the
    episode fails (--episode-failures). All are counted (docs/agents.md)."""

    rollout_max_context_len: Annotated[
        int | None, at_least(2), BY_AGENT,
        Against(lambda run: run.rollout_max_context_len <= run.rollout_max_response_len,
            "a prompt and --rollout-max-response-len={run.rollout_max_response_len} do not fit",
            "Raise the one, or lower the other."),
    ] = None  # fmt: skip
    """Most tokens of a sequence, given and sampled; the model's context if not given. Beyond it the
    function gets a ContextExceededError."""

    episode_time_limit: Annotated[Seconds | None, BY_AGENT] = None
    """Seconds that an episode may take besides sampling, before it counts as failed; no limit if not
    given."""

    episode_failures: Annotated[Literal["drop", "retry", "stop"], BY_AGENT] = "stop"
    """What becomes of an episode whose function raises, returns nonsense or takes too long. drop: its
    group is learnt from without it. retry: it begins anew with other seeds, three times at most, and is
    dropped then. stop: the run ends and says why. All are counted, and none is given a reward."""
