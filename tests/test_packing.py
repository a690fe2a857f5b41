"""`patch(pack_linears=True)`: fewer, larger products in compiled steps, and nothing else to see."""

from __future__ import annotations

import copy
import pickle
import weakref

import accelerate
import pytest
import torch
from models import PROMPT, RAGGED, assert_same, new_model, run
from peft import LoraConfig, get_peft_model
from torch.fx import Graph
from torch.nn import Linear, Module
from torch.nn.utils import parametrize, prune
from transformers import AutoModelForCausalLM, CompileConfig

import hf_cascade
from hf_cascade.packing import _PACK, PackedLinear

SAMPLED = {"do_sample": True, "num_return_sequences": 3}


@pytest.fixture(autouse=True)
def few_recompilations():
    """Every test compiles anew, and torch counts them together against its limit."""
    torch._dynamo.reset()


def packed(name: str = "llama"):
    model = hf_cascade.patch(new_model(name), strict=True, compile=True, pack_linears=True)
    run(model, **RAGGED)
    return model


def products(model, **arguments) -> int:
    """Products with a weight in one compiled step."""
    counts: list[int] = []

    def count(graph: Graph) -> None:
        ops = (torch.ops.aten.mm.default, torch.ops.aten.addmm.default)
        counts.append(sum(node.target in ops for node in graph.nodes))

    torch._dynamo.reset()
    config = CompileConfig(mode=None, options={"post_grad_custom_pre_pass": count})
    run(model, **arguments, compile_config=config)
    return counts[-1]


@pytest.mark.parametrize("name", ["llama", "qwen2", "qwen3", "gemma"])
def test_tokens_are_those_of_stock(name) -> None:
    stock, model = new_model(name), packed(name)
    for arguments in (RAGGED | SAMPLED, PROMPT | SAMPLED, PROMPT):
        assert_same(run(stock, **arguments), run(model, **arguments))
    assert model.cascade.stats.fused_layers == 2


@pytest.mark.parametrize("name", ["llama", "qwen2"])
def test_siblings_are_one_product(name) -> None:
    plain = hf_cascade.patch(new_model(name), strict=True, compile=True)
    assert products(plain, **RAGGED) == 2 * 7 + 1  # layers, and the logits
    assert products(packed(name), **RAGGED) == 2 * 4 + 1


def test_the_weights_are_what_they_were(tmp_path) -> None:
    stock, model = new_model(), packed()
    assert isinstance(model.model.layers[0].mlp.up_proj, PackedLinear)
    for found in (
        model.state_dict(),
        copy.deepcopy(model).state_dict(),
        pickle.loads(pickle.dumps(model)).state_dict(),
        dict(model.named_parameters()),
    ):
        for name, weight in dict(stock.named_parameters()).items():
            assert torch.equal(found[name], weight)
    model.save_pretrained(tmp_path)
    loaded = AutoModelForCausalLM.from_pretrained(tmp_path).eval()
    assert torch.equal(loaded(**RAGGED).logits, stock(**RAGGED).logits)
    assert torch.equal(model(**RAGGED).logits, stock(**RAGGED).logits)


@pytest.mark.parametrize("by", ["copy", "assignment", "data"])
def test_new_weights_are_seen(by) -> None:
    stock, model = new_model(seed=1), packed()
    weights = stock.state_dict()
    if by == "data":
        for name, parameter in model.named_parameters():
            parameter.data = weights[name].clone()
    else:
        model.load_state_dict(weights, assign=by == "assignment")
    assert_same(run(stock, **RAGGED, **SAMPLED), run(model, **RAGGED, **SAMPLED))


def wrap_in_lora(model) -> None:
    torch.manual_seed(0)
    config = LoraConfig(target_modules=["q_proj", "up_proj"], init_lora_weights=False)
    get_peft_model(model, config).eval()
    model.to(torch.float64)


def offload(model) -> None:
    accelerate.cpu_offload(model, execution_device=torch.device("cpu"))


@pytest.mark.parametrize("change", [wrap_in_lora, offload])
def test_layers_that_can_t_be_packed_any_more_are_plain_again(change) -> None:
    """A matrix that nobody keeps up to date must not be read."""
    stock, model = new_model(), packed()
    for each in (stock, model):
        change(each)
    torch._dynamo.reset()
    assert_same(run(stock, **RAGGED, **SAMPLED), run(model, **RAGGED, **SAMPLED))


class Triple(Module):
    def forward(self, weight):
        return weight * 3.0


def parametrize_weight(layer: Linear) -> None:
    parametrize.register_parametrization(layer, "weight", Triple())


def test_a_parametrized_layer_computes_its_own_weight() -> None:
    stock, model = new_model(), packed()
    for each in (stock, model):
        parametrize_weight(each.model.layers[0].self_attn.q_proj)
    assert_same(run(stock, **RAGGED), run(model, **RAGGED))

    layer = hf_cascade.unpatch(model).model.layers[0].self_attn.q_proj
    assert not isinstance(layer, PackedLinear)
    parametrize.remove_parametrizations(layer, "weight", leave_parametrized=False)
    assert type(layer) is Linear


def test_a_parametrized_layer_is_right_in_other_compiled_code_too() -> None:
    """Nothing asks `pack_linears` first there."""
    layer = packed().model.layers[0].self_attn.q_proj
    parametrize_weight(layer)
    x = torch.ones(1, layer.in_features)
    with torch.no_grad():
        assert torch.equal(torch.compile(layer, backend="eager")(x), layer(x))


def test_pruned_layers_follow_the_weight_they_prune() -> None:
    stock, model = new_model(), packed()
    for each in (stock, model):
        attention = each.model.layers[0].self_attn
        for layer in (attention.q_proj, attention.k_proj, attention.v_proj):
            prune.l1_unstructured(layer, "weight", amount=0.5)
            with torch.no_grad():
                layer.weight_orig.mul_(-2.0)
    assert_same(run(stock, **RAGGED), run(model, **RAGGED))


def test_weights_that_move_take_no_memory_where_they_were() -> None:
    model = packed()
    pack = vars(model.model.layers[0].self_attn.q_proj)[_PACK]
    matrix = weakref.ref(pack[0])
    del pack
    model.to("cpu")  # where they are
    assert matrix() is not None
    model.double()
    assert matrix() is None


def test_copies_go_their_own_way() -> None:
    model = packed()
    copied = copy.deepcopy(model)
    with torch.no_grad():
        for parameter in copied.parameters():
            parameter.mul_(1.5)
    assert_same(run(new_model(), **RAGGED), run(model, **RAGGED))
    stock = hf_cascade.unpatch(copy.deepcopy(copied))
    assert_same(run(stock, **RAGGED), run(copied, **RAGGED))


def test_unpatch_leaves_plain_layers() -> None:
    model = hf_cascade.unpatch(packed())
    assert not [m for m in model.modules() if isinstance(m, PackedLinear)]
    assert [set(vars(m)) for m in model.modules()] == [set(vars(m)) for m in new_model().modules()]
    assert_same(run(new_model(), **RAGGED), run(model, **RAGGED))
