"""How conversations are cut out of a novel."""

from __future__ import annotations

import random

from chat_data import chat_conversations, paragraphs

FILLER = "\n\n".join(f"He walked on, and the road number {i}\nwas long." for i in range(250))


def test_consecutive_speeches_become_turns() -> None:
    talk = '"Who is there?" cried the old man. "Speak!"\n\n"A friend," said she, "and a\ntired one."'
    novel = f"{FILLER}\n\n{talk}\n\n{FILLER}"
    conversations = chat_conversations(novel, random.Random(3))
    spoken = "<|user|>Who is there? Speak!<|end|><|assistant|>A friend, and a tired one.<|end|>"
    assert any(c.endswith(spoken) for c in conversations)


def test_turns_come_in_pairs() -> None:
    talk = "\n\n".join(f'"Speech number {i}," said he.' for i in range(7))
    conversations = chat_conversations(f"{FILLER}\n\n{talk}\n\n{FILLER}", random.Random(3))
    assert all(c.count("<|user|>") == c.count("<|assistant|>") for c in conversations)
    assert any(c.endswith("<|assistant|>Speech number 5.<|end|>") for c in conversations)


def test_a_novel_without_blank_lines_gives_none() -> None:
    wrapped = "\n".join(f"line {i} of a novel whose paragraphs are not marked" for i in range(2000))
    assert paragraphs(wrapped) == []
    assert chat_conversations(wrapped, random.Random(3)) == []
