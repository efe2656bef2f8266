"""The decoder for GPUs writes what the token loop writes, whatever the batch, the order of refilling and the ends."""

from functools import partial

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

from core.distributed import autocast
from core.distributions import draw_uniforms
from core.generation import Stop, generate
from core.models import load_model, load_tokenizer
from core.performance import decode
from core.performance.decode import Decoder, can_decode
from grpo.sampling_settings import SamplingSettings
from tests.exactness.test_generation import PROMPTS, expect_same
from tests.exactness.test_turns import SETTINGS as TURNS
from tests.families import CAUSAL_FAMILIES, FAMILIES, model_folder
from tests.pretend_cuda import PretendCuda
from tests.tiny import CAUSAL, causal_model, causal_policy, prompt_config, prompt_consumer

NOISE = draw_uniforms(3, 7, range(3), (4, 24))


class Early(Stop):
    """About a quarter of the vocabulary ends a row."""

    def __init__(self, *sequences):
        super().__init__(CAUSAL, sequences)
        self.ids = tuple(range(72, CAUSAL.base_vocab_size))


@pytest.fixture(autouse=True)
def small_buckets(monkeypatch):
    for name, value in {"POLL_STEPS": 3, "ROWS": 2, "COLUMNS": 16}.items():
        monkeypatch.setattr(decode, name, value)


@pytest.fixture
def large_vocabulary(monkeypatch):
    """A vocabulary is large from 64 tokens on, and its top part has 8."""
    monkeypatch.setattr("core.distributions.LARGE_VOCABULARY", 64)
    monkeypatch.setattr("core.performance.decode.LARGE_VOCABULARY", 64)
    monkeypatch.setattr("core.distributions.TOP_PART", 8)


@pytest.mark.parametrize("rows", [3, pytest.param(1, marks=pytest.mark.slow), pytest.param(64, marks=pytest.mark.slow)])
@pytest.mark.parametrize("truncation", [{}, {"top_p": 0.8, "min_p": 0.01}, {"top_k": 5}, {"top_k": 1}], ids=str)
@pytest.mark.parametrize("stop", [Early(), Early("e", "  "), Stop(CAUSAL)], ids=["ids", "sequences", "few"])
def test_every_batch_and_order_of_refilling_writes_what_the_loop_writes(rows, truncation, stop):
    """In twice as many rows, then with fewer and shorter completions, in the buffers that are there."""
    net = causal_model(scale=1.5, n_layer=2, block_size=int(PROMPTS[0].shape[1]) + NOISE.shape[2] - 1)
    decoder = partial(Decoder(net), rows=rows)
    for noise in NOISE[:, :2, :12], NOISE, NOISE[:, 1:3, :20]:
        found = decoder(*PROMPTS, noise, stop, temperature=1.1, **truncation)
        expect_same(found, generate(net, *PROMPTS, noise, stop, temperature=1.1, **truncation))


@pytest.mark.parametrize("temperature, truncation, most", [
    (0.05, {"top_p": 0.8}, 0.2), (0.1, {"top_p": 0.8}, 0.5), (1.0, {"top_p": 0.8}, 1.0),
    (0.1, {"top_p": 0.8, "min_p": 0.05}, 0.5), (0.1, {"top_p": 0.8, "top_k": 7}, 1.0),
    (0.1, {"top_p": 0.8, "top_k": 30, "min_p": 0.01}, 1.0)], ids=str)
