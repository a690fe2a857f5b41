"""The table of supported models is what the installed transformers gives, and nothing is wrong.

`make supported-models` tries all architectures; the tests try quick ones of every kind.
"""

from __future__ import annotations

import re

import pytest
import transformers

import hf_cascade
from docs.supported_models import (
    TABLE,
    architectures,
    as_row,
    isolated_verdicts,
    verdict,
)

LINES = TABLE.read_text(encoding="utf-8").splitlines()
IS_OF_THIS_VERSION = any(f"transformers {transformers.__version__} knows" in line for line in LINES)

QUICK = """
    afmoe apertus arcee bert biogpt bloom codegen cohere2 cohere_compass_text ctrl cwm dbrx
    deepseek_v3 diffllama doge dots1 ernie4_5 exaone4 falcon flex_olmo gemma2 gemma3_text
    gemma4_text glm4 glm4_moe gpt2 gpt_bigcode gpt_neox gpt_oss granite_swa granitemoe helium
    hunyuan_v1_dense jetmoe laguna lfm2 llama mamba mellum minimax_m2 minimax_m3_vl_text ministral3
    mistral mllama modernbert-decoder moshi mpt nanochat nemotron olmo3 opt persimmon phi3 phimoe
    qwen2_moe qwen3_next roc_bert seed_oss smollm3 stablelm starcoder2 vaultgemma xglm zaya
"""


@pytest.mark.skipif(not IS_OF_THIS_VERSION, reason="the table is of another transformers")
def test_the_table_has_the_architectures_of_the_installed_transformers():
    rows = (re.match(r"\| (\S+) \| `(\w+)` \|", line) for line in LINES)
    assert dict(row.groups() for row in rows if row) == architectures()


@pytest.mark.parametrize("name", QUICK.split())
def test_a_model_is_refused_or_right(name):
    found = verdict(name)
    assert found.outcome != "wrong", found
    assert not IS_OF_THIS_VERSION or as_row(found) in LINES


def test_nothing_in_the_table_is_wrong():
    assert not [line for line in LINES if "| wrong |" in line]


@pytest.mark.parametrize(("factor", "reason"), [(1.3, "tokens differ"), (1.003, "logits differ")])
def test_a_patched_model_that_generates_something_else_is_wrong(factor, reason, monkeypatch):
    def spoil(model):
        model.model.layers[0].self_attn.v_proj.weight.data *= factor

    monkeypatch.setattr(hf_cascade, "patch", spoil)
    found = verdict("llama")
    assert found.outcome == "wrong"
    assert reason in found.reason


def test_an_architecture_that_ends_its_process_is_not_the_end():
    unknown, llama = isolated_verdicts(["no such architecture", "llama"])
    assert (unknown.outcome, llama.outcome) == ("not tried", "cascade")
    assert unknown.reason == "the process ended with exit code 1"
