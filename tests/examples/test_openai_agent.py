"""The agent that is written with the openai package: what it does with answers."""

import random
import re
from dataclasses import replace
from pathlib import Path

from onpolicy.agents.gateway.gateway_server import Gateway
from onpolicy.agents.gateway.parsing import AnswerParser
from onpolicy.agents.gateway.session import SessionRules
from onpolicy.agents.gateway.session_rollouter import AgentRollouter, in_thread
from onpolicy.system.user_functions import load_function
from tests.support.acting import PROMPT, Says, SpelledOut, decode, roll_out

EXAMPLE = Path(__file__).parents[2] / "examples/openai_agent"


def rolled_out(*answers):
    parser = AnswerParser(tool_call_parser="pythonic")
    rules = SessionRules(template=SpelledOut(), parser=parser)
    act = load_function(f"{EXAMPLE}/agent.py:act", "--custom-agent-function-path")
    prompt = replace(PROMPT, text="12*3=", label="36")
    return roll_out(
        AgentRollouter(lambda: Gateway(rules), in_thread(act)), Says(answers), prompt=prompt
    )


def test_the_agent_calls_its_tool_and_is_paid_for_the_right_product():
    called = rolled_out("[mul(a=12, b=3)]", "36")
    (trajectory,) = called.trajectories
    assert decode(trajectory.response_ids) == "[mul(a=12, b=3)]<stop>36<stop>"
    assert decode(trajectory.token_ids).endswith("<stop>tool:36|assistant:36<stop>")
    assert called.samples[0].reward == 1.0
    assert rolled_out("[mul(a=12, b=4)]", "48").samples[0].reward == 0.0
    assert rolled_out("36").samples[0].reward == 1.0
    assert rolled_out("[mul(a=12)]").samples[0].reward == 0.0


def test_what_the_model_has_seen_is_what_its_template_writes():
    tokenizer = load_function(f"{EXAMPLE}/prepare.py:tokenizer_with_template", "example")()
    call = {"type": "function", "function": {"name": "mul", "arguments": {"a": 347, "b": 89}}}
    messages = [
        {"role": "user", "content": "347*89="},
        {"role": "assistant", "content": "", "tool_calls": [call]},
        {"role": "tool", "content": "30883"},
    ]
    text = tokenizer.apply_chat_template(messages, tokenize=False, add_generation_prompt=True)
    assert text == "347*89=[mul(a=347,b=89)]<eos>(30883)"
    assert tokenizer.decode(tokenizer.encode(text)) == text
    seen, rng = load_function(f"{EXAMPLE}/prepare.py:seen", "example"), random.Random(0)
    rows = [seen(rng) for _ in range(400)]
    assert all(
        tokenizer.pad_token_id not in tokenizer.encode("".join(row.values())) for row in rows
    )
    shapes = {re.sub(r"\d+", "N", f"{row['prompt']}|{row['response']}") for row in rows}
    call = "[mul(a=N,b=N)]"
    assert shapes == {f"N*N=|{call}", "N*N=|N", f"N*N={call}<eos>(N)|N"}
