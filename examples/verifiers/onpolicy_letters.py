"""An environment of the `verifiers` package, as its users write them; it knows nothing of onpolicy.

The policy is to find a letter. After each guess it is told whether the letter comes before ("<") or
after (">") in the alphabet; "!" says that the guess was no letter.
"""

import verifiers as vf
from datasets import Dataset

LETTERS = "abcdef"


class FindLetter(vf.MultiTurnEnv):
    async def env_response(self, messages, state, **kwargs):
        guess, letter = messages[-1].content, state["answer"]
        if guess == letter:
            state["final_env_response"] = hint = [{"role": "user", "content": "="}]
            return hint
        if guess not in LETTERS:
            return [{"role": "user", "content": "!"}]
        return [{"role": "user", "content": "<" if letter < guess else ">"}]


def found(completion, answer) -> float:
    """1 if the last guess is the letter."""
    guesses = [message.content for message in completion if message.role == "assistant"]
    return float(bool(guesses) and guesses[-1] == answer)


def load_environment(max_turns: int = 3) -> vf.Environment:
    """Returns the environment; who halves the letters finds one of six in three guesses."""
    return FindLetter(
        dataset=Dataset.from_list([{"question": "?", "answer": letter} for letter in LETTERS]),
        rubric=vf.Rubric(funcs=[found]),
        sampling_args={"max_tokens": 2},
        max_turns=max_turns,
    )
