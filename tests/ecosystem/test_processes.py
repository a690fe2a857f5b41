"""Two CPU processes, started by `accelerate launch`: the tokens are those of one process."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
from models import DOCUMENT, batch, new_model, run
from two_processes import PROMPTS, sample


@pytest.fixture(scope="module")
def found(tmp_path_factory) -> dict:
    """What the processes wrote."""
    folder = tmp_path_factory.mktemp("processes")
    here = Path(__file__).parent
    # --multi_gpu is accelerate's word for several processes; the script asks for CPUs.
    command = [sys.executable, "-m", "accelerate.commands.launch", "--multi_gpu"]
    command += ["--num_processes", "2", "--num_machines", "1", "--main_process_port", "0"]
    command += ["--mixed_precision", "no", "--dynamo_backend", "no"]
    path = os.pathsep.join(filter(None, [str(here.parent), os.environ.get("PYTHONPATH")]))
    done = subprocess.run(
        [*command, str(here / "two_processes.py"), str(folder)],
        env=os.environ | {"PYTHONPATH": path, "OMP_NUM_THREADS": "1"},
        capture_output=True,
        text=True,
        timeout=300,
    )
    assert done.returncode == 0, done.stderr
    found = json.loads((folder / "found.json").read_text())
    assert found["num_processes"] == 2
    return found


def test_a_prompt_set_split_between_processes(found):
    job = found["data parallel"]
    assert job["prompts_each"] == [3, 2]
    assert job["samples"] == sample(new_model(), PROMPTS)


def test_a_tensor_parallel_model(found):
    job = found["tensor parallel"]
    assert job["stock"] == job["patched"] == job["unpatched"]
    assert job["patched"] == samples_in_one_process(DOCUMENT)
    assert (job["path"], job["shared"]) == ("cascade", True)
    assert job["pool_heads"] == new_model().config.num_key_value_heads / 2


def test_a_fully_sharded_model(found):
    """With synced_gpus a process goes on until the last one is done."""
    job = found["fully sharded"]
    assert job["stock"] == job["patched"] == job["unpatched"]
    for process, samples in enumerate(job["patched"]):
        prompt = DOCUMENT[: 3 + 6 * process]
        assert samples == samples_in_one_process(
            prompt, max_new_tokens=16 - len(prompt), seed=process
        )
    assert job["path"] == ["cascade"] * 2
    assert job["decode_steps"] == [12] * 2  # as many as the shorter prompt needs


def samples_in_one_process(prompt: list[int], **options) -> list[list[int]]:
    return run(
        new_model(), **batch(prompt), do_sample=True, num_return_sequences=4, **options
    ).sequences.tolist()
