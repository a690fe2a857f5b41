"""The command line ends well, however it ends: wrong usage, failures, Ctrl-C, closed pipes."""

import io
import json
import os
import signal
import subprocess
import sys

import pytest
import torch
from transformers import AutoModelForCausalLM

from hf_cascade.cli import output, samples
from hf_cascade.cli.summary import readable_size, summarize
from tests.command_line import CHAIN_OF_SUMS, PROMPT, SAMPLING, assert_one_line, run, save
from tests.models import new_model

# What is asked wrongly


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        ((CHAIN_OF_SUMS, ""), ("the prompt is empty",)),
        ((CHAIN_OF_SUMS, " \n"), ("the prompt is empty",)),
        ((CHAIN_OF_SUMS,), ("the prompt is empty",)),  # stdin
        ((CHAIN_OF_SUMS, "x", "--file", "y"), ("one of PROMPT, --file and --prompts",)),
        ((CHAIN_OF_SUMS, "x", "-n", "0"), ("--samples",)),
        ((CHAIN_OF_SUMS, "x", "-n", "two"), ("--samples",)),
        ((CHAIN_OF_SUMS, "x", "--max-new-tokens", "0"), ("--max-new-tokens",)),
        ((CHAIN_OF_SUMS, "x", "--batch-size", "0"), ("--batch-size",)),
        ((CHAIN_OF_SUMS, "x", "--temperature", "-1"), ("--temperature",)),
        ((CHAIN_OF_SUMS, "x", "--temperature", "0", "-n", "2"), ("--samples", "the same")),
        ((CHAIN_OF_SUMS, "x", "--temperature", "0", "--top-k", "2"), ("--top-k",)),
        ((CHAIN_OF_SUMS, "x", "--top-p", "0"), ("--top-p",)),
        ((CHAIN_OF_SUMS, "x", "--top-p", "1.1"), ("--top-p",)),
        ((CHAIN_OF_SUMS, "x", "--seed", "-1"), ("--seed",)),
        ((CHAIN_OF_SUMS, "x", "--stop", ""), ("--stop",)),
        ((CHAIN_OF_SUMS, "x", "--dtype", "int3"), ("--dtype", "bfloat16")),
        (
            (CHAIN_OF_SUMS, "x", "--device", "nonsense"),
            ("--device", "'nonsense'", "Expected one of"),
        ),
        ((CHAIN_OF_SUMS, "x", "--device", "cuda:99"), ("--device", "cuda:99")),
        ((CHAIN_OF_SUMS, "x", "--nonsense"), ("--nonsense",)),
        ((CHAIN_OF_SUMS, "x", "y"), ("y",)),
        (("", "x"), ("MODEL",)),
        ((), ("MODEL",)),
    ],
)
def test_wrong_usage_is_one_line_and_exit_code_2(arguments, words):
    assert_one_line(run("generate", *arguments), 2, *words)


def test_a_command_that_is_not_there_is_wrong_usage():
    assert_one_line(run("nonsense"), 2, "nonsense")


def test_without_a_command_there_is_help_and_no_error():
    result = run()
    assert result.exit_code == 2
    assert "Usage: " in result.output
    assert "generate" in result.output
    assert "error" not in result.output


# What can't be done


@pytest.mark.parametrize(
    ("name", "data", "words"),
    [
        ("a.txt", b"\n \n", ("holds no prompts",)),
        ("a.txt", b"fine\nnot \xff fine", ("UTF-8", "byte 9")),
        ("a.jsonl", b"plain", ("line 1", "JSON")),
        ("a.jsonl", b'{"prompt": "x"}\n\n{"text": "x"}', ("line 3", '"prompt"')),
        ("a.txt", b'{"prompt": "x"}\n[1]', ("line 2", '"prompt"')),
        ("a.txt", b'{"prompt": " "}', ("line 1", '"prompt"')),
        ("a.txt", b'{"prompt": 3}', ("line 1", '"prompt"')),
    ],
)
def test_a_bad_file_of_prompts_is_one_line_that_says_where(tmp_path, name, data, words):
    file = tmp_path / name
    file.write_bytes(data)
    assert_one_line(run("generate", CHAIN_OF_SUMS, "--prompts", file), 1, name, *words)


def test_a_model_that_is_not_there_is_one_line(tmp_path, monkeypatch):
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", True)
    (tmp_path / "empty").mkdir()
    (tmp_path / "file.gguf").touch()
    broken = tmp_path / "broken"
    broken.mkdir()
    (broken / "config.json").write_text("{")
    monkeypatch.chdir(tmp_path)
    for name, words in {
        "empty": "the folder has no config.json",
        "file.gguf": "is a file",
        "./nowhere": "there is no folder ./nowhere",
        "~/nowhere": "there is no folder ~/nowhere",
        "a/b/c": "there is no folder a/b/c",
        "broken": "broken can't be loaded",
        "nobody/nothing": "no such folder here, and we couldn't connect",
    }.items():
        assert_one_line(run("generate", name, "x"), 1, name, words)


