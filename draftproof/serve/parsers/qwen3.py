"""Reasoning of the Qwen3 family: the text up to `</think>`, or up to a tool call."""

from __future__ import annotations

from draftproof.serve.parsers.base import THINK, THINK_END, TOOL, Scanner, Tags

TURNS = ("<|im_start|>", "<|im_end|>")


def starts_thinking(prompt_text: str, default: bool = True) -> bool:
    """Whether the generation starts inside reasoning: the newest think tag of the prompt's last turn is an open one.

    `default` is the answer for a turn without any: templates that leave `<think>` to the model (Qwen3) write
    `<think></think>` when thinking is off, so a turn without tags thinks.
    """
    turn = max(prompt_text.rfind(tag) for tag in TURNS)
    opened, closed = prompt_text.rfind(THINK), prompt_text.rfind(THINK_END)
    if max(opened, closed) <= turn:
        return default
    return opened > closed


class Qwen3Reasoning:
    """`</think>` ends the reasoning, a generated `<think>` is swallowed; without an end everything is reasoning.

    thinking: False when the reasoning is over before the first token. tools: `<tool_call>` ends the reasoning too,
    and belongs to the rest.
    """

    def __init__(self, *, thinking: bool, tools: bool) -> None:
        self._thinking = thinking
        self._tags = Tags(THINK, THINK_END, *([TOOL] if tools else []))
        self._scanner = Scanner()

    def feed(self, text: str) -> tuple[str, str]:
        if not self._thinking:
            return "", text
        self._scanner.feed(text)
        reasoning: list[str] = []
        while self._thinking:
            part, tag = self._scanner.scan(self._tags)
            reasoning.append(part)
            if tag is None:
                return "".join(reasoning), ""
            self._thinking = tag == THINK
            if tag == TOOL:
                self._scanner.unread(tag)
        return "".join(reasoning), self._scanner.rest()

    def finish(self) -> str:
        return self._scanner.rest()
