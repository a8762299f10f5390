"""Games of gymnasium and textarena are played by one class, in a Python that has them."""

import subprocess
from pathlib import Path

from tests.support.own_pythons import python_of

GAMES = Path(__file__).parents[2] / "examples/games/games.py"
PLAY = """
import runpy, sys
from types import SimpleNamespace as Prompt
Game = runpy.run_path(sys.argv[1])["Game"]
for row, actions in [
    ({"game": "gymnasium:FrozenLake-v1", "options": {"is_slippery": False}}, "221112"),
    ({"game": "gymnasium:FrozenLake-v1"}, "9"),
    ({"game": "textarena:GuessTheNumber-v0"}, [f"[{n}]" for n in range(1, 21)]),
]:
    game, total, done = Game(), 0.0, False
    assert game.reset(Prompt(metadata=row))
    for action in actions:
        if not done:
            seen, reward, done = game.step(action + "\\n")
            total += reward
    game.close()
    print(total > 0, done, "[G]" in seen, "\\x1b" in seen)
"""


def test_games_are_played_to_their_end_and_pay():
    command = [python_of("games"), "-c", PLAY, GAMES]
    done = subprocess.run(command, capture_output=True, text=True)
    assert done.stdout.splitlines() == [
        "True True True False", "False True False False", "True True False False"
    ], done.stderr  # fmt: skip
