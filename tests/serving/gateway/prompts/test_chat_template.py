"""Our rendering against transformers' own."""

from pathlib import Path

import jinja2
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from prfaas.serving.gateway.prompts.tokenizers import ChatTemplate

from ..stand_in import CHAT_TEMPLATE, write_tokenizer

TEMPLATES = {
    "chatml": CHAT_TEMPLATE,
    "loop controls": "{%- for m in messages %}\n    {%- if m.role == 'system' %}{% continue %}{% endif %}\n"
    "[{{ loop.index0 }}] {{ m.content | tojson }}\n  {%- endfor %}{{ bos_token }}{{ eos_token }}",
    "namespaces": "{%- set ns = namespace(n=0) %}{%- for m in messages[::-1] %}{%- set ns.n = ns.n + 1 %}"
    "{{ ns.n }}{{ m['content'].strip() }}{%- endfor %}{% if tools is not none %}T{% endif %}",
}
MESSAGES = st.lists(
    st.tuples(
        st.sampled_from(("system", "user", "assistant")), st.text(alphabet="a <>\n\té\"'{}&", max_size=12)
    ),
    min_size=1,
    max_size=4,
)


@pytest.mark.parametrize("name", TEMPLATES)
def test_it_renders_as_transformers_does(name: str, tmp_path_factory: pytest.TempPathFactory) -> None:
    transformers = pytest.importorskip("transformers")
    directory = write_tokenizer(tmp_path_factory.mktemp("model"))
    reference = transformers.PreTrainedTokenizerFast(
        tokenizer_file=str(directory / "tokenizer.json"), eos_token="<|im_end|>"
    )
    ours = ChatTemplate(TEMPLATES[name], {"eos_token": "<|im_end|>"})

    @settings(deadline=None)
    @given(MESSAGES)
    def check(messages: list[tuple[str, str]]) -> None:
        expected = reference.apply_chat_template(
            [{"role": role, "content": content} for role, content in messages],
            chat_template=TEMPLATES[name],
            add_generation_prompt=True,
            tokenize=False,
        )
        assert ours.render(messages) == expected

    check()


def test_text_parts_are_joined_by_newlines() -> None:
    assert ChatTemplate("{{ messages[0].content }}", {}).render([("user", ("a", "", "b"))]) == "a\nb"


def test_a_template_may_refuse() -> None:
    with pytest.raises(jinja2.TemplateError, match="no"):
        ChatTemplate("{{ raise_exception('no') }}", {}).render([("user", "x")])


def test_a_checkpoint_without_a_usable_template_has_none(tmp_path: Path) -> None:
    assert ChatTemplate.of_model(tmp_path) is None
    (tmp_path / "tokenizer_config.json").write_text('{"chat_template": "{% generation %}"}')
    assert ChatTemplate.of_model(tmp_path) is None
    (tmp_path / "tokenizer_config.json").write_text(
        '{"chat_template": [{"name": "default", "template": "x"}]}'
    )
    template = ChatTemplate.of_model(tmp_path)
    assert template is not None and template.render([("user", "y")]) == "x"


@pytest.mark.parametrize(
    "text", ["[" * 100_000, "[1]", "{", '{"chat_template": [1]}', '{"chat_template": "{% x"}']
)
def test_a_template_that_can_t_be_used_is_none(tmp_path: Path, text: str) -> None:
    """Engines render conversations then."""
    (tmp_path / "tokenizer_config.json").write_text(text)
    assert ChatTemplate.of_model(tmp_path) is None
