"""Hugging Face models behind the model interface compute what transformers computes, in every way that we read them."""

import inspect

import pytest
import torch

transformers = pytest.importorskip("transformers")

from core.huggingface.tokenizer import load_huggingface_tokenizer
from core.model import LANGUAGE_MODEL, MASKED_FILL, SEQUENCE_SCORER
from core.models import load_model
from tests.families import (
    CAUSAL_FAMILIES,
    FILL_FAMILIES,
    RECURRENT_FAMILIES,
    base_model,
    expect_close,
    expect_equal_gradients,
    folder_maker,
    random_ids,
)

pytestmark = pytest.mark.slow  # it is the number of them that takes the time

DELTA_FAMILIES = ("qwen3_5", "qwen3_next")
SCAN = 800 * torch.finfo(torch.float32).eps  # they sum chunks of 64 tokens in float32, a dozen times in a row


def precise(family):
    """float64, whose rounding no limit needs to know; the experts of Qwen3-Next have no products in it."""
    return torch.float32 if family == "qwen3_next" else torch.float64


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """family -> the folder of a small random model."""
    return folder_maker(tmp_path_factory.mktemp("families"))


@pytest.fixture
def both(folder):
    """(family, dtype) -> (our model, its tokenizer, the model of transformers)."""
    def of(family, dtype=torch.float32):
        tokenizer = load_huggingface_tokenizer(folder(family))
        model, theirs = load_model(folder(family), tokenizer=tokenizer)[0], base_model(folder(family))
        return model.to(dtype), tokenizer, theirs.to(dtype)
    return of


def framed(model, tokens):
    """The ids that transformers reads for texts: of a fill-in model between the start and the end token."""
    start, end = (torch.tensor([ids] * len(tokens)).view(len(tokens), -1) for ids in (model.start_ids, model.end_ids))
    return torch.cat((start, tokens, end), 1).long()


@pytest.mark.parametrize("family", CAUSAL_FAMILIES + FILL_FAMILIES)
def test_logits_equal_those_of_transformers_and_special_tokens_are_never_filled_in(family, both):
    """Every layer counts: the weights are random."""
    model, tokenizer, theirs = both(family)
    tokens, columns = random_ids(tokenizer, 3, 17), torch.tensor([[0, 16], [5, 5], [16, 3]])
    fills = family in FILL_FAMILIES
    if fills:
        tokens[torch.rand(3, 17) < 0.3] = tokenizer.mask_token_id
        assert set(tokenizer.backend.all_special_ids) <= set(tokenizer.banned_token_ids)
    S = len(model.start_ids)
    assert S == len(model.end_ids) == fills and model.mode == (MASKED_FILL if fills else LANGUAGE_MODEL)
    with torch.no_grad():
        ours, expected = model(tokens), theirs(framed(model, tokens)).logits[:, S : S + 17]
        at = model(tokens, columns)
    assert ours.dtype == torch.float32 and not model.training
    assert ours.shape == (3, 17, tokenizer.base_vocab_size)
    assert float(ours.softmax(-1)[..., list(tokenizer.banned_token_ids)].sum()) == 0.0
    sampled = [i for i in range(model.vocabulary) if i not in tokenizer.banned_token_ids]
    expect_close(ours[..., sampled], expected[..., sampled])
    expect_close(at, ours.gather(1, columns[..., None].expand(-1, -1, ours.shape[-1])))
    kinds = model.parameters_by_kind().values()
    assert sorted(id(p) for kind in kinds for p in kind) == sorted(map(id, model.parameters())), "each is trained once"


def tensors_of(past):
    """All keys, values and states of a cache, copied."""
    values = [x for layer in past.content.layers for x in vars(layer).values()]
    values += [state for x in values if isinstance(x, dict) for state in x.values()]
    return [x.clone() for x in values if torch.is_tensor(x)]


@pytest.mark.parametrize("family", CAUSAL_FAMILIES)
@torch.no_grad()
def test_token_by_token_through_the_cache_and_behind_padding_equals_transformers_on_each_whole_text(family, both):
    """Rows leave in between, and others take their places. NaN stands where they have left."""
    model, tokenizer, theirs = both(family, precise(family))
    prompt, rest, padding = random_ids(tokenizer, 2, 9), random_ids(tokenizer, 6, 12, seed=1), torch.tensor([0, 5])
    group = torch.tensor([0, 0, 0, 1, 1, 1])

    def ours(filler):
        first, rows = model.new_cache(), torch.arange(6)
        wide = torch.where(torch.arange(9) < padding[:, None], filler, prompt)
        parts = [model(wide, torch.tensor([[8], [8]]), first, padding)[group]]
        before, past = tensors_of(first), first.expand(group, room=12)
        for t in range(12):
            if t in (3, 7):
                keep = torch.tensor([0, 4, 2, 5] if t == 3 else [2, 1])
                rows = rows[keep]
                past.keep(keep)
            out = torch.full((6, 1, model.vocabulary), torch.nan, dtype=precise(family))
            out[rows] = model(rest[rows, t : t + 1], None, past, padding[group[rows]]).to(out.dtype)
            parts.append(out)
        assert rows.tolist() == [2, 4] and past.length == 21
        assert before and all(map(torch.equal, before, tensors_of(first))), "the prompts' cache has changed"
        return torch.cat(parts, 1)                                                   # (6, 13, V)

    found = ours(tokenizer.pad_token_id)
    for n, logits in enumerate(found):
        read = 13 if n in (2, 4) else 4  # at least
        text = torch.cat((prompt[group[n], padding[group[n]] :], rest[n]))[None]
        expected = theirs(text).logits[0, -13:, : model.vocabulary]
        expect_close(logits[:read], expected[:read].to(logits))  # Mamba-2 computes in float32
    expect_close(ours(77), found)  # whatever the padding is


