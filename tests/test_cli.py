"""The command line: what it writes is what `generate` returns, and what its other commands say."""

import json
import runpy
import sys
from dataclasses import replace
from importlib import metadata
from itertools import product
from pathlib import Path

import pytest
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

import hf_cascade
from hf_cascade.cli import demo, samples
from hf_cascade.cli import generate as command
from tests.command_line import CHAIN_OF_SUMS, HEADER, PROMPT, SAMPLING, generate, run, save
from tests.models import new_model, trie_size


@pytest.fixture(scope="module")
def tokenizer():
    return AutoTokenizer.from_pretrained(CHAIN_OF_SUMS)


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


def test_a_stop_text_of_the_models_own_is_kept(tmp_path):
    model = AutoModelForCausalLM.from_pretrained(CHAIN_OF_SUMS)
    model.generation_config.stop_strings = ["="]
    lines, _ = generate(PROMPT, "-n", 4, "--max-new-tokens", 90, model=save(model, tmp_path))
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


def test_a_chat_template_is_used_unless_the_prompt_is_raw(tmp_path, tokenizer):
    template = "<bos>Q: {{ messages[0].content }}{% if add_generation_prompt %}. A:{% endif %}"
    folder = save(
        AutoModelForCausalLM.from_pretrained(CHAIN_OF_SUMS), tmp_path, chat_template=template
    )
    for raw, text in ((), "<bos>Q: Bob. A:"), (("--raw",), "Bob"):
        _, summary = generate("Bob", *raw, "--max-new-tokens", 1, model=folder)
        assert summary["prompt_tokens"] == len(tokenizer(text).input_ids)


@pytest.mark.filterwarnings("default::hf_cascade.CascadeFallbackWarning")
def test_a_warning_is_a_line_and_the_summary_says_stock(tmp_path):
    folder = save(new_model("mistral", sliding_window=4, vocab_size=84), tmp_path)
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
