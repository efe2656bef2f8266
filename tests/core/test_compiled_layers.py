"""Compiled layers compute what the plain ones do."""

import pytest
import torch

from core.cache import new_cache
from core.model import LANGUAGE_MODEL, MASKED_FILL
from tests.tiny import model


@pytest.mark.slow
@pytest.mark.parametrize(("mode", "dtype"), [(LANGUAGE_MODEL, torch.bfloat16), (MASKED_FILL, torch.float32)])
def test_compiled_layers_compute_what_plain_ones_do_and_a_frozen_copy_exactly_the_same(mode, dtype):
    """So that the first ratio is 1 and the first KL is 0: a policy is read with gradients, its reference without."""
    torch.compiler.reset()
    net, tokens = model(mode, n_layer=3, scale=2.0), torch.randint(0, 90, (4, 12))
    padding = torch.tensor([2, 0, 1, 0])
    plain, rows = net.frozen(), torch.tensor([0, 0, 1, 1, 2, 3])
    net.compile_layers()
    twin = net.frozen()

    def read(net):
        """States of whole texts, and of texts that continue those of a cache."""
        with torch.autocast("cpu", dtype, enabled=dtype != torch.float32):
            found, past = [net.states(tokens[:, 3:]), net.states(tokens[:, :5])], new_cache(net)
            if mode == LANGUAGE_MODEL:
                net.states(tokens[:, :7], past=past, padding=padding)
                found.append(net.states(tokens[rows, 7:], None, past.expand(rows), padding[rows]))
            return found

    learning = read(net)
    sum(h.sum() for h in learning).backward()
    assert all(p.grad is not None for name, p in net.named_parameters() if name.startswith("blocks."))
    with torch.no_grad():
        for a, b, c in zip(learning, read(twin), read(plain), strict=True):
            assert a.requires_grad and torch.equal(a, b)
            close = 1e-4 if dtype == torch.float32 else 0.1
            torch.testing.assert_close(b, c, rtol=close, atol=close)
