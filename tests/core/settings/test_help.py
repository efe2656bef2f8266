"""What --help prints."""


from core.settings.help import HELP_WIDTH, help_lines
from grpo.grpo_config import GRPOConfig
from tests.tiny import all_settings


def test_help_shows_the_usual_settings_all_of_them_or_those_of_a_room():
    usual, every, room = ([line.split("=")[0].strip(" -") for line in help_lines(GRPOConfig, which) if line.startswith("  --")]
                          for which in ("", "all", "vllm"))
    assert 25 < len(usual) < 40 and usual[:2] == ["dataset", "generator_checkpoint"] and set(every) == all_settings(GRPOConfig)
    assert room == ["vllm_url"] and all(len(line) <= HELP_WIDTH for line in help_lines(GRPOConfig, "all"))
