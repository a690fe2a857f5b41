"""A patched model generates what the stock one does: the same tokens from the same random numbers.

All in float32 and strict, unless a test says otherwise. What `parity` itself can see is the first
test: it must notice attention that is a little wrong.
"""

from __future__ import annotations

import threading
from collections.abc import Callable

import pytest
import torch
from hf_cascade.ops import composed
from hypothesis import given, settings
from hypothesis import strategies as st
from models import (
    ARCHITECTURES,
    BOS,
    DOCUMENT,
    PAD,
    PROMPT,
    RAGGED,
    ROWS,
    VOCAB_SIZE,
    Run,
    assert_same,
    batch,
    forwarded_tokens,
    new_model,
    parity,
    run,
    tokens,
    trie_size,
)
from tokenizers import Tokenizer
from tokenizers.models import WordLevel
from tokenizers.pre_tokenizers import WhitespaceSplit
from transformers import (
    GenerationConfig,
    LogitsProcessorList,
    PreTrainedTokenizerFast,
    StoppingCriteriaList,
    TextIteratorStreamer,
)
from transformers.generation import WatermarkingConfig
from transformers.generation.streamers import BaseStreamer

import hf_cascade

each_architecture = pytest.mark.parametrize("name", ARCHITECTURES)

SAMPLED = {"do_sample": True, "num_return_sequences": 3}
BEAMS = {"num_beams": 3, "num_return_sequences": 2}
MODES = {
    "sampling": SAMPLED,
    "greedy": {"do_sample": False},
    "beams": BEAMS,
    "beam sampling": BEAMS | {"do_sample": True},
}
each_mode = pytest.mark.parametrize("mode", MODES.values(), ids=MODES)


# The core, for every architecture


@each_architecture
def test_parity_notices_a_lost_prefix(name, monkeypatch):
    for merge in ("merge_state", "merge_nonempty"):
        monkeypatch.setattr(hf_cascade.ops.composed, merge, lambda out, lse, *suffix: suffix)
    with pytest.raises(AssertionError, match="tokens differ"):
        parity(new_model(name), **RAGGED, **SAMPLED)


@each_architecture
@each_mode
def test_every_architecture_generates_what_it_did(name, mode):
    stock, _, _ = parity(new_model(name), **RAGGED, **mode)
    new_tokens = stock.sequences[:, RAGGED["input_ids"].shape[1] :]
    assert new_tokens.unique().numel() > 8, "tokens too much alike to tell anything"


@each_architecture
@each_mode
def test_scores_and_logits_are_the_stock_ones(name, mode):
    stock, patched, _ = parity(
        new_model(name),
        **RAGGED,
        **mode,
        return_dict_in_generate=True,
        output_scores=True,
        output_logits=True,
    )
    for field in ("scores", "logits", "sequences_scores"):
        expected = getattr(stock.out, field, None)
        if expected is not None:
            torch.testing.assert_close(getattr(patched.out, field), expected, atol=1e-4, rtol=1e-4)


# Options of sampling and of beam search

SAMPLING = {
    "temperature": {"temperature": 0.6},
    "top_k": {"top_k": 5},
    "all tokens": {"top_k": 0},
    "top_p": {"top_p": 0.7},
    "min_p": {"min_p": 0.2},
    "typical_p": {"typical_p": 0.6},
    "epsilon_cutoff": {"epsilon_cutoff": 0.02},
    "eta_cutoff": {"eta_cutoff": 0.05},
    "repetition_penalty": {"repetition_penalty": 1.7},
    "no_repeat_ngram_size": {"no_repeat_ngram_size": 2},
    "bad_words_ids": {"bad_words_ids": [[token] for token in range(3, 30)] + [[40, 41]]},
    "suppress_tokens": {"suppress_tokens": list(range(20, 50))},
    "sequence_bias": {"sequence_bias": [[[token], 4.0] for token in range(5, 9)]},
    "prefix_allowed_tokens_fn": {
        "prefix_allowed_tokens_fn": lambda row, ids: list(range(10 + row, 20 + row))
    },
    "guidance_scale": {"guidance_scale": 1.6},
    "negative prompt": {
        "guidance_scale": 1.6,
        "negative_prompt_ids": torch.tensor([tokens(6, seed=9)] * 15),
    },
    "watermark": {"watermarking_config": WatermarkingConfig(bias=3.0)},
    "forced_eos_token_id": {"forced_eos_token_id": 7},
    "renormalized": {"top_k": 7, "renormalize_logits": True},
    "several at once": {"temperature": 0.8, "top_k": 20, "top_p": 0.9, "repetition_penalty": 1.2},
}
BEAM_SEARCH = {
    "one beam returned": {"num_beams": 4},
    "all beams returned": {"num_beams": 4, "num_return_sequences": 4},
    "short ones favoured": {"num_beams": 3, "length_penalty": -1.0, "eos_token_id": [5, 6, 7]},
    "long ones favoured": {"num_beams": 3, "length_penalty": 2.0, "eos_token_id": [5, 6, 7]},
    "early stopping": {"num_beams": 3, "early_stopping": True, "eos_token_id": list(range(5, 30))},
    "never early": {"num_beams": 3, "early_stopping": "never", "eos_token_id": list(range(5, 30))},
    "no repetition": {"num_beams": 3, "no_repeat_ngram_size": 1},
    "hot": {"num_beams": 3, "do_sample": True, "temperature": 2.0, "top_k": 0},
}
on_a_few = pytest.mark.parametrize("name", ["llama", "qwen3_moe"])


