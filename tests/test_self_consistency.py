"""Self-consistency: what `generate` is asked for, and what is made of what it gives."""

from __future__ import annotations

import copy
import sys
from collections import Counter

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from peft import LoraConfig, get_peft_model
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, processors
from transformers import GenerationConfig, PreTrainedTokenizerFast

import hf_cascade
from hf_cascade import Consensus, self_consistency
from hf_cascade.self_consistency import _progress_bar
from tests.models import BOS, PAD, VOCAB_SIZE, forwarded_tokens, new_model, run, trie_size

EOS = 2
CHARACTERS = "abcdefghijklmnopqrstuvwxyzABCDEFGHIJKLMNOPQRSTUVWXYZ012345678"
HEADER = "questionAanswer1questionBanswer2"
PROMPTS = [HEADER + "C", HEADER + "thelastandlongestquestionD", HEADER + "C", "x"]


def new_tokenizer(**special: str) -> PreTrainedTokenizerFast:
    """A token per character; special tokens exist, but none is said to be the pad token."""
    symbols = ["<pad>", "<bos>", "<eos>", *CHARACTERS]
    assert len(symbols) == VOCAB_SIZE
    assert symbols.index("<pad>") == PAD
    backend = Tokenizer(models.WordLevel({symbol: i for i, symbol in enumerate(symbols)}))
    backend.add_special_tokens(symbols[1:3])
    backend.pre_tokenizer = pre_tokenizers.Split("", "isolated")
    backend.decoder = decoders.Fuse()
    backend.post_processor = processors.TemplateProcessing(
        single="<bos> $A", special_tokens=[("<bos>", BOS)]
    )
    return PreTrainedTokenizerFast(tokenizer_object=backend, bos_token="<bos>", **special)


def first_character(text: str) -> str | None:
    """The answer of most tests: a letter; digits are no answer."""
    return text[0] if text and text[0].isalpha() else None


class Script:
    """Stands in for `model.generate`: gives each prompt its own answers, one after the other."""

    def __init__(self, answers: dict[str, str], tail: str = "") -> None:
        self.tokenizer = new_tokenizer()
        self.answers = {tuple(self.tokenizer(prompt).input_ids): a for prompt, a in answers.items()}
        self.tail = self.tokenizer(tail, add_special_tokens=False).input_ids
        self.drawn: Counter[tuple[int, ...]] = Counter()
        self.calls: list[dict] = []

    def __call__(self, input_ids, attention_mask, **kwargs):
        self.calls.append(kwargs | {"rows": len(input_ids)})
        new = []
        for ids, mask in zip(input_ids, attention_mask, strict=True):
            assert mask.tolist() == sorted(mask.tolist())  # padded on the left
            prompt = tuple(ids[mask == 1].tolist())
            answer = self.answers[prompt][self.drawn[prompt]]
            self.drawn[prompt] += 1
            new.append(self.tokenizer(answer, add_special_tokens=False).input_ids + self.tail)
        return torch.cat([input_ids, torch.tensor(new)], dim=1)


def scripted(answers: dict[str, str], **kwargs):
    """A model that generates by a Script, and that Script."""
    model = new_model()
    model.generate = Script(answers, **kwargs)
    return model, model.generate


# Sampling


@settings(deadline=None, max_examples=60, derandomize=True)
@given(
    answers=st.lists(st.text("ab1", min_size=9, max_size=9), min_size=1, max_size=5),
    n=st.integers(1, 9),
    chunk_size=st.none() | st.integers(1, 10),
    batch_size=st.integers(1, 12),
)
def test_stopping_early_changes_no_answer(answers, n, chunk_size, batch_size):
    prompts = [HEADER + CHARACTERS[:index] for index in range(len(answers))]
    results = {}
    for early_stop in (True, False):
        model, script = scripted(dict(zip(prompts, answers, strict=True)))
        results[early_stop] = self_consistency(
            model,
            new_tokenizer(),
            prompts,
            parse=first_character,
            n=n,
            batch_size=batch_size,
            early_stop=early_stop,
            chunk_size=chunk_size,
        )
        assert max(call["rows"] for call in script.calls) <= batch_size
        assert sum(call["rows"] for call in script.calls) == sum(
            len(result.samples) for result in results[early_stop]
        )
    for early, full, script in zip(results[True], results[False], answers, strict=True):
        assert early.answer == full.answer
        assert [sample.text for sample in full.samples] == list(script[:n])
        assert early.samples == full.samples[: len(early.samples)]


