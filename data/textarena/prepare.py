"""Games of the package textarena as problems: writes prompts.jsonl and meta.json beside this file.

pip install --no-deps -r requirements-textarena.txt
python data/textarena/prepare.py
python data/textarena/prepare.py --game=TowerOfHanoi-v0 --game_settings="{'num_disks': 2}" --out=FOLDER
--out=FOLDER writes elsewhere, to be used as --dataset=FOLDER.

A record names a game and its number. Its prompt is only a name: the environment gives the one that the model reads.
"""

import os
import pathlib
import sys
from dataclasses import dataclass

sys.path.insert(0, str(pathlib.Path(__file__).resolve().parents[2]))

from core.config import load_config
from core.files.records import write_prompts
from core.settings.script import run_script
from core.settings.user_code import guarded
from core.tokenizer import CharTokenizer
from grpo.environments import find_environment

HERE = os.path.dirname(os.path.relpath(__file__))


@dataclass(frozen=True)
class TextArenaConfig:
    game: str = "GuessTheNumber-v0"    # data/textarena/README.md lists them
    game_settings: dict | None = None  # of the game, {'max_number': 10}; None: those that textarena gives it
    problems: int = 1000               # number of games; a tenth of them is for validation
    out: str = HERE                    # the folder of the dataset; another one is used as --dataset=FOLDER

    def __post_init__(self):
        if self.problems < 20:
            raise ValueError(f"problems={self.problems} must be at least 20")


def main(argv):
    config, _ = load_config(TextArenaConfig, argv)
    records = []
    for number in range(config.problems):
        records.append({"prompt": f"{config.game} {number}", "game": config.game, "number": number,
                        "game_settings": config.game_settings or {}})
    player = find_environment("TextArena", os.path.join(HERE, "environment.py"))(seed=0)
    with guarded(f"game={config.game} with game_settings={config.game_settings} does not start", "correct them"):
        player.reset(records[0])
    write_prompts(config.out, records, CharTokenizer(stop=True), game=config.game, game_settings=config.game_settings)


if __name__ == "__main__":
    run_script(main)
