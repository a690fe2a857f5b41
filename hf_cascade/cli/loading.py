"""A patched model and its tokenizer, by the name that someone typed."""

from __future__ import annotations

import os
import re
import sys
from collections.abc import Sequence
from logging import getLogger
from pathlib import Path
from typing import Any

import torch
import typer
from transformers import (
    AutoConfig,
    AutoModelForCausalLM,
    AutoTokenizer,
    LlamaConfig,
    LlamaForCausalLM,
    PreTrainedModel,
)
from transformers.utils import logging

from ..errors import UnsupportedModelError
from ..patch import patch
from .errors import Failure, described, one_line


def checked_device(name: str | None) -> torch.device:
    """The device of that name; without a name the first CUDA device if there is one, or the CPU.

    Raises:
        typer.BadParameter: torch knows or finds no such device.
    """
    if name is None:
        return torch.device("cuda" if torch.cuda.is_available() else "cpu")
    try:
        device = torch.device(name)
        torch.empty(0, device=device)
    # An unknown name, a torch without that backend, a backend without storage: each has its own.
    except (RuntimeError, AssertionError, NotImplementedError) as error:
        reason = one_line(error, width=200)
        raise typer.BadParameter(
            f"torch can't use the device {name!r} here ({reason})", param_hint="--device"
        ) from error
    return device


def load(name: str, *, dtype: str, device: torch.device, compile: bool) -> tuple[Any, Any]:
    """Load and patch a model.

    Args:
        name: a folder, or the id of a model on the hub.
        dtype: "auto" (what the checkpoint has) or a dtype of torch.
    Returns:
        (model, tokenizer), the model in eval mode.
    Raises:
        Failure: there is no such model, it can't be loaded, or it can't be patched.
    """
    source = _checked_source(name)
    logging.disable_progress_bar()
    # It tells of every retry; the error at the end is enough.
    getLogger("huggingface_hub").setLevel("ERROR")
    if sys.stderr.isatty():
        print(f"loading {name}", file=sys.stderr)
    try:
        AutoConfig.from_pretrained(source, trust_remote_code=False)  # fails before much is fetched
        tokenizer = AutoTokenizer.from_pretrained(source, trust_remote_code=False)
        model: PreTrainedModel = AutoModelForCausalLM.from_pretrained(
            source, dtype=dtype, trust_remote_code=False
        )
        model = model.to(device).eval()  # type: ignore[arg-type]
    except Exception as error:  # configs, weights and hubs fail in ways of their own
        reason = described(error)
        if not Path(source).is_dir():
            # The sentence goes on; a name such as OSError stays as it is.
            reason = re.sub(r"^[A-Z](?=[a-z]* )", lambda first: first[0].lower(), reason)
            reason = f"there is no such folder here, and {reason}"
        raise Failure(f"{name} can't be loaded: {reason}") from error
    try:
        return patch(model, compile=compile), tokenizer
    except (UnsupportedModelError, ValueError) as error:
        raise Failure(str(error)) from error


def encode(tokenizer: Any, prompts: Sequence[str], *, raw: bool) -> list[list[int]]:
    """The tokens of each prompt: as a user's turn of a chat if the tokenizer has a chat template.

    Args:
        raw: the text as it is, chat template or not.
    Raises:
        Failure: the template fails, or a prompt has no tokens.
    """
    is_chat = not raw and getattr(tokenizer, "chat_template", None) is not None
    rows = []
    for prompt in prompts:
        try:
            encoded = (
                tokenizer.apply_chat_template(
                    [{"role": "user", "content": prompt}],
                    add_generation_prompt=True,
                    return_dict=True,
                )
                if is_chat
                else tokenizer(prompt)
            )
        except Exception as error:  # templates are programs
            hint = "the chat template fails (--raw does without it)" if is_chat else "no tokens"
            raise Failure(f"{hint}: {described(error)}") from error
        if not encoded["input_ids"]:
            raise Failure("a prompt has no tokens")
        rows.append(encoded["input_ids"])
    return rows


def random_model() -> PreTrainedModel:
    """A small Llama of random weights, in eval mode, always the same."""
    config = LlamaConfig(
        vocab_size=1000,
        hidden_size=256,
        intermediate_size=704,
        num_hidden_layers=6,
        num_attention_heads=8,
        num_key_value_heads=4,
        bos_token_id=1,
        eos_token_id=None,
        pad_token_id=0,
    )
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        return LlamaForCausalLM(config).eval()


def _checked_source(name: str) -> str:
    path = Path(name).expanduser()
    if not name.strip():
        raise typer.BadParameter("the name of the model is empty", param_hint="MODEL")
    if path.is_dir():
        if not (path / "config.json").is_file():
            raise Failure(f"{name} is no model: the folder has no config.json")
        return str(path)
    if path.exists():
        raise Failure(f"{name} is a file; a model is a folder with a config.json, or a hub id")
    if not re.fullmatch(r"[\w.-]+(/[\w.-]+)?", name) or name.startswith((".", "~", os.sep)):
        raise Failure(f"there is no folder {name}, and a hub id looks different")
    return name