def test_stopping_early_draws_fewer_samples():
    prompts = {HEADER: "a" * 16, HEADER + "C": "aaabbbab" + "a" * 8, "x": "ab" * 8}
    model, script = scripted(prompts)
    results = self_consistency(
        model, new_tokenizer(), list(prompts), parse=first_character, n=16, batch_size=24
    )
    assert [len(result.samples) for result in results] == [8, 12, 16]
    assert [call["rows"] for call in script.calls] == [8 + 8 + 8, 4 + 4, 4]


def test_the_samples_are_those_of_generate():
    model, tokenizer = new_model(), new_tokenizer()
    rows = [tokenizer(prompt).input_ids for prompt in PROMPTS for _ in range(3)]
    length = max(map(len, rows))
    inputs = {
        "input_ids": torch.tensor([[PAD] * (length - len(row)) + row for row in rows]),
        "attention_mask": torch.tensor(
            [[0] * (length - len(row)) + [1] * len(row) for row in rows]
        ),
    }
    options = {"do_sample": True, "temperature": 0.7, "top_k": 20, "max_new_tokens": 6}
    stock = run(model, seed=3, **inputs, **options).sequences[:, length:]

    tokens = forwarded_tokens(model)
    results = self_consistency(
        model,
        tokenizer,
        PROMPTS,
        parse=first_character,
        n=3,
        early_stop=False,
        seed=3,
        temperature=0.7,
        top_k=20,
        max_new_tokens=6,
    )
    texts = [sample.text for result in results for sample in result.samples]
    assert texts == tokenizer.batch_decode(stock, skip_special_tokens=True)
    assert len(set(texts)) == len(texts)
    assert [sample.answer for result in results for sample in result.samples] == [
        first_character(text) for text in texts
    ]
    # The header went through the model once, in a call that was patched for the occasion.
    assert tokens == [trie_size(rows), *[len(rows)] * 5]
    assert not hasattr(model, "cascade")


def test_a_batch_larger_than_batch_size_goes_in_several_calls():
    model = new_model()
    tokens = forwarded_tokens(model)
    tokenizer = new_tokenizer()
    results = self_consistency(
        model,
        tokenizer,
        ["abc", "abd"],
        parse=first_character,
        n=5,
        batch_size=4,
        early_stop=False,
        max_new_tokens=2,
    )
    assert [len(result.samples) for result in results] == [5, 5]
    # Rows aaaa abbb bb: prompts of 1 + 3 tokens, and a decode step of each call.
    assert tokens == [4, 4, 5, 4, 4, 2]


def test_a_single_string_has_a_single_result():
    tokenizer = new_tokenizer()
    options = {"parse": first_character, "n": 1, "seed": 1, "max_new_tokens": 4}
    alone = self_consistency(new_model(), tokenizer, "abc", **options)
    assert isinstance(alone, Consensus)
    assert len(alone.samples) == 1
    assert alone.answer == alone.samples[0].answer
    assert [alone] == self_consistency(new_model(), tokenizer, ["abc"], **options)
    assert self_consistency(new_model(), tokenizer, [], **options) == []


def test_results_follow_their_seed():
    model, tokenizer = new_model(), new_tokenizer()
    options = {"parse": first_character, "n": 4, "max_new_tokens": 8, "progress": False}
    first = self_consistency(model, tokenizer, PROMPTS, seed=5, **options)
    going_on = self_consistency(model, tokenizer, PROMPTS, **options)
    assert first == self_consistency(model, tokenizer, PROMPTS, seed=5, **options)
    assert going_on == self_consistency(model, tokenizer, PROMPTS, **options)
    assert first != going_on