@on_a_few
@pytest.mark.parametrize("options", SAMPLING.values(), ids=SAMPLING)
def test_options_of_sampling(name, options):
    parity(new_model(name), **RAGGED, **SAMPLED | options)


def test_every_option_of_sampling_matters():
    model = new_model()
    plain = run(model, **RAGGED, **SAMPLED).sequences
    same = [
        name
        for name, options in SAMPLING.items()
        if torch.equal(run(model, **RAGGED, **SAMPLED | options).sequences, plain)
    ]
    assert not same


@on_a_few
@pytest.mark.parametrize("options", BEAM_SEARCH.values(), ids=BEAM_SEARCH)
def test_options_of_beam_search(name, options):
    parity(new_model(name), **RAGGED, **options, max_new_tokens=12)


# Rows that end

MANY_ENDS = list(range(3, 30))


@on_a_few
@pytest.mark.parametrize(
    "options",
    [
        {"eos_token_id": 5},
        {"eos_token_id": [5, 17, 30]},
        {"eos_token_id": MANY_ENDS},
        {"eos_token_id": MANY_ENDS, "min_new_tokens": 4},
        {"eos_token_id": MANY_ENDS, "exponential_decay_length_penalty": (2, 1.5)},
        {"eos_token_id": list(range(3, VOCAB_SIZE))},
        {"eos_token_id": None},
    ],
    ids=str,
)
@pytest.mark.parametrize("page_size", [1, 16])
def test_rows_end_when_they_did(name, options, page_size):
    parity(new_model(name), **RAGGED, **SAMPLED, **options, page_size=page_size, max_new_tokens=14)


def test_some_rows_end_early_and_others_go_on():
    _, patched, _ = parity(
        new_model(), **RAGGED, **SAMPLED, eos_token_id=MANY_ENDS, max_new_tokens=14
    )
    lengths = (patched.sequences[:, RAGGED["input_ids"].shape[1] :] != PAD).sum(1)
    assert lengths.min() == 1
    assert lengths.unique().numel() > 3


def test_all_rows_may_end_at_the_first_token():
    _, patched, model = parity(new_model(), **RAGGED, **SAMPLED, eos_token_id=list(range(64)))
    assert patched.sequences.shape[1] == RAGGED["input_ids"].shape[1] + 1
    assert model.cascade.stats.decode_steps == 0


def word_tokenizer() -> PreTrainedTokenizerFast:
    """Token i is the word "<i>"."""
    words = {f"<{i}>": i for i in range(VOCAB_SIZE)} | {"abcdef": VOCAB_SIZE}
    tokenizer = Tokenizer(WordLevel(words, "<0>"))
    tokenizer.pre_tokenizer = WhitespaceSplit()
    return PreTrainedTokenizerFast(tokenizer_object=tokenizer)


def test_stop_strings():
    arguments = RAGGED | SAMPLED | {"eos_token_id": 3, "max_new_tokens": 14}
    stock, _, _ = parity(
        new_model(), **arguments, stop_strings=["2>", "<35>", "41"], tokenizer=word_tokenizer()
    )
    assert not torch.equal(stock.sequences, run(new_model(), **arguments).sequences)


# Prompts