@pytest.mark.parametrize("stop", [Early(), pytest.param(Stop(CAUSAL), marks=pytest.mark.slow)], ids=["ids", "few"])
def test_rows_whose_nucleus_exceeds_the_top_part_wait_and_write_the_same(
        temperature, truncation, most, stop, large_vocabulary, monkeypatch):
    """Few rows wait; some do; all do, and therefore all tokens are sorted in every step from the second round on; with
    top_k none does. most: share of the steps that sort all tokens"""
    net = causal_model(scale=4.0, n_layer=2, block_size=int(PROMPTS[0].shape[1]) + NOISE.shape[2])
    steps, step = [], Decoder.step
    monkeypatch.setattr(Decoder, "step", lambda self, kind, *a, **s: steps.append(kind) or step(self, kind, *a, **s))
    monkeypatch.setattr(decode, "POLL_STEPS", 6)
    sampling = {"temperature": temperature} | truncation
    found = Decoder(net)(*PROMPTS, NOISE, stop, rows=4, **sampling)
    expected = generate(net, *PROMPTS, NOISE, stop, **sampling)
    expect_same(found, expected)
    whole = steps.count(False) / len(steps)
    assert most - 0.5 < whole <= most and len(found.mask.sum(1).unique()) > 1


@pytest.mark.parametrize("sampling", [{}, {"top_p": 0.8}, {"top_k": 1}], ids=str)
def test_on_a_gpu_no_step_waits_for_the_device_and_greedy_steps_keep_nothing(sampling, large_vocabulary):
    net = causal_model(scale=1.5, n_layer=2, block_size=int(PROMPTS[0].shape[1]) + NOISE.shape[2])
    expected = generate(net, *PROMPTS, NOISE, Early(), **sampling)
    with PretendCuda() as gpu:
        prompt, padding = (x.to("cuda") for x in PROMPTS)
        decoder = Decoder(net.to("cuda"))
        found = decoder(prompt, padding, NOISE, Early(), rows=4, **sampling)
        assert gpu.replays and not gpu.mixes
        kinds = {kind for kind, *_ in decoder.graphs}
        target, truncated = found.target.cpu(), found.truncated.cpu()
    assert torch.equal(target, expected.target) and torch.equal(truncated, expected.truncated)
    assert kinds == ({False, True} if "top_p" in sampling else {False})
    assert decoder.sizes.vocabulary == (len(CAUSAL.characters) + 1 if "top_p" in sampling else 0)
    assert (found.kept is None) == ("top_p" not in sampling)


@pytest.mark.parametrize("family", CAUSAL_FAMILIES)
def test_models_of_others_are_decoded_where_every_layer_keeps_all_tokens(family, tmp_path):
    path = model_folder(tmp_path / family, family)
    net, tokenizer = load_model(path)[0], load_tokenizer(path)
    assert can_decode(net) == (FAMILIES[family].keeps == "all tokens")
    if family == "llama":  # where the rotation of a row depends on the longest one
        assert can_decode(net)
        net.config.rope_parameters |= {"rope_type": "dynamic", "factor": 2.0}
    if can_decode(net):
        prompt = torch.arange(24).view(3, 8) + 10
        stop = Stop(tokenizer)
        stop.ids += tuple(range(0, tokenizer.base_vocab_size, 7))
        for padding in None, torch.tensor([0, 3, 6]):
            found, expected = (complete(prompt, padding, NOISE, stop, temperature=2.0, top_p=0.9)
                               for complete in (partial(Decoder(net), rows=4), lambda *a, **s: generate(net, *a, **s)))
            expect_same(found, expected, tokenizer.base_vocab_size)
            assert len(found.mask.sum(1).unique()) > 2


@pytest.mark.parametrize("settings", [
    {}, {"stop_sequences": ()}, {"max_new_tokens": 9, "top_p": 0.9}, {"top_p": 0.9, "temperature": 0.1}], ids=str)
def test_an_environment_hears_and_answers_the_same(prompts, settings, request):
    if "temperature" in settings:
        request.getfixturevalue("large_vocabulary")
    c = prompt_config(**TURNS | settings)
    policy, other = causal_policy(1, scale=3.0), causal_policy(1, scale=3.0)
    other.decoder, c = Decoder(other.model), c.varied(sample_rows=6)
    problems = prompt_consumer(prompts, c).problems("train", 0)
    expected, found = (one.sample(problems, 0, SamplingSettings.of(c)) for one in (policy, other))
    for name in ("target", "mask", "truncated"):
        assert torch.equal(getattr(found, name), getattr(expected, name)), name
    torch.testing.assert_close(found.old_logp, expected.old_logp, rtol=1e-4, atol=1e-4)
    if expected.inputs.kept is not None:
        for one, other in zip(found.inputs.kept, expected.inputs.kept, strict=True):
            assert torch.equal(one.ids, other.ids) and torch.equal(one.counts, other.counts)
    assert found.texts.columns == expected.texts.columns and found.texts.completions == expected.texts.completions
    assert (expected.mask[:, 0] == 1).all() and (expected.mask == 0).any()