def test_tokenizer_and_configs_stay_as_they_were():
    model, tokenizer = new_model(), new_tokenizer(eos_token="<eos>")
    config = GenerationConfig(max_new_tokens=3, eos_token_id=EOS)
    before = copy.deepcopy((model.generation_config, config))
    assert tokenizer.pad_token is None
    side = tokenizer.padding_side
    result = self_consistency(
        model, tokenizer, PROMPTS, parse=first_character, n=2, generation_config=config
    )
    assert all(1 <= len(sample.text) <= 3 for each in result for sample in each.samples)
    assert (tokenizer.pad_token, tokenizer.padding_side) == (None, side)
    assert (model.generation_config, config) == before


def test_special_tokens_are_added_unless_the_prompt_has_them():
    answers = {"abc": "xy"}
    model, script = scripted(answers)
    options = {"parse": first_character, "n": 2, "early_stop": False}
    self_consistency(model, script.tokenizer, "abc", **options)
    self_consistency(
        *scripted(answers)[:1],
        script.tokenizer,
        "<bos>abc",
        add_special_tokens=False,
        **options,
    )
    with pytest.raises(KeyError):  # <bos> twice
        self_consistency(*scripted(answers)[:1], script.tokenizer, "<bos>abc", **options)


# Where a text ends


def test_a_text_ends_with_its_end_token_whatever_token_pads():
    model, script = scripted({"abc": "xyz"}, tail="1<eos>222")
    pad = script.tokenizer.convert_tokens_to_ids("2")
    options = {"parse": str, "n": 3, "early_stop": False, "pad_token_id": pad}
    for eos in (EOS, [EOS, 63], torch.tensor([63, EOS])):
        script.drawn.clear()
        result = self_consistency(model, script.tokenizer, "abc", eos_token_id=eos, **options)
        assert [sample.text for sample in result.samples] == ["x1", "y1", "z1"]


def test_padding_after_a_stop_string_is_no_text():
    model, script = scripted({"abc": "xyz"}, tail="1222")
    pad = script.tokenizer.convert_tokens_to_ids("2")
    options = {"parse": str, "n": 3, "early_stop": False, "pad_token_id": pad}
    result = self_consistency(model, script.tokenizer, "abc", eos_token_id=EOS, **options)
    assert [sample.text for sample in result.samples] == ["x1", "y1", "z1"]
    script.drawn.clear()  # without an end token `generate` doesn't pad
    result = self_consistency(model, script.tokenizer, "abc", **options)
    assert [sample.text for sample in result.samples] == ["x1222", "y1222", "z1222"]


def test_stop_strings_end_texts():
    result = self_consistency(
        new_model(),
        new_tokenizer(),
        "abc",
        parse=str,
        n=16,
        early_stop=False,
        seed=0,
        temperature=3.0,
        max_new_tokens=20,
        eos_token_id=EOS,
        pad_token_id=PAD,
        stop_strings=["a", "b", "c", "d"],
    )
    texts = [sample.text for sample in result.samples]
    assert all(not set("abcd") & set(text[:-1]) for text in texts)
    assert any(text[-1] in "abcd" for text in texts)
    assert len({len(text) for text in texts}) > 1


@pytest.mark.parametrize(
    ("of_model", "of_call", "expected"),
    [
        ({}, {}, (256, None)),
        ({"max_new_tokens": 9}, {}, (9, None)),
        ({"max_length": 90}, {}, (None, 90)),
        ({"max_length": 90}, {"max_new_tokens": 7}, (7, 90)),
        ({"max_length": 90}, {"generation_config": GenerationConfig()}, (None, None)),
        ({}, {"generation_config": GenerationConfig(do_sample=True, top_k=5)}, (256, None)),
        ({}, {"generation_config": GenerationConfig(max_length=80)}, (None, 80)),
        ({}, {"generation_config": GenerationConfig(max_length=80), "max_new_tokens": 5}, (5, 80)),
    ],
)
def test_texts_have_room_unless_a_length_is_set(of_model, of_call, expected):
    model, script = scripted({"abc": "x"})
    model.generation_config.update(**of_model)
    self_consistency(model, script.tokenizer, "abc", parse=str, n=1, **of_call)
    config = script.calls[0]["generation_config"]
    assert (config.max_new_tokens, config.max_length) == expected
    assert config.do_sample is True