@pytest.mark.parametrize("page_size", [1, 2, 8, 32])
@pytest.mark.parametrize("length", [1, 2, 3, 4, 7, 8, 9, 16, 33])
def test_prompts_of_every_length_modulo_page_size(length, page_size):
    parity(new_model(), **batch(tokens(length)), **SAMPLED, page_size=page_size)


@pytest.mark.parametrize(
    "prompt", [PROMPT, batch([5]), batch([5], [5]), batch([5], [6], [5, 6])], ids=len
)
@pytest.mark.parametrize("n", [1, 2, 4])
@pytest.mark.parametrize("max_new_tokens", [1, 2, 5])
def test_the_smallest_calls(prompt, n, max_new_tokens):
    parity(
        new_model(), **prompt, do_sample=True, num_return_sequences=n,
        max_new_tokens=max_new_tokens,
    )  # fmt: skip


def test_no_prompt_but_the_bos_token():
    stock, _, _ = parity(new_model(), do_sample=True, num_return_sequences=3)
    assert (stock.sequences[:, 0] == BOS).all()


def test_positional_inputs_and_no_mask():
    model = new_model()
    ids = PROMPT["input_ids"]
    stock = model.generate(ids, max_new_tokens=6, do_sample=False)
    hf_cascade.patch(model, strict=True)
    assert torch.equal(model.generate(ids, max_new_tokens=6, do_sample=False), stock)


@pytest.mark.parametrize("dtype", [torch.bool, torch.int32, torch.float32])
def test_masks_of_any_dtype(dtype):
    mask = RAGGED["attention_mask"].to(dtype)
    parity(new_model(), input_ids=RAGGED["input_ids"], attention_mask=mask, **SAMPLED)


def test_the_mask_is_inferred_from_padding_as_ever():
    _, _, model = parity(new_model(), input_ids=RAGGED["input_ids"], **SAMPLED)
    assert model.cascade.stats.prompt_tokens == 3 * sum(map(len, ROWS))


@on_a_few
@pytest.mark.parametrize("mode", [SAMPLED, BEAMS], ids=["sampling", "beams"])
@pytest.mark.parametrize("with_ids", [False, True])
def test_embeddings_as_input(name, mode, with_ids):
    model = new_model(name)
    embeddings = model.get_input_embeddings()(RAGGED["input_ids"]).detach()
    embeddings[3:] += 0.01  # rows that are nobody's tokens
    arguments = RAGGED if with_ids else {"attention_mask": RAGGED["attention_mask"]}
    parity(model, **arguments, inputs_embeds=embeddings, **mode)


@on_a_few
@pytest.mark.parametrize("chunk", [1, 7, 16, 1000])
@pytest.mark.parametrize("mode", [SAMPLED, BEAMS], ids=["sampling", "beams"])
def test_prefill_in_chunks(name, chunk, mode):
    model = new_model(name)
    counts = forwarded_tokens(model)
    parity(model, **RAGGED, **mode, prefill_chunk_size=chunk)
    assert max(counts) <= max(chunk * 5 * 3, 15)  # stock: rows x chunk, steps of all rows


@pytest.mark.parametrize("chunk", [1, 7, 1000])
def test_a_chunk_is_at_most_what_was_asked_for(chunk):
    model = hf_cascade.patch(new_model(), strict=True)
    counts = forwarded_tokens(model)
    run(model, **RAGGED, prefill_chunk_size=chunk, max_new_tokens=1)
    assert max(counts) == min(chunk, sum(counts))
    assert sum(counts) == model.cascade.stats.prefill_tokens


@pytest.mark.parametrize("rope_type", ["linear", "dynamic", "yarn", "llama3"])
def test_rope_variants(rope_type):
    rope = {"rope_type": rope_type, "rope_theta": 10000.0, "factor": 3.0}
    if rope_type in ("yarn", "llama3"):
        rope["original_max_position_embeddings"] = 12
    if rope_type == "llama3":
        rope |= {"low_freq_factor": 1.0, "high_freq_factor": 4.0}
    model = new_model(rope_parameters=rope, max_position_embeddings=12)  # texts get longer
    stock, _, patched = parity(model, **RAGGED, **SAMPLED)
    plain = run(new_model(), **RAGGED, **SAMPLED)
    assert not torch.equal(stock.sequences, plain.sequences)
    # Dynamic frequencies have a state: a short text after a long one, then a long one again.
    for prompt in (batch([5, 6]), RAGGED):
        assert_same(run(model, **prompt, **SAMPLED), run(patched, **prompt, **SAMPLED))


