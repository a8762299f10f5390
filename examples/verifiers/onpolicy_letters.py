"""An environment of the `verifiers` package (0.4), as users write them, knowing nothing of onpolicy.

The policy is to find a letter. After each guess it is told whether the letter comes before ("<") or
after (">") in the alphabet; "!" says that the guess was no letter.
"""

import verifiers.v1 as vf

__all__ = ["FindLetter", "Letters"]

LETTERS = "abcdef"


class Letter(vf.TaskData):
    answer: str


class FindLetterTask(vf.Task[Letter, vf.State, vf.TaskConfig]):
    @vf.reward()
    async def found(self, trace) -> float:
        """1 if the last guess is the letter."""
        return float(trace.last_reply == self.data.answer)


class Letters(vf.Taskset[FindLetterTask, vf.TasksetConfig]):
    def load(self):
        for letter in LETTERS:
            yield FindLetterTask(Letter(name=letter, prompt="?", answer=letter), self.config.task)


class FindLetterConfig(vf.EnvConfig):
    player: vf.AgentConfig = vf.AgentConfig(
        harness={"id": "null"}, runtime={"type": "subprocess"}, sampling={"max_tokens": 2}
    )
    guesses: int = 3


class FindLetter(vf.Env[FindLetterConfig]):
    """Who halves the letters finds one of six in three guesses."""

    async def run(self, task, agents):
        letter = task.data.answer
        async with agents.player.interaction(task) as game:
            segment = await game.turn()
            for _ in range(self.config.guesses - 1):
                guess = segment.last_reply
                if segment.terminated or guess == letter:
                    break
                hint = "<" if letter < guess else ">"
                segment = await game.turn(hint if guess and guess in LETTERS else "!")