@pytest.mark.parametrize("name", ["cache", "past_key_values", "cache_params"])
@torch.no_grad()
def test_the_cache_has_the_name_that_a_version_of_transformers_gives_it(name, both, monkeypatch):
    """Under another name it would be dropped without a word, as here."""
    forward = transformers.LlamaModel.forward
    parameters = inspect.signature(forward).parameters
    own = "cache" if "cache" in parameters else "past_key_values"  # from 5.24 on, before

    def renamed(self, *args, **settings):
        return forward(self, *args, **{own if key == name else key: x for key, x in settings.items()
                                       if key == name or key != own})

    renamed.__signature__ = inspect.Signature([p.replace(name=name) if key == own else p
                                               for key, p in parameters.items()])
    monkeypatch.setattr(transformers.LlamaModel, "forward", renamed)
    model, tokenizer, theirs = both("llama", torch.float64)
    text, past = random_ids(tokenizer, 2, 9), model.new_cache()
    found = torch.cat([model(part, None, past) for part in text.split([5, 1, 3], 1)], 1)
    expect_close(found, theirs(text, use_cache=False).logits[..., : model.vocabulary])


WITH_GRADIENT = [(family, 7) for family in CAUSAL_FAMILIES] + [(family, 1) for family in RECURRENT_FAMILIES]


@pytest.mark.parametrize("checkpointed", [False, True], ids=["stored", "recomputed"])
@pytest.mark.parametrize("family, M", WITH_GRADIENT)
def test_a_prompt_read_once_has_the_gradient_of_transformers_that_reads_it_with_each_completion(
        family, M, checkpointed, both):
    """Completions of one token are a case of their own where transformers changes states in place."""
    model, tokenizer, theirs = both(family, precise(family))
    model.grad_checkpoint = checkpointed
    (P, G, S), V = (3, 2, 12), model.vocabulary
    tokens, padding = random_ids(tokenizer, P, S), torch.tensor([0, 5, S - 1])  # the last prompt is one token
    rest = random_ids(tokenizer, P * G, M, seed=1)
    weight = torch.randn(P * G, M, generator=torch.Generator().manual_seed(2))

    def score(logits, rows):
        return (logits.log_softmax(-1).gather(-1, rest[rows][..., None]).squeeze(-1) * weight[rows]).sum()

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
    assert past.length == S - 1
    ours.backward()
    torch.testing.assert_close(ours, loss, rtol=1e-5, atol=0)
    expect_equal_gradients(model.net, theirs, SCAN if family in DELTA_FAMILIES else 1e-5)


@pytest.mark.parametrize("family", FILL_FAMILIES)
def test_the_gradient_of_a_fill_equals_that_of_transformers_also_with_activations_computed_again(family, both):
    model, tokenizer, theirs = both(family, torch.float64)
    model.grad_checkpoint = True
    tokens, target = random_ids(tokenizer, 3, 14), random_ids(tokenizer, 3, 14, seed=1)
    tokens[:, ::3] = tokenizer.mask_token_id
    banned = torch.zeros(model.vocabulary, dtype=torch.bool)
    banned[list(tokenizer.banned_token_ids)] = True

    def score(logits):
        logp = logits.masked_fill(banned, -torch.inf).log_softmax(-1)
        return logp.gather(-1, target[..., None]).squeeze(-1)[:, ::3].sum()

    score(theirs(framed(model, tokens)).logits[:, 1:-1]).backward()
    score(model(tokens)).backward()
    expect_equal_gradients(model.net, theirs)


def test_electra_is_a_judge_of_each_token(folder):
    path = folder("electra_judge")
    tokenizer = load_huggingface_tokenizer(path)
    model, _ = load_model(path, mode=SEQUENCE_SCORER, tokenizer=tokenizer)
    theirs = transformers.ElectraForPreTraining.from_pretrained(path).eval()
    tokens = random_ids(tokenizer, 3, 14)
    with torch.no_grad():
        replaced = theirs(framed(model, tokens)).logits[:, 1:-1].sigmoid()           # (3, 14) their probability
        expect_close(model(tokens).sigmoid(), 1 - replaced)
    assert model.judge_head == "realness" and replaced.std() > 0.05
