"""The private hooks of transformers' `generate` that hf_cascade stands on: all of them, only here.

`CascadeGenerate` is mixed into a patched model's class, in front of the original one. Each hook
does little: it asks the gates, opens the cache, runs the packed prefill; the decoding loop,
processors and stopping stay transformers' own code; what it draws tokens with may be ours (`draw`),
with the same random stream.
"""

from __future__ import annotations

import copy
import functools
import inspect
from typing import Any

import torch
import torch.nn.modules.module as _module
import transformers
from torch import Tensor
from transformers import Cache, CompileConfig, GenerationMixin
from transformers.generation import MaxLengthCriteria

from .attention import (
    attention_switched,
    foreign_attention,
    switch_back,
    switched_configs,
)
from .cache import CascadeCache
from .columns import GROWING, Columns
from .draw import hand_on_logits, replacements
from .errors import UnsupportedModelError
from .gates import call_obstacle
from .loops import Criteria, Stepping, stock_sample
from .packing import pack_linears, unpack_linears
from .prefill import packed_prefill, read_prompts
from .runtime import Call, Cascade
from .step import DecodeStep
from .stopping import LateStopCheck, RowCloser
from .versions import TESTED_TRANSFORMERS

# Where transformers keeps a model's compiled call, which is bound to that very model.
COMPILED_ATTRIBUTES = ("_compiled_call", "_last_compile_config")


def check_version() -> None:
    """Raise UnsupportedModelError unless this version of transformers was tested."""
    if not TESTED_TRANSFORMERS.contains(transformers.__version__, prereleases=True):
        raise UnsupportedModelError(
            "hf_cascade relies on private generation hooks of transformers and was tested with "
            f"transformers{TESTED_TRANSFORMERS}; {transformers.__version__} is installed "
            f"(pip install 'transformers{TESTED_TRANSFORMERS}')"
        )


