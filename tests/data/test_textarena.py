"""Games of textarena as environments."""

import random

import pytest

from core.config import run_config_file
from core.files.records import read_records
from grpo.environments import find_environment
from tests.tiny import ROOT, run_here

PATH = f"{ROOT}/data/textarena/environment.py"
GAMES = run_config_file(PATH)["GAMES"]


@pytest.fixture
def new_game(monkeypatch):
    """A function (name, number) -> (environment, its prompt)."""
    pytest.importorskip("textarena")

    def begin(game, number):
        player = find_environment("TextArena", PATH)(0)
        return player, player.reset({"game": f"{game}-v0", "number": number, "game_settings": {}})
    return begin


@pytest.mark.slow
@pytest.mark.parametrize("game", GAMES)
def test_the_players_of_a_group_play_one_game_whatever_others_do_meanwhile(new_game, game):
    moves = ["[1]", "[2]", "[up]", "[50]"]
    first, prompt = new_game(game, 3)
    answers = [first.step(move) for move in moves[:2]]
    random.seed(1)
    before = random.getstate()
    second, again = new_game(game, 3)
    third, other = new_game(game, 4)
    found = []
    for move in moves[:2]:
        found.append(second.step(move))
        third.step("[3]")
    assert prompt and again == prompt and found == answers
    assert random.getstate() == before, "what others draw does not hang on it"


def test_a_game_is_won_by_who_halves_and_another_number_is_another_game(new_game):
    targets = set()
    for number in range(6):
        player, prompt = new_game("GuessTheNumber", number)
        low, high, answer, turns = 1, 20, "", 0
        while answer is not None and turns < 10:
            guess = (low + high) // 2
            answer, reward = player.step(f"I say [{guess}]")
            turns += 1
            if answer is not None:
                low, high = (guess + 1, high) if "higher" in answer else (low, guess - 1)
        assert answer is None and reward == 1.0 and turns <= 5, prompt
        targets.add(guess)
    assert len(targets) > 2


def test_prompts_name_games_and_a_wrong_game_is_one_line(tmp_path):
    pytest.importorskip("textarena")
    done = run_here("data/textarena/prepare.py", "--problems=20", f"--out={tmp_path}/a")
    records = read_records(f"{tmp_path}/a/prompts.jsonl")
    assert done.returncode == 0 and [r["number"] for r in records] == list(range(20)), done.stderr
    done = run_here("data/textarena/prepare.py", "--game=Chess-v7", f"--out={tmp_path}/b")
    assert done.returncode and "game=Chess-v7 is none of 2048, Bandit" in done.stderr


def test_without_the_package_one_line_says_how_to_install_it(monkeypatch):
    monkeypatch.setitem(__import__("sys").modules, "textarena", None)
    with pytest.raises(ValueError, match="environment='TextArena' needs the package textarena: pip install --no-deps -r requirements-textarena.txt"):
        find_environment("TextArena", PATH)(0)