def test_a_model_config_that_asks_for_other_outputs_is_overruled():
    model, tokenizer = new_model(), new_tokenizer()
    model.generation_config.update(
        do_sample=True, num_return_sequences=2, return_dict_in_generate=True
    )
    result = self_consistency(model, tokenizer, "abc", parse=str, n=4, max_new_tokens=5, seed=0)
    assert len(result.votes) > 1


# Patched or not


def test_a_patched_model_is_used_as_it_is():
    model = hf_cascade.patch(new_model(), page_size=4, strict=True)
    cascade = model.cascade
    options = {"parse": str, "n": 3, "early_stop": False, "max_new_tokens": 4}
    self_consistency(model, new_tokenizer(), PROMPTS, **options)
    assert model.cascade is cascade
    assert cascade.stats.path == "cascade"
    assert cascade.stats.prompt_tokens > 3 * cascade.stats.prefill_tokens
    with pytest.raises(hf_cascade.UnsupportedCallError, match="use_cache"):
        self_consistency(model, new_tokenizer(), PROMPTS, use_cache=False, **options)


@pytest.mark.filterwarnings("error")
def test_a_call_that_cannot_be_served_falls_back_with_a_warning():
    model = new_model()
    options = {"parse": str, "n": 2, "max_new_tokens": 3, "use_cache": False}
    with pytest.warns(hf_cascade.CascadeFallbackWarning, match="use_cache=False"):
        self_consistency(model, new_tokenizer(), "abc", **options)
    assert not hasattr(model, "cascade")


def test_a_model_that_patch_refuses_runs_on_stock_generate():
    options = {"parse": str, "n": 3, "max_new_tokens": 4, "seed": 2}
    expected = self_consistency(new_model(), new_tokenizer(), PROMPTS, **options)
    model = new_model()
    model.config.alibi = True
    with pytest.warns(hf_cascade.CascadeFallbackWarning, match="ALiBi") as caught:
        result = self_consistency(model, new_tokenizer(), PROMPTS, **options)
    assert [warning.filename for warning in caught] == [__file__]
    assert result == expected
    assert not hasattr(model, "cascade")


def test_a_lora_model_is_patched_for_the_call_too():
    model = get_peft_model(new_model(), LoraConfig(target_modules=["q_proj"], r=2)).eval()
    tokens = forwarded_tokens(model.get_base_model())
    result = self_consistency(
        model, new_tokenizer(), "abc", parse=str, n=4, early_stop=False, max_new_tokens=2
    )
    assert len(result.samples) == 4
    assert tokens == [4, 4]
    assert not hasattr(model.get_base_model(), "cascade")
    hf_cascade.patch(model)
    self_consistency(model, new_tokenizer(), "abc", parse=str, n=4, max_new_tokens=2)
    assert hasattr(model.get_base_model(), "cascade")


# What can go wrong


def test_a_parse_that_raises_names_the_sample_and_leaves_the_model_as_it_was():
    model, script = scripted({"abc": "xy", "abd": "8y"})
    with pytest.raises(ValueError, match=r"IndexError for a sample of prompts\[1\]: '8'") as caught:
        self_consistency(
            model,
            script.tokenizer,
            ["abc", "abd"],
            parse=lambda text: [][0] if text == "8" else text,
            n=2,
        )
    assert isinstance(caught.value.__cause__, IndexError)
    assert not hasattr(model, "cascade")


def test_answers_must_be_hashable():
    model, script = scripted({"abc": "xy"})
    with pytest.raises(TypeError, match=r"hashable or None, got list .* prompts\[0\]: 'x'"):
        self_consistency(model, script.tokenizer, "abc", parse=list, n=2)


