"""Inputs that grow by a column a step are those that stock generate concatenates."""

import copy

import pytest
import torch
from models import new_model
from torch import Tensor
from transformers import GenerationMixin, PreTrainedModel

import hf_cascade
from hf_cascade.columns import GROWING, Columns

ROWS, LENGTH, ROOM = 3, 5, 4


def stock_grown(name: str, now: Tensor) -> Tensor:
    return GenerationMixin()._update_model_kwargs_for_generation({}, {name: now})[name]


def prompt(name: str) -> Tensor:
    mask = torch.ones(ROWS, LENGTH, dtype=torch.long)
    mask[1, :3] = 0  # padding
    return mask if name == "attention_mask" else (mask.cumsum(1) - 1).clamp(min=0)


@pytest.mark.parametrize("name", GROWING)
def test_columns_are_stock_s_beyond_the_room_too(name) -> None:
    columns, ours, theirs = Columns(ROOM), prompt(name), prompt(name)
    for _ in range(3 * ROOM):
        ours, theirs = columns.grown(name, ours), stock_grown(name, theirs)
        assert torch.equal(ours, theirs)
        assert ours.dtype == theirs.dtype


@pytest.mark.parametrize("name", GROWING)
def test_steps_within_the_room_copy_nothing(name) -> None:
    columns = Columns(ROOM)
    first = columns.grown(name, prompt(name))
    now = first
    for _ in range(ROOM - 1):
        now = columns.grown(name, now)
        assert now.data_ptr() == first.data_ptr()


@pytest.mark.parametrize("name", GROWING)
def test_what_someone_changed_meanwhile_counts(name) -> None:
    columns = Columns(ROOM)
    changed = columns.grown(name, prompt(name))[:2].clone()
    changed[0, 0] = 0
    assert torch.equal(columns.grown(name, changed), stock_grown(name, changed))


@pytest.fixture
def stock() -> PreTrainedModel:
    return new_model("llama", eos_token_id=None)


def test_a_call_s_inputs_are_stock_s(stock, monkeypatch) -> None:
    def inputs_of(model: PreTrainedModel) -> list[dict]:
        seen: list[dict] = []
        update = GenerationMixin._update_model_kwargs_for_generation
        prepare = type(model).prepare_inputs_for_generation

        def recorded(self, ids, *args, **kwargs):
            seen.append({name: kwargs[name] for name in GROWING})
            return prepare(self, ids, *args, **kwargs)

        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(type(model), "prepare_inputs_for_generation", recorded)
            ids = torch.randint(3, 61, (2, 9), generator=torch.Generator().manual_seed(0))
            mask = torch.ones_like(ids)
            mask[1, :4] = 0
            model.generate(ids, attention_mask=mask, do_sample=False, max_new_tokens=6)
        assert GenerationMixin._update_model_kwargs_for_generation is update
        return seen

    theirs = inputs_of(stock)[-5:]
    ours = inputs_of(hf_cascade.patch(copy.deepcopy(stock), strict=True))[-5:]
    assert len(ours) == 5
    for our, their in zip(ours, theirs, strict=True):
        assert all(torch.equal(our[name], their[name]) for name in GROWING)
