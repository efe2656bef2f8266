"""Names of settings in other projects; the tables themselves: tests/docs/test_coming_from.py."""

from core.settings.other_names import settings_of


def test_a_name_is_known_whole_with_its_groups_and_by_its_end():
    for name in ("rollout.n", "actor_rollout_ref.rollout.n", "n"):
        assert settings_of(name, {"group_size", "seed"}) == ["group_size"]
    assert settings_of("rollout.n", {"seed"}) == [], "known, but nothing here does that"
    assert settings_of("eval_iters", {"eval_problems"}) == ["eval_problems"], "the remark has it"
    assert settings_of("grup_size", {"group_size"}) is None
