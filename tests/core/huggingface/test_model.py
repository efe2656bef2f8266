"""Hugging Face models behind the model interface compute what transformers computes, in every way that we read them."""

import pytest
import torch

transformers = pytest.importorskip("transformers")

from core.generation import Stop, generate
from core.huggingface.tokenizer import load_huggingface_tokenizer
from core.model import LANGUAGE_MODEL, MASKED_FILL, SEQUENCE_SCORER
from core.models import load_model
from tests.families import CAUSAL_FAMILIES, FILL_FAMILIES, few_quick, folder_maker, random_ids

pytestmark = pytest.mark.slow  # it is the number of them that takes the time

CLOSE = {"rtol": 1e-4, "atol": 1e-5}
CLASSES = dict.fromkeys(CAUSAL_FAMILIES, "AutoModelForCausalLM") | dict.fromkeys(FILL_FAMILIES, "AutoModelForMaskedLM")


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """family -> the folder of a small random model."""
    return folder_maker(tmp_path_factory.mktemp("families"))


@pytest.fixture
def both(folder):
    """family -> (our model, its tokenizer, the model of transformers)."""
    def of(family):
        path, kind = folder(family), CLASSES[family]
        theirs = getattr(transformers, kind).from_pretrained(path, dtype=torch.float32).eval()
        tokenizer = load_huggingface_tokenizer(path)
        return load_model(path, tokenizer=tokenizer)[0], tokenizer, theirs
    return of


def framed(model, tokens):
    """The ids that transformers reads for texts: of a fill-in model between the start and the end token."""
    start, end = (torch.tensor([ids] * len(tokens)).view(len(tokens), -1) for ids in (model.start_ids, model.end_ids))
    return torch.cat((start, tokens, end), 1).long()


def gradients(net):
    """{name: gradient} of a transformers model."""
    return {name: p.grad for name, p in net.named_parameters() if p.grad is not None}


def expect_equal_gradients(ours, theirs, bound=1e-5):
    assert ours.keys() == theirs.keys()
    for name, expected in theirs.items():
        assert (ours[name] - expected).norm() <= bound * max(float(expected.norm()), 1e-3), name


@pytest.mark.parametrize("family", few_quick(CAUSAL_FAMILIES + FILL_FAMILIES))
def test_logits_equal_those_of_transformers(family, both):
    model, tokenizer, theirs = both(family)
    tokens, columns = random_ids(tokenizer, 3, 17), torch.tensor([[0, 16], [5, 5], [16, 3]])
    fills = family in FILL_FAMILIES
    if fills:
        tokens[torch.rand(3, 17) < 0.3] = tokenizer.mask_token_id
        assert len(model.start_ids) == len(model.end_ids) == 1
    S = len(model.start_ids)
    with torch.no_grad():
        ours, expected = model(tokens), theirs(framed(model, tokens)).logits[:, S : S + 17]
        at = model(tokens, columns)
    assert model.mode == (MASKED_FILL if fills else LANGUAGE_MODEL)
    assert ours.dtype == torch.float32 and not model.training
    assert ours.shape == (3, 17, tokenizer.base_vocab_size)
    sampled = [i for i in range(model.vocabulary) if i not in tokenizer.banned_token_ids]
    torch.testing.assert_close(ours[..., sampled], expected[..., sampled], **CLOSE)
    torch.testing.assert_close(at, ours.gather(1, columns[..., None].expand(-1, -1, ours.shape[-1])), **CLOSE)
    assert float(torch.distributions.Categorical(logits=ours).entropy().mean()) < 0.9 * torch.tensor(290.0).log()


# --- causal models


