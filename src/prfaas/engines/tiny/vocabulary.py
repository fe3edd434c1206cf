"""The vocabulary of the tiny models: token id = byte value, special tokens after the 256 bytes."""

SPECIAL_TOKENS: tuple[str, ...] = ("<pad>", "<s>", "</s>", "<|im_start|>", "<|im_end|>")

PAD_ID, BEGIN_ID, END_ID, TURN_START_ID, TURN_END_ID = range(256, 256 + len(SPECIAL_TOKENS))

# A multiple of 64, as engines pad the embedding to that anyway; the ids above the special tokens are never used.
VOCAB_SIZE = 320

# The only tokens that a tiny model can answer with, so that answers are readable text and never end by themselves.
PRINTABLE_IDS: tuple[int, ...] = (ord("\n"), *range(0x20, 0x7F))

CHAT_TEMPLATE = """\
{%- if tools %}<|im_start|>system
tools: {{ tools | tojson }}<|im_end|>
{% endif %}
{%- for message in messages %}<|im_start|>{{ message.role }}
{{ message.content or '' }}
{%- if message.tool_calls %}{{ message.tool_calls | tojson }}{% endif %}<|im_end|>
{% endfor %}
{%- if add_generation_prompt %}<|im_start|>assistant
{% endif %}"""
