"""Games of gymnasium and textarena as environments of `onpolicy train`, in one class.

A row says the game: {"prompt": "...", "game": "gymnasium:FrozenLake-v1", "seed": 3, "options": {}}.
Actions of gymnasium are whole numbers (its Discrete spaces); a text that is no action ends a game.
"""

import re
from typing import Any


class Game:
    """An episode of the game that a row names; `--environment games.py:Game`."""

    stop = ("\n",)

    def reset(self, prompt: Any) -> str:
        row = prompt.metadata
        kind, _, name = row["game"].partition(":")
        options, seed = row.get("options", {}), row.get("seed", 0)
        if kind == "gymnasium":
            import gymnasium

            self.game = gymnasium.make(name, render_mode="ansi", **options)
            self.game.reset(seed=seed)
            self._step = self._step_gymnasium
            return f"\n{self._board()}\nActions: 0 to {self.game.action_space.n - 1}\n"
        if kind == "textarena":
            import textarena

            self.game = textarena.make(env_id=name, **options)
            self.game.reset(num_players=1, seed=seed)
            self._step = self._step_textarena
            return f"{self.game.get_observation()[1]}\n"
        raise ValueError(f"game={row['game']!r}: must begin with gymnasium: or textarena:")

    def step(self, action: str) -> tuple[str, float, bool]:
        return self._step(action.strip())

    def close(self) -> None:
        if hasattr(self, "game"):
            self.game.close()

    def _board(self) -> str:
        """The game as text, with [X] where a terminal would colour X."""
        return re.sub(r"\x1b\[\d+m(.)\x1b\[0m", r"[\1]", self.game.render())

    def _step_gymnasium(self, action: str) -> tuple[str, float, bool]:
        if not (action.isdecimal() and int(action) < self.game.action_space.n):
            return "That is no action.\n", 0.0, True
        _, reward, is_over, is_cut, _ = self.game.step(int(action))
        return f"{self._board()}\n", float(reward), is_over or is_cut

    def _step_textarena(self, action: str) -> tuple[str, float, bool]:
        is_done, _ = self.game.step(action=action)
        if is_done:
            rewards, _ = self.game.close()
            return "", float(rewards[0]), True
        return f"{self.game.get_observation()[1]}\n", 0.0, False
