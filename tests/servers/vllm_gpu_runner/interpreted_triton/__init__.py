"""A Triton backend for CPUs that runs kernels in Triton's interpreter, so that vLLM's V2 model runner works here.

vLLM takes its kernels only if Triton knows a backend `cpu`. With this folder on PYTHONPATH, Triton and vLLM find this
package by its entry points, and no installed file is changed. It needs `TRITON_INTERPRET=1`.
"""

from __future__ import annotations

from typing import Any


class Counter(int):
    """A loop's counter. Compiled kernels have a tensor there and convert it; the interpreter has a plain number."""

    def to(self, _: Any) -> Counter:
        return self


def register() -> None:
    """Give the loops of interpreted kernels such counters."""
    from triton.runtime import interpreter

    patch = interpreter._patch_lang_core

    def patch_with_counters(language: Any, scope: Any) -> None:
        patch(language, scope)
        steps = language.range
        scope.set_attr(language, "range", lambda *bounds, **options: map(Counter, steps(*bounds, **options)))

    interpreter._patch_lang_core = patch_with_counters