@pytest.mark.parametrize("original_length", [8, RAGGED["input_ids"].shape[1] + 3, 64])
def test_long_rope_of_phi3(original_length):
    """Where its long factors begin, it drops its cache and keeps the argument that goes with it."""
    rope = {
        "rope_type": "longrope",
        "rope_theta": 10000.0,
        "short_factor": [1.0] * 4,
        "long_factor": [3.0] * 4,
        "original_max_position_embeddings": original_length,
    }
    model = new_model(
        "phi3", rope_parameters=rope, original_max_position_embeddings=original_length
    )
    parity(model, **batch(*[row[:4] for row in ROWS], tokens(16)), **SAMPLED)


@pytest.mark.parametrize("window", [24, 64])
def test_a_window_as_wide_as_the_text_is_none(window):
    length = RAGGED["input_ids"].shape[1]
    parity(new_model("mistral", sliding_window=window), **RAGGED, **SAMPLED,
           max_new_tokens=24 - length)  # fmt: skip


# What users plug in


class Listener(BaseStreamer):
    """A streamer that remembers what it heard."""

    def __init__(self) -> None:
        self.heard: list[list[int]] = []

    def put(self, value):
        self.heard.append(value.flatten().tolist())

    def end(self):
        self.heard.append([])


def test_streamers_hear_the_same():
    listeners = []

    def listening(model):
        listeners.append(Listener())
        return {"streamer": listeners[-1]}

    parity(new_model(), **PROMPT, do_sample=True, with_model=listening)
    assert listeners[0].heard == listeners[1].heard
    assert len(listeners[0].heard) == 1 + 8 + 1


def test_streaming_from_a_worker_thread():
    model = hf_cascade.patch(new_model(), strict=True)
    expected = run(new_model(), **PROMPT, do_sample=False).sequences[0].tolist()
    streamer = TextIteratorStreamer(word_tokenizer(), timeout=30)
    arguments = PROMPT | {"streamer": streamer, "do_sample": False, "max_new_tokens": 8}
    worker = threading.Thread(target=model.generate, kwargs=arguments)
    worker.start()
    text = "".join(streamer)
    worker.join()
    assert [int(word.strip("<>")) for word in text.split()] == expected
    assert model.cascade.stats.path == "cascade"


def processors(*functions: Callable) -> LogitsProcessorList:
    return LogitsProcessorList(functions)


def test_processors_of_the_user():
    def favour_what_was_said(ids, scores):
        return scores + 2.0 * torch.zeros_like(scores).scatter(1, ids, 1.0)

    parity(new_model(), **RAGGED, **SAMPLED, logits_processor=processors(favour_what_was_said))


def test_processors_of_the_user_see_stock_scores_in_every_row():
    """Also in rows that are over: a processor may mix rows, as batched guidance does."""
    seen: list[list[torch.Tensor]] = []

    def mixing(model):
        seen.append([])

        def mix_neighbours(ids, scores):
            seen[-1].append(scores)
            return scores + 0.5 * scores.roll(1, 0)

        return {"logits_processor": processors(mix_neighbours)}

    parity(
        new_model(), **RAGGED, **SAMPLED, eos_token_id=MANY_ENDS, max_new_tokens=14,
        with_model=mixing,
    )  # fmt: skip
    torch.testing.assert_close(*seen, atol=1e-4, rtol=1e-4)


def test_stopping_criteria_of_the_user():
    def at_even_sums(ids, scores, **kwargs):
        return ids[:, -3:].sum(1) % 4 == 0

    for ends in (None, [5, 6, 7]):
        stock, _, _ = parity(
            new_model(), **RAGGED, **SAMPLED, eos_token_id=ends, max_new_tokens=14,
            stopping_criteria=StoppingCriteriaList([at_even_sums]),
        )  # fmt: skip
    assert (stock.sequences[:, -1] == PAD).any()