def test_a_model_without_weights_is_one_line(tmp_path):
    folder = save(new_model(vocab_size=84), tmp_path)
    (folder / "model.safetensors").write_bytes(b"no weights")
    assert_one_line(run("generate", folder, "x"), 1, "can't be loaded")


def test_a_model_that_cannot_be_patched_is_one_line_with_the_reason(tmp_path):
    folder = save(
        new_model("gemma2", vocab_size=84, head_dim=8, attn_logit_softcapping=30.0), tmp_path
    )
    assert_one_line(run("generate", folder, "x"), 1, "can't be patched", "caps attention logits")


def test_a_generate_that_fails_is_one_line(tmp_path):
    folder = save(new_model(vocab_size=8), tmp_path)  # the tokenizer has 84 tokens
    assert_one_line(run("generate", folder, PROMPT), 1, "generate failed", "IndexError")


def test_a_chat_template_that_fails_is_one_line(tmp_path):
    template = "{{ raise_exception('only\npoems') }}"
    folder = save(
        AutoModelForCausalLM.from_pretrained(CHAIN_OF_SUMS), tmp_path, chat_template=template
    )
    assert_one_line(run("generate", folder, "x"), 1, "chat template", "only poems", "--raw")


def test_too_little_memory_is_one_line_with_a_way_out(monkeypatch):
    def draw(*args, **kwargs):
        raise torch.OutOfMemoryError("Tried to allocate 1 GiB.\nOf what?")
        yield

    monkeypatch.setattr(samples, "draw", draw)
    result = run("generate", CHAIN_OF_SUMS, PROMPT, "--batch-size", 9)
    assert_one_line(result, 1, "out of memory", "lower --batch-size than 9")


@pytest.mark.parametrize("place", [".", "nowhere/out.jsonl"])
def test_an_output_that_cannot_be_written_is_one_line_before_the_model_is_loaded(
    place, tmp_path, monkeypatch
):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr("hf_cascade.cli.loading.load", None)
    assert_one_line(run("generate", CHAIN_OF_SUMS, "x", "-o", place), 1, place)


# Whole lines


def test_an_output_file_gets_the_lines_and_stdout_nothing(tmp_path):
    file = tmp_path / "out.jsonl"
    file.write_text("something older\n")
    arguments = (PROMPT, "-n", 2, "--max-new-tokens", 4, *SAMPLING)
    result = run("generate", CHAIN_OF_SUMS, *arguments, "--output", file)
    assert result.stdout == ""
    assert file.read_text() == run("generate", CHAIN_OF_SUMS, *arguments).stdout
    assert result.stderr.startswith("2 samples of 1 prompt; ")
    assert "; seed 1\n" in result.stderr


