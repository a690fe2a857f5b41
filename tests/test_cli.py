"""The command line: what it writes is what `generate` returns, and it ends well however it ends."""

import io
import json
import os
import runpy
import signal
import subprocess
import sys
from dataclasses import replace
from importlib import metadata
from itertools import product
from pathlib import Path

import pytest
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer
from typer.testing import CliRunner

import hf_cascade
from hf_cascade.cli import demo, output, samples
from hf_cascade.cli import generate as command
from hf_cascade.cli.app import app
from hf_cascade.cli.summary import summarize
from tests.models import new_model, trie_size

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
    assert result.exit_code == exit_code, result.output
    assert result.stdout == ""
    assert result.stderr.startswith("error: ")
    assert result.stderr.count("\n") == 1, result.stderr
    assert result.stderr.endswith("\n")
    for word in words:
        assert word in result.stderr


@pytest.fixture(scope="module")
def tokenizer():
    return AutoTokenizer.from_pretrained(CHAIN_OF_SUMS)


@pytest.fixture
def save(tmp_path, tokenizer):
    """Save a model with the tokenizer of chain_of_sums; returns the folder."""

    def save(model, **of_tokenizer):
        folder = tmp_path / "model"
        model.save_pretrained(folder)
        mine = AutoTokenizer.from_pretrained(CHAIN_OF_SUMS, **of_tokenizer)
        mine.save_pretrained(folder)
        return folder

    return save


# What is generated


@pytest.mark.parametrize(("prompt", "max_new_tokens"), [(PROMPT, 5), ("x", 30)])
def test_samples_are_those_of_stock_generate(tokenizer, prompt, max_new_tokens):
    lines, summary = generate(prompt, "-n", 6, "--max-new-tokens", max_new_tokens)
    model = AutoModelForCausalLM.from_pretrained(CHAIN_OF_SUMS)
    inputs = tokenizer(prompt, return_tensors="pt", return_token_type_ids=False)
    prompt_len = inputs["input_ids"].shape[1]
    torch.manual_seed(1)
    rows = model.generate(
        **inputs,
        do_sample=True,
        temperature=1.3,
        top_k=0,
        num_return_sequences=6,
        max_new_tokens=max_new_tokens,
    )[:, prompt_len:].tolist()
    eos = tokenizer.eos_token_id
    expected = [row[: row.index(eos) + 1] if eos in row else row for row in rows]
    assert [line["tokens"] for line in lines] == expected
    assert [line["text"] for line in lines] == tokenizer.batch_decode(
        expected, skip_special_tokens=True
    )
    reasons = ["stop" if row[-1] == eos else "length" for row in expected]
    assert [line["finish_reason"] for line in lines] == reasons
    assert [(line["prompt"], line["sample"]) for line in lines] == [(0, i) for i in range(6)]
    assert set(reasons) == ({"length"} if prompt == PROMPT else {"stop", "length"})
    assert summary["samples"] == summary["wanted"] == 6
    assert summary["new_tokens"] == sum(map(len, expected))
    assert summary["shared_tokens"] == 5 * prompt_len
    assert prompt == "x" or summary["kv_bytes"] < summary["kv_bytes_unshared"]
    assert summary["path"] == "cascade"


def test_temperature_0_is_greedy(tokenizer):
    result = run("generate", CHAIN_OF_SUMS, PROMPT, "--temperature", 0, "--max-new-tokens", 20)
    (line,) = map(json.loads, result.stdout.splitlines())
    model = AutoModelForCausalLM.from_pretrained(CHAIN_OF_SUMS)
    inputs = tokenizer(PROMPT, return_tensors="pt", return_token_type_ids=False)
    greedy = model.generate(**inputs, do_sample=False, max_new_tokens=20)
    assert line["tokens"] == greedy[0, inputs["input_ids"].shape[1] :].tolist()


def test_the_seed_is_told_and_brings_the_samples_again(monkeypatch):
    seeds = iter([11, 12])
    monkeypatch.setattr(command.secrets, "randbelow", lambda limit: next(seeds))

    def of(*seed):
        result = run("generate", CHAIN_OF_SUMS, "x", "-n", 4, "--max-new-tokens", 12, *seed)
        assert result.exit_code == 0
        return result.stdout, result.stderr.split("; ")[-1]

    first, told = of()
    other, _ = of()
    assert first != other
    assert told == "seed 11\n"
    assert of("--seed", 11) == (first, told)


def test_prompts_of_a_file_share_their_beginning(tmp_path, tokenizer):
    prompts = [f"{HEADER}Q: {name} buys 410." for name in ("Ann", "Bob", "Eve")]
    file = tmp_path / "prompts.jsonl"
    file.write_text("".join(json.dumps({"prompt": p, "id": 7}) + "\n" for p in prompts))
    lines, summary = generate("--prompts", file, "-n", 4, "--max-new-tokens", 6)
    assert [(x["prompt"], x["sample"]) for x in lines] == list(product(range(3), range(4)))
    rows = [tokenizer(prompt).input_ids for prompt in prompts]
    assert summary["prompts"] == 3
    assert summary["prompt_tokens"] == 4 * sum(map(len, rows))
    assert summary["prefill_tokens"] == trie_size(rows)