def test_forward_passes_inside_generate_are_stock():
    """Padded, unpadded and with a cache of their own: beside the call's, which goes on."""
    ids, mask = RAGGED["input_ids"], RAGGED["attention_mask"]

    def looking(model):
        def add_what_a_forward_says(_, scores):
            padded = model(ids, attention_mask=mask)
            more = model(ids[:, -1:], past_key_values=model(ids).past_key_values)
            said = padded.logits[:, -1] + more.logits[:, -1]
            return scores + 0.3 * said.repeat_interleave(len(scores) // len(ids), 0)

        return {"logits_processor": processors(add_what_a_forward_says)}

    for implementation in ("sdpa", "eager"):
        model = new_model()
        model.set_attn_implementation(implementation)
        _, _, patched = parity(model, **RAGGED, **SAMPLED, with_model=looking)
        stats = patched.cascade.stats
        assert (stats.prefill_tokens, stats.decode_steps) == (trie_size(ROWS), 7)


def generating(model):
    """Arguments that let a small generate call of `model` have a say in each token."""

    def continue_from_here(ids, scores):
        started = torch.ones_like(ids)
        started[:, : RAGGED["input_ids"].shape[1]] = RAGGED["attention_mask"].repeat_interleave(
            len(ids) // len(ROWS), 0
        )
        with torch.random.fork_rng():
            more = run(model, input_ids=ids, attention_mask=started, max_new_tokens=2).sequences
        return scores + 2.0 * torch.zeros_like(scores).scatter(1, more[:, -1:], 1.0)

    return {"logits_processor": processors(continue_from_here)}


@pytest.mark.parametrize("mode", [SAMPLED, BEAMS], ids=["sampling", "beams"])
def test_generate_inside_generate(mode):
    _, _, model = parity(new_model(), **RAGGED, **mode, with_model=generating)
    stats = model.cascade.stats  # of the outer call, which ended last
    assert (stats.decode_steps, stats.prefill_tokens) == (7, trie_size(ROWS))
    assert model.cascade.allocator.pages_in_use == 0


def test_two_models_made_from_one_config_generate_inside_each_other():
    first = new_model()
    second = type(first)(first.config).eval()
    second.load_state_dict(new_model(seed=1).state_dict())

    def sampled() -> Run:
        return run(first, **RAGGED, **SAMPLED, **generating(second))

    expected = sampled()
    hf_cascade.patch(first, strict=True)
    hf_cascade.patch(second, strict=True)
    assert_same(expected, sampled())
    assert first.config._attn_implementation == "sdpa"


def test_a_generation_config_object():
    config = GenerationConfig(
        do_sample=True, num_return_sequences=2, max_new_tokens=6, top_k=9, pad_token_id=PAD
    )
    stock, _, _ = parity(new_model(), **RAGGED, generation_config=config)
    assert stock.sequences.shape == (10, RAGGED["input_ids"].shape[1] + 8)  # `run` wants 8


def test_defaults_of_the_model_s_own_generation_config():
    model = new_model()
    model.generation_config.update(do_sample=True, top_k=3, num_return_sequences=2, max_length=40)
    parity(model, **RAGGED)


# Modes of the model, of torch and of precision


@pytest.mark.parametrize("implementation", ["eager", "sdpa"])
def test_whatever_attention_the_model_had(implementation):
    model = new_model()
    model.set_attn_implementation(implementation)
    _, _, patched = parity(model, **RAGGED, **SAMPLED)
    assert patched.config._attn_implementation == implementation


def test_train_mode_without_dropout():
    parity(new_model().train(), **RAGGED, **SAMPLED)


def test_inference_mode_and_no_grad_take_turns():
    stock, model = new_model(), hf_cascade.patch(new_model(), strict=True)
    for length in (4, 40, 80):  # the pool is born in the first and grows in the others
        for context in (torch.inference_mode, torch.no_grad, torch.enable_grad):
            with context():
                arguments = batch(tokens(length)) | SAMPLED
                assert_same(run(stock, **arguments), run(model, **arguments))


@pytest.mark.parametrize("prompts", [(tokens(5, 1), tokens(5, 2)), (tokens(9), tokens(9)[:7])])
def test_gradients_asked_for_on_the_way_are_refused_and_leave_nothing_behind(prompts):
    stock, model = new_model(), hf_cascade.patch(new_model(), strict=True, page_size=4)
    arguments = batch(*prompts) | SAMPLED
    asks = model.model.layers[0].register_forward_pre_hook(
        lambda module, args: torch.set_grad_enabled(True) and None
    )
    with pytest.raises(RuntimeError, match=r"hf_cascade::\w+ is for inference and has no gradient"):
        run(model, **arguments)
    asks.remove()
    with torch.enable_grad():
        assert_same(run(stock, **arguments), run(model, **arguments))
    assert not any(pool.requires_grad for pair in model.cascade.pool.layers() for pool in pair)


def test_a_pass_is_found_once_for_all_layers(monkeypatch):
    found, find_pass = [], composed.find_pass
    monkeypatch.setattr(composed, "find_pass", lambda *args: found.append(args) or find_pass(*args))
    model = hf_cascade.patch(new_model(num_hidden_layers=5), strict=True)
    run(model, **RAGGED, **SAMPLED)
    assert len(found) == 1 + model.cascade.stats.decode_steps


def test_values_that_do_not_fit_their_keys_are_an_error_that_says_so():
    model = hf_cascade.patch(new_model(), strict=True)
    attention = model.model.layers[-1].self_attn
    values = attention.v_proj
    attention.v_proj = torch.nn.Linear(values.in_features, 2 * values.out_features, bias=False)
    with pytest.raises(ValueError, match="v_pool must be like k_pool"):
        run(model, **RAGGED, **SAMPLED)


def scripted(script: list[int]) -> dict:
    """Arguments that make every row continue with the script, so that logits can be compared."""
    start = RAGGED["input_ids"].shape[1]
    return {
        "prefix_allowed_tokens_fn": lambda row, ids: [script[len(ids) - start]],
        "return_dict_in_generate": True,
        "output_logits": True,
        "max_new_tokens": len(script),
        "do_sample": False,
    }


def assert_as_exact_as_stock(stock: tuple, patched: tuple, truth: tuple) -> None:
    """Logits [rows, vocab] per step err at most twice as much as stock's do."""
    stock_error, patched_error = (
        max((a - b).abs().max() for a, b in zip(logits, truth, strict=True))
        for logits in (stock, patched)
    )
    assert 0 < patched_error <= 2 * stock_error


@pytest.mark.parametrize("name", ["llama", "qwen3", "gemma", "olmo2"])
@pytest.mark.parametrize("implementation", ["eager", "sdpa"])
def test_under_autocast_logits_are_as_exact_as_stock_s(name, implementation):
    """The projections' dtype differs from what RoPE and norms make of q and k."""
    model = new_model(name)
    model.set_attn_implementation(implementation)
    arguments = RAGGED | scripted(tokens(6, seed=7))
    truth = run(model, **arguments).out.logits
    with torch.autocast("cpu", torch.bfloat16):
        stock, patched, owner = parity(model, **arguments)
    assert_as_exact_as_stock(stock.out.logits, patched.out.logits, truth)
    stored = {pool.dtype for pools in owner.cascade.pool.layers() for pool in pools}
    assert stored == {torch.bfloat16}


@pytest.mark.parametrize("name", ["llama", "qwen3", "gemma", "granite"])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_half_precision_models_are_as_exact_as_stock(name, dtype):
    arguments = RAGGED | scripted(tokens(6, seed=7))
    half = new_model(name).to(dtype)
    truth = run(new_model(name).to(dtype).float(), **arguments).out.logits  # of the same weights
    stock, patched, _ = parity(half, **arguments)
    assert_as_exact_as_stock(stock.out.logits, patched.out.logits, truth)


@each_mode
def test_double_precision_generates_what_it_did(mode):
    parity(new_model().double(), **RAGGED, **mode)


# Everything at once


@st.composite
def calls(draw: st.DrawFn) -> dict:
    """A ragged batch of rows that begin alike or don't, and a way to continue them."""
    rows: list[list[int]] = []
    for _ in range(draw(st.integers(1, 4))):
        stem = draw(st.sampled_from([[], DOCUMENT, *rows]))
        stem = stem[: draw(st.integers(0, len(stem)))]
        rows.append(stem + draw(st.lists(st.integers(3, 6), min_size=not stem, max_size=6)))
    mode = draw(st.sampled_from(list(MODES.values())))
    ends = draw(st.lists(st.integers(3, VOCAB_SIZE - 1), max_size=20, unique=True))
    return batch(*rows) | mode | {
        "page_size": draw(st.sampled_from([1, 2, 4, 16])),
        "prefill_chunk_size": draw(st.sampled_from([None, 1, 3, 50])),
        "max_new_tokens": draw(st.integers(1, 12)),
        "eos_token_id": ends or None,
        "return_dict_in_generate": draw(st.booleans()),
        "seed": draw(st.integers(0, 99)),
    }  # fmt: skip


@settings(max_examples=50, derandomize=True, deadline=None, database=None)
@given(calls())
def test_any_batch_any_way(call):
    rows = [row[row != PAD].tolist() for row in call["input_ids"]]
    _, _, model = parity(new_model(), **call)
    assert model.cascade.stats.prefill_tokens <= sum(map(len, rows))