class CascadeGenerate:
    """The overridden hooks of `generate`; `self` is the patched model."""

    cascade: Cascade
    device: torch.device

    def __reduce_ex__(self, protocol):
        # By reference to the original class: the subclass can't be found by its name.
        reduced = super().__reduce_ex__(max(2, protocol))
        assert isinstance(reduced, tuple)
        state = {k: v for k, v in reduced[2].items() if k not in COMPILED_ATTRIBUTES}
        state[_SWITCHED] = switched_configs(self)
        return _new_patched, (original_class(type(self)),), state, *reduced[3:]

    def __setstate__(self, state):
        state = dict(state)
        switch_back(state.pop(_SWITCHED, ()))
        super().__setstate__(state)  # type: ignore[misc]

    @torch.compiler.disable  # user code around it may be compiled
    def generate(self, *args, **kwargs):
        cascade = self.cascade
        with cascade.call() as call:
            # Unpatched, or patched anew, while this call waited.
            if getattr(self, "cascade", None) is not cascade:
                return self.generate(*args, **kwargs)
            call.is_plain = self._is_plain(args, kwargs)
            arguments = dict(zip(_GENERATE_PARAMETERS, args, strict=False)) | kwargs
            call.reason_before = _call_obstacle_before(arguments)
            call.longest = _longest_allowed(arguments.get("stopping_criteria"))
            if call.reason_before is not None:
                cascade.fall_back(call, call.reason_before, type(self).__name__)
            return super().generate(*args, **kwargs)  # type: ignore[misc]

    def _is_plain(self, args: tuple, kwargs: dict[str, Any]) -> bool:
        """Whether nothing of the user's can see finished rows or count steps."""
        return (
            len(args) <= 2
            and not any(map(kwargs.get, _STEP_WATCHERS))
            and all(
                getattr(getattr(self, hook), "__func__", None) is getattr(GenerationMixin, hook)
                for hook in _WATCHERS_HOOKS
            )
        )

    def _served(self, cache: Any) -> Call | None:
        """The running call, if this is its cache.

        None if user code called stock `generate` directly inside a patched call.
        """
        call = self.cascade.current
        return call if call is not None and call.cache is not None and call.cache is cache else None

    def _prepare_generated_length(
        self, generation_config, *args, inputs_tensor, input_ids_length, **kwargs
    ):
        # The first hook of a run, and the last that sees the prompt before the cache is prepared.
        call = self.cascade.begin_run()
        if call is not None and input_ids_length in (0, inputs_tensor.shape[1]):
            copies = max(generation_config.num_beams, generation_config.num_return_sequences)
            call.prompt_shape = (inputs_tensor.shape[0] * copies, inputs_tensor.shape[1])
        return super()._prepare_generated_length(  # type: ignore[misc]
            generation_config,
            *args,
            inputs_tensor=inputs_tensor,
            input_ids_length=input_ids_length,
            **kwargs,
        )

    def _prepare_cache_for_generation(
        self, generation_config, model_kwargs, generation_mode, batch_size, max_cache_length
    ):
        call = self.cascade.uncached
        reason = None
        if call is not None:
            reason = (
                call.reason_before
                or _attention_obstacle(self)
                or _length_obstacle(call.longest, generation_config)
                or call_obstacle(
                    self,
                    original_class(type(self)),
                    generation_config,
                    model_kwargs,
                    generation_mode.value,
                    call.prompt_shape,
                )
            )
            if reason is not None and call.reason_before is None:
                self.cascade.fall_back(call, reason, type(self).__name__)
            embeds, given = (
                model_kwargs.get(name) for name in ("inputs_embeds", "past_key_values")
            )
            shape = call.prompt_shape
            if shape is None:  # ids and embeddings of other lengths, or ids that were changed since
                shape = (0, 0) if embeds is None else embeds.shape[:2]
            known = given.get_seq_length() if isinstance(given, Cache) else 0
            call.count_prompt(model_kwargs.get("attention_mask"), shape, int(known))
        if call is None or reason is not None:
            return super()._prepare_cache_for_generation(  # type: ignore[misc]
                generation_config, model_kwargs, generation_mode, batch_size, max_cache_length
            )
        assert call.prompt_shape is not None  # or there was an obstacle
        cache = self.cascade.open_cache(call)
        self._set_up_compiling(generation_config, cache, rows=call.prompt_shape[0])
        # A page too many may be one that max_pages does not grant.
        cache.may_step_too_far = (
            call.is_plain and self.cascade.options.max_pages is None and not _is_distributed()
        )
        model_kwargs["past_key_values"] = model_kwargs["hf_cascade"] = cache
        call.cleanup.enter_context(attention_switched(self))

    def _set_up_compiling(self, generation_config, cache: CascadeCache, rows: int) -> None:
        """Have decode steps of so many rows compiled, where that is asked for and possible.

        The cache then is compileable, the config says how, and linear layers are packed.
        """
        if not self.cascade.compiles_on(self.device) or generation_config.disable_compile:
            return
        if _are_all_watched() or (self.cascade.options.compile == "auto" and _is_watched(self)):
            self.cascade.compiler.warn_once(
                "forward hooks are registered, which compiled code would not call in every step"
            )
            return
        given = generation_config.compile_config
        generation_config.compile_config = self._compile_config(generation_config, rows)
        cache.is_compileable = True  # transformers asks both whether it may compile
        if not self._valid_auto_compile_criteria({"past_key_values": cache}, generation_config):  # type: ignore[attr-defined]
            cache.is_compileable, generation_config.compile_config = False, given
        elif self.cascade.options.pack_linears:
            # Offloaded weights are fetched at each use, so they can't lie in one packed matrix.
            (unpack_linears if _has_hooks(self) else pack_linears)(self)

    def _compile_config(self, generation_config, rows: int) -> CompileConfig:
        """How decode steps are compiled: as the user said, and with cascades fused."""
        config = copy.copy(generation_config.compile_config)
        if config is None:
            config = CompileConfig(fullgraph=not _has_hooks(self), mode=None)  # type: ignore[arg-type]
        options = dict(config.options or {})
        if config.mode is not None:  # torch.compile takes a mode or options
            options = torch._inductor.list_mode_options(config.mode) | options
            config.mode = None
        name = "post_grad_custom_pre_pass"
        then = options.get(name) or getattr(torch._inductor.config, name)
        if rows == 1 and self.device.type == "cuda":
            # Where matrices meet a single vector, the compiler's own kernels beat the library's, if
            # each computes its vector first, instead of anew for every row of the matrix.
            options.setdefault("coordinate_descent_tuning", True)
            options.setdefault("realize_opcount_threshold", 6)
        elif self.device.type == "cpu":
            # Fused code otherwise rounds once where the model's own rounds each operator: in half
            # precision more exact, and further from the model. (From torch 2.13 on.)
            options.setdefault("emulate_precision_casts", True)
        config.options = options | {name: self.cascade.fusion(then)}
        config._compile_all_devices = True
        return config

    def get_compiled_call(self, compile_config):
        call = self.cascade.current
        if call is None or call.cache is None:
            return super().get_compiled_call(compile_config)  # type: ignore[misc]
        forward = self.cascade.compiler.forward(
            self, compile_config, must_compile=self.cascade.options.compile is True
        )
        captures = self.device.type == "cuda" and not _has_hooks(self) and not _is_distributed()
        call.step = step = DecodeStep(forward, call.cache, captures=captures)
        if call.only_draws:
            return lambda **inputs: hand_on_logits(step(**inputs))
        return step

    def _sample(
        self, input_ids, logits_processor, stopping_criteria, generation_config, *args, **kwargs
    ):
        call = self._served(kwargs.get("past_key_values"))
        if call is None:
            return super()._sample(  # type: ignore[misc]
                input_ids, logits_processor, stopping_criteria, generation_config, *args, **kwargs
            )
        cache = call.cache
        assert cache is not None
        cache.may_run_dry = bool(kwargs.get("synced_gpus"))
        returned = generation_config.return_dict_in_generate and (
            generation_config.output_scores or generation_config.output_logits
        )
        call.only_draws = (
            cache.is_compileable
            and self._updates_as_stock()
            and generation_config.do_sample
            and not logits_processor
            and not returned
        )
        # Rows that are over go on in the stock loop, fed with padding. Nobody sees what they
        # compute, unless the scores or the cache are returned or a processor of the user's looks
        # at all rows.
        rows = None
        if (
            call.is_plain
            and not generation_config.return_dict_in_generate
            and any(hasattr(criterion, "eos_token_id") for criterion in stopping_criteria)
        ):
            rows = RowCloser(cache)
        # The stop check is ours where stock's would not wait either, and so are the draws of
        # compiled steps.
        sample = stock_sample(DeferredStopCheck=LateStopCheck, **replacements(call.draw))
        output = sample(
            self, input_ids, logits_processor, Criteria(stopping_criteria, rows),
            generation_config, *args, **kwargs,
        )  # fmt: skip
        self.cascade.end_run(output)
        return output

    def _beam_search(
        self, input_ids, logits_processor, stopping_criteria, generation_config, *args, **kwargs
    ):
        call = self._served(kwargs.get("past_key_values"))
        if call is None:
            return super()._beam_search(  # type: ignore[misc]
                input_ids, logits_processor, stopping_criteria, generation_config, *args, **kwargs
            )
        model: Any = self
        assert call.cache is not None
        call.cache.may_run_dry = bool(kwargs.get("synced_gpus"))
        if call.cache.is_compileable:
            # Sampling asks for a compiled call, beam search calls the model: here, one that steps.
            model = Stepping(self, self.get_compiled_call(generation_config.compile_config))
        output = GenerationMixin._beam_search(
            model, input_ids, logits_processor, Criteria(stopping_criteria), generation_config,
            *args, **kwargs,
        )  # fmt: skip
        self.cascade.end_run(output)
        return output

    def _prefill(self, input_ids, generation_config, model_kwargs, is_first_iteration=True):
        cache = model_kwargs.get("past_key_values")
        call = self._served(cache) or self.cascade.uncached
        if call is None or not isinstance(cache, CascadeCache):
            if call is not None:
                call.is_prefilling = True
            outputs = super()._prefill(  # type: ignore[misc]
                input_ids, generation_config, model_kwargs, is_first_iteration
            )
            if call is not None:
                call.is_prefilling, call.is_prefilled = False, True
            return outputs
        prompts = read_prompts(
            input_ids, model_kwargs.get("inputs_embeds"), model_kwargs.get("attention_mask")
        )
        room = generation_config.max_length - input_ids.shape[1]
        cache.reserve(prompts.rows, room)
        call.columns = Columns(room)
        outputs, call.prefill_tokens = packed_prefill(
            self, cache, prompts, generation_config.prefill_chunk_size
        )
        return hand_on_logits(outputs) if call.only_draws else outputs

    def _update_model_kwargs_for_generation(self, outputs, model_kwargs, *args, **kwargs):
        call, grown = self._served(model_kwargs.get("past_key_values")), {}
        is_step = not args and kwargs.get("num_new_tokens", 1) == 1
        if call is not None and call.columns is not None and is_step and self._updates_as_stock():
            for name in GROWING:
                if isinstance(now := model_kwargs.get(name), Tensor) and now.ndim == 2:
                    grown[name] = call.columns.grown(name, model_kwargs.pop(name))
        update = super()._update_model_kwargs_for_generation  # type: ignore[misc]
        return update(outputs, model_kwargs, *args, **kwargs) | grown

    def _updates_as_stock(self) -> bool:
        """Whether the model's own class leaves it to transformers what goes from step to step."""
        update = super()._update_model_kwargs_for_generation  # type: ignore[misc]
        return update.__func__ is GenerationMixin._update_model_kwargs_for_generation

    def prepare_inputs_for_generation(self, input_ids, *args, **kwargs):
        inputs = super().prepare_inputs_for_generation(input_ids, *args, **kwargs)  # type: ignore[misc]
        call, cache = self.cascade.uncached, inputs.get("past_key_values")
        if call is not None and not call.is_prefilling:  # a loop may prefill in a step of its own
            call.decode_steps += call.is_prefilled
            call.is_prefilled = True
        if isinstance(cache, CascadeCache):
            cache.begin_step()
        return inputs


