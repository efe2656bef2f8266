"""Names of settings in other projects."""

from core.settings.other_names import rows, settings_of


def test_names_and_settings_of_a_row_go_together_in_their_order():
    found = {name: settings for name, settings, _ in rows()}
    assert found["trainer.save_freq"] == ["save_interval"] and found["trainer.test_freq"] == ["eval_interval"]
    assert found["actor.use_kl_loss"] == found["actor.kl_loss_coef"] == ["kl_beta"]
    assert found["peft_config"] == ["lora_rank", "lora_alpha", "lora_targets"]


def test_a_name_is_known_whole_with_its_groups_and_by_its_end():
    for name in ("rollout.n", "actor_rollout_ref.rollout.n", "n"):
        assert settings_of(name, {"group_size", "seed"}) == ["group_size"]
    assert settings_of("rollout.n", {"seed"}) == [], "known, but nothing here does that"
    assert settings_of("eval_iters", {"eval_batches"}) == ["eval_batches"]
    assert settings_of("eval_iters", {"eval_problems"}) == ["eval_problems"], "the remark has it"
    assert settings_of("grup_size", {"group_size"}) is None and settings_of("lou", {"group_size"}) is None
