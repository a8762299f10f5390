"""Construction of a gateway and its agent from the flags of a run."""

from __future__ import annotations

import inspect
import logging
from collections.abc import Collection, Mapping, Sequence
from typing import Any

from transformers import PreTrainedTokenizerBase

from onpolicy.agents.gateway.gateway_server import Gateway
from onpolicy.agents.gateway.parsing import AnswerParser, bytes_reader
from onpolicy.agents.gateway.session import SessionRules
from onpolicy.agents.gateway.session_rollouter import Agent
from onpolicy.chat.template import make_template
from onpolicy.config.groups.agent_flags import GatewayConfig
from onpolicy.errors import ConfigError
from onpolicy.images.placing import ImagePlacer
from onpolicy.system.user_functions import load_function

FLAG = "--custom-agent-function-path"


def load_agent(path: str) -> Agent:
    """Return the agent at `path`. Raises ConfigError if its signature does not fit the call."""
    function = load_function(path, FLAG)
    try:
        inspect.signature(function).bind("", "", None)
    except TypeError as error:
        raise ConfigError(
            f"{FLAG}={path}: {error}: it is called with the base URL, the key and the prompt. Make it "
            "`def function(base_url, api_key, prompt)`."
        ) from error
    return function


def require_parsers(config: GatewayConfig) -> None:
    """Raise ConfigError for names of parsers that SGLang does not have."""
    if config.tool_call_parser:
        from sglang.srt.function_call.function_call_parser import FunctionCallParser

        known = FunctionCallParser.ToolCallParserEnum
        _require_known("--tool-call-parser", config.tool_call_parser, known)
    if config.reasoning_parser:
        from sglang.srt.parser.reasoning_parser import ReasoningParser

        known = ReasoningParser.DetectorMap
        _require_known("--reasoning-parser", config.reasoning_parser, known)


def _require_known(flag: str, name: str, known: Collection[str]) -> None:
    if name not in known:
        raise ConfigError(
            f"{flag}={name}: SGLang has no such parser. Known: {', '.join(sorted(known))}."
        )


def make_gateway(
    config: GatewayConfig,
    tokenizer: PreTrainedTokenizerBase,
    stop_token_ids: Sequence[int],
    options: Mapping[str, Any],
    placer: ImagePlacer | None = None,
) -> Gateway:
    """Return a gateway that listens when the first session is opened.

    options: variables of the chat template. placer: of images; None refuses them. Raises ConfigError
    for an option that the template does not read.
    """
    for client in ("httpx", "httpx2"):  # they log a line for each request
        logging.getLogger(client).setLevel(logging.WARNING)
    # The parsers log a traceback for each answer that is none of theirs.
    logging.getLogger("sglang.srt.function_call").setLevel(logging.CRITICAL)
    rule = config.chat_drift
    rules = SessionRules(
        template=make_template(
            tokenizer, stop_token_ids, rule=rule, options=options, placer=placer
        ),
        parser=AnswerParser(
            tool_call_parser=config.tool_call_parser,
            reasoning_parser=config.reasoning_parser,
            read_bytes=bytes_reader(tokenizer),
        ),
    )
    return Gateway(rules, config.gateway_host)
