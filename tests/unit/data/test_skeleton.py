"""A template's skeleton gives what the template gives, or nothing."""

from __future__ import annotations

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from rlspeed.data.render import PromptRenderer, load_tokenizer
from rlspeed.data.skeleton import Text, _Opaque, _Table, _Use

EACH = "{% for m in messages %}"
END = "{% if add_generation_prompt %}{{ '<assistant>' }}{% endif %}"
TEMPLATES = {
    "chatml": EACH + "{{ '<' + m['role'] + '>\n' + m['content'] + '<eos>' + '\n' }}{% endfor %}" + END,
    "default system": (
        "{% if messages[0]['role'] != 'system' %}{{ '<system> s <eos>' }}{% endif %}"
        "{%- for m in messages %}{{- '<' + m.role + '>' + m.content + '<eos>' }}{% endfor %}" + END
    ),
    "trim": (
        "{{ bos_token }}{% for m in messages %}{% if (m['role'] == 'user') != (loop.index0 % 2 == 0) %}"
        "{{ raise_exception('roles must alternate') }}{% endif %}"
        "{{ '<' + m['role'] + '>' + m['content'] | trim + '<eos>' }}{% endfor %}" + END
    ),
    "thinking": (
        "{%- set ns = namespace(last=messages|length - 1) %}{%- for m in messages[::-1] %}"
        "{%- if m.role == 'user' and m.content is string and not(m.content.startswith('<tool>') "
        "and m.content.endswith('</tool>')) %}{%- set ns.last = loop.index0 %}{% endif %}{% endfor %}"
        "{%- for m in messages %}{%- if m.content is string %}{%- set c = m.content %}"
        "{%- else %}{%- set c = '' %}{%- endif %}"
        "{%- if m.role == 'assistant' and '</think>' in c %}"
        "{%- set c = c.split('</think>')[-1].lstrip('\\n') %}{%- endif %}"
        "{{- '<' + m.role + '>' + c.strip() + '<eos>' }}{{ ns.last }}{% endfor %}"
        "{%- if tools %}{{ tools | tojson }}{% endif %}" + END
    ),
    "looks inside": EACH + "{{ m['content'][:3] }}|{{ m['content'] | upper }}{% endfor %}" + END,
    "json": EACH + "{{ m['content'] | tojson }}{% endfor %}" + END,
    "joined": EACH + "{% set c = m.content ~ '!' %}{% if 'a!' in c %}x{% endif %}{{ c }}{% endfor %}" + END,
    "macro": "{% macro f(c) %}{{ c }}{% endmacro %}"
    + EACH
    + "{% if f(m.content) == 'a' %}x{% endif %}{% endfor %}"
    + END,
    "formatted": EACH + "{% set c = '%s' % m.content %}{% if c == 'a' %}x{% endif %}{{ c }}{% endfor %}" + END,
    "set": EACH + "{% set c %}{{ m.content }}{% endset %}{% if c == 'a' %}x{% endif %}{{ c }}{% endfor %}" + END,
    "member": EACH + "{% if m.content in 'abc' %}x{% endif %}{{ m.content }}{% endfor %}" + END,
    "shorter": EACH + "{% if m.content | length < 3 %}x{% endif %}{{ m.content }}{% endfor %}" + END,
    "sequence": EACH + "{% if m.content is sequence %}x{% endif %}{{ m.content }}{% endfor %}" + END,
    "stripped to nothing": EACH + "{% if m.content.strip('a') %}x{% endif %}{{ m.content }}{% endfor %}" + END,
    "or": EACH + "{{ m.content or 'nothing' }}{% if m.content == 'b' %}x{% endif %}{% endfor %}" + END,
}
BY_SKELETON = {"chatml", "default system", "trim", "thinking", "or"}
WORDS = st.sampled_from(
    [
        *("a", "b", "abc", " a ", "", " \n", "x\ny", "</think>\n\nz", "<tool>", "</tool>", '"{{ q }}"'),
        *("\ue0000\ue001", "\u00e9\u2028"),
    ]
)
CHATS = st.lists(
    st.lists(
        st.fixed_dictionaries(
            {
                "role": st.sampled_from(["user", "system", "assistant"]),
                "content": st.lists(WORDS, max_size=3).map("".join),
            }
        ),
        min_size=1,
        max_size=3,
    ),
    min_size=1,
    max_size=6,
)


@pytest.fixture(scope="module")
def tokenizers(tmp_path_factory, kit):
    folder = tmp_path_factory.mktemp("templates")
    return {
        name: load_tokenizer(str(kit.make_tokenizer(folder / name.replace(" ", "-"), template=source)))
        for name, source in TEMPLATES.items()
    }


@pytest.mark.parametrize("name", TEMPLATES)
@settings(max_examples=60, deadline=None, suppress_health_check=list(HealthCheck))
@given(chats=CHATS)
def test_every_chat_renders_as_by_the_tokenizer_itself(tokenizers, name, chats):
    tokenizer = tokenizers[name]
    renderer = PromptRenderer(tokenizer)
    for chat, got in zip(chats * 2, renderer.render(chats * 2)):
        try:
            want = tokenizer.apply_chat_template(chat, tokenize=False, add_generation_prompt=True)
        except Exception:
            assert got.fault
        else:
            assert (got.fault, got.text) == ("", want)


@pytest.mark.parametrize("name", TEMPLATES)
def test_only_templates_that_copy_texts_have_skeletons(tokenizers, kit, name):
    skeletons = PromptRenderer(tokenizers[name]).skeletons
    text = skeletons.render([kit.chat(("user", "what is it?"))])[0]
    assert (text is not None) == (name in BY_SKELETON)


def test_a_skeleton_that_were_wrong_would_be_found_out_and_given_up(tokenizers, kit):
    renderer = PromptRenderer(tokenizers["chatml"])
    chat = kit.chat(("user", "what is it?"))
    right = renderer.render([chat])[0].text
    good = renderer.skeletons.known[("user",)]
    renderer.skeletons.known[("user",)] = type(good)((*good.pieces, "wrong"), ())
    assert renderer.render([chat, chat])[1].text == right
    assert renderer.skeletons.template is None
    assert renderer.render([chat])[0].text == right


LOOKS = {
    "length": len,
    "iteration": iter,
    "hash": hash,
    "repr": repr,
    "number": int,
    "index": lambda t: t[0],
    "order": lambda t: t < "a",
    "repeat": lambda t: t * 2,
    "percent": lambda t: t % (),
    "format": lambda t: f"{t:>3}",
    "upper": lambda t: t.upper(),
    "split": lambda t: t.split(),
    "encode": lambda t: t.encode(),
    "itself": lambda t: t == t,
    "member": lambda t: 1 in t,
    "empty sum": lambda t: bool(t + "a"),
    "stripped sum": lambda t: (t + "a").strip(),
    "stripped question": lambda t: t.strip().startswith("a"),
    "key": lambda t: {t: 1},
    "sorted": lambda t: sorted([t, "a"]),
}


@pytest.mark.parametrize("name", LOOKS)
def test_opaque_texts_tell_nothing(name):
    text = _Table().text(_Use(0))
    assert isinstance(text, Text)
    with pytest.raises((_Opaque, TypeError)):
        LOOKS[name](text)