class InterruptedStream(io.BytesIO):
    """Ctrl-C comes when half of a line is out, as often as `times` says."""

    def __init__(self, times):
        super().__init__()
        self.times = times

    def write(self, data):
        super().write(data[: len(data) // 2])
        for _ in range(self.times):
            os.kill(os.getpid(), signal.SIGINT)
        return super().write(data[len(data) // 2 :])


@pytest.fixture
def lines(tmp_path):
    lines = output.Lines(tmp_path / "out.jsonl")
    yield lines
    lines.close()


def test_a_line_is_out_before_the_next_begins(lines, tmp_path):
    lines.write({"sample": 0})
    assert (tmp_path / "out.jsonl").read_text() == '{"sample": 0}\n'


def test_ctrl_c_waits_for_the_end_of_a_line(lines):
    handler = signal.getsignal(signal.SIGINT)
    lines._out = InterruptedStream(times=1)
    with pytest.raises(KeyboardInterrupt):
        lines.write({"text": "ä\n"})
    assert lines._out.getvalue().decode() == '{"text": "ä\\n"}\n'
    assert lines.count == 1
    assert signal.getsignal(signal.SIGINT) is handler


def test_a_second_ctrl_c_does_not_wait(lines):
    handler = signal.getsignal(signal.SIGINT)
    lines._out = InterruptedStream(times=2)
    with pytest.raises(KeyboardInterrupt):
        lines.write({"text": "x"})
    assert b"\n" not in lines._out.getvalue()
    assert signal.getsignal(signal.SIGINT) is handler


def test_a_full_disk_is_one_line(monkeypatch):
    def write(self, data):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(InterruptedStream, "write", write)
    monkeypatch.setattr(output.Lines, "is_terminal", False)
    opened = output.Lines.__init__

    def open_full(self, path):
        opened(self, path)
        self._out = InterruptedStream(0)

    monkeypatch.setattr(output.Lines, "__init__", open_full)
    result = run("generate", CHAIN_OF_SUMS, PROMPT, "--max-new-tokens", 2)
    assert_one_line(result, 1, "stdout can't be written: No space left on device")


def test_an_interrupt_keeps_what_is_written_and_says_how_much(monkeypatch):
    write = output.Lines.write

    def interrupted(self, value):
        write(self, value)
        if self.count == 3:
            raise KeyboardInterrupt

    monkeypatch.setattr(output.Lines, "write", interrupted)
    arguments = ("-n", 8, "--batch-size", 2, "--max-new-tokens", 4)
    result = run("generate", CHAIN_OF_SUMS, PROMPT, *arguments, *SAMPLING)
    assert result.exit_code == 130
    assert len([json.loads(line) for line in result.stdout.splitlines()]) == 3
    assert result.stderr.startswith("interrupted after 3 of 8 samples of 1 prompt; ")
    assert result.stderr.count("\n") == 1


def test_a_summary_of_nothing_claims_nothing():
    summary = summarize(
        [], ending="interrupted", samples=0, wanted=4, prompts=2, new_tokens=0, seconds=0.0, seed=5
    )
    assert str(summary) == (
        "interrupted after 0 of 4 samples of 2 prompts; 0.0 s, 0 tokens/s; seed 5"
    )


def test_a_size_below_a_megabyte_is_in_kb():
    sizes = [
        readable_size(num_bytes) for num_bytes in (0, 8_192, 999_949, 1_000_000, 2_345_678_901)
    ]
    assert sizes == ["0.0 kB", "8.2 kB", "999.9 kB", "1.0 MB", "2,345.7 MB"]


# Real processes


@pytest.fixture
def endless():
    """`hf-cascade generate`, which has written its first line and would go on for long."""
    command = [sys.executable, "-m", "hf_cascade", "generate", CHAIN_OF_SUMS, "--prompts", "-"]
    command += ["-n", "1000000", "--batch-size", "4", "--max-new-tokens", "40", *SAMPLING]
    process = subprocess.Popen(
        command,
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        env=os.environ | {"OMP_NUM_THREADS": "1"},
    )
    process.stdin.write(PROMPT.replace("\n", " ").encode())
    process.stdin.close()
    yield process, process.stdout.readline()
    process.kill()
    process.wait()
    process.stdout.close()
    process.stderr.close()


def test_ctrl_c_leaves_whole_lines_and_exit_code_130(endless):
    process, first = endless
    process.send_signal(signal.SIGINT)
    text = (first + process.stdout.read()).decode()
    errors = process.stderr.read().decode()
    assert process.wait() == 130
    assert text.endswith("\n")
    values = [json.loads(line) for line in text.splitlines()]
    assert values[0].keys() == {"prompt", "sample", "text", "tokens", "finish_reason"}
    last = errors.splitlines()[-1]
    assert last.startswith(f"interrupted after {len(values)} of 1000000 samples of 1 prompt; ")
    assert "Traceback" not in errors


def test_a_reader_that_goes_ends_it_quietly(endless):
    process, first = endless
    process.stdout.close()
    errors = process.stderr.read().decode()
    assert process.wait() == 141
    assert json.loads(first)
    assert errors.splitlines()[-1].startswith("stdout closed after ")
    assert "Traceback" not in errors
    assert "BrokenPipe" not in errors


def run_python(code, *arguments):
    return subprocess.run(
        [sys.executable, "-c", code, *arguments], capture_output=True, text=True, check=False
    )


@pytest.mark.parametrize("arguments", [(), ("generate",), ("doctor",), ("demo",)])
def test_help_does_not_wait_for_torch(arguments):
    code = (
        "import atexit, sys\n"
        "atexit.register(lambda: print('torch' in sys.modules, file=sys.stderr))\n"
        "from hf_cascade.cli import main\n"
        "main()\n"
    )
    shown = run_python(code, *arguments, "--help")
    assert shown.returncode == 0
    assert "Usage: hf-cascade" in shown.stdout
    assert shown.stderr == "False\n"


def test_without_typer_the_extra_is_named():
    code = "import sys; sys.modules['typer'] = None; from hf_cascade.cli import main; main()"
    shown = run_python(code)
    assert shown.returncode == 1
    assert shown.stderr == "error: the command line needs typer: pip install rich typer\n"
