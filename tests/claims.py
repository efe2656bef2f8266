"""Every claim that the tests show, each with a test of it: the page to read before the tests.

python tests/claims.py
"""

CLAIMS = {
    "exactness": {
        "a larger kl_beta lowers the KL; judge and reference stay to the last bit":
            "exactness/test_first_ratio.py::test_a_larger_kl_beta_keeps_the_policy_nearer_and_frozen_models_stay_to_the_last_bit",
        "the first ratio is exactly 1 and the first KL exactly 0":
            "exactness/test_first_ratio.py::test_the_first_ratio_is_one_and_the_first_kl_exactly_zero",
        "tokens are scored under the distribution that they were drawn from":
            "exactness/test_first_ratio.py::test_the_first_ratio_is_one_and_the_first_kl_exactly_zero",
        "the clipped ratio starts from the policy, whoever sampled":
            "exactness/test_first_ratio.py::test_the_clipped_ratio_starts_from_the_policy_whoever_sampled",
        "a difference between sampler and policy is measured over the whole step":
            "exactness/test_first_ratio.py::test_the_mismatch_is_that_of_the_whole_step",
        "the gradient equals a loop over completions, each read on its own":
            "exactness/test_gradient.py::test_the_gradient_equals_that_of_every_completion_forwarded_on_its_own",
        "the same for prompts, with rewards or with a teacher":
            "exactness/test_gradient.py::test_on_prompts_the_gradient_equals_that_of_every_completion_forwarded_on_its_own",
        "no micro-batch, accumulation or token budget changes the gradient":
            "exactness/test_gradient.py::test_the_gradient_does_not_depend_on_the_cut",
        "k2, k3 and exact KL have the KL's gradient, by enumeration":
            "exactness/test_kl.py::test_in_the_loss_the_expected_gradient_is_that_of_the_kl_of_each_token",
        "another reference gives another gradient, the policy itself none":
            "exactness/test_kl.py::test_another_reference_gives_another_gradient_and_the_policy_itself_none",
        "an estimator of a config too, and the row of an objective may name it":
            "exactness/test_kl.py::test_the_row_of_an_objective_may_name_an_estimator",
        "KL in the reward is that of whole completions, by enumeration":
            "exactness/test_kl.py::test_in_the_reward_the_expected_gradient_is_that_of_the_kl_of_whole_completions",
        "without rewards a teacher alone teaches":
            "exactness/test_kl.py::test_without_rewards_the_teacher_alone_teaches",
        "each distinct input is read once by policy, reference and judge":
            "exactness/test_reads.py::test_each_distinct_input_is_read_once",
        "a group's prompt read once has the gradient of padded rows":
            "exactness/test_reads.py::test_reading_prompts_once_and_like_lengths_together_gives_the_gradient_of_padded_rows",
        "a large vocabulary is scored in fewer passes, with the gradient of the plain formulas":
            "exactness/test_large_vocabulary.py::test_the_gradient_is_that_of_the_plain_formulas",
        "logits are made in bounded memory":
            "exactness/test_reads.py::test_the_reference_pass_of_the_exact_kl_makes_bounded_logits",
        "the loops to read give the numbers of the trainer":
            "exactness/test_plain.py::test_the_loop_to_read_gives_the_numbers_and_weights_of_the_trainer",
        "rows that continue a prompt through a cache equal the whole text read at once":
            "exactness/test_cache.py::test_rows_that_continue_a_prompt_equal_the_whole_text_while_others_leave",
        "A prompt read once for its group gets the gradient of the whole texts":
            "exactness/test_cache.py::test_a_prompt_that_several_parts_share_gets_the_gradient_of_the_whole_texts",
        "A completion does not depend on the batch that it is sampled in":
            "exactness/test_generation.py::test_a_completion_does_not_depend_on_the_batch_that_it_is_in",
        "sampled tokens are as frequent as reported, at every temperature and top_p":
            "exactness/test_generation.py::test_frequencies_match_the_reported_log_probabilities",
        "each token is stored with the probability and the kept tokens of the model":
            "exactness/test_generation.py::test_finished_rows_leave_and_each_token_has_the_probability_and_the_kept_tokens_of_the_model",
        "A stop sequence ends a completion where its text first contains it":
            "exactness/test_generation.py::test_stop_sequences_end_a_completion_where_its_text_first_contains_one",
        "CUDA-graph decoding writes what the token loop writes, in every order of refilling":
            "exactness/test_decode.py::test_every_batch_and_order_of_refilling_writes_what_the_loop_writes",
        "a token of a large vocabulary is drawn by blocks, as by one running sum":
            "exactness/test_distributions.py::test_a_large_vocabulary_is_drawn_by_blocks_as_by_one_running_sum_and_never_what_has_no_probability",
        "rows whose nucleus exceeds the likeliest tokens wait for a whole sort, and write the same":
            "exactness/test_decode.py::test_rows_whose_nucleus_exceeds_the_top_part_wait_and_write_the_same",
        "truncation, drawing and logits in parts equal loops, at extreme logits too":
            "exactness/test_distributions.py::test_of_extreme_logits_what_is_drawn_is_possible_and_numbers_and_gradients_are_finite",
        "left padding changes nothing, whatever its tokens are":
            "exactness/test_model.py::test_padding_on_the_left_changes_nothing_whatever_its_tokens",
        "A judge's score is the mean realness, or one minus the replaced share":
            "exactness/test_model.py::test_a_judge_s_score_is_the_mean_realness_or_one_minus_the_regressed_share",
        "compiled and packed layers compute what plain layers compute":
            "exactness/test_faster_layers.py::test_compiled_layers_compute_what_plain_ones_do_and_a_frozen_copy_exactly_the_same",
        "A step with compiled Hugging Face layers is the step without":
            "exactness/test_compiled_layers.py::test_a_step_with_compiled_layers_is_the_step_without",
        "what cannot be compiled ends the run at its start, in one line":
            "exactness/test_compiled_layers.py::test_what_cannot_be_compiled_ends_the_run_at_its_start_in_one_line",
        "no other cut into parts of like length reads fewer padded tokens":
            "exactness/test_parts_of_a_step.py::test_no_cut_into_like_lengths_is_cheaper",
        "logits and special tokens of every model family equal those of transformers":
            "exactness/test_huggingface_models.py::test_logits_equal_those_of_transformers_and_special_tokens_are_never_filled_in",
        "recurrent and hybrid layers read a group's prompt once, with exact gradients":
            "exactness/test_huggingface_models.py::test_a_prompt_read_once_has_the_gradient_of_transformers_that_reads_it_with_each_completion",
        "LLaDA, Dream and SDAR folders have the logits of their papers, by renaming alone":
            "exactness/test_diffusion_models.py::test_the_logits_are_those_of_the_paper_and_padding_changes_nothing",
        "FSDP on two and four ranks equals one rank":
            "exactness/test_sharding.py::test_a_sharded_run_equals_that_of_one_rank",
        "tokens of turns are never encoded twice":
            "exactness/test_turns.py::test_the_tokens_are_those_that_were_sampled_and_those_of_the_answers",
        "each token has its probability given the whole text, ratio 1":
            "exactness/test_turns.py::test_each_token_has_the_probability_of_the_whole_text_before_it",
        "recorded turns are what the environment heard and returned":
            "exactness/test_turns.py::test_the_turns_are_what_the_environment_heard_and_returned",
        "names of roles that a chat template writes are in the tokens, not in the text":
            "exactness/test_turns.py::test_the_names_of_roles_are_in_the_tokens_but_not_in_the_text",
        "nothing trains on the environment's tokens":
            "exactness/test_turns.py::test_what_answers_were_taken_for_has_no_part_in_the_gradient",
        "a group starts in one state":
            "exactness/test_turns.py::test_a_group_starts_in_one_state_and_other_problems_in_others",
        "loss and gradient equal those of TRL's trainer":
            "exactness/test_trl_loss.py::test_loss_and_gradient_of_a_hugging_face_model_equal_those_of_trls_trainer",
        "rollouts come from the weights of k iterations before, to the last bit":
            "exactness/test_staleness.py::test_rollouts_are_sampled_by_the_weights_of_k_iterations_before_to_the_last_bit",
        "a resumed run samples again what was in flight":
            "exactness/test_staleness.py::test_a_resumed_run_samples_again_what_was_in_flight_with_the_weights_it_has",
        "iterations ahead start before training, and none beyond the last":
            "exactness/test_staleness.py::test_later_iterations_start_before_this_one_is_trained_and_none_beyond_the_last",
        "the gradient passes finite differences, with exact KL and with k3":
            "exactness/test_gradient.py::test_the_gradient_passes_finite_differences",
        "the cache has the name that a version of transformers gives it":
            "exactness/test_huggingface_models.py::test_the_cache_has_the_name_that_a_version_of_transformers_gives_it",
        "token by token through the cache, every causal family has the logits of transformers":
            "exactness/test_huggingface_models.py::test_token_by_token_through_the_cache_and_behind_padding_equals_transformers_on_each_whole_text",
        "logits that are not finite give tokens of the vocabulary and a skipped step":
            "exactness/test_distributions.py::test_logits_that_are_not_finite_raise_nothing_and_give_tokens_of_the_vocabulary",
        "the unbounded ratio to the sampler is unbiased, by enumeration":
            "exactness/test_first_ratio.py::test_the_expected_gradient_with_the_ratio_to_the_sampler_is_the_policys",
        "k3 keeps its precision where the policies are close":
            "exactness/test_kl.py::test_k3_is_exact_where_the_policies_are_close",
        "a moving reference follows tied matrices once":
            "exactness/test_kl.py::test_an_ema_reference_follows_once_where_input_and_output_share_a_matrix",
        "three optimizer steps move the weights as TRL's do":
            "exactness/test_trl_loss.py::test_three_optimizer_steps_on_given_rollouts_move_the_weights_as_trls_do",
        "a stop sequence is found in tokens that are parts of characters":
            "exactness/test_generation.py::test_a_sequence_is_found_where_its_last_character_is_written_in_parts",
        "a stop sequence does not reach back behind its turn":
            "exactness/test_generation.py::test_a_stop_sequence_does_not_begin_before_its_turn",
        "padding and the other prompts change nothing in turns":
            "exactness/test_turns.py::test_padding_and_the_other_prompts_change_nothing",
        "a resumed run with an environment has the bits of the uninterrupted one":
            "exactness/test_turns.py::test_a_resumed_run_goes_on_bit_for_bit_with_environments",
        "a language model does not see the future, a fill-in model does":
            "exactness/test_model.py::test_a_language_model_does_not_see_the_future_and_a_fill_model_does",
    },
    "objectives": {
        "every objective with every KL equals the paper's sum, token by token":
            "objectives/test_objectives.py::test_loss_and_gradient_equal_the_papers_sum",
        "the entropy bonus has the entropy's gradient":
            "objectives/test_objectives.py::test_the_entropy_bonus_is_the_entropys_gradient",
        "a new objective is a row":
            "objectives/test_objectives.py::test_a_new_algorithm_is_a_row",
        "every advantage equals its formula":
            "objectives/test_advantages.py::test_an_advantage_equals_its_formula",
        "equal rewards give an advantage of exactly 0":
            "objectives/test_advantages.py::test_equal_rewards_give_exactly_zero",
        "MaxRL's expected gradient is the sum of those of pass@k / k":
            "objectives/test_advantages.py::test_the_expected_gradient_of_max_rl_is_the_sum_of_those_of_pass_at_k_over_k",
        "training for pass@k follows its derivative, by enumeration":
            "objectives/test_pass_at_k.py::test_training_for_pass_at_k_follows_its_derivative",
        "extreme logits, ratios and rewards give finite losses and gradients":
            "objectives/test_extremes.py::test_loss_gradient_and_metrics_are_finite",
        "groups of equal rewards cost no backward, are dropped, or replaced":
            "objectives/test_groups.py::test_groups_of_equal_rewards_are_replaced_by_other_problems",
        "a step without a gradient moves nothing, not even by momentum":
            "objectives/test_groups.py::test_a_step_of_equal_rewards_moves_nothing_unless_kl_or_entropy_have_a_gradient",
        "the logged means of rollouts equal loops":
            "objectives/test_metrics.py::test_the_sums_of_rollouts_by_hand",
        "the test vectors are what loops from the papers make":
            "vectors/test_vectors.py::test_the_files_are_what_the_loops_make",
        "test vectors of both versions have the losses of the loops":
            "vectors/test_vectors.py::test_the_losses_of_both_versions_are_those_of_the_loops",
        "settings of recent papers give the papers' losses":
            "objectives/test_recipes_of_papers.py::test_a_recipe_gives_the_gradient_of_the_papers_formula",
        "a baseline of the step tells close rewards from equal ones":
            "objectives/test_advantages.py::test_a_step_wide_baseline_tells_close_rewards_from_equal_ones",
        "advantage='gdpo' gives the advantages of GDPO":
            "objectives/test_advantages.py::test_the_sum_of_normalised_rewards_gets_the_advantages_of_gdpo",
        "at ratio 1 every objective is REINFORCE with its baseline and weights":
            "objectives/test_objectives.py::test_on_policy_the_gradient_is_that_of_the_advantage_times_the_log_probability",
        "a weight for pass@k is k times the share of sets that are all wrong":
            "objectives/test_pass_at_k.py::test_a_weight_is_k_times_the_share_of_sets_of_others_that_are_all_wrong",
    },
    "policies": {
        "fill-in scores equal reading each text on its own":
            "policies/test_fill.py::test_scores_equal_reading_each_text_on_its_own",
        "in any order each token has the probability of its pass":
            "policies/test_any_order.py::test_each_token_has_the_probability_of_its_pass_in_a_text_without_padding",
        "padding and the other prompts change nothing":
            "policies/test_any_order.py::test_padding_and_the_other_prompts_change_nothing",
        "the stop token is trained":
            "policies/test_causal.py::test_the_stop_token_is_trained",
        "noise belongs to the problem, however many are sampled at once":
            "policies/test_all_kinds.py::test_what_is_sampled_does_not_depend_on_how_many_problems_are_sampled_at_once",
        "a policy in thirty lines trains with the whole zoo":
            "policies/test_own_policy.py::test_a_table_of_logits_trains_with_the_whole_zoo",
        "the inputs of a policy come back from a state that holds plain values":
            "policies/test_own_policy.py::test_its_inputs_come_back_from_a_state_that_holds_plain_values",
        "inputs of rollouts that are a dictionary are refused in one line":
            "policies/test_own_policy.py::test_inputs_as_a_dictionary_are_refused_in_one_line",
        "inputs that cannot be selected by problem are refused":
            "policies/test_own_policy.py::test_a_field_of_inputs_that_cannot_be_selected_by_problem_is_refused",
        "a metric of a policy with the name of another is refused":
            "policies/test_own_policy.py::test_a_metric_of_a_policy_with_the_name_of_another_is_refused",
        "rewards of another shape than problems and group are refused":
            "policies/test_own_policy.py::test_rewards_of_another_shape_are_refused",
        "a KL without a reference is told":
            "policies/test_own_policy.py::test_a_kl_without_a_reference_is_told",
        "filled-in tokens are as frequent as reported, in one and in several passes":
            "policies/test_fill_in.py::test_texts_are_as_frequent_as_the_reported_probabilities_of_their_passes",
        "filling by confidence draws what LLaDA's sampler draws":
            "policies/test_fill_in.py::test_by_confidence_texts_are_as_frequent_as_in_a_loop_of_llada_s_sampler",
        "filled-in tokens of one pass are as frequent as reported":
            "policies/test_fill_in.py::test_tokens_of_one_pass_are_as_frequent_as_reported",
        "every hidden token has its pass, each equally often the first":
            "policies/test_fill_in.py::test_every_hidden_token_has_its_pass_and_each_is_first_equally_often",
        "an order of a config with the formula of a built-in one gives the same numbers":
            "policies/test_any_order.py::"
            "test_an_order_of_a_config_with_the_formula_of_a_built_in_one_gives_the_same_numbers",
        "blocks follow each other, in the order asked for, one of a config's too":
            "policies/test_any_order.py::test_blocks_follow_each_other_and_the_order_within_them_is_the_one_asked_for",
        "completions in any order, read alone, have the gradient of all":
            "policies/test_any_order.py::test_completions_read_alone_have_the_gradient_of_all",
        "greedy completions are the likeliest tokens one by one":
            "policies/test_causal.py::test_greedy_completions_are_the_likeliest_tokens_one_by_one",
    },
    "data": {
        "every token id, 16 or 32 bits, is read as it was written":
            "data/test_text_windows.py::test_every_id_of_a_large_vocabulary_is_read_as_it_was_written",
        "a window depends on seed, step and number, however a step is cut":
            "data/test_text_windows.py::test_batches_are_pure_and_dealt_alike_to_any_layout",
        "masks hide the asked share; spans are runs, lines spare newlines":
            "data/test_text_windows.py::test_a_mask_hides_its_share_and_spans_are_runs_and_lines_spare_newlines",
        "prompts of a step do not depend on ranks; none occurs twice":
            "data/test_prompts.py::test_problems_do_not_depend_on_how_a_step_is_cut_and_none_occurs_twice",
        "no prompt is dropped but training prompts above max_prompt_length":
            "data/test_prompts.py::test_no_prompt_is_left_out_but_training_prompts_above_max_prompt_length",
        "a share leaves out training prompts above that percentile, and no validation prompt":
            "data/test_prompts.py::test_a_share_leaves_out_training_prompts_above_that_percentile_and_no_validation_prompt",
        "templates end where the answer begins; the model's own adds one start token":
            "data/test_prompts.py::test_the_template_of_the_model_makes_one_start_token_and_ends_where_the_answer_begins",
        "a task has a template, that of a chat model with its rules, unless one is set":
            "data/test_prompts.py::test_a_task_has_a_template_unless_one_is_set",
        "tags that a reward looks for and no prompt names are told":
            "data/test_prompts.py::test_tags_that_a_reward_looks_for_and_no_prompt_names_are_told",
        "JSONL, JSON, Parquet and hub data sets give the same records":
            "data/test_records.py::test_every_way_to_write_a_list_of_records_is_read",
        "a list of records from Python is read and refused as its file is":
            "data/test_records.py::test_a_list_from_python_gives_the_records_and_notes_of_its_file_and_stays_as_it_is",
        "prompts alone, in any list of JSON, are records":
            "data/test_records.py::test_prompts_alone_are_records_in_every_list",
        "characters, tags and byte pairs survive the round trip and their description":
            "data/test_tokenizers.py::test_byte_pairs_survive_the_round_trip_and_may_have_unused_ids",
        "a judge learns from fills of every generator and from clean text":
            "data/test_judge_training.py::test_a_judge_learns_from_fills_of_every_generator_and_from_clean_text",
        "AUC and rank correlation of a judge equal loops":
            "data/test_judge_training.py::test_auc_and_ranks_are_those_of_loops",
        "offline generators write what their rewards ask for; gsm8k, HumanEval, own prompts":
            "data/test_prepare.py::test_an_offline_generator_writes_what_its_reward_asks_for",
        "the scripts that prepare data start without torch":
            "data/test_prepare.py::test_the_scripts_that_prepare_data_start_without_torch",
        "your own text, in any encoding, is split without leaking":
            "data/test_prepare.py::test_your_own_text_in_any_form_is_split_without_leaking",
        "all 288 sudoku boards, split without renamings across, checked exactly":
            "data/test_sudoku.py::test_every_solution_of_a_puzzle_is_right_and_every_other_board_is_wrong",
        "reasoning-gym's right answers score 1, and no answer's code is run":
            "data/test_gym.py::test_the_code_of_an_answer_is_never_run",
        "the calculator answers calls with the number, and nothing else":
            "data/test_calculator.py::test_calls_are_answered_with_the_number",
        "a GGUF file becomes a folder that writes what transformers writes":
            "data/test_smollm2.py::test_a_gguf_file_becomes_a_folder_that_writes_what_transformers_writes_from_the_file",
        "malformed settings and prompts end in one documented line":
            "data/test_malformed.py::test_malformed_records_end_in_a_mistake",
        "every sudoku solution is right, every other board wrong":
            "data/test_sudoku.py::test_every_solution_of_a_puzzle_is_right_and_every_other_board_is_wrong",
        "reasoning-gym answers are never evaluated as code":
            "data/test_gym.py::test_the_code_of_an_answer_is_never_run",
        "the calculator answers calls with the number":
            "data/test_calculator.py::test_calls_are_answered_with_the_number",
        "the report of a judge that knows the true texts is perfect":
            "data/test_judge_training.py::test_the_report_of_a_judge_that_knows_the_true_texts",
        "the report of a judge equals loops over texts, tokens and pairs":
            "data/test_judge_training.py::test_the_report_of_a_judge_equals_loops",
        "a judge with a teacher gets the teacher's log-odds of the same texts":
            "data/test_judge_training.py::test_a_judge_with_a_teacher_gets_its_log_odds_of_the_same_texts",
        "generator, temperature and tokens of a judge's text are those that a loop draws":
            "data/test_judge_training.py::test_the_texts_of_a_judge_are_those_of_a_loop",
        "generators, temperatures and clean texts of a judge have their frequencies":
            "data/test_judge_training.py::test_the_generators_temperatures_and_clean_texts_of_a_judge_have_their_frequencies",
        "the texts of a judge do not depend on micro-batches and ranks":
            "data/test_judge_training.py::test_the_texts_of_a_judge_are_the_same_however_a_step_is_cut",
    },
    "runs": {
        "two to ten prompts alone train, are evaluated on, and said to be":
            "runs/test_starts_and_ends.py::test_two_to_ten_prompts_alone_train_and_are_evaluated_on_and_said_to_be",
        "of a damaged state the one before is used and kept":
            "runs/test_states.py::test_of_a_damaged_state_the_one_before_is_used_and_kept",
        "two ranks equal one with twice the batch or accumulation":
            "runs/test_ranks.py::test_two_ranks_equal_one",
        "two ranks evaluate what one does, to the last bit where batches suffice, and call a reward once a completion":
            "runs/test_ranks.py::test_two_ranks_evaluate_what_one_does_and_call_a_reward_once_for_each_completion",
        "two ranks evaluate supervised models as one does":
            "runs/test_ranks.py::test_two_ranks_evaluate_supervised_models_to_the_last_bit_as_one_does",
        "fewer batches of an evaluation than ranks are cut, and change no mean":
            "rooms/test_held_out_samples.py::"
            "test_fewer_batches_than_ranks_are_cut_and_neither_means_nor_samples_change",
        "both ranks skip a step that one cannot take":
            "runs/test_ranks.py::test_both_ranks_skip_a_step_that_one_cannot_take",
        "a resumed run has the bits of the uninterrupted one":
            "runs/test_resume.py::test_a_resumed_run_equals_the_uninterrupted_one",
        "a run of an earlier commit, cut within an iteration too, resumes with that commit's numbers":
            "runs/test_runs_of_before.py::test_a_run_of_an_earlier_commit_resumes_with_the_numbers_of_that_commit",
        "a resumed run says once which of its settings left and what they are now":
            "runs/test_runs_of_before.py::test_a_resumed_run_tells_once_which_settings_left_and_no_change_that_is_none",
        "settings of an earlier version mean what they meant, or are refused with their file":
            "runs/test_runs_of_before.py::test_settings_of_an_earlier_version_mean_what_they_meant",
        "the command that a stopped run prints resumes it":
            "runs/test_starts_and_ends.py::test_the_command_that_a_stopped_run_prints_resumes_it",
        "a run that is killed while it writes its first files starts again in its folder":
            "runs/test_starts_and_ends.py::test_a_run_that_was_killed_while_it_wrote_its_first_files_starts_again",
        "a damaged file of a run ends its resume in one line, and nothing is lost":
            "runs/test_starts_and_ends.py::test_a_damaged_file_of_a_run_ends_its_resume_in_one_line_and_nothing_is_lost",
        "pages of a long run take a time that is linear in its steps":
            "runs/test_iterations.py::test_pages_of_a_long_run_take_a_time_that_is_linear_in_its_steps",
        "a resumed run says which settings and how many ranks have changed":
            "runs/test_resume.py::test_what_has_changed_since_the_last_start_is_told_and_nothing_else",
        "an earlier run that a failed start set aside is named, and resumes":
            "runs/test_starts_and_ends.py::test_an_earlier_run_that_failed_starts_set_aside_is_named_with_the_command_that_resumes_it",
        "resume alone looks in the default folder of the script":
            "runs/test_starts_and_ends.py::test_a_script_resumes_in_its_default_folder_and_says_what_has_changed",
        "a resumed run keeps its template, bit for bit":
            "runs/test_starts_and_ends.py::test_a_resumed_run_keeps_its_template_bit_for_bit",
        "max_iters is the number of optimizer steps":
            "runs/test_resume.py::test_max_iters_is_the_number_of_optimizer_steps_and_everything_is_written",
        "a rollout serves all its epochs; the reference reads it once":
            "runs/test_iterations.py::test_a_rollout_serves_all_its_epochs_and_everything_else_runs_once",
        "steps from Python with a buffer are those of the trainer":
            "runs/test_iterations.py::test_steps_from_python_with_a_buffer_are_those_of_the_trainer",
        "a step without a buffer is one step on rollouts of its own, and says that epochs have no effect":
            "runs/test_iterations.py::test_a_step_without_a_buffer_is_the_one_step_on_its_rollouts_and_says_so",
        "adaptive kl_beta moves towards its target within bounds":
            "runs/test_iterations.py::test_kl_beta_moves_towards_its_target_and_stays_within_a_hundredth_and_a_hundredfold",
        "reference and kl_beta move once after each iteration":
            "runs/test_iterations.py::test_reference_and_kl_beta_move_once_after_each_iteration",
        "a step that is not finite moves nothing, is counted and named":
            "runs/test_bad_steps.py::test_a_bad_step_moves_nothing_is_counted_and_named",
        "rewards that differ in no group of the first steps are named once, with their value":
            "runs/test_bad_steps.py::test_rewards_that_differ_in_no_group_of_the_first_steps_are_named_once_with_their_value",
        "a reward varies if it does on any rank":
            "runs/test_ranks.py::test_a_reward_varies_if_it_does_on_any_rank_and_held_out_rewards_are_those_of_all",
        "runs killed at random moments end with the same bits":
            "runs/test_faults.py::test_runs_that_are_killed_at_random_moments_end_with_the_same_bits",
        "another number of ranks goes on between two iterations":
            "runs/test_faults.py::test_another_number_of_ranks_goes_on_between_two_iterations_with_the_same_problems",
        "policies and references are those that a config names":
            "runs/test_what_a_config_builds.py::test_the_policy_is_of_the_kind_that_checkpoint_and_dataset_say",
        "a command without a config takes the example and says so":
            "runs/test_command.py::test_a_command_without_a_config_takes_the_example_and_says_so",
        "a learning_rate below the min_lr of a config makes that a tenth and says so":
            "runs/test_settings.py::test_a_learning_rate_below_the_min_lr_of_a_file_makes_that_a_tenth_and_says_so",
        "a dry run prints the plan and writes nothing":
            "runs/test_command.py::test_a_dry_run_prints_the_changed_settings_and_the_plan_and_writes_nothing",
        "the line of a step fits the terminal and has the metrics that were measured":
            "runs/test_console.py::test_the_line_of_a_step_fits_and_leaves_out_only_what_does_not",
        "the time that is left is that of the steps and evaluations to come":
            "runs/test_console.py::test_the_time_that_is_left_is_that_of_the_steps_and_evaluations_to_come",
        "the plan counts what the run samples":
            "runs/test_console.py::test_the_plan_counts_what_the_run_samples",
        "a teacher stays, and its student comes nearer":
            "runs/test_command.py::test_the_teacher_stays_and_the_student_comes_nearer",
        "fill-in training needs nothing that Windows lacks":
            "runs/test_other_systems.py::test_fill_in_training_needs_nothing_that_windows_lacks",
        "every kind of training gives its recorded numbers":
            "golden/test_golden.py::test_a_run_gives_the_recorded_numbers",
        "wrong inputs end in one line with key and remedy; nothing is lost":
            "runs/test_wrong_inputs.py::test_a_wrong_input_is_one_line_with_its_key_and_the_remedy",
        "names of TRL's and verl's settings are answered, all of a command in one error":
            "runs/test_settings.py::test_names_of_trl_and_verl_are_answered_all_in_one_error",
        "a tuple of names takes a,b, and one of texts does not":
            "runs/test_settings.py::test_names_with_commas_are_a_tuple_of_them_and_texts_are_not",
        "a package that is too old ends a run in one line, before weights are read":
            "runs/test_wrong_inputs.py::test_an_old_package_is_one_line_with_its_floor_before_weights_are_read",
        "settings are a plain dataclass with features and conflicts in Python":
            "runs/test_settings.py::test_a_page_of_settings_is_a_plain_dataclass_with_features_and_conflicts",
        "an error names the settings that the user typed, and the file that set them; of two mistakes always the same":
            "runs/test_settings.py::test_errors_name_only_what_was_typed_and_two_mistakes_always_the_same_first",
        "--help begins with model, data and rewards, and shows every switch":
            "runs/test_settings.py::test_help_begins_with_model_data_and_rewards_and_shows_the_switches",
        "later arguments win, and a config file may compute":
            "runs/test_settings.py::test_later_arguments_win_and_a_config_file_may_compute",
        "variables of torchrun that do not fit together are one line":
            "runs/test_wrong_inputs.py::test_variables_of_torchrun_that_do_not_fit_together_are_one_line",
        "a bug of ours keeps its traceback": "runs/test_wrong_inputs.py::test_a_bug_of_ours_keeps_its_traceback",
        "an error in the user's code names the user's file and line":
            "runs/test_errors.py::test_an_exception_of_the_users_code_is_a_mistake_with_his_line",
        "a save that was cut anywhere leaves a whole state and model":
            "runs/test_states.py::test_a_run_whose_save_was_cut_anywhere_ends_with_its_last_model",
        "a state is loaded without running code; another run's is refused":
            "runs/test_states.py::test_a_state_that_is_damaged_or_would_run_code_is_refused_in_one_line",
        "the best model by a held-out metric is kept; ties keep the earlier, and NaN never wins":
            "runs/test_best.py::test_the_best_model_is_that_of_the_earliest_evaluation_that_no_other_beats",
        "the best model is a run that resumes as the run went on":
            "runs/test_best.py::test_the_best_run_resumes_as_the_run_went_on_to_the_last_bit",
        "a cut anywhere leaves a best model and a best state that resumes; the run that resumes has the last of both":
            "runs/test_best.py::test_a_cut_at_any_file_leaves_a_best_state_and_model_and_the_resumed_run_has_the_last",
        "a metric to choose the best model that does not exist is refused before the first step":
            "runs/test_best.py::test_a_metric_that_does_not_exist_is_refused_before_the_first_step",
        "the best adapter is kept, also of a sharded run":
            "rooms/test_huggingface_runs.py::test_the_best_adapter_is_kept_whole_and_its_run_goes_on_also_sharded",
        "an earlier run is set aside; nothing of the user's is moved":
            "runs/test_run_folder.py::test_earlier_runs_are_set_aside_one_by_one_and_other_files_stay",
        "a signal ends a run after its step; a second one at once":
            "runs/test_signals.py::test_a_second_signal_ends_the_process_at_once",
        "a process that a reward forks ends on a signal, as a Pool expects":
            "runs/test_signals.py::test_a_process_that_a_reward_forks_ends_as_ever",
        "bad steps in a row stop the run with the last state named":
            "runs/test_signals.py::test_a_run_that_no_longer_trains_stops_and_names_the_last_good_state",
        "every start and end is recorded; out of memory names what lowers it":
            "runs/test_starts_and_ends.py::test_out_of_memory_is_one_line_with_what_lowers_it_and_the_run_goes_on_later",
        "every config dry-runs in a fresh clone and builds nothing":
            "runs/test_starts_and_ends.py::test_a_dry_run_in_a_fresh_clone_says_what_would_be_built",
        "empty or non-finite steps move neither weights nor momentum":
            "runs/test_optimizer_step.py::test_a_step_that_is_empty_or_not_finite_moves_neither_weights_nor_momentum",
        "the supervised gradient is that of the mean loss over all micro-batches":
            "runs/test_supervised_training.py::test_the_gradient_is_that_of_the_mean_loss_over_all_micro_batches",
        "a resumed supervised run, of a judge too, equals the uninterrupted one bit for bit":
            "runs/test_supervised_training.py::test_a_resumed_run_equals_the_uninterrupted_one_bit_for_bit",
        "supervised training on two ranks equals one with twice the batch":
            "runs/test_supervised_training.py::test_two_ranks_equal_one_with_twice_the_batch",
        "supervised losses and accuracies equal loops":
            "runs/test_supervised_training.py::test_accuracy_counts_what_was_predicted_right",
        "validation numbers are means over all tokens of all batches, without dropout":
            "runs/test_supervised_training.py::test_the_validation_numbers_are_those_of_a_loop_over_all_batches",
        "every generator that a judge learns from has its own report":
            "runs/test_supervised_training.py::test_every_generator_of_a_judge_has_its_own_report",
        "a supervised step that is not finite is skipped, and too many in a row end the run":
            "runs/test_supervised_training.py::test_a_run_whose_steps_are_all_skipped_ends_and_counts_them",
        "a new model starts from another's weights but for an output layer of another kind":
            "runs/test_supervised_training.py::test_a_new_model_starts_from_the_weights_of_another_but_for_an_output_layer_of_another_kind",
        "the export of a supervised run is the final model in half precision":
            "runs/test_supervised_training.py::test_the_export_is_the_final_model_in_half_precision",
        "fine-tuning of a Hugging Face model has the loss and gradient of transformers":
            "runs/test_supervised_training.py::test_a_hugging_face_model_learns_the_completions_with_the_loss_of_transformers",
        "ranks wait at a barrier, not for ever; torchrun restarts them":
            "runs/test_waiting_ranks.py::test_ranks_that_torchrun_restarts_meet_again",
        "handles, threads and records of a long run stay flat":
            "runs/test_long_runs.py::test_handles_threads_and_records_of_a_short_run_are_flat",
        "A saved model is whole, and enough to use it":
            "runs/test_model_files.py::test_a_model_file_is_all_that_is_needed_to_use_the_model",
        "A run keeps every tensor on one device and waits once a step":
            "runs/test_pretended_gpu.py::test_a_run_is_on_one_device_and_rarely_waits",
        "no run needs float64 on an Apple GPU":
            "runs/test_pretended_gpu.py::test_a_run_on_an_apple_gpu_is_on_one_device_and_needs_no_float64",
        "a GPU that would emulate bfloat16 multiplies in float32":
            "runs/test_pretended_gpu.py::test_no_model_of_a_run_multiplies_in_bfloat16_where_it_would_be_emulated",
        "the device is the best that is there, or the one that is named":
            "runs/test_pretended_gpu.py::test_the_device_is_the_best_that_is_there_or_the_one_that_is_named",
        "bfloat16 is chosen where a GPU computes in it":
            "runs/test_pretended_gpu.py::test_the_precision_is_bfloat16_where_a_gpu_computes_in_it_or_a_setting_says_so",
        "a reference that waits on the CPU gives the same losses":
            "runs/test_pretended_gpu.py::test_a_reference_that_waits_on_the_cpu_gives_the_same_losses",
        "minibatches divide the problems and leave groups whole":
            "runs/test_iterations.py::test_minibatches_divide_the_problems_and_leave_groups_whole",
        "ranks must resume from the same step": "runs/test_resume.py::test_ranks_must_resume_from_the_same_step",
        "a model with numbers that are not finite is refused":
            "runs/test_model_files.py::test_a_model_with_numbers_that_are_not_finite_is_refused",
        "names of objectives may be in any case":
            "runs/test_what_a_config_builds.py::test_the_name_of_an_objective_may_be_in_any_case",
        "a config may add an objective of its own":
            "runs/test_what_a_config_builds.py::test_a_config_may_add_an_objective_of_its_own",
        "a config may add an objective, a KL estimator and an unmasking order, as docs show":
            "docs/test_examples.py::test_a_config_that_adds_a_row_to_a_table_trains_with_it",
        "a run with rows of a config's own resumes with the command that it prints":
            "runs/test_starts_and_ends.py::test_the_command_that_a_stopped_run_prints_resumes_it",
        "a file of the user's may add a mask": "runs/test_what_a_config_builds.py::test_a_users_file_adds_a_mask",
        "a rank killed in a sharded step ends the others with a line each":
            "runs/test_faults.py::test_if_a_rank_is_killed_in_a_sharded_step_the_others_end_with_a_line_each",
    },
    "rooms": {
        "wandb_log asks for wandb, and a missing package is named with its command":
            "rooms/test_trackers.py::test_wandb_log_asks_for_wandb_and_a_missing_package_is_named_with_its_command",
        "sampling and training are measured on a GPU for every way to train":
            "runs/test_pretended_gpu.py::test_the_measurements_of_a_gpu_run_on_one_for_every_way_to_train",
        "a tracker shows what was logged, sends no text, cannot stop a run":
            "rooms/test_trackers.py::test_a_tracker_shows_what_was_logged_and_no_text_is_sent",
        "sample.py samples as training and transformers do; exports open there":
            "rooms/test_sample_and_export.py::test_the_order_of_the_passes_is_that_of_training",
        "both sides of a benchmark do the same work and have the same gradient":
            "rooms/test_bench.py::test_a_comparison_measures_both_sides_in_processes_of_their_own_and_their_gradients_are_equal",
        "operations, bytes and passes over the logits of a token and of a step stay below ceilings":
            "rooms/test_counts.py::test_operations_bytes_and_passes_stay_below_the_ceilings",
        "operations, bytes and FLOPs that are counted without a GPU are those counted by hand":
            "rooms/test_counts.py::test_operations_bytes_and_flops_are_those_counted_by_hand",
        "autograd keeps the bytes of the formulas for one GPU":
            "rooms/test_counts.py::test_a_layer_keeps_the_bytes_of_the_formulas_of_the_page",
        "every measurement of a GPU runs in miniature on a CPU":
            "rooms/test_bench.py::test_the_parts_that_measure_a_gpu_run_in_miniature_and_each_finding_is_a_line_of_json",
        "learning is measured on the model, the dataset and the settings that are named":
            "rooms/test_bench.py::test_learning_is_measured_on_the_model_the_dataset_and_the_settings_that_are_named",
        "an adapter alone is trained; its reference stays the base model to the last bit":
            "rooms/test_lora.py::test_the_adapter_alone_is_trained_and_the_reference_stays_the_base_model_to_the_last_bit",
        "weights in 4 bits have the logits and gradients of their values":
            "rooms/test_lora.py::test_weights_in_4_bits_have_the_logits_and_the_gradient_of_a_model_with_their_values",
        "an exported model has equal logits and greedy texts in transformers, and is read back":
            "rooms/test_export.py::test_transformers_computes_equal_logits_and_greedy_texts",
        "every declared end id ends a completion; ids are those of the model's tokenizer":
            "rooms/test_huggingface_tokenizer.py::test_every_declared_end_id_ends_a_completion_the_tokenizer_s_own_first",
        "an object of transformers or peft is trained as the model of its folder is":
            "rooms/test_huggingface_folders.py::test_an_object_of_transformers_or_peft_is_the_model_of_its_folder",
        "a saved Hugging Face folder has a model card, and an export keeps it":
            "rooms/test_huggingface_folders.py::test_the_card_of_a_model_says_what_was_trained_and_an_export_keeps_what_its_owner_added",
        "functions from Python are rewards by their names":
            "rooms/test_reward_sums.py::test_functions_from_python_are_rewards_by_their_names_also_when_two_objects_take_turns",
        "a name of the hub is said before a library opens it":
            "rooms/test_huggingface_folders.py::test_a_name_of_the_hub_is_said_once_and_on_rank_0_alone_before_a_library_opens_it",
        "code of a model's folder is never run, and no kernel is fetched":
            "rooms/test_huggingface_folders.py::test_code_of_a_folder_is_never_run",
        "an interrupted save of a model's folder leaves the old weights whole":
            "rooms/test_huggingface_folders.py::test_weights_change_last_so_that_an_interrupted_change_leaves_the_old_ones_whole",
        "of every family the first ratio is 1 and the first KL 0":
            "rooms/test_huggingface_runs.py::test_at_step_0_the_policy_is_its_reference_and_the_sampler_agrees_with_the_scorer",
        "runs of Hugging Face models resume to the last bit; two ranks equal one":
            "rooms/test_huggingface_runs.py::test_a_resumed_run_is_the_run_that_was_not_interrupted_to_the_last_bit",
        "rewards are weighted, added and may skip a completion":
            "rooms/test_reward_sums.py::test_rewards_are_weighted_and_added_and_what_one_of_them_skips_alone_is_left_out_of_the_group",
        "rewards normalised within their group before they are added":
            "rooms/test_reward_sums.py::test_rewards_may_be_normalised_before_they_are_added",
        "a credit window gives the judge's credit to each token":
            "rooms/test_reward_sums.py::test_the_judge_alone_reads_token_ids_and_with_a_credit_window_gives_credit_to_tokens",
        "functions written for TRL get the same arguments from TRL itself":
            "rooms/test_reward_calls.py::test_a_function_gets_the_same_from_trl_itself",
        "an error in a user's reward is one line naming its file":
            "rooms/test_reward_calls.py::test_whatever_a_reward_does_it_ends_in_one_line_that_names_its_file",
        "a completion that a call failed for is not worse than its group":
            "runs/test_bad_steps.py::test_a_judge_that_fails_now_and_then_makes_no_difference_out_of_nothing",
        "steps that no reward scores are said, and end the run":
            "runs/test_bad_steps.py::test_steps_in_which_all_completions_are_skipped_are_said_and_end_the_run",
        "records are merged only if they are equal in every field":
            "data/test_prompts.py::test_only_records_that_are_equal_in_every_field_are_merged_and_a_line_says_how_many",
        "forms of other trainers are read, and what is joined or ignored is noted":
            "data/test_records.py::test_forms_of_other_trainers_are_read_and_what_is_joined_or_ignored_is_noted",
        "an assistant's message at the end of a prompt is continued":
            "data/test_prompts.py::test_an_assistant_s_message_at_the_end_is_continued",
        "special tokens that were added stay in the text":
            "rooms/test_huggingface_tokenizer.py::"
            "test_special_tokens_that_were_added_stay_in_the_text_unless_they_mark_turns",
        "the adapter for verl's reward functions scores verl's records":
            "rooms/test_reward_file.py::test_the_adapter_for_verl_scores_records_of_verl",
        "a reward file finds the files and packages beside it at any time, in other processes too":
            "rooms/test_reward_file.py::test_a_reward_file_and_its_neighbours_import_each_other",
        "an object with __call__ is a reward by the name of its variable":
            "rooms/test_reward_file.py::test_an_object_with_call_is_a_reward_by_the_name_of_its_variable",
        "a file beside it that is called datasets.py or metrics.py is found by nothing else":
            "rooms/test_reward_file.py::test_a_neighbour_is_seen_by_nobody_else",
        "functions of TRL that are named slow have the same values in another process":
            "rooms/test_reward_file.py::"
            "test_functions_of_trl_that_are_named_slow_have_their_values_in_another_process",
        "two reward files of one name in one process keep their rewards, masks and environments":
            "rooms/test_reward_file.py::test_two_files_of_one_name_are_not_mixed_up",
        "what a reward file changes of torch's defaults ends with its call":
            "rooms/test_reward_file.py::test_what_a_file_changes_of_torch_ends_with_its_call",
        "late completions are skipped; hanging or killed workers are replaced, their files removed":
            "rooms/test_reward_workers.py::test_a_completion_that_does_not_end_is_late_and_the_processes_and_their_files_are_replaced",
        "workers end with a run that is killed":
            "rooms/test_reward_workers.py::test_a_worker_ends_with_a_run_that_is_killed",
        "every value of math_format, math_answer and math_number":
            "rooms/test_math_rewards.py::test_the_solution_is_compared_with_the_answer",
        "countdown equals an independent evaluation of random expressions":
            "rooms/test_math_rewards.py::test_countdown_equals_an_independent_evaluation_of_random_expressions",
        "hostile arithmetic such as 99**98**97 costs little work":
            "rooms/test_math_rewards.py::test_hostile_arithmetic_is_never_parsed_at_length",
        "LaTeX answers are compared by value":
            "rooms/test_math_rewards.py::test_an_answer_in_latex_is_compared_by_its_value",
        "every value of the rewards of texts": "rooms/test_text_rewards.py::test_every_value",
        "every value of code_correctness and code_execution":
            "rooms/test_code_rewards.py::test_code_execution_is_one_only_if_the_tests_pass",
        "asserts cut into calls are judged as Python judges them":
            "rooms/test_code_rewards.py::test_an_answer_is_judged_as_python_judges_the_value",
        "the judge scores texts of any length as if alone":
            "rooms/test_judge_reward.py::test_texts_of_any_length_are_scored_as_if_each_were_alone_by_their_ids_or_their_text",
        "a token's credit is the mean log-odds near it":
            "rooms/test_judge_reward.py::test_credit_of_a_token_is_the_log_odds_near_it",
        "reward models score as transformers does, text by text":
            "rooms/test_reward_model.py::test_every_text_has_the_score_that_it_has_alone",
        "all 72 attacks on the machine are contained":
            "rooms/test_sandbox_attacks.py::test_an_attack_on_the_machine_is_contained",
        "each kernel part holds alone against its attacks":
            "rooms/test_sandbox_attacks.py::test_each_part_of_the_kernel_holds_alone",
        "wrong solutions cannot forge tests that are cut into calls":
            "rooms/test_sandbox_attacks.py::test_a_wrong_solution_cannot_forge_tests_that_are_cut_into_calls",
        "code passes only if it ran to its end":
            "rooms/test_sandbox.py::test_the_sandbox_passes_only_what_ran_to_its_end",
        "code runs only where the kernel guards calls and files":
            "rooms/test_sandbox.py::test_code_runs_only_where_the_kernel_guards_calls_and_files",
        "the filter allows the listed system calls alone, on both architectures":
            "rooms/test_system_calls.py::test_calls_in_the_table_are_allowed_and_all_others_refused",
        "what an environment returns is read within its time; nonsense ends the run":
            "rooms/test_environments.py::test_what_fails_while_it_is_read_fails_the_completion_alone",
        "environments that wait, raise or return nonsense are named":
            "rooms/test_environments.py::test_an_environment_that_waits_or_raises_fails_with_the_line_of_its_file",
        "an environment that cannot work is refused at the start":
            "runs/test_wrong_inputs.py::test_a_wrong_input_is_one_line_with_its_key_and_the_remedy",
        "an environment that works is not refused": "rooms/test_environments.py::test_an_environment_that_works_begins",
        "what fails at the end of an episode is counted and said":
            "rooms/test_environments.py::test_what_fails_at_the_end_of_an_episode_is_counted_and_said_once",
        "no name of a user's reaches terminal or picture raw":
            "rooms/test_environments.py::test_no_name_of_a_users_reaches_terminal_or_picture_raw",
        "what workers say of environments is said once by the run":
            "rooms/test_ray_workers.py::test_what_workers_say_of_environments_is_said_once",
        "a config with several features on comes through pickle into a fresh process":
            "rooms/test_ray_workers.py::test_configs_are_the_same_in_a_process_that_has_imported_nothing_yet",
        "Ray workers sample what the policy samples, whatever their number":
            "rooms/test_ray_workers.py::test_workers_sample_what_the_policy_samples",
        "a start is sampled with the weights of the last sync before it":
            "rooms/test_ray_workers.py::test_a_start_is_sampled_with_the_weights_of_the_last_sync_before_it",
        "a run starts a Ray of its own and ends it":
            "rooms/test_ray_runs.py::test_a_run_starts_a_ray_of_its_own_and_ends_it",
        "the weights that Ray's workers get are the trainer's, to the last bit":
            "rooms/test_ray_workers.py::test_weights_of_every_kind_come_to_the_last_bit",
        "a sync with Ray in bfloat16 halves the bytes of linear layers and changes no bit of a sample":
            "rooms/test_ray_workers.py::"
            "test_of_a_run_in_bfloat16_linear_layers_come_in_half_the_bytes_and_no_bit_of_a_sample_changes",
        "a vLLM server gets weights in the precision of the run":
            "rooms/test_vllm.py::test_weights_are_written_in_the_precision_of_the_run",
        "a run whose worker is killed is the run without workers":
            "rooms/test_ray_runs.py::test_a_run_whose_worker_is_killed_is_the_run_without_workers",
        "two sharded ranks on a Ray cluster train as one process":
            "rooms/test_ray_runs.py::test_two_sharded_ranks_join_a_cluster_and_train_as_one_process",
        "an outsider cannot join the Ray of a run":
            "rooms/test_ray_runs.py::test_an_outsider_cannot_join_the_ray_of_a_run_even_where_authentication_is_off",
        "Ray's workers know what a config adds to the tables":
            "rooms/test_ray_runs.py::test_workers_know_what_a_config_adds_to_the_tables",
        "vLLM has the weights of each sync and the policy's log-probabilities":
            "rooms/test_vllm.py::test_a_sync_brings_the_weights_and_the_policy_scores_what_was_drawn_alike",
        "stale weights or re-encoded ids of a server end the run by the mismatch":
            "rooms/test_vllm.py::test_other_weights_or_ids_end_the_run_by_the_mismatch_once_they_are_far_from_the_policy",
        "a server of raw log-probabilities ends the run":
            "rooms/test_vllm.py::test_a_server_of_raw_log_probabilities_ends_the_run",
        "a server's completions depend on seed, iteration and problem alone":
            "rooms/test_vllm.py::test_completions_depend_on_seed_iteration_and_problem_alone",
        "no file holds the key of a server": "rooms/test_vllm.py::test_no_file_holds_the_key_of_a_server",
        "two sharded ranks train an adapter with vLLM as one does":
            "rooms/test_vllm.py::test_two_sharded_ranks_train_an_adapter_on_what_the_server_samples_as_one_does",
        "fill-in's held-out figures are those of a loop over completions":
            "rooms/test_fill_in_evaluation.py::test_the_figures_are_those_of_a_loop_over_completions",
        "the held-out reward of fill-in is what training compares, with a judge too":
            "rooms/test_fill_in_evaluation.py::test_the_held_out_reward_is_what_training_compares_with_a_judge_too",
        "evaluation reads no more rows at once than batch_size allows":
            "rooms/test_fill_in_evaluation.py::test_no_forward_reads_more_rows_than_batch_size_allows",
        "a filled word is right only where its tokens hold what was around it":
            "rooms/test_fill_in_evaluation.py::test_a_word_is_right_or_known_only_where_its_tokens_hold_what_was_around_it",
        "neither the estimator nor the seed of training changes a held-out figure":
            "rooms/test_fill_in_evaluation.py::test_neither_the_estimator_nor_the_seed_of_training_changes_a_figure",
        "accuracies, pass@k and lengths of prompts are those of a loop":
            "rooms/test_prompt_evaluation.py::test_evaluation_counts_what_a_loop_counts",
        "held-out KL and entropy are means over tokens, for every estimator":
            "rooms/test_prompt_evaluation.py::test_kl_and_entropy_are_means_over_tokens",
        "late completions count neither right nor wrong":
            "rooms/test_prompt_evaluation.py::test_late_completions_count_neither_right_nor_wrong",
        "samples show the value of each reward; held-out rewards are those of their sum":
            "rooms/test_prompt_evaluation.py::test_samples_show_the_value_of_each_reward_and_held_out_metrics_those_of_their_sum",
        "accuracies and pass@k of every pattern of verdicts are counted as by hand":
            "rooms/test_prompt_evaluation.py::test_accuracies_and_pass_at_k_of_every_pattern_of_verdicts",
        "the words that fill-in's evaluation counts are those of a walk over characters":
            "rooms/test_fill_in_evaluation.py::test_touched_words_are_those_of_a_walk_over_characters",
        "the credit beside a filled token is the mean log-odds around it":
            "rooms/test_fill_in_evaluation.py::test_the_credit_beside_a_filled_token_is_the_mean_log_odds_around_it",
        "held-out means are over all completions; samples go from the best to the worst":
            "rooms/test_held_out_samples.py::test_held_out_means_are_over_all_completions_and_samples_are_sorted",
        "groups of training in samples.jsonl have the means that their step logs":
            "runs/test_training_samples.py::test_all_groups_of_a_step_have_the_means_that_it_logs",
        "a resume doubles no samples":
            "runs/test_training_samples.py::test_a_run_that_is_cut_and_resumed_has_the_samples_of_one_that_is_not",
        "the seconds of a reward are those of its calls":
            "runs/test_training_samples.py::test_the_seconds_of_a_reward_are_those_of_its_calls_in_training",
        "samples.jsonl is valid JSON whatever rewards are":
            "rooms/test_held_out_samples.py::test_samples_are_valid_json_whatever_rewards_are",
        "the table before and after has changes only of what was measured twice":
            "rooms/test_held_out_samples.py::test_the_table_before_and_after_has_changes_only_of_what_was_measured_twice",
        "the doctor finds a gradient that is 0, infinite or misses a layer":
            "rooms/test_doctor.py::test_the_examined_step_is_the_first_of_the_run_and_every_way_to_break_its_gradient_is_found",
        "the doctor examines the run's first step and changes no weight":
            "rooms/test_doctor.py::test_the_examined_step_is_the_first_of_the_run_and_every_way_to_break_its_gradient_is_found",
        "of lost characters, cut answers and weak verifiers the right check speaks":
            "rooms/test_doctor.py::test_the_check_of_what_is_wrong_speaks_and_no_other",
        "the doctor finds a judge that prefers filled text":
            "rooms/test_doctor.py::test_a_judge_that_prefers_filled_text_is_found",
        "environments that differ from their twins are found":
            "rooms/test_doctor.py::test_environments_that_answer_the_same_texts_differently_are_found",
        "the doctor calls no shipped config wrong": "rooms/test_doctor.py::test_a_shipped_config_is_not_called_wrong",
        "whatever a model writes stays text on the page of a run":
            "rooms/test_report.py::test_whatever_a_model_writes_stays_text_and_no_script_runs_and_nothing_is_loaded",
        "the numbers on the page of a run are those of metrics.jsonl":
            "rooms/test_report.py::test_the_numbers_on_a_page_are_those_of_metrics_jsonl",
        "the page of a long run has every evaluation and the last step":
            "rooms/test_report.py::test_the_page_of_a_long_run_has_every_evaluation_and_the_last_step",
        "the line of a curve is the mean of the numbers around each":
            "rooms/test_report.py::test_the_line_of_a_curve_is_the_mean_of_the_numbers_around_each",
        "colours of rewards are their standard deviations above the mean of the group":
            "rooms/test_report.py::test_colours_of_rewards_are_their_standard_deviations_above_the_mean_of_the_group",
        "a page and the console mark what an environment answered":
            "rooms/test_report.py::test_groups_of_training_are_apart_and_answers_of_an_environment_are_marked",
        "a page shows the samples of the first and of the latest evaluations":
            "rooms/test_report.py::test_a_page_shows_the_samples_of_the_first_and_of_the_latest_evaluations",
        "the first line of a page says what was trained":
            "rooms/test_report.py::test_the_first_line_of_a_page_says_what_was_trained",
        "a page marks the metric that chose the model, and does not claim it in its first line":
            "rooms/test_report.py::test_the_metric_that_chose_the_model_is_marked_and_not_claimed_in_the_first_line",
        "a page shows evaluations with their standard errors and histograms":
            "rooms/test_report.py::test_dots_bars_and_histograms_show_what_the_evaluations_measured",
        "a standard error is the deviation of the mean over other problems":
            "rooms/test_held_out_samples.py::test_a_standard_error_is_the_deviation_of_the_mean_over_other_problems",
        "curves are means over runs with a band of one standard deviation":
            "rooms/test_report.py::test_curves_are_means_over_runs_with_a_band_of_one_standard_deviation",
        "the line of a resume and the doctor say what the buffer holds":
            "runs/test_starts_and_ends.py::test_a_run_that_a_signal_stops_records_it_and_goes_on",
        "the page of a run has the evaluations of its buffer, those before a resume too":
            "runs/test_resume.py::test_the_page_has_the_evaluations_of_the_buffer_those_before_a_resume_too",
        "the table over seeds has means, deviations and the least change":
            "rooms/test_report.py::test_the_table_over_seeds_holds_means_deviations_and_the_least_change",
        "two sets of runs are compared by seed, with an interval that holds as often as it says":
            "rooms/test_report.py::"
            "test_the_interval_of_paired_differences_contains_the_true_mean_as_often_as_its_level_says",
        "the table of two sets has the differences of runs of equal seeds at their last step":
            "rooms/test_report.py::test_two_sets_of_runs_are_compared_by_seed_at_their_last_step",
        "settings that differ within a set of runs, or between two, are named":
            "rooms/test_report.py::test_settings_that_differ_within_and_between_sets_are_named",
        "the checker names right losses of every objective": "rooms/test_check_loss.py::test_a_right_loss_is_named",
        "the checker knows the KL estimators of a config":
            "rooms/test_check_loss.py::test_a_config_adds_an_estimator_of_the_kl",
        "the checker names every planted fault of a loss": "rooms/test_check_loss.py::test_a_planted_fault_is_named",
        "the checker calls conventions right, and names them":
            "rooms/test_check_loss.py::test_a_convention_is_named_and_right",
        "the checker sees bounds that are missing or others":
            "rooms/test_check_loss.py::test_a_loss_with_other_bounds_is_not_right",
        "the checker finds the faults of published formulas": "rooms/test_check_loss.py::test_published_formulas",
        "an adapter resumes with its base model and alpha, and no other":
            "rooms/test_lora.py::test_a_run_resumes_from_the_state_of_its_adapter_alone_and_of_no_other",
    },
    "docs": {
        "the file that teaches has the project's loss and gradient, and learns":
            "docs/test_grpo_in_one_file.py::test_its_loss_and_gradient_are_the_project_s_on_the_same_tokens",
        "which of nine ways to write the KL have its gradient":
            "docs/test_kl_nine_ways.py::test_which_losses_have_the_gradient_of_the_kl",
        "the pictures show what was measured":
            "docs/test_pictures.py::test_the_picture_of_the_objectives_is_drawn_from_its_table",
        "the moving picture begins with whole boards":
            "docs/test_pictures.py::test_the_moving_picture_begins_with_whole_boards",
        "the picture of the passes shows mean and deviation of the seeds":
            "docs/test_pictures.py::"
            "test_the_picture_of_the_passes_shows_the_means_and_deviations_of_the_seeds_in_the_folders",
        "both halves of the Python example learn, cell by cell as in a notebook":
            "docs/test_examples.py::test_both_halves_of_the_python_example_learn_cell_by_cell_as_in_a_notebook",
        "every shipped config is one": "docs/test_examples.py::test_a_shipped_config_is_one",
        "--help begins with the docstring of the script, and settings follow":
            "docs/test_examples.py::test_help_begins_with_the_docstring_of_the_script",
        "the recipe of the shipped judges starts, each command on what those before it made":
            "docs/test_examples.py::test_the_recipe_of_the_judges_starts_each_command_on_what_those_before_it_made",
        "the documented command of each preset of rewards starts":
            "docs/test_examples.py::test_the_commands_of_the_presets_start",
        "the defaults that differ from TRL's are those of both":
            "docs/test_examples.py::test_the_defaults_that_differ_from_trl_are_those_of_both",
        "imports run in no circle, and features do not import their neighbours":
            "docs/test_house.py::test_no_imports_run_in_a_circle_and_a_layer_imports_only_those_before_it",
        "public functions have type hints on parameters and result":
            "docs/test_house.py::test_public_functions_have_type_hints_on_parameters_and_result",
        "nothing evaluates text or catches every error":
            "docs/test_house.py::test_nothing_evaluates_text_or_catches_every_error",
        "tokens, density, settings and words stay below their ceilings":
            "docs/test_budget.py::test_there_is_no_more_to_read_than_the_ceilings_say",
        "a statement that is only wrapped is as dense as before":
            "docs/test_budget.py::test_a_statement_that_is_wrapped_is_as_dense_as_before",
        "the files that a step runs through stay below their ceilings":
            "docs/test_budget.py::test_a_step_of_the_main_job_runs_through_no_more_than_the_ceilings_say",
        "the main job loads no feature that is off":
            "docs/test_house.py::test_the_main_job_loads_no_feature_that_is_off",
    },
}


def main():
    for area, claims in CLAIMS.items():
        print(f"\n{area}")
        for claim, test in claims.items():
            print(f"  {claim:<100} {test}")


if __name__ == "__main__":
    main()
