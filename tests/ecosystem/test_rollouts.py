"""Reinforcement learning: sample a group of completions per prompt, train on them, sample again.

A loop of one's own, and TRL's GRPOTrainer. Both go as they do with the stock model, to the bit.
"""

from __future__ import annotations

import weakref
from dataclasses import dataclass

import pytest
import torch
from models import DOCUMENT, Run, assert_same, batch, new_model, run, tokens
from peft import LoraConfig
from sums import CHECKPOINT, PROMPTS
from torch import Tensor
from transformers import AutoModelForCausalLM, AutoTokenizer, PreTrainedModel, set_seed

import hf_cascade

GROUP_SIZE = 8


# A loop of one's own


@dataclass(frozen=True)
class Round:
    samples: Run
    loss: Tensor


def rollout(model: PreTrainedModel) -> Run:
    """GROUP_SIZE samples of two prompts; always with the same seed, so only weights change them."""
    prompts = batch(DOCUMENT, tokens(6, seed=5))
    return run(model, **prompts, do_sample=True, num_return_sequences=GROUP_SIZE)


def train(model: PreTrainedModel, samples: Run) -> Round:
    """A step of policy gradient; the reward is the number of different tokens."""
    sequences = samples.sequences
    rewards = torch.tensor([float(len(set(row))) for row in sequences.tolist()])
    groups = rewards.view(-1, GROUP_SIZE)
    advantages = (groups - groups.mean(1, keepdim=True)).flatten()
    log_probs = model(sequences[:, :-1]).logits.log_softmax(-1)
    chosen = log_probs.gather(-1, sequences[:, 1:, None]).squeeze(-1)[:, -8:]
    loss = -(advantages[:, None] * chosen).mean()
    model.zero_grad()
    loss.backward()
    with torch.no_grad():
        for parameter in model.parameters():
            parameter -= 0.05 * parameter.grad
    return Round(samples, loss.detach())


@pytest.mark.parametrize("compile", [False, True], ids=["eager", "compiled"])
def test_generate_train_generate_in_groups(compile):
    stock = new_model().train()
    model = hf_cascade.patch(new_model().train(), strict=True, compile=compile)
    rounds: list[Round] = []
    for _ in range(3):
        expected = train(stock, rollout(stock))
        samples = rollout(model)
        stats = model.cascade.stats
        assert stats.prompt_tokens == GROUP_SIZE * stats.prefill_tokens

        pages = [weakref.ref(pool) for pools in model.cascade.pool.layers() for pool in pools]
        assert len(pages) == 4
        model.cascade.release()
        assert not any(pool() is not None for pool in pages), "training has less memory than it may"

        rounds.append(train(model, samples))
        assert_same(expected.samples, rounds[-1].samples)
        assert torch.equal(expected.loss, rounds[-1].loss)
    first, second, third = (each.samples.sequences.tolist() for each in rounds)
    assert first != second != third != first


# TRL

LORA = LoraConfig(r=4, target_modules=["q_proj", "v_proj"], lora_dropout=0.1, task_type="CAUSAL_LM")


@pytest.mark.parametrize("adapter", [None, LORA], ids=["all weights", "LoRA"])
def test_grpo_trainer(adapter, tmp_path):
    trl = pytest.importorskip("trl")
    datasets = pytest.importorskip("datasets")

    def completions(model: PreTrainedModel) -> list[list[str]]:
        """What the trainer sampled in each step."""
        seen: list[list[str]] = []

        def number_of_characters(completions, **_) -> list[float]:
            if hasattr(model, "cascade"):
                stats = model.cascade.stats
                assert 4 * stats.prefill_tokens < stats.prompt_tokens
                model.cascade.release()  # the step that follows needs the memory
            seen.append(completions)
            return [float(len(set(text))) for text in completions]

        config = trl.GRPOConfig(
            output_dir=str(tmp_path), seed=0, use_cpu=True, bf16=False, report_to=[],
            save_strategy="no", max_steps=3, learning_rate=1e-2, num_generations=GROUP_SIZE,
            per_device_train_batch_size=2 * GROUP_SIZE, max_completion_length=16,
            disable_dropout=True,  # with dropout, and the model in train mode, it is stock's turn
        )  # fmt: skip
        trainer = trl.GRPOTrainer(
            model=model,
            args=config,
            reward_funcs=number_of_characters,
            train_dataset=datasets.Dataset.from_list([{"prompt": prompt} for prompt in PROMPTS]),
            processing_class=AutoTokenizer.from_pretrained(CHECKPOINT),
            peft_config=adapter,
        )
        set_seed(0)
        trainer.train()
        return seen

    stock, patched = (
        AutoModelForCausalLM.from_pretrained(CHECKPOINT, dtype=torch.float32) for _ in range(2)
    )
    hf_cascade.patch(patched, strict=True)
    before = {name: tensor.clone() for name, tensor in stock.state_dict().items()}
    expected = completions(stock)
    assert len(expected) == 3
    assert completions(patched) == expected
    trained, trained_patched = stock.state_dict(), patched.state_dict()
    assert all(torch.equal(tensor, trained_patched[name]) for name, tensor in trained.items())
    kind = "lora_B" if adapter else "mlp"  # lora_B starts at zero
    changed = [tensor - before.get(name, 0) for name, tensor in trained.items() if kind in name]
    assert changed
    assert all(difference.any() for difference in changed), "nothing was trained"
