"""Running `hf-cascade` in the tests, in this process, on the model that the repository ships."""

import json
from pathlib import Path

from transformers import AutoTokenizer
from typer.testing import CliRunner

from hf_cascade.cli.app import app

CHAIN_OF_SUMS = str(Path(__file__).parents[1] / "examples" / "chain_of_sums")
HEADER = "<bos>Q: Dan buys 237, 682. Total?\nA: 682, 237:919. Total=919\n"
PROMPT = HEADER + "Q: Bob buys 902, 949, 410. Total?\nA:"
# A temperature at which rows end early and late, and differ.
SAMPLING = ("--temperature", "1.3", "--top-k", "0", "--seed", "1", "--device", "cpu")


def run(*arguments, input=None):
    return CliRunner().invoke(app, [str(a) for a in arguments], input=input)


def generate(*arguments, model=CHAIN_OF_SUMS, input=None):
    """Run `generate`, which must succeed; its lines in order of prompt and sample, and its
    summary."""
    result = run("generate", model, *arguments, *SAMPLING, "--json", input=input)
    assert result.exit_code == 0, result.output
    lines = [json.loads(line) for line in result.stdout.split("\n")[:-1]]
    lines.sort(key=lambda line: (line["prompt"], line["sample"]))
    return lines, json.loads(result.stderr.split("\n")[-2])


def assert_one_line(result, exit_code, *words):
    """The command failed: nothing on stdout, and one line with these words on stderr."""
    assert result.exit_code == exit_code, result.output
    assert result.stdout == ""
    assert result.stderr.startswith("error: ")
    assert result.stderr.count("\n") == 1, result.stderr
    assert result.stderr.endswith("\n")
    for word in words:
        assert word in result.stderr


def save(model, folder, **of_tokenizer):
    """Save a model with the tokenizer of chain_of_sums, changed so; returns the folder."""
    model.save_pretrained(folder)
    AutoTokenizer.from_pretrained(CHAIN_OF_SUMS, **of_tokenizer).save_pretrained(folder)
    return folder
