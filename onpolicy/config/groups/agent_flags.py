"""The flags of agents: who acts in an episode, and the handling of failed episodes."""

from dataclasses import dataclass, fields
from typing import Annotated, Any, Literal

from fallback_correction.ranges import ReadBy, above, at_least, at_most
from onpolicy.config.flags import also
from onpolicy.config.kinds import Seconds, json_object
from onpolicy.config.rules import NO_RESULT, Against, Facts, Parsed


def has_agent(run: "Facts | AgentConfig") -> bool:
    """Return whether anything but the policy decides the content of an episode."""
    return bool(run.custom_generate_function_path or run.environment) or has_gateway(run)


def has_gateway(run: "Facts | AgentConfig") -> bool:
    """Return whether agents act through the gateway."""
    of_tools = run.environment.startswith("openenv-tools:")
    return bool(run.custom_agent_function_path) or of_tools or has_programs(run)


def has_programs(run: "Facts | AgentConfig") -> bool:
    """Return whether programs in processes of their own act through the gateway."""
    return bool(run.agent_command) or is_of_verifiers(run)


def has_workers(run: "Facts | AgentConfig") -> bool:
    """Return whether worker processes run the episodes' function."""
    return bool(run.custom_generate_function_path or run.environment or run.agent_command)


def is_of_verifiers(run: "Facts | AgentConfig") -> bool:
    """Return whether episodes use an environment of the verifiers package."""
    return bool(run.environment.startswith("verifiers:"))


def template_options(text: str) -> dict[str, Any]:
    """Return the value of --chat-template-kwargs. Raises ConfigError if it is no JSON object."""
    return json_object(text, "--chat-template-kwargs", '{"enable_thinking": false}')


TemplateOptions = Annotated[str, Parsed(template_options)]
"""Variables of a chat template, as JSON text."""

BY_AGENT = ReadBy(
    "--custom-generate-function-path, --custom-agent-function-path, --agent-command or --environment",
    has_agent,
)
BY_FUNCTION = ReadBy(
    "--custom-generate-function-path, --agent-command or --environment", has_workers
)
BY_GATEWAY = ReadBy(
    "--custom-agent-function-path, --agent-command, or --environment with verifiers:NAME or "
    "openenv-tools:URL",
    has_gateway,
)
BY_PROGRAMS = ReadBy("--agent-command or --environment verifiers:NAME", has_programs)
BY_ENVIRONMENT = ReadBy("--environment", lambda run: run.environment)
BY_STEPS = ReadBy(
    "--environment with a class or openenv:URL",
    lambda run: run.environment and not has_gateway(run),
)


@dataclass(frozen=True, kw_only=True)
class GatewayConfig:
    gateway_host: str = "127.0.0.1"
    """Address that the gateway listens on, for agents on other hosts. Clients need a session's key."""

    tool_call_parser: str = ""
    """SGLang parser that finds tool calls in answers, as in SGLang's --tool-call-parser. Without one, a
    request with tools is refused."""

    reasoning_parser: str = ""
    """SGLang parser that finds reasoning in answers, as in SGLang's --reasoning-parser. By default
    reasoning is part of the content."""

    chat_drift: Literal["new", "words", "keep", "refuse"] = "new"
    """What happens if the chat template renders earlier messages of a chat differently from the tokens
    that were sampled. `new`: a new trajectory begins at the first token that differs. `words`: so it
    does, unless only special tokens, space and order differ; then the tokens stay. `keep`: they
    stay, and the new messages follow them. `refuse`: the episode fails. All cases are counted
    (docs/gateway.md)."""


BY_SESSIONS = ReadBy("--sessions", lambda run: run.sessions)


def gateway_read_by(reader: ReadBy) -> dict[str, list[ReadBy]]:
    """Return the flags of the gateway, each with a note on its reader."""
    return {field.name: [reader] for field in fields(GatewayConfig)}


@also(**gateway_read_by(BY_SESSIONS))
@dataclass(frozen=True, kw_only=True)
class SessionsConfig(GatewayConfig):
    sessions: bool = False
    """Also serve the gateway for agents: POST /sessions opens a session, and DELETE ends it and returns
    the sampled trajectories (docs/gateway.md)."""

    chat_template_kwargs: Annotated[TemplateOptions, BY_SESSIONS] = "{}"
    """Variables of the chat template in sessions as a JSON object, such as '{"enable_thinking": false}'.
    A variable that the template does not read is refused."""

    session_time_limit: Annotated[Seconds, BY_SESSIONS] = 3600.0
    """Seconds after which a session ends by itself, not counting sampling, and seconds for which its
    trajectories are kept afterwards."""


