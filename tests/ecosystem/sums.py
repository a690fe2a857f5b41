"""The shipped chain-of-sums model with its tokenizer, for what wants text, and prompts for it."""

from __future__ import annotations

from pathlib import Path

CHECKPOINT = Path(__file__).parents[2] / "examples" / "chain_of_sums"

SHOWN = ("Dan buys 237, 682. Total?", " 682, 237:919. Total=919")
QUESTIONS = (
    "Bob buys 902, 949, 410. Total?",
    "Eve buys 118, 264. Total?",
    "Finn buys 902, 333, 410, 571. Total?",
)
PROMPTS = [f"<bos>Q: {SHOWN[0]}\nA:{SHOWN[1]}\nQ: {question}\nA:" for question in QUESTIONS]

# The same prompts as a chat: the worked example is its first turn.
CHAT_TEMPLATE = (
    "{{ bos_token }}{% for message in messages %}"
    "{% if message.role == 'user' %}{{ 'Q: ' + message.content + '\n' }}"
    "{% else %}{{ 'A:' + message.content + '\n' }}{% endif %}{% endfor %}"
    "{% if add_generation_prompt %}A:{% endif %}"
)
CHATS = [
    [
        {"role": "user", "content": SHOWN[0]},
        {"role": "assistant", "content": SHOWN[1]},
        {"role": "user", "content": question},
    ]
    for question in QUESTIONS
]