def test_prompts_of_different_lengths_are_padded_out_of_sight():
    short = "<bos>Q: Ann"
    together, _ = generate(
        "--prompts", "-", "--max-new-tokens", 8, input=f"{PROMPT!r}\n{short}\n".replace("\\n", " ")
    )
    assert [line["prompt"] for line in together] == [0, 1]
    model = AutoModelForCausalLM.from_pretrained(CHAIN_OF_SUMS)
    assert model.config.pad_token_id not in together[1]["tokens"]


@pytest.mark.parametrize(("num_samples", "batch_size"), [(5, 2), (5, 5), (5, 99), (1, 1)])
def test_more_samples_than_a_batch_are_drawn_in_turns(num_samples, batch_size):
    lines, summary = generate(
        PROMPT, "-n", num_samples, "--batch-size", batch_size, "--max-new-tokens", 4
    )
    assert [line["sample"] for line in lines] == list(range(num_samples))
    calls = -(-num_samples // batch_size)
    assert summary["prompt_tokens"] == num_samples * summary["prefill_tokens"] / calls


@pytest.mark.parametrize("num_prompts", [1, 2, 7])
@pytest.mark.parametrize("num_samples", [1, 3, 8])
@pytest.mark.parametrize("batch_size", [1, 2, 3, 7, 100])
def test_batches_hold_each_sample_of_each_prompt_once(num_prompts, num_samples, batch_size):
    rows = []
    for batch in samples.batches(num_prompts, num_samples, batch_size):
        size = len(batch.prompts) * len(batch.samples)
        assert 1 <= size <= batch_size
        rows += map(batch.row, range(size))
    assert rows == list(product(range(num_prompts), range(num_samples)))


def test_a_stop_text_ends_a_sample(tokenizer):
    lines, _ = generate(PROMPT, "-n", 6, "--stop", "al=", "--stop", "\n", "--max-new-tokens", 90)
    free, _ = generate(PROMPT, "-n", 6, "--max-new-tokens", 90)
    assert any(line["finish_reason"] == "stop" for line in lines)
    assert any("al=" in line["text"] for line in free)
    for line in lines:
        assert "al=" not in line["text"]
        assert "\n" not in line["text"]
        whole = tokenizer.decode(line["tokens"], skip_special_tokens=True)
        assert whole.startswith(line["text"])
        found = [whole.find(stop) for stop in ("al=", "\n") if stop in whole]
        if found:
            assert line["text"] == whole[: min(found)]
            before = tokenizer.decode(line["tokens"][:-1])
            assert "al=" not in before
            assert "\n" not in before
        else:
            assert len(line["tokens"]) == 90 or line["tokens"][-1] == tokenizer.eos_token_id


def test_a_stop_text_of_the_models_own_is_kept(save):
    model = AutoModelForCausalLM.from_pretrained(CHAIN_OF_SUMS)
    model.generation_config.stop_strings = ["="]
    lines, _ = generate(PROMPT, "-n", 4, "--max-new-tokens", 90, model=save(model))
    assert any(line["text"].endswith("Total") for line in lines)
    assert not any("=" in line["text"] for line in lines)


@pytest.mark.parametrize(
    ("options", "dtype", "compile"),
    [((), torch.float32, False), (("--dtype", "bfloat16", "--compile"), torch.bfloat16, True)],
)
def test_the_model_is_loaded_and_patched_as_asked(monkeypatch, options, dtype, compile):
    def patch(model, **asked):
        found.append((model.dtype, model.training, asked))
        return hf_cascade.patch(model)

    found = []
    monkeypatch.setattr("hf_cascade.cli.loading.patch", patch)
    generate(PROMPT, "--max-new-tokens", 2, *options)
    assert found == [(dtype, False, {"compile": compile})]


def test_a_chat_template_is_used_unless_the_prompt_is_raw(save, tokenizer):
    template = "<bos>Q: {{ messages[0].content }}{% if add_generation_prompt %}. A:{% endif %}"
    folder = save(AutoModelForCausalLM.from_pretrained(CHAIN_OF_SUMS), chat_template=template)
    for raw, text in ((), "<bos>Q: Bob. A:"), (("--raw",), "Bob"):
        _, summary = generate("Bob", *raw, "--max-new-tokens", 1, model=folder)
        assert summary["prompt_tokens"] == len(tokenizer(text).input_ids)


@pytest.mark.filterwarnings("default::hf_cascade.CascadeFallbackWarning")
def test_a_warning_is_a_line_and_the_summary_says_stock(save):
    folder = save(new_model("mistral", sliding_window=4, vocab_size=84))
    result = run("generate", folder, PROMPT, "--max-new-tokens", 3, "-n", 2, *SAMPLING)
    assert result.exit_code == 0
    assert len(result.stdout.splitlines()) == 2
    warning, summary = result.stderr.splitlines()
    assert warning.startswith("warning: MistralForCausalLM.generate runs without shared prefixes")
    assert "0 shared; on stock transformers (a sliding window of 4 tokens" in summary


# Where prompts come from


@pytest.mark.parametrize(
    ("arguments", "input"),
    [
        ((PROMPT,), None),
        ((), PROMPT),
        ((), PROMPT + "\n"),
        ((), "\N{ZERO WIDTH NO-BREAK SPACE}" + PROMPT + "\r\n"),
        (("-",), PROMPT),
        (("--file", "-"), PROMPT),
        (("--file", "prompt.txt"), None),
    ],
)
def test_a_prompt_is_the_same_wherever_it_comes_from(arguments, input, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    Path("prompt.txt").write_bytes((PROMPT + "\n").encode())
    read = command.read_prompts
    monkeypatch.setattr(command, "read_prompts", lambda *places: found.extend(read(*places)) or [])
    monkeypatch.setattr(command, "_draw_all", None)  # reached by no prompt at all
    found = []
    run("generate", CHAIN_OF_SUMS, *arguments, input=input)
    assert found == [PROMPT]


@pytest.mark.parametrize(
    ("name", "text", "prompts"),
    [
        ("a.txt", "one\n\n two \r\nthree", ["one", "two", "three"]),
        ("a.txt", 'one\n{"prompt": "x"}\n', ["one", '{"prompt": "x"}']),
        ("a.txt", "{curly\n", ["{curly"]),
        (
            "a.txt",
            '{"prompt": "a\\nb"}\n\n{"id": 1, "prompt": "c\u2028d "}',
            ["a\nb", "c\u2028d "],
        ),
        ("a.jsonl", '{"prompt": "x"}', ["x"]),
    ],
)
def test_a_file_of_prompts_is_lines_or_jsonl(tmp_path, name, text, prompts):
    file = tmp_path / name
    file.write_bytes(text.encode())
    assert command.read_prompts(None, None, file) == prompts


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
        ((CHAIN_OF_SUMS, "x", "--device", "nonsense"), ("--device", "nonsense")),
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


# What can't be done


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
        "nobody/nothing": "no such folder here, and ",
    }.items():
        assert_one_line(run("generate", name, "x"), 1, name, words)


def test_a_model_without_weights_is_one_line(save, tmp_path):
    folder = save(new_model(vocab_size=84))
    (folder / "model.safetensors").write_bytes(b"no weights")
    assert_one_line(run("generate", folder, "x"), 1, "can't be loaded")


def test_a_model_that_cannot_be_patched_is_one_line_with_the_reason(save):
    folder = save(new_model("gemma2", vocab_size=84, head_dim=8, attn_logit_softcapping=30.0))
    assert_one_line(run("generate", folder, "x"), 1, "can't be patched", "caps attention logits")


def test_a_generate_that_fails_is_one_line(save):
    folder = save(new_model(vocab_size=8))  # the tokenizer has 84 tokens
    assert_one_line(run("generate", folder, PROMPT), 1, "generate failed", "IndexError")


def test_a_chat_template_that_fails_is_one_line(save):
    template = "{{ raise_exception('only\npoems') }}"
    folder = save(AutoModelForCausalLM.from_pretrained(CHAIN_OF_SUMS), chat_template=template)
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
    assert shown.stderr == ("error: the command line needs typer: pip install 'hf-cascade[cli]'\n")


# The other commands


def test_the_version_is_that_of_the_package():
    assert run("--version").stdout == f"hf-cascade {metadata.version('hf-cascade')}\n"


def test_the_doctor_prints_its_report():
    report = hf_cascade.doctor()
    result = run("doctor")
    assert result.stdout == f"{report}\n"
    assert result.exit_code == (0 if report.is_ready else 1)
    assert json.loads(run("doctor", "--json").stdout)["verdict"] == report.verdict


def test_the_doctors_exit_code_is_its_verdict(monkeypatch):
    report = replace(hf_cascade.doctor(), is_ready=False, verdict="not ready: no torch")
    monkeypatch.setattr(sys.modules["hf_cascade.doctor"], "doctor", lambda: report)
    result = run("doctor")
    assert result.exit_code == 1
    assert result.stdout.endswith("\nnot ready: no torch\n")


def test_the_demo_of_a_checkout_is_the_examples(monkeypatch):
    calls = []
    monkeypatch.setattr(runpy, "run_module", lambda *a, **k: calls.append((a, k, sys.argv)))
    monkeypatch.setattr(sys, "argv", sys.argv)
    monkeypatch.setattr(sys, "path", list(sys.path))
    monkeypatch.setattr(demo, "_NEEDS", ())
    assert run("demo", "--quick").exit_code == 0
    assert calls == [(("examples.demo",), {"run_name": "__main__"}, ["hf-cascade demo", "--quick"])]


def test_the_demo_without_examples_compares_on_a_random_model(monkeypatch):
    monkeypatch.setattr(demo, "_NEEDS", ("no_such_module",))
    result = run("demo", "--quick")
    assert result.exit_code == 0, result.output
    text = " ".join(result.stdout.replace("│", " ").split())
    assert "prompt tokens forwarded 2,048 512 4.0x" in text
    assert "identical tokens yes" in text
    assert "level 0: 512 tokens, 4 sequences" in text