@also(**gateway_read_by(BY_GATEWAY))
@dataclass(frozen=True, kw_only=True)
class AgentConfig(GatewayConfig):
    custom_generate_function_path: str = ""
    """Your own rollout function: package.module.function or path/to/file.py:function, an `async def
    function(turns, prompt)` (docs/agents.md). By default an episode is one response."""

    agent_workers: Annotated[
        int | None, at_least(0), at_most(256), BY_FUNCTION, NO_RESULT,
        Against(lambda run: run.agent_workers == 0 and has_programs(run),
            "programs end with the worker that starts them",
            "Give at least 1."),
    ] = None  # fmt: skip
    """Number of processes that run the function, each with a part of the episodes. The default is one
    for every two cores, at most 16. 0 runs the function in the run's own process, where a function that
    computes blocks everything else."""

    agent_hang_limit: Annotated[Seconds, BY_FUNCTION, NO_RESULT] = 60.0
    """Seconds that the function may compute without awaiting anything. After that its process is killed
    and replaced, and the episodes in it have failed."""

    custom_agent_function_path: Annotated[
        str,
        Against(lambda run: bool(run.custom_generate_function_path),
            "each of the two rolls all prompts out",
            "Give one of them."),
    ] = ""  # fmt: skip
    """Your own agent: package.module.function or path/to/file.py:function, a `def function(base_url,
    api_key, prompt)`, async or not. It acts through an OpenAI or Anthropic client, and returns a reward
    or nothing (docs/gateway.md)."""

    agent_command: Annotated[
        str,
        Against(lambda run: run.custom_generate_function_path or run.custom_agent_function_path,
            "each of it and {found} rolls all prompts out", "Give one of them."),
    ] = ""  # fmt: skip
    """Your own agent as a program in any Python or language, such as 'venv/bin/python agent.py'. It is
    started for each episode, with the gateway's address and the row, and acts through an OpenAI or
    Anthropic client (docs/gateway.md)."""

    agent_command_repeats: Annotated[
        bool, ReadBy("--agent-command", lambda run: run.agent_command)
    ] = False
    """Have a program of --agent-command play one episode after another: it reads a line for each, and
    answers by one."""

    agent_programs: Annotated[
        int | None, at_least(1), at_most(65536), BY_PROGRAMS, NO_RESULT
    ] = None  # fmt: skip
    """Largest number of programs at a time. Other episodes wait, outside their time limit. The default
    is four for each core."""

    environment: Annotated[
        str,
        Against(lambda run: run.custom_generate_function_path or run.custom_agent_function_path
                or run.agent_command,
            "each of it and {found} rolls all prompts out", "Give one of them."),
        Against(lambda run: " and ".join(run.config.reward.sources),
            "the environment says the rewards, and {found} would", "Leave out the latter."),
        Against(lambda run: is_of_verifiers(run)
            and (run.prompt_data or run.eval_prompt_data or run.eval_config),
            "the prompts are those of its dataset, and not those of {found}",
            "Leave --prompt-data, --eval-prompt-data and --eval-config out."),
    ] = ""  # fmt: skip
    """Environment of the episodes: a class with reset and step (package.module.Class or
    path/to/file.py:Class), verifiers:NAME for a taskset of the verifiers package, which provides the
    prompts, openenv:URL for an OpenEnv server, or openenv-tools:URL for one whose actions are calls of
    MCP tools (docs/agents.md)."""

    environment_python: Annotated[str, ReadBy("--environment verifiers:NAME", is_of_verifiers)] = ""
    """Python in which verifiers 0.4 or newer and the environment are installed, such as
    venv/bin/python. The default is the one of the run."""

    environment_args: Annotated[
        str,
        Parsed(lambda text: json_object(text, "--environment-args", '{"max_turns": 3}')),
        BY_ENVIRONMENT,
    ] = "{}"
    """Arguments of the environment as a JSON object."""

    environment_rewards: Annotated[Literal["episode", "turn", "token"], BY_STEPS] = "episode"
    """What the rewards of steps are credited to. `episode`: their sum, to all sampled tokens. `turn`:
    each reward, to the last token of its action. `token`: each step returns a number per token."""

    rollout_max_context_len: Annotated[
        int | None, at_least(2), BY_AGENT,
        Against(lambda run: run.rollout_max_context_len <= run.rollout_max_response_len,
            "a prompt and --rollout-max-response-len={run.rollout_max_response_len} do not fit",
            "Raise the one, or lower the other."),
    ] = None  # fmt: skip
    """Largest number of tokens of an agent's sequence, given and sampled. The default is the model's
    context. Beyond it the function gets a ContextExceededError."""

    episode_time_limit: Annotated[float | None, above(0), at_most(1e9), BY_AGENT] = None
    """Seconds after which an episode counts as failed, not counting sampling. By default there is no
    limit."""

    episode_failures: Annotated[Literal["drop", "retry", "stop"], BY_AGENT] = "stop"
    """What happens to an episode whose function raises, returns nonsense or takes too long. `drop`: its
    group is trained on without it. `retry`: it begins again with other seeds, up to three times, and is
    then dropped. `stop`: the run ends with the error. All failures are counted; none gets a reward."""
