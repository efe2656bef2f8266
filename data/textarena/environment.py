"""Single-player games of the package textarena: pip install --no-deps -r requirements-textarena.txt"""

from core.settings.optional import require
from core.settings.user_code import OwnRandom
from grpo.environments import environment

INSTALL = "--no-deps -r requirements-textarena.txt"
# Those that play alone and offline. Of textarena's other single-player games some download words or ask a model over
# the network, some end with an error, and some mix up the reward and the reason of a wrong move.
GAMES = ("2048", "Bandit", "Blackjack", "Crosswords", "FifteenPuzzle", "FrozenLake", "GuessTheNumber", "LightsOut",
         "LogicPuzzle", "Mastermind", "Minesweeper", "PegJump", "RushHour", "Secretary", "Set", "Sokoban", "Sudoku",
         "TowerOfHanoi")


@environment
class TextArena:
    """The game that a record names, by its number: the same moves of two players get the same answers.

    The prompt is what the game says first, an answer what is new after a move. The reward is the game's own at its end.
    """

    def __init__(self, seed):
        """seed: not used, since the number of a game is in its record"""
        self.arena = require("textarena", "environment='TextArena'", INSTALL)

    def reset(self, record):
        """record: game, number, game_settings. Returns the prompt."""
        if record["game"].partition("-v")[0] not in GAMES:
            raise ValueError(f"game={record['game']} is none of {', '.join(GAMES)}")
        self.random = OwnRandom(record["number"])  # games draw from Python's `random`
        with self.random:
            self.game = self.arena.make(record["game"], **record["game_settings"])
            self.game.reset(num_players=1, seed=record["number"])
        return self.news()

    def step(self, text):
        with self.random:
            done, _ = self.game.step(text)
        if not done:
            return self.news(), 0.0
        rewards, _ = self.game.close()
        return None, float(rewards[0])

    def news(self):
        """The messages of the game since the last call, a text. Some say that the player's own move is the game's."""
        messages = self.game.state.get_current_player_observation()
        move = self.arena.ObservationType.PLAYER_ACTION
        found = [text for sender, text, kind in messages if sender == self.arena.GAME_ID and kind is not move]
        return "\n".join(found).strip()
