"""RoPE moves into the cascade that reads its results: of the models that write it the usual way, in
every layer, and of nothing that only looks like it. No GPU is needed: that kernels serve is made
up, and torch operators compute what the graph says.
"""

from __future__ import annotations

import copy
import re
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from cases import Tree, build
from hf_cascade.ops import kernels
from models import new_model
from torch import Tensor
from torch._dynamo.backends.common import aot_autograd
from torch._inductor.decomposition import select_decomp_table
from torch._inductor.utils import run_and_get_code
from torch.fx import Graph, GraphModule, Node
from transformers import CompileConfig, PreTrainedModel
from transformers.models.llama.modeling_llama import apply_rotary_pos_emb, rotate_half

import hf_cascade
from hf_cascade import fuse_rope, ops
from hf_cascade.fuse import FusePass, fuse_pass

CASCADE = torch.ops.hf_cascade.cascade_attention.default
NUM_LAYERS = 2


@pytest.fixture(autouse=True)
def _kernels_serve(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(kernels, "serve", lambda pool: True)
    torch._dynamo.reset()


def calls(graph: Graph) -> list[Node]:
    return [node for node in graph.nodes if node.op == "call_function" and CASCADE in node.args]


def rotating(graph: Graph) -> list[bool]:
    """Of each cascade, whether it gets cos and sin."""
    for call in calls(graph):
        assert ("cos" in call.kwargs) == ("sin" in call.kwargs)
    return ["cos" in call.kwargs for call in calls(graph)]


def fused_backend(fusion: Callable[[Graph], None], graphs: list[Graph]) -> Callable:
    """Inductor's decompositions and the pass, without its code: a second, where that takes ten."""

    def compiler(module: GraphModule, _) -> GraphModule:
        fusion(module.graph)
        module.graph.lint()
        module.recompile()
        graphs.append(module.graph)
        return module

    return aot_autograd(fw_compiler=compiler, decompositions=select_decomp_table())


# ------------------------------------------------------------------ models

# What is special: norms of q and k, cos and sin in float32 always, one projection for q, k and v;
# then heads of which a part is rotated.
MODELS = {
    "llama": {"head_dim": 16},
    "qwen3": {"head_dim": 16},
    "mistral": {"head_dim": 16},
    "granite": {"hidden_size": 64},
    "olmo2": {"hidden_size": 64},
    "phi3": {"hidden_size": 128, "partial_rotary_factor": 0.5},
    "gpt_neox": {"hidden_size": 256},
    "phi": {"hidden_size": 128},
}


def generate(model: PreTrainedModel, **options) -> Tensor:
    torch.manual_seed(0)
    input_ids = torch.randint(3, 60, (1, 9))
    return model.generate(
        input_ids, attention_mask=torch.ones_like(input_ids), do_sample=True,
        num_return_sequences=3, max_new_tokens=12, **options,
    )  # fmt: skip


def generate_fused(stock: PreTrainedModel, **options) -> tuple[Tensor, list[Graph]]:
    """What the patched model generates, its steps being fused, and their graphs."""
    graphs: list[Graph] = []

    def backend(module: GraphModule, inputs: list, *, options: dict) -> Callable:
        return fused_backend(options["post_grad_custom_pre_pass"], graphs)(module, inputs)

    model = hf_cascade.patch(copy.deepcopy(stock), compile=True, strict=True, **options)
    tokens = generate(model, compile_config=CompileConfig(mode=None, backend=backend))
    return tokens, graphs


@pytest.mark.parametrize("name", MODELS)
def test_every_layer_of_these_models_rotates_on_the_way(name: str) -> None:
    stock = new_model(name, **MODELS[name])
    tokens, graphs = generate_fused(stock)
    assert graphs
    assert all(rotating(graph) == [True] * NUM_LAYERS for graph in graphs)
    assert torch.equal(tokens, generate(stock))


@pytest.mark.parametrize("name", ["qwen3", "olmo2", "gpt_neox"])
def test_so_it_does_in_bfloat16(name: str) -> None:
    _, [graph] = generate_fused(new_model(name, **MODELS[name]).bfloat16())
    assert rotating(graph) == [True] * NUM_LAYERS
    angles = {call.kwargs["cos"].meta["val"].dtype for call in calls(graph)}
    assert angles == {torch.float32 if name == "olmo2" else torch.bfloat16}


def test_layers_share_cos_and_sin() -> None:
    _, [graph] = generate_fused(new_model("llama", **MODELS["llama"]))
    first, second = calls(graph)
    assert (first.kwargs["cos"], first.kwargs["sin"]) == (
        second.kwargs["cos"],
        second.kwargs["sin"],
    )


def test_packed_projections_are_read_where_they_are() -> None:
    _, [graph] = generate_fused(new_model("llama", **MODELS["llama"]), pack_linears=True)
    assert rotating(graph) == [True] * NUM_LAYERS
    for call in calls(graph):
        strides = {call.kwargs[name].meta["val"].stride() for name in ("q", "k", "v")}
        assert strides == {((4 + 2 + 2) * 16, 16, 1)}


@pytest.mark.parametrize(
    ("name", "config"),
    [
        ("cohere", {"hidden_size": 64}),  # interleaved pairs
        ("llama", {"head_dim": 4}),  # a half is less than the kernel reads at a time
    ],
)
def test_other_models_are_left_alone(name: str, config: dict) -> None:
    stock = new_model(name, **config)
    tokens, [graph] = generate_fused(stock)
    assert rotating(graph) == [False] * NUM_LAYERS
    assert torch.equal(tokens, generate(stock))


@pytest.mark.parametrize(
    ("name", "config"), [("llama", {"head_dim": 16}), ("phi3", {"hidden_size": 64})], ids=str
)
def test_inductor_itself_compiles_it(name: str, config: dict) -> None:
    stock = new_model(name, **config)
    model = hf_cascade.patch(copy.deepcopy(stock), compile=True, strict=True)
    seen: list[list[bool]] = []
    options = {"post_grad_custom_pre_pass": lambda graph: seen.append(rotating(graph))}
    tokens, code = run_and_get_code(
        generate, model, compile_config=CompileConfig(mode=None, options=options)
    )
    assert seen == [[True] * NUM_LAYERS]
    assert torch.equal(tokens, generate(stock))
    called = re.findall(r"= torch\.ops\.hf_cascade\.cascade_attention\.default\((.*)\)", code[0])
    angles = [re.findall(r"reinterpret_tensor\((\w+),", arguments)[-2:] for arguments in called]
    assert angles == [angles[0]] * NUM_LAYERS  # computed once, for all layers


# ------------------------------------------------------------------ what only looks like it

DECODE = Tree("decode", (None, 0, 0, 0), (9, 3, 0, 4), (1, 2, 3), head_dim=32)
PREFILL = Tree("prefill", (None,), (3,), (0,), q_len=(3,), head_dim=32)
NODES = ("q_indptr", "kv_indptr", "kv_indices", "kv_len", "first_slot")


def arguments(tree: Tree = DECODE, dtype: torch.dtype = torch.float32) -> dict:
    """With q and k as models have them, [batch, num_heads, q_len, head_dim], cos and sin too."""
    args = build(tree, dtype).before_append().args(ops.cascade_attention)
    batch = len(tree.leaves)
    random = torch.Generator().manual_seed(0)
    for name in ("q", "k", "v"):
        args[name] = args[name].unflatten(0, (batch, -1)).transpose(1, 2)
    for name in ("cos", "sin", "other_cos"):
        args[name] = torch.randn(batch, args["q"].shape[2], 32, generator=random).to(dtype)
    return args


def usual(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    return apply_rotary_pos_emb(x, x, cos, sin)[0]


def in_part(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    return torch.cat([usual(x[..., :16], cos[..., :16], sin[..., :16]), x[..., 16:]], -1)


def attend(
    t: dict,
    rope: Callable[[Tensor, Tensor, Tensor], Tensor] = usual,
    *,
    k_cos: str = "cos",
    returns: str | None = None,
) -> tuple[Tensor, ...]:
    """A layer's attention, from RoPE on."""
    rotated = {"q": rope(t["q"], t["cos"], t["sin"]), "k": rope(t["k"], t[k_cos], t["sin"])}
    q, k, v = (x.transpose(1, 2).flatten(0, 1) for x in (*rotated.values(), t["v"]))
    pools, nodes = (t["k_pool"], t["v_pool"]), [t[name] for name in NODES]
    ops.append_kv(k, v, *pools, t["slots"])
    prefix = ops.prefix_attention(q, *pools, *nodes, t["reader_indptr"], t["readers"], 0.25)
    suffix = ops.suffix_attention(q, *pools, *nodes, t["leaves"], 0.25)
    state = ops.merge_state(*prefix, *suffix)
    return state if returns is None else (*state, rotated[returns] + 1)


def check(
    function: Callable[[dict], tuple[Tensor, ...]], t: dict, rotates: bool
) -> tuple[Graph, tuple[Tensor, ...]]:
    """The compiled function rotates on the way or not, and computes what the plain one does."""
    graphs: list[Graph] = []
    plain, traced = ({name: copy.deepcopy(value) for name, value in t.items()} for _ in "ab")
    with torch.no_grad():
        expected = (*function(plain), plain["k_pool"])
        compiled = torch.compile(
            function, backend=fused_backend(fuse_pass(), graphs), fullgraph=True
        )
        results = (*compiled(traced), traced["k_pool"])
    assert rotating(graphs[0]) == [rotates]
    for result, value in zip(results, expected, strict=True):
        torch.testing.assert_close(result, value, rtol=0, atol=0, equal_nan=True)
    return graphs[0], results


@pytest.mark.parametrize("rope", [usual, in_part])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_the_usual_form_is_taken_with_all_that_was_made_for_it(rope, dtype) -> None:
    graph, _ = check(lambda t: attend(t, rope), arguments(dtype=dtype), rotates=True)
    names = {str(node.target) for node in graph.nodes if node.op == "call_function"}
    assert not {"aten.mul.Tensor", "aten.neg.default", "aten.cat.default"} & names


def interleaved(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    turned = torch.stack([-x[..., 1::2], x[..., ::2]], -1).flatten(-2)
    return x * cos[:, None] + turned * sin[:, None]


def backwards(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    first, second = x.chunk(2, -1)
    return x * cos[:, None] + torch.cat([second, -first], -1) * sin[:, None]


def at_the_end(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    return torch.cat([x[..., :16], usual(x[..., 16:], cos[..., :16], sin[..., :16])], -1)


def of_other_values(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    return x * cos[:, None] + rotate_half(x + 1) * sin[:, None]


def scaled(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    return usual(x, cos, sin) * 2


def alike_for_all(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    return usual(x, cos[:1], sin[:1])


def for_each_head(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    cos, sin = (y[:, None] + torch.arange(x.shape[1])[:, None, None] for y in (cos, sin))
    return x * cos + rotate_half(x) * sin


@pytest.mark.parametrize(
    "near_miss",
    [
        {"rope": interleaved},
        {"rope": backwards},
        {"rope": at_the_end},
        {"rope": of_other_values},
        {"rope": scaled},
        {"rope": alike_for_all},
        {"rope": for_each_head},
        {"k_cos": "other_cos"},
        {"returns": "k"},
        {"returns": "q"},
    ],
    ids=lambda each: str(next(getattr(value, "__name__", value) for value in each.values())),
)
def test_near_misses_are_left_alone(near_miss: dict) -> None:
    check(lambda t: attend(t, **near_miss), arguments(), rotates=False)


def test_several_query_tokens_are_left_alone() -> None:
    check(attend, arguments(PREFILL), rotates=False)


def test_halves_that_are_no_whole_accesses_are_left_alone() -> None:
    def narrow(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        return torch.cat([usual(x[..., :24], cos[..., :24], sin[..., :24]), x[..., 24:]], -1)

    check(lambda t: attend(t, narrow), arguments(dtype=torch.bfloat16), rotates=False)


def test_values_that_do_not_lie_side_by_side_are_left_alone() -> None:
    t = arguments()
    t["q"] = t["q"].transpose(1, 3).contiguous().transpose(1, 3)
    check(attend, t, rotates=False)


def test_what_is_rotated_in_a_wider_dtype_is_left_alone() -> None:
    def widened(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        return usual(x.float(), cos.float(), sin.float()).to(x.dtype)

    check(lambda t: attend(t, widened), arguments(dtype=torch.bfloat16), rotates=False)


def test_where_no_kernels_serve_inductor_rotates(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(kernels, "serve", lambda pool: False)
    check(attend, arguments(), rotates=False)


# ------------------------------------------------------------------ the pass


def test_a_second_time_it_changes_nothing() -> None:
    before: list[str] = []

    def twice(graph: Graph) -> None:
        fuse_pass()(graph)
        before.append(str(graph))
        fuse_pass()(graph)

    graphs: list[Graph] = []
    with torch.no_grad():
        torch.compile(attend, backend=fused_backend(twice, graphs))(arguments())
    assert rotating(graphs[0]) == [True]
    assert str(graphs[0]) == before[0]


def test_the_compile_cache_key_follows_the_source(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    key = FusePass().uuid()
    changed = tmp_path / "fuse_rope.py"
    changed.write_text("# another state of the source\n")
    monkeypatch.setattr(fuse_rope, "__file__", str(changed))
    assert FusePass().uuid() != key