@pytest.mark.parametrize(
    ("options", "error", "message"),
    [
        ({"num_return_sequences": 4}, ValueError, "num_return_sequences .*n says how many"),
        ({"return_dict_in_generate": True}, ValueError, "return_dict_in_generate .*texts"),
        ({"streamer": object()}, ValueError, "streamer .*rows of many prompts"),
        ({"input_ids": torch.ones(1, 2)}, ValueError, "input_ids .*made from prompts"),
        ({"past_key_values": ()}, ValueError, "past_key_values .*made from prompts"),
        ({"do_sample": False}, ValueError, "do_sample=False .*must differ"),
        (
            {"generation_config": GenerationConfig(do_sample=False)},
            ValueError,
            "do_sample=False .*must differ",
        ),
        (
            {"generation_config": GenerationConfig(do_sample=True, num_return_sequences=3)},
            ValueError,
            "generation_config.num_return_sequences=3 .*n says how many",
        ),
        ({"n": 0}, ValueError, "n must be at least 1, got 0"),
        ({"n": 2.0}, TypeError, "n must be an int, got float"),
        ({"batch_size": 0}, ValueError, "batch_size must be at least 1, got 0"),
        ({"chunk_size": 0}, ValueError, "chunk_size must be at least 1, got 0"),
        ({"parse": None}, TypeError, "parse must be callable, got NoneType"),
        ({"prompts": ["abc", 7]}, TypeError, r"prompts\[1\] must be a str, got int"),
        (
            {"prompts": [{"role": "user", "content": "abc"}]},
            TypeError,
            "got dict; .*apply_chat_template",
        ),
        (
            {"prompts": ["abc", ""], "add_special_tokens": False},
            ValueError,
            r"prompts\[1\] has no tokens: ''",
        ),
        ({"model": torch.nn.Linear(1, 1)}, TypeError, "Linear has none"),
        ({"tempreature": 1.0}, ValueError, "tempreature"),
    ],
)
def test_a_wrong_argument_is_named(options, error, message):
    model = new_model()
    arguments = {"model": model, "prompts": "abc", "parse": str, "n": 2} | options
    with pytest.raises(error, match=message):
        self_consistency(tokenizer=new_tokenizer(), **arguments)
    assert not hasattr(model, "cascade")


def test_encoder_decoders_are_refused():
    model = new_model()
    model.config.is_encoder_decoder = True
    with pytest.raises(hf_cascade.UnsupportedModelError, match="LlamaForCausalLM is an encoder-"):
        self_consistency(model, new_tokenizer(), "abc", parse=str)


# Progress


def show(progress):
    prompts = {"abc": "x" * 8, "abd": "xyzxyzxy"}
    model, script = scripted(prompts)
    self_consistency(
        model, script.tokenizer, list(prompts), parse=str, n=8, batch_size=3, progress=progress
    )


def test_progress_is_shown_where_it_is_asked_for(capsys):
    show(progress=True)
    shown = capsys.readouterr()
    assert "Samples" in shown.err
    assert "16/16" in shown.err  # samples that are not needed any more are done
    assert shown.out == ""


@pytest.mark.parametrize("progress", [None, False])
def test_progress_is_silent_without_a_terminal(capsys, progress):
    show(progress=progress)
    shown = capsys.readouterr()
    assert shown.err + shown.out == ""


def test_progress_needs_rich_only_if_asked_for(monkeypatch):
    for name in ("rich", "rich.console", "rich.progress"):
        monkeypatch.setitem(sys.modules, name, None)
    show(progress=None)
    with pytest.raises(ImportError, match="progress=True needs rich"):
        show(progress=True)


def test_errors_without_rich_have_nothing_to_do_with_it(monkeypatch):
    for name in ("rich", "rich.console", "rich.progress"):
        monkeypatch.setitem(sys.modules, name, None)
    with pytest.raises(ZeroDivisionError) as error, _progress_bar(None, 1):
        _ = 1 / 0
    assert error.value.__context__ is None
