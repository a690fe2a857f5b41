"""What can go wrong, as types: every error of this package is a :class:`CascadeError`."""

from __future__ import annotations


class CascadeError(Exception):
    """Base of every error raised by hf_cascade."""


class UnsupportedModelError(CascadeError):
    """`patch` refuses this model: packed prefill over a KV tree would be wrong for it."""


class UnsupportedCallError(CascadeError):
    """In strict mode, a `generate` call that would have fallen back to stock transformers."""


class OutOfPagesError(CascadeError):
    """The page pool cannot hold what a step needs. Raised before any page is written.

    Args:
        needed: pages that the step asks for.
        available: pages that are free, the room that the pool may still grow by included.
        max_pages: the limit set by `patch(max_pages=...)`.
    """

    def __init__(self, needed: int, available: int, max_pages: int) -> None:
        self.needed, self.available, self.max_pages = needed, available, max_pages
        super().__init__(
            f"{needed} pages are needed, {available} of max_pages={max_pages} are available; "
            "raise max_pages in hf_cascade.patch, lower num_return_sequences, the batch size or "
            "max_new_tokens, or drop past_key_values that earlier calls returned"
        )

    def __reduce__(self):
        return type(self), (self.needed, self.available, self.max_pages)


class CascadeFallbackWarning(UserWarning):
    """A `generate` call ran on stock transformers; the message names the reason."""
