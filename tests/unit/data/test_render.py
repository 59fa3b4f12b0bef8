"""One rendering for all: against the tokenizer's own apply_chat_template and its own tokenisation."""

from __future__ import annotations

import subprocess
import sys

import numpy as np
import pytest

from rlspeed.data.render import PromptRenderer, load_tokenizer
from rlspeed.errors import ConfigError


def ids_of(renderer, prompts):
    rendered = renderer.render(prompts)
    assert renderer.lengths(rendered) == [len(x) for x in renderer.token_ids(rendered)]
    return renderer.token_ids(rendered)


def test_message_lists_are_what_the_tokenizer_itself_makes_of_them(tokenizer, kit):
    chats = [kit.chat(("user", "a b")), kit.chat(("system", "c"), ("user", "d"), ("assistant", "e"), ("user", "f"))]
    own = [tokenizer.apply_chat_template(c, add_generation_prompt=True)["input_ids"] for c in chats]
    assert ids_of(PromptRenderer(tokenizer), chats) == own


def test_text_parts_are_joined_in_order(tokenizer, kit):
    """data-06: content as parts in one row, as a string in another."""
    parts = [{"type": "text", "text": "a "}, {"type": "text", "text": "b", "image": None}]
    prompts = [kit.chat(("user", "a b")), kit.chat(("user", parts)), np.array(kit.chat(("user", np.array(parts))))]
    ids = ids_of(PromptRenderer(tokenizer), prompts)
    assert ids[0] == ids[1] == ids[2]


def test_parts_that_are_not_text_are_a_fault_of_their_row(tokenizer, kit):
    """data-06"""
    prompts = [kit.chat(("user", [{"type": "image", "image": "x.png"}])), kit.chat(("user", "a"))]
    bad, good = PromptRenderer(tokenizer).render(prompts)
    assert "'image'" in bad.fault
    assert good.fault == ""


def test_what_a_template_refuses_is_a_fault_of_its_row_and_nothing_is_invented(strict_tokenizer, kit):
    """data-07: system-only and late system messages."""
    prompts = [
        kit.chat(("user", "a")),
        kit.chat(("system", "s"), ("user", "a")),
        kit.chat(("system", "s")),
        kit.chat(("user", "a"), ("system", "s")),
    ]
    out = PromptRenderer(strict_tokenizer).render(prompts)
    assert out[0].text == "<bos><user> a <eos> <assistant>"
    assert out[1].text == "<bos><system> s <eos> <user> a <eos> <assistant>"
    assert "a user message is required" in out[2].fault
    assert "the system message must come first" in out[3].fault


def test_there_is_never_a_second_begin_token(strict_tokenizer, tokenizer, kit):
    renderer = PromptRenderer(strict_tokenizer)
    for ids in ids_of(renderer, [kit.chat(("user", "a")), "a b", "<bos> a b"]):
        assert ids[0] == strict_tokenizer.bos_token_id
        assert ids.count(strict_tokenizer.bos_token_id) == 1
    assert ids_of(renderer, ["a b"]) == [strict_tokenizer("a b")["input_ids"]]
    assert ids_of(PromptRenderer(tokenizer), ["a b"]) == [tokenizer("a b")["input_ids"]]


def test_a_cut_in_the_tokenizer_file_is_not_applied(bare_tokenizer, kit):
    assert [len(x) for x in ids_of(PromptRenderer(bare_tokenizer), [kit.words(9)])] == [9]


def test_the_three_ways_of_strings(tokenizer, kit):
    as_chat = ids_of(PromptRenderer(tokenizer), [kit.chat(("user", "a"))])
    assert ids_of(PromptRenderer(tokenizer, apply_chat_template="always"), ["a"]) == as_chat
    never = PromptRenderer(tokenizer, apply_chat_template="never")
    assert len(ids_of(never, ["a"])[0]) == 1
    assert "never" in never.render([kit.chat(("user", "a"))])[0].fault


def test_the_system_prompt_goes_only_where_there_is_none(tokenizer, kit):
    renderer = PromptRenderer(tokenizer, system_prompt="z")
    texts = [r.text for r in renderer.render([kit.chat(("user", "a")), kit.chat(("system", "s"), ("user", "a")), "a"])]
    assert texts == ["<system> z <eos> <user> a <eos> <assistant>", "<system> s <eos> <user> a <eos> <assistant>", "a"]


def test_a_default_system_turn_is_not_added_twice(tmp_path, kit):
    """data-20: ids of the whole conversation begin with the prompt's ids."""
    template = (
        "{% if messages[0]['role'] != 'system' %}<system> s <eos> {% endif %}"
        "{% for m in messages %}<{{ m['role'] }}> {{ m['content'] }} <eos> {% endfor %}"
        "{% if add_generation_prompt %}<assistant> {% endif %}"
    )
    tokenizer = load_tokenizer(str(kit.make_tokenizer(tmp_path / "t", template=template)))
    prompt, answer = kit.chat(("user", "a b")), kit.chat(("assistant", "c d"))
    ids = ids_of(PromptRenderer(tokenizer), [prompt])[0]
    whole = tokenizer.apply_chat_template(prompt + answer)["input_ids"]
    assert whole == ids + tokenizer("c d <eos>")["input_ids"]


def test_prompts_without_content_are_told_apart(tokenizer, kit):
    """data-13: nothing, blanks, no messages, an empty message, null, no role."""
    prompts = ["", "   ", [], kit.chat(("user", "")), None, [{"content": "a"}], [{"role": "user"}], "a", 5, ["a"]]
    renderer = PromptRenderer(tokenizer)
    out = renderer.render(prompts)
    assert [r.blank for r in out] == [True, True, True, True, False, False, False, False, False, False]
    assert "null" in out[4].fault
    assert "message 0 has no role (its keys: content)" in out[5].fault
    assert "no content" in out[6].fault
    assert "int" in out[8].fault
    assert "message 0 is of type str" in out[9].fault
    assert renderer.lengths(out) == [0, 0, 1, 3, 0, 0, 0, 1, 0, 0]


def test_without_a_chat_template_message_lists_are_a_fault(bare_tokenizer, kit):
    out = PromptRenderer(bare_tokenizer).render([kit.chat(("user", "a"))])
    assert "chat template" in out[0].fault


def test_template_arguments_are_passed_on_and_reserved_ones_refused(tmp_path, kit):
    template = "{% if think %}<system> {% endif %}" + "{{ messages[0]['content'] }}"
    tokenizer = load_tokenizer(str(kit.make_tokenizer(tmp_path / "t", template=template)))
    renderer = PromptRenderer(tokenizer, chat_template_kwargs={"think": True})
    assert renderer.render([kit.chat(("user", "a"))])[0].text == "<system> a"
    with pytest.raises(ConfigError, match="add_generation_prompt"):
        PromptRenderer(tokenizer, chat_template_kwargs={"add_generation_prompt": False})


def test_a_missing_tokenizer_is_named(tmp_path):
    with pytest.raises(ConfigError, match="--tokenizer"):
        load_tokenizer(str(tmp_path / "none"), where="--tokenizer")


def test_tokenizers_load_without_torch(tokenizer_dir):
    code = (
        "import sys; from rlspeed.data.render import PromptRenderer, load_tokenizer\n"
        f"r = PromptRenderer(load_tokenizer({str(tokenizer_dir)!r}, without_torch=True))\n"
        "assert r.render([[{'role': 'user', 'content': 'a'}]])[0].text == '<user> a <eos> <assistant>'\n"
        "assert 'torch' not in sys.modules\n"
        "import torch; assert torch.ones(1).sum() == 1\n"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr
    assert done.stderr == ""