class Answers:
    """Answers that are there from the start, of a token that ends a row where the policy draws it."""

    def __init__(self):
        self.given = torch.full((12, 24), -1)
        self.given[:, 2:4] = Early().ids[0]

    def over(self, target, number, t, drawn):
        return Early()(target[number, : t + 1], t)[:, 0] & drawn

    def answer_turn(self, number, written):
        return True


@pytest.mark.parametrize("is_large", [False, True])
def test_a_stop_token_in_an_answer_ends_no_completion(is_large, request):
    sampling = {"top_p": 0.9}
    if is_large:
        request.getfixturevalue("large_vocabulary")
        sampling["temperature"] = 0.05  # some rows wait
    net = causal_model(scale=1.5, n_layer=2, block_size=int(PROMPTS[0].shape[1]) + NOISE.shape[2])
    found = Decoder(net)(*PROMPTS, NOISE, Early(), Answers(), rows=5, **sampling)
    expect_same(found, generate(net, *PROMPTS, NOISE, Early(), Answers(), **sampling))
    assert found.mask[:, 2:4].sum() == 0 and found.mask[:, 4].sum() > 0


def test_in_bfloat16_the_weights_follow_the_model_whose_own_come_back():
    net = causal_model(n_layer=2, n_embd=64)
    decoder, own = Decoder(net), dict(net.named_parameters())
    for change in 1.0, 2.0:
        with torch.no_grad(), autocast(torch.device("cpu"), torch.bfloat16):
            net.blocks[0].up.weight.mul_(change)
            found = decoder(*PROMPTS, NOISE[:, :2, :5], Early())
            logp = net(PROMPTS[0], padding=PROMPTS[1])[:, -1].log_softmax(-1).repeat_interleave(2, 0)
        expected = logp.gather(1, found.target[:, :1])[:, 0]
        torch.testing.assert_close(found.logp[:, 0], expected, rtol=2e-2, atol=2e-2)
        assert all(p is own[name] for name, p in net.named_parameters())


class Casts(TorchDispatchMode):
    """Counts the casts to bfloat16."""
    count = 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        out = func(*args, **(kwargs or {}))
        self.count += func._schema.name == "aten::_to_copy" and out.dtype == torch.bfloat16
        return out


def test_weights_and_biases_are_cast_once_a_call_with_the_same_numbers(tmp_path, monkeypatch):
    net = load_model(model_folder(tmp_path / "qwen2", "qwen2"))[0]
    prompt, found, counts = torch.arange(24).view(3, 8) + 10, [], []
    uncached = partial(torch.autocast, "cpu", torch.bfloat16, cache_enabled=False)
    assert sum(isinstance(x, torch.nn.Linear) and x.bias is not None for x in net.modules()) == 6  # in two layers
    for _ in range(2):
        for tokens in 3, 9:  # a round and three
            with torch.no_grad(), autocast(torch.device("cpu"), torch.bfloat16), Casts() as casts:
                found.append(Decoder(net)(prompt, None, NOISE[:, :1, :tokens], Stop(CAUSAL), rows=3))
            counts.append(casts.count)
        monkeypatch.setattr(Decoder, "cast_weights", lambda _: uncached())
    assert torch.equal(found[1].logp, found[3].logp) and torch.equal(found[1].target, found[3].target)
    linear = 2 * 7 + 1
    assert (counts[3] - counts[2]) - (counts[1] - counts[0]) == 6 * (linear + 6), "of 6 more tokens"
