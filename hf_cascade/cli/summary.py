"""What all `generate` calls of a command came to."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from ..stats import GenerateStats


@dataclass(frozen=True)
class Summary:
    """A command's samples in numbers; what `GenerateStats` has too means the same, over all calls.

    Attributes:
        ending: "complete", "interrupted" (by Ctrl-C) or "stdout closed" (by who read it).
        samples, wanted: how many were written, how many were asked for.
        path: "stock" if a call was on stock transformers, and `reason` and `backend` are that
            call's; "none" if no call ended.
        shared_tokens: prompt tokens that stock generate would forward and that were not.
        new_tokens, seconds: of the samples written; since the first call, loading left out.
        seed: of the random stream; with it and the same options the samples come again.
    """

    ending: str
    samples: int
    wanted: int
    prompts: int
    new_tokens: int
    seconds: float
    prompt_tokens: int
    prefill_tokens: int
    shared_tokens: int
    kv_bytes: int
    kv_bytes_unshared: int
    path: str
    reason: str | None
    backend: str
    seed: int

    def __str__(self) -> str:
        """One line for people."""
        count = f"{self.samples} sample" + "s" * (self.samples != 1)
        if self.ending != "complete":
            count = f"{self.ending} after {self.samples} of {self.wanted} samples"
        parts = [
            f"{count} of {self.prompts} prompt" + "s" * (self.prompts != 1),
            f"{self.seconds:.1f} s, {self.new_tokens / max(self.seconds, 1e-9):,.0f} tokens/s",
        ]
        if self.path != "none":
            parts.append(
                f"prompt tokens: {self.prefill_tokens:,} forwarded, {self.shared_tokens:,} shared"
            )
        if self.path == "cascade":
            stored, unshared = readable_size(self.kv_bytes), readable_size(self.kv_bytes_unshared)
            parts.append(f"KV: {stored} instead of {unshared} by {self.backend}")
        if self.reason is not None:
            parts.append(f"on stock transformers ({self.reason})")
        return "; ".join([*parts, f"seed {self.seed}"])


def readable_size(num_bytes: int) -> str:
    """A size for people, in kB where it is less than 1 MB."""
    if num_bytes < 1e6:
        return f"{num_bytes / 1e3:,.1f} kB"
    return f"{num_bytes / 1e6:,.1f} MB"


def summarize(
    calls: Sequence[GenerateStats],
    *,
    ending: str,
    samples: int,
    wanted: int,
    prompts: int,
    new_tokens: int,
    seconds: float,
    seed: int,
) -> Summary:
    """Add up calls; those that did not end are not among them."""
    prompt_tokens = sum(call.prompt_tokens for call in calls)
    prefill_tokens = sum(call.prefill_tokens for call in calls)
    on_stock = [call for call in calls if call.path == "stock"]
    last = next(reversed(on_stock or list(calls)), None)
    return Summary(
        ending=ending,
        samples=samples,
        wanted=wanted,
        prompts=prompts,
        new_tokens=new_tokens,
        seconds=seconds,
        prompt_tokens=prompt_tokens,
        prefill_tokens=prefill_tokens,
        shared_tokens=prompt_tokens - prefill_tokens,
        kv_bytes=max((call.kv_bytes for call in calls), default=0),
        kv_bytes_unshared=max((call.kv_bytes_unshared for call in calls), default=0),
        path="none" if last is None else last.path,
        reason=None if last is None else last.reason,
        backend="none" if last is None else last.backend,
        seed=seed,
    )
