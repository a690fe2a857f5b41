"""What the processes of test_processes.py do; `accelerate launch` runs it in each of them.

The first process writes what all of them found as JSON into the folder given as argument.
"""

from __future__ import annotations

import json
import os
import sys
from pathlib import Path

import torch
import transformers
from accelerate import PartialState
from accelerate.utils import gather_object
from models import DOCUMENT, Run, batch, new_model, run, tokens
from transformers import AutoModelForCausalLM, PreTrainedModel
from transformers.distributed import DistributedConfig

import hf_cascade

# Prompts of several lengths, an odd number of them, each with a seed of its own.
PROMPTS = [(seed, DOCUMENT + tokens(2 + seed, seed=seed)) for seed in range(5)]


def sample(model: PreTrainedModel, prompts: list[tuple[int, list[int]]]) -> list[list[list[int]]]:
    """Four samples of each prompt; what a prompt gets does not depend on the others."""
    return [
        run(
            model, **batch(prompt), seed=seed, do_sample=True, num_return_sequences=4
        ).sequences.tolist()
        for seed, prompt in prompts
    ]


def data_parallel(state: PartialState) -> dict:
    """Each process samples its share of the prompts."""
    model = hf_cascade.patch(new_model(), strict=True)
    with state.split_between_processes(PROMPTS) as share:
        samples = sample(model, share)
    return {"samples": gather_object(samples), "prompts_each": gather_object([len(samples)])}


def tensor_parallel(state: PartialState, folder: Path) -> dict:
    """Each process has half of the heads of one model."""
    return compare(load(folder, DistributedConfig(tp_size=state.num_processes)), DOCUMENT)


def fully_sharded(state: PartialState, folder: Path) -> dict:
    """Each process has half of every weight, and a prompt of its own; one ends before the other."""
    prompt = DOCUMENT[: 3 + 6 * state.process_index]
    found = [
        compare(
            load(folder, DistributedConfig(fsdp_size=state.num_processes)), prompt,
            synced_gpus=True, max_new_tokens=None, max_length=16, seed=state.process_index,
        )
    ]  # fmt: skip
    return {key: [each[key] for each in gather_object(found)] for key in found[0]}


def load(folder: Path, config: DistributedConfig) -> PreTrainedModel:
    return AutoModelForCausalLM.from_pretrained(
        folder, distributed_config=config, dtype=torch.float32
    ).eval()


def compare(model: PreTrainedModel, prompt: list[int], **options) -> dict:
    """What stock, patched and unpatched calls of this model return."""

    def call() -> Run:
        return run(
            model, **batch(prompt), **{"do_sample": True, "num_return_sequences": 4}, **options
        )

    stock = call()
    hf_cascade.patch(model, strict=True)
    patched, stats = call(), model.cascade.stats
    pool_heads = model.cascade.pool.layers()[0][0].shape[1]
    hf_cascade.unpatch(model)
    return {
        "stock": stock.sequences.tolist(),
        "patched": patched.sequences.tolist(),
        "unpatched": call().sequences.tolist(),
        "path": stats.path,
        "shared": stats.prompt_tokens == 4 * stats.prefill_tokens,
        "decode_steps": stats.decode_steps,
        "pool_heads": pool_heads,
    }


def main() -> None:
    torch.set_num_threads(1)
    transformers.logging.set_verbosity_error()
    folder = Path(sys.argv[1])
    state = PartialState(cpu=True)
    if state.is_main_process:
        new_model().save_pretrained(folder / "model")
    state.wait_for_everyone()
    found = {
        "num_processes": state.num_processes,
        "data parallel": data_parallel(state),
        "tensor parallel": tensor_parallel(state, folder / "model"),
        "fully sharded": fully_sharded(state, folder / "model"),
    }
    if state.is_main_process:
        (folder / "found.json").write_text(json.dumps(found))
    state.destroy_process_group()
    # All is done. After fully_shard over gloo, torch aborts now and then while the interpreter ends
    # ("terminate called without an active exception"; 1 of 25 runs without hf_cascade, too).
    os._exit(0)


if __name__ == "__main__":
    main()
