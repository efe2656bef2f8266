"""The names of what a run writes."""

import pytest

from core.run.names import STAYING, is_set_aside

OF_A_RUN = """state.pt state-before.pt state.pt.tmp model.safetensors model model-000040 model.tmp
    model-1234567.safetensors samples.jsonl report.html events.out.tfevents.1700000000.host.0""".split()
OF_OTHERS = """.bashrc thesis.tex state.pt.old my-state.pt model-best.safetensors model.bin metrics.jsonl~ tokenizer.json
    train.bin events previous lock wandb vllm-weights notes.tmp state-.pt""".split()


@pytest.mark.parametrize("name", OF_A_RUN + OF_OTHERS)
def test_what_a_run_writes_is_set_aside_and_nothing_else(name):
    assert is_set_aside(name) == (name in OF_A_RUN) and not (name in OF_A_RUN and name in STAYING)
