"""LoRA as files: adapters put into a patched model by transformers itself, and loaded by PEFT.

PEFT models made on the spot, and switching, merging and disabling them: tests/test_patch.py,
tests/test_sharing.py. Adapters that differ between rows: tests/test_fallback.py.
"""

from __future__ import annotations

import pytest
import torch
from models import RAGGED, Run, assert_same, new_model, run
from peft import LoraConfig, PeftModel, get_peft_model

import hf_cascade

SAMPLED = RAGGED | {"do_sample": True, "num_return_sequences": 3}


def lora(**options) -> LoraConfig:
    return LoraConfig(
        r=4, target_modules=["q_proj", "v_proj"], init_lora_weights=False,
        task_type="CAUSAL_LM", **options,
    )  # fmt: skip


@pytest.fixture
def adapters(tmp_path):
    """Two adapters as folders."""
    torch.manual_seed(0)
    model = get_peft_model(new_model(), lora(), adapter_name="one")
    model.add_adapter("two", lora())
    model.save_pretrained(tmp_path)
    return tmp_path / "one", tmp_path / "two"


def different(runs: list[Run]) -> bool:
    return len({str(each.sequences.tolist()) for each in runs}) == len(runs)


@pytest.mark.filterwarnings("ignore:Already found a `peft_config`")
@pytest.mark.filterwarnings("ignore:Adapter two was active")
def test_adapters_of_the_model_itself(adapters):
    """The methods that transformers gives every model; PEFT then works inside of it."""
    models = stock, patched = new_model(), hf_cascade.patch(new_model(), strict=True)
    for model in models:
        for name, folder in zip(("one", "two"), adapters, strict=True):
            model.load_adapter(str(folder), adapter_name=name)
    seen = []
    for change in (
        lambda model: model.set_adapter("one"),
        lambda model: model.set_adapter("two"),
        lambda model: model.disable_adapters(),
    ):
        for model in models:
            change(model)
        seen.append(run(patched, **SAMPLED))
        assert_same(run(stock, **SAMPLED), seen[-1])
    one, _, without = seen
    assert different(seen)
    assert_same(run(new_model(), **SAMPLED), without)
    patched.enable_adapters()
    patched.delete_adapter("two")
    patched.set_adapter("one")
    assert_same(one, run(patched, **SAMPLED))


def test_adapters_from_files_on_a_patched_model(adapters, tmp_path):
    one, two = adapters
    models = [
        PeftModel.from_pretrained(base, one, adapter_name="one").eval()
        for base in (new_model(), hf_cascade.patch(new_model(), strict=True))
    ]
    seen = []
    for change in (
        lambda model: None,
        lambda model: (model.load_adapter(two, "two"), model.set_adapter("two")),
        lambda model: (
            model.add_weighted_adapter(["one", "two"], [0.5, 0.7], "both", "linear"),
            model.set_adapter("both"),
        ),
    ):
        for model in models:
            change(model)
        expected, actual = (run(model, **SAMPLED) for model in models)
        assert_same(expected, actual)
        assert models[1].cascade.stats.path == "cascade"
        seen.append(actual)
    assert different(seen)
    models[1].save_pretrained(tmp_path / "again")
    again = PeftModel.from_pretrained(new_model(), tmp_path / "again" / "both").eval()
    assert_same(seen[-1], run(again, **SAMPLED))