def _new_patched(original: type) -> Any:
    return object.__new__(cascade_class(original))


_SWITCHED = "_hf_cascade_switched_configs"  # in the state of a copy
_GENERATE_PARAMETERS = list(inspect.signature(GenerationMixin.generate).parameters)[1:]
# By these arguments, and in these hooks of its class, a call gets what may watch its steps.
_STEP_WATCHERS = ("logits_processor", "stopping_criteria", "prefix_allowed_tokens_fn")
_WATCHERS_HOOKS = ("_get_logits_processor", "_get_stopping_criteria")


def _has_hooks(model: Any) -> bool:
    """Whether accelerate has put hooks on layers: it does where a model is split or offloaded."""
    devices = set((getattr(model, "hf_device_map", None) or {}).values())
    return "_hf_hook" in vars(model) or len(devices) > 1


def _is_watched(model: Any) -> bool:
    """Whether forward hooks are registered for a module of the model."""
    return any(module._forward_hooks or module._forward_pre_hooks for module in model.modules())


def _are_all_watched() -> bool:
    """Whether forward hooks are registered for all modules there are: the compiler ignores them."""
    return bool(_module._global_forward_hooks or _module._global_forward_pre_hooks)


def _attention_obstacle(model: Any) -> str | None:
    name = foreign_attention(model)
    return None if name is None else f"the attention function {name!r} is not of transformers"