@pytest.mark.parametrize("family", few_quick(CAUSAL_FAMILIES))
def test_token_by_token_through_the_cache_equals_transformers_on_the_whole_text(family, both):
    model, tokenizer, theirs = both(family)
    prompt, rest = random_ids(tokenizer, 2, 9), random_ids(tokenizer, 6, 12, seed=1)
    with torch.no_grad():
        whole = theirs(torch.cat((prompt.repeat_interleave(3, 0), rest), 1)).logits[:, 8:, : model.vocabulary]
        past = model.new_cache()
        parts = [model(prompt, torch.tensor([[8], [8]]), past).repeat_interleave(3, 0)]
        past, rows = past.expand(torch.arange(2).repeat_interleave(3), room=12), torch.arange(6)
        for t in range(12):
            if t == 5:  # rows that have finished leave
                rows = torch.tensor([0, 2, 5])
                past.keep(rows)
            out = torch.full((6, 1, model.vocabulary), torch.nan)
            out[rows] = model(rest[rows, t : t + 1], None, past)
            parts.append(out)
        assert past.length == 21
    ours = torch.cat(parts, 1)                                                       # (6, 13, V)
    torch.testing.assert_close(ours[:, :6], whole[:, :6], **CLOSE)
    torch.testing.assert_close(ours[rows], whole[rows], **CLOSE)


@pytest.mark.parametrize("padded", [False, True], ids=["full", "padded"])
@pytest.mark.parametrize("family", ["gpt2", "llama", "gemma3"])
def test_a_cache_written_in_place_gives_the_states_of_one_that_grows(family, padded, both):
    """Rows leave in between, and others take their places. Gemma 3's layers with a sliding window grow either way."""
    model, tokenizer, _ = both(family)
    prompt, rest = random_ids(tokenizer, 2, 9), random_ids(tokenizer, 6, 12, seed=1)
    padding, group = torch.tensor([0, 4]), torch.tensor([0, 0, 0, 1, 1, 1])
    padding = padding if padded else None
    with torch.no_grad():
        first = model.new_cache()
        model.states(prompt, None, first, padding)
        before = [layer.keys.clone() for layer in first.content.layers]
        caches, rows = [first.expand(group, room=room) for room in (0, 12)], torch.arange(6)
        for t in range(12):
            if t in (3, 7):
                keep = torch.tensor([0, 4, 2, 5] if t == 3 else [2, 1])
                rows = rows[keep]
                for past in caches:
                    past.keep(keep)
            shift = None if padding is None else padding[group[rows]]
            grown, in_place = (model.states(rest[rows, t : t + 1], None, past, shift) for past in caches)
            torch.testing.assert_close(in_place, grown, **CLOSE)
    assert rows.tolist() == [2, 4] and caches[1].length == caches[1].content.get_seq_length() == 21
    for layer, keys in zip(first.content.layers, before, strict=True):
        assert torch.equal(layer.keys, keys), "the prompts' keys have changed"
    assert any(hasattr(layer, "whole") for layer in caches[1].content.layers)


@pytest.mark.parametrize("family", few_quick(CAUSAL_FAMILIES))
def test_padding_changes_nothing_whatever_its_columns_hold(family, both):
    model, tokenizer, theirs = both(family)
    tokens, padding = random_ids(tokenizer, 3, 20), torch.tensor([0, 4, 11])
    alone = torch.cat([theirs(tokens[i : i + 1, n:]).logits[0, -6:, : model.vocabulary]
                       for i, n in enumerate(padding.tolist())]).detach().view(3, 6, -1)

    def padded(filler, cached):
        wide = torch.where(torch.arange(20) < padding[:, None], filler, tokens)
        with torch.no_grad():
            if not cached:
                return model(wide, None, None, padding)[:, -6:]
            past = model.new_cache()
            model(wide[:, :15], None, past, padding)
            past = past.expand(torch.arange(len(wide)).repeat_interleave(2), room=5)
            twice = wide.repeat_interleave(2, 0)
            parts = [model(twice[:, t : t + 1], None, past, padding.repeat_interleave(2)) for t in range(15, 20)]
            return torch.cat(parts, 1)[1::2]

    torch.testing.assert_close(padded(tokenizer.pad_token_id, False), alone, **CLOSE)
    torch.testing.assert_close(padded(tokenizer.pad_token_id, True), alone[:, 1:], **CLOSE)
    assert torch.equal(padded(tokenizer.pad_token_id, False), padded(77, False)), "attention read a padded column"


