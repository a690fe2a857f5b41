"""Where prompts come from: the command line, a file, or stdin."""

from __future__ import annotations

import json
import sys
from pathlib import Path

from .errors import Failure, WrongUsageError

STDIN = Path("-")


def read_prompts(argument: str | None, file: Path | None, many: Path | None) -> list[str]:
    """The prompts that a command was given, from exactly one place; nothing at all is stdin.

    Args:
        argument: the prompt itself; "-" is stdin.
        file: a file that holds one prompt; a line break at its end is not part of it.
        many: a file of prompts, one a line, or JSONL; see `_split`.
    Raises:
        WrongUsageError: several places, or a blank prompt.
        Failure: a file can't be read or is not text, or a line of JSONL has no prompt.
    """
    if sum(place is not None for place in (argument, file, many)) > 1:
        raise WrongUsageError("give one of PROMPT, --file and --prompts")
    if many is not None:
        prompts = _split(_read(many), many)
        if not prompts:
            raise Failure(f"{_name(many)} holds no prompts")
        return prompts
    if argument is None and file is None and (sys.stdin is None or sys.stdin.isatty()):
        raise WrongUsageError("a prompt is missing: give PROMPT, --file, --prompts or stdin")
    if argument is None or argument == "-":
        prompt = _read(file or STDIN).removesuffix("\n").removesuffix("\r")
    else:
        prompt = argument
    if not prompt.strip():
        raise WrongUsageError("the prompt is empty")
    return [prompt]


def _read(path: Path) -> str:
    if path == STDIN and sys.stdin is None:
        raise Failure("stdin is closed")
    try:
        data = sys.stdin.buffer.read() if path == STDIN else path.expanduser().read_bytes()
    except OSError as error:
        raise Failure(f"{_name(path)} can't be read: {error.strerror}") from error
    try:
        return data.decode("utf-8-sig")  # without the mark that some editors put first
    except UnicodeDecodeError as error:
        raise Failure(f"{_name(path)} is not UTF-8 text: byte {error.start:,} is wrong") from error


def _split(text: str, path: Path) -> list[str]:
    """Prompts of a text: one a line, blank lines left out.

    It is JSONL, a line `{"prompt": ..}` each, if the file is named so or begins with an object.
    """
    # Only line feeds end a line: JSON strings may hold what else `splitlines` would split at.
    lines = [(i, line.strip()) for i, line in enumerate(text.split("\n"), 1) if line.strip()]
    is_jsonl = path.suffix in (".json", ".jsonl") or (bool(lines) and _is_object(lines[0][1]))
    if not is_jsonl:
        return [line for _, line in lines]
    return [_prompt_of(line, f"{_name(path)}, line {i}") for i, line in lines]


def _is_object(line: str) -> bool:
    try:
        return isinstance(json.loads(line), dict)
    except (ValueError, RecursionError):
        return False


def _prompt_of(line: str, place: str) -> str:
    try:
        value = json.loads(line)
    except (ValueError, RecursionError) as error:
        raise Failure(f"{place}: no JSON ({error})") from error
    prompt = value.get("prompt") if isinstance(value, dict) else None
    if not isinstance(prompt, str) or not prompt.strip():
        raise Failure(f'{place}: an object with a text "prompt" is needed')
    return prompt


def _name(path: Path) -> str:
    return "stdin" if path == STDIN else str(path)
