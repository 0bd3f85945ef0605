"""Tries a chat template in a process of its own, which can be killed: templates are programs of whoever made the model.

Jinja's sandbox keeps them from files and code, not from loops without an end and texts without bounds. Only that is
looked for here. All other faults are found when the template is really used.

    python template_trial.py < JSON of template, messages and variables
"""

from __future__ import annotations

import functools
import json
import resource
import subprocess
import sys
from collections.abc import Mapping, Sequence
from typing import Any

CPU_S = 10  # of its own time, so a busy machine counts for nothing
MEMORY_BYTES = 1 << 30
LONGEST_TEXT = 1 << 24
TOO_MUCH = 9  # exit code


def overdoes(tokenizer: Any, template: str, variables: Mapping[str, Any], messages: Sequence[Any]) -> str | None:
    """Return what a template takes too much of, when it is rendered for these messages; None if nothing.

    `variables` are those of `apply_chat_template`.
    """
    special = {name: str(value) for name, value in tokenizer.special_tokens_map.items()}
    own = {name: value for name, value in variables.items() if name != "chat_template"}
    try:
        call = json.dumps({**special, **own, "messages": messages, "add_generation_prompt": True})
    except (ValueError, TypeError):
        return None  # said when it is used
    return _tried(template, call)


@functools.lru_cache(maxsize=64)
def _tried(template: str, call: str) -> str | None:
    done = subprocess.run(
        [sys.executable, "-I", __file__],
        input=json.dumps([template, json.loads(call)]).encode(),
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
        env={},
        check=False,
    )
    if done.returncode < 0:
        return f"takes more than {CPU_S} s"
    if done.returncode == TOO_MUCH:
        return f"takes more than {MEMORY_BYTES >> 20} MiB, or makes a text of more than {LONGEST_TEXT >> 20} MiB"
    return None


def _render(template: str, call: dict[str, Any]) -> int:
    """Render as transformers does, as far as it matters for time and room. Return the exit code."""
    import jinja2
    from jinja2 import nodes
    from jinja2.ext import Extension, loopcontrols
    from jinja2.sandbox import ImmutableSandboxedEnvironment

    class Generation(Extension):
        tags = {"generation"}  # noqa: RUF012 - as Jinja has it

        def parse(self, parser: Any) -> Any:
            next(parser.stream)
            return nodes.If(nodes.Const(True), parser.parse_statements(("name:endgeneration",), True), [], [])

    def fail(message: str = "") -> None:
        raise jinja2.TemplateError(message)

    environment = ImmutableSandboxedEnvironment(
        trim_blocks=True, lstrip_blocks=True, extensions=[Generation, loopcontrols]
    )
    environment.filters["tojson"] = lambda value, **_: json.dumps(value)
    environment.globals |= {"raise_exception": fail, "strftime_now": lambda spelling: spelling}
    size = 0
    try:
        for part in environment.from_string(template).generate(**call):
            size += len(part)
            if size > LONGEST_TEXT:
                return TOO_MUCH
    except MemoryError:
        return TOO_MUCH
    except Exception:  # noqa: BLE001 - whoever really uses it says it better
        return 1
    return 0


def _main() -> int:
    resource.setrlimit(resource.RLIMIT_CPU, (CPU_S, CPU_S))
    resource.setrlimit(resource.RLIMIT_AS, (MEMORY_BYTES, MEMORY_BYTES))
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    return _render(*json.loads(sys.stdin.buffer.read()))


if __name__ == "__main__":
    sys.exit(_main())