@pytest.mark.parametrize("checkpointed", [False, True], ids=["stored", "recomputed"])
@pytest.mark.parametrize("family", few_quick(CAUSAL_FAMILIES))
def test_a_prompt_read_once_has_the_gradient_of_transformers_that_reads_it_with_each_completion(
        family, checkpointed, both):
    model, tokenizer, theirs = both(family)
    model.grad_checkpoint = checkpointed
    (P, G, S, M), V = (3, 2, 12, 7), model.vocabulary
    tokens, padding = random_ids(tokenizer, P, S), torch.tensor([0, 5, S - 1])  # the last prompt is one token
    rest = random_ids(tokenizer, P * G, M, seed=1)
    weight = torch.randn(P * G, M, generator=torch.Generator().manual_seed(2))
    score = lambda logits, rows: (logits.log_softmax(-1).gather(-1, rest[rows][..., None]).squeeze(-1)
                                  * weight[rows]).sum()
    loss = 0.0
    for n in range(P * G):  # each text alone, without padding and cache
        text = torch.cat((tokens[n // G, padding[n // G] :], rest[n]))[None]
        loss = loss + score(theirs(text, use_cache=False).logits[:, -M - 1 : -1, :V], [n])
    loss.backward()
    past = model.new_cache()
    wide = torch.where(torch.arange(S) < padding[:, None], tokenizer.pad_token_id, tokens)
    model.states(wide[:, :-1], past=past, padding=padding)
    inputs = torch.cat((wide[:, -1:].repeat_interleave(G, 0), rest[:, :-1]), 1)
    ours = 0.0
    for rows in (torch.tensor([5, 0, 2]), torch.tensor([4, 1, 3])):  # one reading of the prompts serves several parts
        h = model.states(inputs[rows], None, past.expand(rows // G), padding[rows // G])
        ours = ours + score(model.project(h), rows)
    assert past.length == past.content.get_seq_length() == S - 1
    ours.backward()
    torch.testing.assert_close(ours, loss, **CLOSE)
    expect_equal_gradients(gradients(model.net), gradients(theirs))


def test_recomputed_activations_are_not_stored(both):
    """Fewer bytes are kept for the backward pass."""
    model, tokenizer, _ = both("llama")
    tokens, kept = random_ids(tokenizer, 2, 30), {}
    for model.grad_checkpoint in (False, True):
        seen = []
        with torch.autograd.graph.saved_tensors_hooks(lambda x: seen.append(x.numel()) or x, lambda x: x):
            model.states(tokens)
        kept[model.grad_checkpoint] = sum(seen)
    assert kept[True] < 0.5 * kept[False]


def greedy(model, tokenizer, prompts, length):
    """The ids that our generate writes for prompts of different lengths, the end token included."""
    wide = max(map(len, prompts))
    padding = torch.tensor([wide - len(ids) for ids in prompts])
    input = torch.tensor([[tokenizer.pad_token_id] * (wide - len(ids)) + ids for ids in prompts])
    out = generate(model, input, padding, torch.zeros(len(prompts), 1, length), Stop(tokenizer), temperature=0)
    return [row[: int(n)].tolist() for row, n in zip(out.target, out.mask.sum(1), strict=True)]


@pytest.mark.slow
@pytest.mark.parametrize("family", few_quick(CAUSAL_FAMILIES))
def test_greedy_text_equals_that_of_transformers_generate(family, both):
    model, tokenizer, theirs = both(family)
    prompts = [tokenizer.encode_prompt(text) for text in ("7+8=", "the quick brown fox jumps over", "a", "9+12=")]
    ours = greedy(model, tokenizer, prompts, 24)
    beyond = list(range(tokenizer.base_vocab_size, theirs.config.vocab_size)) or None
    for ids, written in zip(prompts, ours, strict=True):
        whole = theirs.generate(torch.tensor([ids]), attention_mask=torch.ones(1, len(ids)), do_sample=False,
                                max_new_tokens=24, eos_token_id=list(tokenizer.stop_token_ids), pad_token_id=0,
                                suppress_tokens=beyond)
        assert written == whole[0, len(ids) :].tolist()
        assert tokenizer.decode(written) == tokenizer.backend.decode(whole[0, len(ids) :], skip_special_tokens=True)


DECLARED = {"qwen3": ("<|endoftext|>", "<|im_end|>"), "gpt2": ("<|endoftext|>",), "llama": ("</s>",)}


@pytest.mark.parametrize("family", DECLARED)
def test_every_declared_end_ends_a_completion_and_nothing_else_does(family, both):
    model, tokenizer, _ = both(family)
    ends = tokenizer.backend.convert_tokens_to_ids(list(DECLARED[family]))
    assert sorted(tokenizer.stop_token_ids) == sorted(ends)
    with torch.no_grad():  # flat distributions, so that ends are drawn often enough
        noise = torch.rand(2, 60, 30, dtype=torch.float64, generator=torch.Generator().manual_seed(0))
    out = generate(model, random_ids(tokenizer, 2, 5), None, noise, Stop(tokenizer), temperature=30.0)
    ended = set()
    for row, mask, truncated in zip(out.target.tolist(), out.mask.tolist(), out.truncated.tolist(), strict=True):
        places = [t for t, token in enumerate(row) if token in ends and mask[t]]
        assert len(places) <= 1 and truncated == (not places)
        assert sum(mask) == (places[0] + 1 if places else len(row))
        ended |= {row[t] for t in places}
    assert ended == set(ends), "noise that draws every end"
    assert all(DECLARED[family][0] not in tokenizer.decode(row) for row in out.target.tolist())


@pytest.mark.parametrize("family", ["qwen2", "qwen3"])
def test_ids_without_text_are_never_written(family, both):
    model, tokenizer, theirs = both(family)
    assert theirs.config.vocab_size > model.vocabulary == len(tokenizer.backend)
    with torch.no_grad():
        theirs.get_output_embeddings().weight[model.vocabulary :] = 50.0  # they would be written all the time
    model.load_weights(theirs.state_dict())
    noise = torch.rand(1, 40, 20, dtype=torch.float64)
    out = generate(model, random_ids(tokenizer, 1, 5), None, noise, Stop(tokenizer))
    assert int(out.target.max()) < len(tokenizer.backend)


@pytest.mark.parametrize("family", few_quick(CAUSAL_FAMILIES + FILL_FAMILIES))
def test_an_input_that_is_too_long_is_refused(family, both):
    model, tokenizer, _ = both(family)
    frame = len(tokenizer.start_ids) + len(tokenizer.end_ids) if family in FILL_FAMILIES else 0
    assert model.longest_input == 128 - frame
    with torch.no_grad():
        model.states(random_ids(tokenizer, 1, model.longest_input))
        with pytest.raises(ValueError, match=f"input of {model.longest_input + 1} tokens does not fit"):
            model.states(random_ids(tokenizer, 1, model.longest_input + 1))


# --- fill-in models


@pytest.mark.parametrize("family", few_quick(FILL_FAMILIES))
def test_special_tokens_are_never_filled_in(family, both):
    model, tokenizer, _ = both(family)
    assert set(tokenizer.backend.all_special_ids) <= set(tokenizer.banned_token_ids)
    with torch.no_grad():
        p = model(torch.full((1, 9), tokenizer.mask_token_id)).softmax(-1)
    assert float(p[..., list(tokenizer.banned_token_ids)].abs().max()) == 0.0
    torch.testing.assert_close(p.sum(-1), torch.ones(1, 9))


@pytest.mark.parametrize("checkpointed", [False, True], ids=["stored", "recomputed"])
@pytest.mark.parametrize("family", few_quick(FILL_FAMILIES))
def test_the_gradient_of_a_fill_equals_that_of_transformers(family, checkpointed, both):
    model, tokenizer, theirs = both(family)
    model.grad_checkpoint = checkpointed
    tokens, target = random_ids(tokenizer, 3, 14), random_ids(tokenizer, 3, 14, seed=1)
    tokens[:, ::3] = tokenizer.mask_token_id
    banned = torch.zeros(model.vocabulary, dtype=torch.bool)
    banned[list(tokenizer.banned_token_ids)] = True

    def score(logits):
        logp = logits.masked_fill(banned, -torch.inf).log_softmax(-1)
        return logp.gather(-1, target[..., None]).squeeze(-1)[:, ::3].sum()

    score(theirs(framed(model, tokens)).logits[:, 1:-1]).backward()
    score(model(tokens)).backward()
    expect_equal_gradients(gradients(model.net), gradients(theirs))


# --- judges


def test_electra_is_a_judge_of_each_token(folder):
    path = folder("electra_judge")
    tokenizer = load_huggingface_tokenizer(path)
    model, _ = load_model(path, mode=SEQUENCE_SCORER, tokenizer=tokenizer)
    theirs = transformers.ElectraForPreTraining.from_pretrained(path).eval()
    tokens = random_ids(tokenizer, 3, 14)
    with torch.no_grad():
        replaced = theirs(framed(model, tokens)).logits[:, 1:-1].sigmoid()           # (3, 14) their probability
        torch.testing.assert_close(model(tokens).sigmoid(), 1 - replaced, **CLOSE)
        torch.testing.assert_close(model(tokens), torch.cat([model(row[None]) for row in tokens]), **CLOSE)
    assert model.mode == SEQUENCE_SCORER and model.judge_head == "realness" and replaced.std() > 0.05


# --- the interface


@pytest.mark.parametrize("family", ["gpt2", "gemma3", "modernbert"])
def test_frozen_copies_and_weights_do_not_follow_the_model(family, both):
    model, tokenizer, _ = both(family)
    tokens = random_ids(tokenizer, 2, 9)
    with torch.no_grad():
        before, twin = model(tokens), model.frozen()
        saved = {name: p.clone() for name, p in model.weights().items()}
        for p in model.parameters():
            p.add_(0.1)
        assert torch.equal(twin(tokens), before) and not torch.equal(model(tokens), before)
        assert not any(p.requires_grad for p in twin.parameters()) and all(p.requires_grad for p in model.parameters())
        model.load_weights(saved)
        assert torch.equal(model(tokens), before)


@pytest.mark.parametrize("family", few_quick(CAUSAL_FAMILIES + FILL_FAMILIES))
def test_every_parameter_is_of_one_kind(family, both):
    model, _, theirs = both(family)
    kinds = model.parameters_by_kind()
    found = [id(p) for group in kinds.values() for p in group]
    assert sorted(kinds) == ["embeddings", "matrices", "vectors"] and len(set(found)) == len(found)
    assert set(found) == {id(p) for p in model.parameters()}
    assert model.num_parameters() == theirs.num_parameters()
    assert all(p.dim() >= 2 for p in kinds["matrices"]) and all(p.dim() == 1 for p in kinds["vectors"])
    names = {id(p): name for name, p in model.net.named_parameters()}
    assert all("layer" in names[id(p)] or ".h." in names[id(p)] for p in kinds["matrices"])
    assert any("embed" in names[id(p)] or "wte" in names[id(p)] for p in kinds["embeddings"])


def test_bfloat16_computes_in_bfloat16_and_scores_in_float32(both):
    model, tokenizer, theirs = both("llama")
    tokens = random_ids(tokenizer, 2, 9)
    with torch.autocast("cpu", torch.bfloat16):
        h = model.states(tokens)
        rounded = model.project(h)
        model.head_dtype = torch.float32
        exact = model.project(h)
    assert rounded.dtype == exact.dtype == torch.float32
    whole = h.float() @ theirs.lm_head.weight.T
    torch.testing.assert_close(exact, whole[..., : model.vocabulary], **CLOSE)
    assert 1e-4 < float((rounded - exact).detach().abs().max()) < 0.2