def _longest_allowed(stopping_criteria: Any) -> int:
    """The most tokens that a length criterion of the caller's own allows; 0 without one."""
    if not isinstance(stopping_criteria, list):
        return 0
    limits = (c.max_length for c in stopping_criteria if isinstance(c, MaxLengthCriteria))
    return max(limits, default=0)


def _length_obstacle(longest: int, generation_config: Any) -> str | None:
    """A MaxLengthCriteria among the arguments takes the place of the one that generate makes."""
    limit = generation_config.max_length
    if longest > limit:
        return f"a MaxLengthCriteria of {longest} tokens, which is more than max_length={limit}"
    return None


def _is_distributed() -> bool:
    return torch.distributed.is_available() and torch.distributed.is_initialized()


def _call_obstacle_before(kwargs: dict[str, Any]) -> str | None:
    """What generate acts on before any hook could."""
    if kwargs.get("custom_generate") is not None:
        return "the argument custom_generate"
    if kwargs.get("cache_implementation") == "paged":
        return "cache_implementation='paged'"
    return None


@functools.cache
def cascade_class(original: type) -> type:
    """The subclass of a model's class whose `generate` shares prefixes; it has the same name."""

    # transformers reads this hook's parameters to tell model inputs from typing errors.
    @functools.wraps(original.prepare_inputs_for_generation)  # type: ignore[attr-defined]
    def prepare_inputs_for_generation(self, *args, **kwargs):
        if not isinstance(self, CascadeGenerate):  # unpatched, but someone kept the bound method
            return original.prepare_inputs_for_generation(self, *args, **kwargs)  # type: ignore[attr-defined]
        return CascadeGenerate.prepare_inputs_for_generation(self, *args, **kwargs)

    # `__wrapped__` is what it is in stock, for whoever calls that to have gradients.
    @functools.wraps(inspect.unwrap(original.generate))  # type: ignore[attr-defined]
    def generate(self, *args, **kwargs):
        if not isinstance(self, CascadeGenerate):
            return original.generate(self, *args, **kwargs)  # type: ignore[attr-defined]
        return CascadeGenerate.generate(self, *args, **kwargs)

    def __new__(cls, *args, **kwargs):
        # Of a patched model's class one gets a new model that is not patched.
        return original(*args, **kwargs) if cls is patched else object.__new__(cls)

    namespace = {
        "__module__": original.__module__,
        "__qualname__": original.__qualname__,
        "__doc__": original.__doc__,
        "__new__": __new__,
        "generate": generate,
        "prepare_inputs_for_generation": prepare_inputs_for_generation,
    }
    patched = type(original.__name__, (CascadeGenerate, original), namespace)
    return patched


def original_class(patched: type) -> type:
    """The class of a patched model as it would be without `patch`.

    Something else may have subclassed it since, as fully_shard of torch does; that stays.
    """
    if CascadeGenerate in patched.__bases__:
        return patched.__bases__[1]
    namespace = {k: v for k, v in vars(patched).items() if k not in ("__dict__", "__weakref__")}
    bases = (
        original_class(base) if issubclass(base, CascadeGenerate) else base
        for base in patched.__bases__
    )
    return type(patched)(patched.__name__, tuple(bases), namespace)
