"""How a model's reasoning is marked off, and how its template is told whether to reason. Knows templates' text only."""

from __future__ import annotations

import re
from dataclasses import dataclass
from functools import lru_cache
from typing import Any

from jinja2 import nodes

from sluice.text.template_sandbox import MAX_SOURCE, BoundedEnvironment

# what opens and closes a stretch of reasoning; {} stands for a suffix that the template puts into its tokens
_PAIRS = (
    ("<think>", "</think>"),
    ("<seed:think>", "</seed:think>"),
    ("<think{}>", "</think{}>"),
    ("[THINK]", "[/THINK]"),
    ("<thinking>", "</thinking>"),
    ("<|START_THINKING|>", "<|END_THINKING|>"),
    ("<|channel>thought", "<channel|>"),
)
# what some models put around the answer that follows their reasoning
_AROUND_ANSWER = (("<answer>", "</answer>"), ("<response>", "</response>"))
_EFFORTS = {  # what each of OpenAI's efforts may be called in a template, best first
    "none": ("none", "no_think", "minimal", "low"),
    "minimal": ("minimal", "low"),
    "low": ("low",),
    "medium": ("medium", "high"),
    "high": ("high",),
    "xhigh": ("xhigh", "max", "high"),
    "max": ("max", "xhigh", "high"),
}


@dataclass(frozen=True)
class Block:
    """A stretch of reasoning at the beginning of a reply: what opens it, what closes it, what may frame the answer."""

    open: str
    close: str
    answer: tuple[str, str] | None = None

    @property
    def markers(self) -> tuple[str, ...]:
        return (self.open, self.close)

    def opened(self, prompt_tail: str) -> bool:
        """Whether the prompt ends within an open block."""
        return prompt_tail.rstrip().endswith(self.open)

    def closed(self, prompt_tail: str) -> bool:
        """Whether the prompt ends with a block already closed: the model is not to reason."""
        return prompt_tail.rstrip().endswith(self.close)


def suffix(template: str) -> str:
    """What the template puts in its tokens' `{}`, as `<think{}>`; "" if it says nothing of the kind."""
    found = re.search(r"set\s+\w+\s*=\s*['\"](:\w{1,32})['\"]", template)
    return found[1] if found else ""


def block_of(template: str) -> Block | None:
    """The reasoning block that a template speaks of; None if it speaks of none."""
    for open, close in _PAIRS:
        if close in template:
            filled = suffix(template)
            around = next((pair for pair in _AROUND_ANSWER if pair[0] in template), None)
            return Block(open.replace("{}", filled), close.replace("{}", filled), around)
    return None


def variables(template: str, effort: str | None, enable: bool | None) -> dict[str, Any]:
    """The template variables that ask for `effort` (OpenAI's reasoning_effort) or turn reasoning on or off.

    Only variables that the template reads; nothing when neither is given. An effort that the template doesn't name
    becomes one that it does, by _EFFORTS.
    """
    out: dict[str, Any] = {}
    names, texts = words(template)
    if effort is not None and enable is None:
        enable = effort != "none"
    if enable is not None:
        out = dict.fromkeys(names & {"enable_thinking", "thinking"}, enable)
        if "thinking_budget" in names and not enable:
            out["thinking_budget"] = 0
        if effort is None and not enable:
            effort = "none"
    if effort is None:
        return out
    for name in names & {"reasoning_effort", "thinking_effort"}:
        wanted = _EFFORTS.get(effort, (effort,))
        known = [each for each in wanted if each in texts]
        if "<|channel|>" in template:  # gpt-oss names its default alone of the three that it was trained on
            known = [each for each in wanted if each in ("low", "medium", "high")]
        if known or not out:
            out[name] = known[0] if known else wanted[-1]
    return out


@lru_cache(maxsize=8)
def words(template: str) -> tuple[frozenset[str], frozenset[str]]:
    """The names that a template reads (variables, attributes, keys), and its constant strings; none if it is broken."""
    if len(template) > MAX_SOURCE:
        return frozenset(), frozenset()
    try:
        tree = BoundedEnvironment().parse(template)
        names = {node.name for node in tree.find_all(nodes.Name) if node.ctx == "load"}
        texts = {node.value for node in tree.find_all(nodes.Const) if isinstance(node.value, str)}
    except Exception:  # rendering will say what is wrong with it
        return frozenset(), frozenset()
    return frozenset(names), frozenset(texts)
