"""All tests: no network, no GPU needed, under ten minutes on two cores.

    python -m pytest -q test_all.py

Names such as POS-3 or STR-1 are kinds of faults that users of similar software have reported.
TOKENIZERS_DIR names a folder with the published tokenizer files in `qwen3` and `gpt2`; what needs
them, transformers, or a device that is not there is skipped with a reason.
"""

import contextlib
import dataclasses
import errno
import functools
import gc
import hashlib
import http.server
import importlib
import importlib.util
import io
import itertools
import json
import math
import os
import random
import re
import shlex
import shutil
import signal
import statistics
import struct
import subprocess
import sys
import threading
import time
import types
import unicodedata
from collections import Counter
from pathlib import Path
from types import SimpleNamespace

import huggingface_hub.constants
import huggingface_hub.utils
import pytest
import safetensors.torch
import tokenizers
import torch
import torch._dynamo  # before a test replaces the classes that it derives from
import torch._dynamo.utils
import torch.nn.functional as F
from safetensors.torch import save_file
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode, _disable_current_modes
from torch.utils._pytree import tree_leaves

import bench
import generate as gen
import kvcache
import measure
import model as models
import pipeline as launchers
from generate import generate
from kvcache import NoCache
from model import head, load
from tokenizer import Tokenizer

# --- tokenizer.py ---------------------------------------------------------------------------------
# The real tokenizer files are not part of the project: TOKENIZERS_DIR names a folder with `qwen3`
# and `gpt2` in it. A tiny tokenizer of the same kind is trained here for what can do without.

SPECIAL = ["<|endoftext|>", "<|im_start|>", "<|im_end|>"]
THINK = ["<think>", "</think>"]
CHATML = (
    "{% for m in messages %}<|im_start|>{{ m.role }}\n{{ m.content }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
    "{% if not enable_thinking %}<think></think>{% endif %}"
)


@functools.cache
def real_folder(name):
    if "TOKENIZERS_DIR" not in os.environ:
        pytest.skip("TOKENIZERS_DIR is not set: no real tokenizer files to test with")
    return Path(os.environ["TOKENIZERS_DIR"]) / name


@functools.cache
def real(name):
    return Tokenizer(real_folder(name))


@functools.cache
def reference(name):
    """The same tokenizer in transformers; the test is skipped where that is not installed."""
    transformers = pytest.importorskip("transformers", reason="transformers is the reference here")
    return transformers.AutoTokenizer.from_pretrained(real_folder(name))


def byte_level_bpe(text, vocab_size, special_tokens):
    """A byte-level BPE: 256 bytes, the special tokens, and merges until vocab_size."""
    tk = tokenizers.Tokenizer(tokenizers.models.BPE())
    tk.pre_tokenizer = tokenizers.pre_tokenizers.ByteLevel(add_prefix_space=False)
    tk.decoder = tokenizers.decoders.ByteLevel()
    trainer = tokenizers.trainers.BpeTrainer(
        vocab_size=vocab_size,
        special_tokens=special_tokens,
        initial_alphabet=tokenizers.pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    tk.train_from_iterator([text] * 20, trainer)
    return tk


@pytest.fixture(scope="module")
def tiny_file(tmp_path_factory):
    """tokenizer.json of a byte-level BPE: 256 bytes, some merges, 3 special and 3 added tokens."""
    words = "the cat sat on the mat 😀 😂 the end, naïve café 日本語 日本 안녕 안녕하세요 a b c"
    tk = byte_level_bpe(words, 330, SPECIAL)
    tk.add_tokens([tokenizers.AddedToken(text, normalized=False) for text in [*THINK, "<日本>"]])
    path = tmp_path_factory.mktemp("tiny") / "tokenizer.json"
    tk.save(str(path))
    return path


@pytest.fixture
def tokenizer_folder(tiny_file, tmp_path):
    """tokenizer_folder(**files) -> a model folder with the tiny tokenizer; JSON or raw content."""

    def make(**files):
        shutil.copy(tiny_file, tmp_path / "tokenizer.json")
        for name, content in files.items():
            path = tmp_path / (name + (".jinja" if name == "chat_template" else ".json"))
            if not isinstance(content, (str, bytes)):
                content = json.dumps(content)
            path.write_bytes(content.encode() if isinstance(content, str) else content)
        return tmp_path

    return make


def byte_table():
    """GPT-2's table of bytes, written once more so that the product is not tested on itself."""
    table, extra = {}, 0
    for byte in range(256):
        if 0x21 <= byte <= 0x7E or 0xA1 <= byte <= 0xAC or 0xAE <= byte <= 0xFF:
            table[chr(byte)] = byte
        else:
            table[chr(256 + extra)] = byte
            extra += 1
    return table


TABLE = byte_table()


def split_unfinished(data):
    """`data` as (complete, unfinished): what may still become a character is at most 3 bytes."""
    if re.search(rb"\xed[\xa0-\xbf]\Z", data):  # half a surrogate, for Python maybe a character yet
        return data[:-2], data[-2:]
    for n in (3, 2, 1):
        try:
            data[-n:].decode()
        except UnicodeDecodeError as error:
            if error.reason == "unexpected end of data" and error.start == 0 and len(data) >= n:
                return data[:-n], data[-n:]
    return data, b""


def check_stream(tok, ids, spellings=None):
    """Pieces joined are the decoded text, and no character is later than the id that ends it."""
    added = tok._tk.get_added_tokens_decoder()
    stream, seen, data = tok.stream(), "", b""
    for id in ids:
        seen += stream.put(id)
        if id in added:
            data += b"" if added[id].special else added[id].content.encode()
        else:
            data += bytes(TABLE[char] for char in tok._tk.id_to_token(id) or "")
        complete, unfinished = split_unfinished(data)
        text = complete.decode("utf-8", "replace")
        # Only the space that belongs to an unfinished character may wait for it.
        assert seen == text or (unfinished and seen + " " == text)
    assert seen + stream.end() == tok.decode(ids)
    assert stream.end() == ""


TEXTS = [
    *["the quick brown fox", "don't I'll we've it's DON'T", "naïve café Ångström", "Tiếng Việt"],
    *["日本語のテキスト、漢字かな交じり", "中文字符与标点。", "한국어 텍스트\n안녕하세요", "𠜎𠜱"],
    *["Привет, мир", "Ελληνικά άλφα", "עברית שלום", "العربية مَرْحَبًا", "ქართული", "አማርኛ"],
    *["हिन्दी नमस्ते", "தமிழ் வணக்கம்", "ไทย สวัสดี", "𝔘𝔫𝔦𝔠𝔬𝔡𝔢 𐍈𐎀", "ﬁ ﬂ Å Ω K", "½²³", "١٢٣"],
    *["e\u0301 a\u0308 n\u0303", "\u1e9b\u0323", "q\u0307\u0323", "¿¡«»", "1234567890", "3.14159"],
    *["🙂😀🎉", "👩‍👩‍👧‍👦 🏳️‍🌈 👍🏽", "🇩🇪🇯🇵", "1️⃣ ☺️ ✈︎", " 😊 🤖"],
    *["def f(x):\n    return x**2  # 平方", "for (;;){\r\n\tx[i]&=~0xFF;\r\n}"],
    *['{"a": [1, 2.5e-3]}', "___---***", "https://a.org/b?c=d#e"],
    *["<html>&nbsp;</html>", "SELECT * FROM t WHERE a='b''c';", "\\frac{1}{2}", "a||b|c"],
    *["a\x00b", "\x00", "\x01\x02\x1b[31m\x7f", "\x80\x9f\xa0\xad", "\ufeffBOM", "x\ufffd\ufffd y"],
    *["\u200b\u200d\u2060", "\u2028\u2029\x85", "\u3000 \u2003", "  ", "   x", "\t\t"],
    *["", "\n\n\n", "\r\n\r\n", " \n \n", "a\r\nb", "   trailing  "],
    *["\U0010ffff\ue000\uffff", "\ufffd"],
    *[*SPECIAL, *THINK, "<tool_call>", "<|fim_prefix|>", "<|im_", "|>", "<|im_start<|im_end|>"],
]


def strings(count=1200):
    """`count` strings of many kinds, the same ones every time."""
    rng = random.Random(0)
    planes = [(0, 0x7F), (0x80, 0x7FF), (0x800, 0xD7FF), (0xE000, 0xFFFF), (0x10000, 0x10FFFF)]
    texts = list(TEXTS)
    while len(texts) < count:
        chars = [chr(rng.randint(*rng.choice(planes))) for _ in range(rng.randint(0, 4))]
        parts = [*rng.choices(TEXTS, k=rng.randint(1, 5)), "".join(chars)]
        rng.shuffle(parts)
        texts.append(rng.choice(["", " ", "\n"]).join(parts))
    return texts


@pytest.mark.parametrize("name", ["qwen3", "gpt2"])
def test_encode_and_stream_equal_transformers(name):
    tok, ref = real(name), reference(name)
    texts = strings()
    assert len(set(texts)) >= 1000
    for text in texts:
        ids = tok.encode(text)
        assert ids == ref.encode(text, add_special_tokens=False)
        clean = dict(skip_special_tokens=True, clean_up_tokenization_spaces=False)
        assert tok.decode(ids) == ref.decode(ids, **clean)
        check_stream(tok, ids)


@pytest.mark.parametrize("name", ["qwen3", "gpt2", "tiny"])
def test_stream_of_random_ids(name, tokenizer_folder):
    """Any ids, not only a text's: broken bytes, special tokens, ids beyond the vocabulary."""
    tok = Tokenizer(tokenizer_folder()) if name == "tiny" else real(name)
    rng = random.Random(1)
    vocab = tok._tk.get_vocab_size()
    # Tokens that are not whole characters come up too seldom among all.
    spelling = {id: bytes(TABLE.get(c, 33) for c in tok._tk.id_to_token(id)) for id in range(vocab)}
    broken = [id for id, data in spelling.items() if not _is_utf8(data)]
    edge = [*tok._tk.get_added_tokens_decoder(), vocab, vocab + 266, *tok.encode(" a\ufffd")]
    assert len(broken) > 100
    for _ in range(1500):
        pools = rng.choices([broken, range(vocab), edge], [6, 2, 1], k=rng.randint(0, 20))
        check_stream(tok, [rng.choice(pool) for pool in pools])


def _is_utf8(data):
    try:
        return data.decode() is not None
    except UnicodeDecodeError:
        return False


def test_stream_of_all_short_byte_strings(tokenizer_folder):
    """Invalid UTF-8 is replaced just as `decode` replaces it: every class of byte, in any order."""
    tok = Tokenizer(tokenizer_folder())
    kinds = [0x20, 0x41, 0x80, 0x8F, 0x90, 0x9F, 0xA0, 0xBF, 0xC1, 0xC2, 0xE0, 0xE1, 0xED, 0xEE]
    kinds += [0xF0, 0xF1, 0xF4, 0xF5, 0xFF]
    char = {byte: char for char, byte in TABLE.items()}
    ids = [tok._tk.token_to_id(char[byte]) for byte in kinds]
    rng = random.Random(2)
    runs = [[a, b, c] for a in ids for b in ids for c in ids]
    for run in [[], *([id] for id in ids), *runs, *(rng.choices(ids, k=6) for _ in range(2000))]:
        check_stream(tok, run)


def test_stream_property(tokenizer_folder):
    hypothesis = pytest.importorskip("hypothesis", reason="hypothesis makes up the ids here")
    tok = Tokenizer(tokenizer_folder())
    ids = hypothesis.strategies.integers(0, tok._tk.get_vocab_size() + 5)

    @hypothesis.settings(max_examples=300, deadline=None, database=None, derandomize=True)
    @hypothesis.given(hypothesis.strategies.lists(ids, max_size=40))
    def check(ids):
        check_stream(tok, ids)

    check()


def test_tok1_characters_of_several_tokens():
    for name, ids in ("qwen3", [9707, 26525, 232]), ("gpt2", [15496, 30325, 232]):
        tok, stream = real(name), real(name).stream()
        assert [stream.put(id) for id in ids] == ["Hello", "", " 😊"]
        assert stream.end() == ""
        assert tok.encode("Hello 😊") == ids
        assert [tok.piece(id) for id in ids] == ["Hello", " <0xF0><0x9F><0x98>", "<0x8A>"]
    stream = real("gpt2").stream()
    pieces = [stream.put(id) for id in (168, 243, 230, 167, 227, 243)]
    assert pieces == ["", "", "안", "", "", "녕"]


def test_tok3_every_token_is_a_piece():
    for name in "qwen3", "gpt2":
        stream = real(name).stream()
        assert [stream.put(64) for _ in range(50)] == ["a"] * 50


def test_stream_end_keeps_what_is_left(tokenizer_folder):
    tok = Tokenizer(tokenizer_folder())
    for text in "\ufffd", "a\ufffd", "\ufffd\ufffd":  # a real U+FFFD is a character like any other
        stream = tok.stream()
        assert "".join(map(stream.put, tok.encode(text))) == text
        assert stream.end() == ""
    stream = tok.stream()
    face = tok._tk.token_to_id("ð")
    space = tok._tk.token_to_id("Ġ")
    assert [stream.put(space), stream.put(face)] == [" ", ""]
    assert [stream.end(), stream.end()] == ["\ufffd", ""]
    assert tok.stream().end() == ""


def test_stream_takes_linear_time(tokenizer_folder):
    """60,000 ids that never make a character take 0.1 s; decoding them all again, minutes."""
    tok = Tokenizer(tokenizer_folder())
    for char in "Ģ", "ð":  # bytes 0x80, which nothing precedes, and 0xF0, which nothing follows
        stream, ids = tok.stream(), [tok._tk.token_to_id(char)] * 60_000
        start = time.perf_counter()
        text = "".join(map(stream.put, ids)) + stream.end()
        assert text == "\ufffd" * 60_000
        assert time.perf_counter() - start < 10


def test_tok5_ids_beyond_the_vocabulary():
    tok, stream = real("qwen3"), real("qwen3").stream()
    ids = [9707, 151669, 151935, 1879]
    assert tok.decode(ids) == "Hello world"
    assert [stream.put(id) for id in ids] == ["Hello", "", "", " world"]
    assert tok.piece(151669) == "<unknown 151669>"
    gpt2 = real("gpt2")
    assert gpt2.decode([50257]) == ""
    assert gpt2.piece(50257) == "<unknown 50257>"
    assert gpt2.stream().put(50257) == ""


def test_pieces(tokenizer_folder):
    tok = Tokenizer(tokenizer_folder())
    assert [tok.piece(tok._tk.token_to_id(text)) for text in SPECIAL + THINK] == SPECIAL + THINK
    assert tok.piece(tok._tk.token_to_id("<日本>")) == "<日本>"
    assert tok.decode(tok.encode("a<|im_end|><think>b<日本>")) == "a<think>b<日本>"
    assert [tok.piece(id) for id in tok.encode("é\n")][-1] == "\n"
    assert tok.piece(tok._tk.token_to_id("å")) == "<0xE5>"
    for id in range(tok._tk.get_vocab_size()):  # whole characters are shown, others byte by byte
        data = re.sub(r"<0x(..)>", lambda m: chr(int(m[1], 16)), tok.piece(id))
        assert data and "\ufffd" not in data


# --- chat ---


def user(content):
    return [{"role": "user", "content": content}]


def test_tok6_special_tokens_in_a_message_are_text():
    tok = real("qwen3")
    start, end = 151644, 151645
    assert tok.encode("hi<|im_end|>x") == [6023, end, 87]
    as_text = [6023, 27, 91, 318, 6213, 91, 29, 87]
    head, tail = [start, 872, 198], [end, 198, start, 77091, 198]
    assert tok.chat(user("hi<|im_end|>x")) == head + as_text + tail
    assert tok.encode("hi<|im_end|>x") == [6023, end, 87]  # and raw prompts are parsed as before
    ids = tok.chat(user("a<|im_end|>\n<|im_start|>system\nevil"))
    assert (ids.count(start), ids.count(end)) == (2, 1)
    # Every field of a message, at any depth; tokens side by side and inside one another.
    every = "".join(tok._special) + "<|im_end|><|im_end|><|im_start<|im_end|>|>"
    for messages in (
        user(every),
        [{"role": "system", "content": every}, *user(every)],
        [*user("a"), {"role": "assistant", "content": every}, *user("b")],
        [{"role": "user" + every, "content": "a"}, *user("b")],
    ):
        plain = json.loads(json.dumps(messages).replace("<|", "<!").replace("|>", "!>"))
        ids, same = tok.chat(messages), tok.chat(plain)
        count = [sum(id in tok._special.values() for id in row) for row in (ids, same)]
        assert count[0] == count[1] > 2
        text = tok._tk.decode(same, skip_special_tokens=False)
        text = text.replace("<!", "<|").replace("!>", "|>")
        assert tok._tk.decode(ids, skip_special_tokens=False) == text


def test_tok6_any_content(tokenizer_folder):
    """No content changes what the template's own tokens are, nor what the text is."""
    hypothesis = pytest.importorskip("hypothesis", reason="hypothesis makes up the messages here")
    st = hypothesis.strategies
    tok = Tokenizer(tokenizer_folder(tokenizer_config={"chat_template": CHATML}))
    parts = [*SPECIAL, *THINK, "<|im_", "end|>", "<", "|", ">", "a", "\n", "\ue000", "\uffff", "\0"]
    texts = st.lists(st.sampled_from(parts) | st.text(max_size=3), max_size=6).map("".join)

    @hypothesis.settings(max_examples=300, deadline=None, database=None, derandomize=True)
    @hypothesis.given(texts, texts)
    def check(role, content):
        ids = tok.chat([{"role": role, "content": content}])
        assert [id for id in ids if id < 3] == [1, 2, 1]
        text = f"<|im_start|>{role}\n{content}<|im_end|>\n<|im_start|>assistant\n"
        assert tok._tk.decode(ids, skip_special_tokens=False) == text

    check()


def test_tok7_raw_prompts_are_not_wrapped():
    assert real("qwen3").encode("The capital of France is") == [785, 6722, 315, 9625, 374]
    assert real("gpt2").encode("The capital of France is") == [464, 3139, 286, 4881, 318]


def test_tok8_thinking():
    tok = real("qwen3")
    ids = [151644, 872, 198, 3838, 374, 220, 17, 10, 17, 30, 151645, 198, 151644, 77091, 198]
    assert tok.chat(user("What is 2+2?")) == tok.chat(user("What is 2+2?"), think=True) == ids
    assert tok.chat(user("What is 2+2?"), think=False) == [*ids, 151667, 271, 151668, 271]
    answers = ["<think>secret</think>Hello", "Hello"]
    both = [[*user("a"), {"role": "assistant", "content": a}, *user("b")] for a in answers]
    assert tok.chat(both[0]) == tok.chat(both[1])  # thoughts of earlier turns are not sent again
    assert tok.decode(tok.encode("<think>a</think>")) == "<think>a</think>"  # not "special"


def conversations():
    yield from (user(text) for text in strings(150) if not any(s in text for s in SPECIAL))
    answer = {"role": "assistant", "content": "<think>\nhm <b>\n</think>\n\nYes\ue000\uffff."}
    system = {"role": "system", "content": "You are a 🐱.\r\n"}
    tool = {"role": "tool", "content": '{"t": 1}'}
    call = {"function": {"name": "f", "arguments": {"ä": [1, "<"]}}}
    yield [system, *user("hi")]
    yield [system]
    yield [*user("hi"), answer]
    yield [*user("hi"), answer, *user("and <think>?")]
    yield [system, *user("hi"), answer, *user(""), answer, *user("  x  ")]
    yield [*user("hi"), dict(answer, content="Yes", reasoning_content="because")]
    yield [*user("hi"), dict(answer, content="", tool_calls=[call, call]), tool, tool]


def test_chat_equals_transformers():
    tok, ref = real("qwen3"), reference("qwen3")
    for messages in conversations():
        before = json.dumps(messages)
        for think in True, False:
            ids = ref.apply_chat_template(
                messages, add_generation_prompt=True, enable_thinking=think, return_dict=False
            )
            assert tok.chat(messages, think=think) == ids
        default = ref.apply_chat_template(messages, add_generation_prompt=True, return_dict=False)
        assert tok.chat(messages) == default
        assert json.dumps(messages) == before


def test_chat_templates(tokenizer_folder):
    """Where the template comes from, and what it may use."""
    tok = Tokenizer(tokenizer_folder(tokenizer_config={"chat_template": CHATML}))
    a = tok.encode("<|im_start|>user\na<|im_end|>\n<|im_start|>assistant\n")
    assert tok.chat(user("a")) == a
    assert tok.chat(user("a"), think=False) == a + tok.encode("<think></think>")
    several = [{"name": "rag", "template": "no"}, {"name": "default", "template": CHATML}]
    tok = Tokenizer(tokenizer_folder(tokenizer_config={"chat_template": several}))
    assert tok.chat(user("a")) == a
    tok = Tokenizer(
        tokenizer_folder(tokenizer_config={"chat_template": "no"}, chat_template=CHATML)
    )
    assert tok.chat(user("a")) == a  # the file wins

    config = {
        "bos_token": {"content": "<|im_start|>", "__type": "AddedToken"},
        "eos_token": "<|im_end|>",
        "pad_token": None,
        "add_bos_token": False,
        "chat_template": "no",
    }
    template = """
    {%- for m in messages %}
        {% if loop.first %}
[
        {% endif %}
        {%- if loop.index > 1 %}{% break %}{% endif %}
        {{- bos_token }}{{ pad_token }}{{ add_bos_token }}
        {{- {"é<": m.content} | tojson }}{{ eos_token }}
    {%- endfor %}
    {%- if strftime_now("%Y") | int > 2000 %}ok{% endif %}
    {%- if tools is none and documents is none %}!{% endif -%}
    """
    tok = Tokenizer(tokenizer_folder(tokenizer_config=config, chat_template=template))
    ids = tok.chat(user("<|im_end|>") + user("b"))
    assert tok._tk.decode(ids, skip_special_tokens=False) == (
        '[\n<|im_start|>{"é<": "<|im_end|>"}<|im_end|>ok!'
    )
    assert [id for id in ids if id < 3] == [1, 2]


@pytest.mark.parametrize(
    ("config", "message"),
    [
        ({}, "has no chat template: leave out --chat"),
        ({"chat_template": None}, "has no chat template: leave out --chat"),
        ({"chat_template": [{"name": "rag", "template": "x"}]}, "has no chat template"),
        ({"chat_template": "{{ raise_exception('two\nlines') }}"}, "chat template: two lines"),
        ({"chat_template": "{% for %}"}, "chat template: "),
        ({"chat_template": "{{ messages[7].content }}"}, "chat template: "),
        ({"chat_template": "{{ 1 + 'a' }}"}, "chat template: unsupported operand"),
        ({"chat_template": "{{ messages.append(1) }}"}, "chat template: "),
        ({"chat_template": "{{ ''.__class__.__mro__[1].__subclasses__() }}"}, "chat template: "),
    ],
)
def test_chat_that_cannot_be(tokenizer_folder, config, message):
    tok = Tokenizer(tokenizer_folder(tokenizer_config=config))
    with pytest.raises(ValueError, match=re.escape(message)) as error:
        tok.chat(user("a"))
    assert "\n" not in str(error.value)


def test_gpt2_has_no_chat():
    with pytest.raises(ValueError, match="gpt2 has no chat template: leave out --chat"):
        real("gpt2").chat(user("a"))


def test_only_chat_needs_jinja2(tokenizer_folder, monkeypatch):
    for name in [name for name in sys.modules if name.split(".")[0] == "jinja2"]:
        monkeypatch.delitem(sys.modules, name)
    monkeypatch.setitem(sys.modules, "jinja2", None)  # importing it is an ImportError now
    monkeypatch.delitem(sys.modules, "tokenizer")
    fresh = importlib.import_module("tokenizer")
    tok = fresh.Tokenizer(tokenizer_folder(tokenizer_config={"chat_template": CHATML}))
    assert tok.decode(tok.encode("the cat")) == "the cat"
    with pytest.raises(ImportError):
        tok.chat(user("a"))


# --- files and ids ---


@pytest.mark.parametrize(
    ("generation", "config", "named", "stop_ids", "bos_id"),
    [
        # eos: generation_config.json, else config.json, else the tokenizer's; never their union
        ({"eos_token_id": 7}, {"eos_token_id": 8}, {"eos_token": "<|im_end|>"}, (7,), 0),
        ({"eos_token_id": [7, 9]}, {"eos_token_id": 8}, {}, (7, 9), 0),
        ({"eos_token_id": None}, {"eos_token_id": 8}, {"eos_token": "<|im_end|>"}, (8,), 0),
        (None, {"eos_token_id": [8]}, {"eos_token": "<|im_end|>"}, (8,), 0),
        ({"eos_token_id": 0}, {"eos_token_id": 8}, {}, (0,), 0),
        ({}, {"eos_token_id": None}, {"eos_token": "<|im_end|>"}, (2,), 0),
        (None, None, {"eos_token": {"content": "<|im_end|>"}}, (2,), 0),
        (None, None, {"eos_token": "not a token"}, (), 0),
        (None, None, {"eos_token": None}, (), 0),
        (None, None, None, (), 0),
        # bos: the same order, then the token that both families begin a text with
        ({"bos_token_id": 5}, {"bos_token_id": 6}, {"bos_token": "<|im_start|>"}, (), 5),
        ({"bos_token_id": None}, {"bos_token_id": 6}, {"bos_token": "<|im_start|>"}, (), 6),
        ({}, {"bos_token_id": None}, {"bos_token": "<|im_start|>"}, (), 1),
        (None, {"bos_token_id": 0}, {"bos_token": "<|im_start|>"}, (), 0),
    ],
)
def test_stop_and_bos_ids(tokenizer_folder, generation, config, named, stop_ids, bos_id):
    files = dict(generation_config=generation, config=config, tokenizer_config=named)
    tok = Tokenizer(
        tokenizer_folder(**{name: data for name, data in files.items() if data is not None})
    )
    assert (tok.stop_ids, tok.bos_id) == (stop_ids, bos_id)
    has_end = named and named.get("eos_token") not in (None, "not a token")
    assert tok.end_of_turn == (2 if has_end else None)


def test_bos_id_of_last_resort(tokenizer_folder, tiny_file):
    """Without any begin-of-text token: what ends a text begins one, and without that, no way."""
    data = json.loads(tiny_file.read_text("utf-8").replace("<|endoftext|>", "<|other|>"))
    tok = Tokenizer(tokenizer_folder(tokenizer=data, config={"eos_token_id": [9, 8]}))
    assert tok.bos_id == 9
    tok = Tokenizer(tokenizer_folder(tokenizer=data, config={}))
    assert tok.stop_ids == ()
    with pytest.raises(ValueError, match="names no begin-of-text token: the prompt needs some"):
        _ = tok.bos_id


def test_eos1_and_cli1_base_and_chat_models(tmp_path):
    """Base and chat models of Qwen3 share tokenizer files; an empty prompt is no ids at all."""
    shutil.copytree(real_folder("qwen3"), tmp_path / "base", copy_function=os.symlink)
    (tmp_path / "base/config.json").write_text('{"bos_token_id": 151643, "eos_token_id": 151643}')
    base = Tokenizer(tmp_path / "base")
    assert (base.stop_ids, base.bos_id, base.end_of_turn) == ((151643,), 151643, 151645)
    generation = {"bos_token_id": 151643, "eos_token_id": [151645, 151643]}
    (tmp_path / "base/generation_config.json").write_text(json.dumps(generation))
    chat = Tokenizer(tmp_path / "base")
    assert (chat.stop_ids, chat.bos_id) == ((151645, 151643), 151643)
    for name, eos, bos in ("qwen3", 151645, 151643), ("gpt2", 50256, 50256):
        tok = real(name)
        assert (tok.stop_ids, tok.bos_id, tok.end_of_turn) == ((eos,), bos, eos)
        assert tok.encode("") == [] and tok.decode([]) == "" and tok.stream().end() == ""
    head, tail = [151644, 872, 198], [151645, 198, 151644, 77091, 198]
    assert real("qwen3").chat(user("")) == head + tail


def test_cli6_invalid_unicode(tokenizer_folder):
    tok = Tokenizer(tokenizer_folder(tokenizer_config={"chat_template": CHATML}))
    message = r"^text is not valid Unicode: '\\udce9' at position 3$"
    with pytest.raises(ValueError, match=message):
        tok.encode("caf\udce9")
    with pytest.raises(ValueError, match=message):
        tok.chat(user("caf\udce9"))
    for half in "\ud800", "\ud83d", "\udfff":  # the first one is what `chat` itself works with
        with pytest.raises(ValueError, match="not valid Unicode"):
            tok.chat([{"role": "user", "content": [{"text": f"a{half}"}]}])
    for text in "a\0b", "a\r\nb", "\ud7ff\ue000\U0010ffff", "\x7f\x80":
        assert tok.decode(tok.encode(text)) == text


def test_cli6_nul_and_crlf_are_text():
    assert real("gpt2").encode("a\0b") == [64, 188, 65]
    assert real("gpt2").decode([64, 188, 65]) == "a\0b"
    assert real("qwen3").decode(real("qwen3").encode("a\r\nb")) == "a\r\nb"


def test_missing_and_broken_files(tokenizer_folder, tmp_path):
    with pytest.raises(FileNotFoundError, match=re.escape(f"{tmp_path} has no tokenizer.json")):
        Tokenizer(tmp_path)
    for name in "tokenizer_config", "generation_config", "config":
        for broken in "{", "", "[1]", "[]", "null", "3", b'{"a": "\xff"}':
            path = tokenizer_folder(**{name: broken}) / f"{name}.json"
            with pytest.raises(ValueError, match=re.escape(f"{path} is not a valid JSON object")):
                Tokenizer(tmp_path)
            path.unlink()
    for broken in "{", "{}", "", b"\xff":
        tokenizer_folder(tokenizer=broken)
        with pytest.raises(ValueError, match=r"tokenizer\.json is not a valid tokenizer"):
            Tokenizer(tmp_path)


def test_tokenizers_of_another_kind(tokenizer_folder, tiny_file):
    data = json.loads(tiny_file.read_text("utf-8"))
    for decoder in None, {"type": "Metaspace", "replacement": "_", "prepend_scheme": "always"}:
        with pytest.raises(ValueError, match="is not a byte-level tokenizer"):
            Tokenizer(tokenizer_folder(tokenizer=dict(data, decoder=decoder)))


def test_settings_of_tokenizer_json_that_change_ids_are_off(tokenizer_folder, tiny_file):
    """A file may cut and pad every text and put tokens around it; a prompt is what was written."""
    tk = tokenizers.Tokenizer.from_file(str(tiny_file))
    text = "the cat sat on the mat"
    ids = tk.encode(text).ids
    tk.enable_truncation(2)
    tk.enable_padding(length=64)
    around = {"single": "<|im_start|> $A", "special_tokens": [("<|im_start|>", 1)]}
    tk.post_processor = tokenizers.processors.TemplateProcessing(**around)
    assert Tokenizer(tokenizer_folder(tokenizer=tk.to_str())).encode(text) == ids


def test_tokenizer_without_special_tokens(tokenizer_folder, tiny_file):
    data = dict(json.loads(tiny_file.read_text("utf-8")), added_tokens=[])
    tok = Tokenizer(tokenizer_folder(tokenizer=data, tokenizer_config={"chat_template": CHATML}))
    text = "<|im_start|>user\na<|im_end|>\n<|im_start|>assistant\n"
    assert tok.decode(tok.chat(user("a"))) == text


# --- model.py and kvcache.py ----------------------------------------------------------------------
# Random weights under the published names, written down here a second time so that a slip in
# model.py cannot hide behind itself. Names such as POS-3 are kinds of faults that users of similar
# software have reported; the numbers are the smallest inputs that show them.

CACHES = {
    "none": kvcache.NoCache,
    "growing": kvcache.GrowingCache,
    "preallocated": kvcache.PreallocatedCache,
}
ARCHS = ("qwen3", "gpt2")
PIPELINES = ("off", "event", "ping-pong", "unchecked")
each_cache = pytest.mark.parametrize("cache", CACHES)
each_arch = pytest.mark.parametrize("arch", ARCHS)
each_pipeline = pytest.mark.parametrize("pipeline", PIPELINES)

QWEN3_JSON = {
    "model_type": "qwen3",
    "vocab_size": 96,
    "hidden_size": 32,
    "intermediate_size": 40,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "max_position_embeddings": 512,
    "rms_norm_eps": 1e-6,
    "rope_theta": 1e6,
    "tie_word_embeddings": True,
    "hidden_act": "silu",
}
GPT2_JSON = {
    "model_type": "gpt2",
    "vocab_size": 96,
    "n_embd": 32,
    "n_layer": 2,
    "n_head": 4,
    "n_positions": 512,
    "layer_norm_epsilon": 1e-5,
    "activation_function": "gelu_new",
}
QWEN3_06B_JSON = {  # as published
    "architectures": ["Qwen3ForCausalLM"], "attention_bias": False, "attention_dropout": 0.0,
    "bos_token_id": 151643, "eos_token_id": 151645, "head_dim": 128, "hidden_act": "silu",
    "hidden_size": 1024, "initializer_range": 0.02, "intermediate_size": 3072,
    "max_position_embeddings": 40960, "max_window_layers": 28, "model_type": "qwen3",
    "num_attention_heads": 16, "num_hidden_layers": 28, "num_key_value_heads": 8,
    "rms_norm_eps": 1e-06, "rope_scaling": None, "rope_theta": 1000000, "sliding_window": None,
    "tie_word_embeddings": True, "torch_dtype": "bfloat16", "transformers_version": "4.51.0",
    "use_cache": True, "use_sliding_window": False, "vocab_size": 151936,
}  # fmt: skip
GPT2_124M_JSON = {  # as published
    "activation_function": "gelu_new", "architectures": ["GPT2LMHeadModel"], "attn_pdrop": 0.1,
    "bos_token_id": 50256, "embd_pdrop": 0.1, "eos_token_id": 50256, "initializer_range": 0.02,
    "layer_norm_epsilon": 1e-05, "model_type": "gpt2", "n_ctx": 1024, "n_embd": 768, "n_head": 12,
    "n_layer": 12, "n_positions": 1024, "resid_pdrop": 0.1, "summary_activation": None,
    "summary_first_dropout": 0.1, "summary_proj_to_labels": True, "summary_type": "cls_index",
    "summary_use_proj": True, "task_specific_params": {}, "vocab_size": 50257,
}  # fmt: skip


def config_json(arch, **changes):
    """A small config.json; a change to `...` removes the key."""
    raw = (QWEN3_JSON if arch == "qwen3" else GPT2_JSON) | changes
    return {key: value for key, value in raw.items() if value is not ...}


def published_shapes(raw):
    """{name: shape} of every tensor in a published file."""
    if raw["model_type"] == "qwen3":
        D, I, hd = raw["hidden_size"], raw["intermediate_size"], raw["head_dim"]  # noqa: E741
        q, kv = raw["num_attention_heads"] * hd, raw["num_key_value_heads"] * hd
        block = {
            "input_layernorm": (D,), "post_attention_layernorm": (D,), "self_attn.q_proj": (q, D),
            "self_attn.k_proj": (kv, D), "self_attn.v_proj": (kv, D), "self_attn.o_proj": (D, q),
            "self_attn.q_norm": (hd,), "self_attn.k_norm": (hd,), "mlp.gate_proj": (I, D),
            "mlp.up_proj": (I, D), "mlp.down_proj": (D, I),
        }  # fmt: skip
        shapes = {"model.embed_tokens.weight": (raw["vocab_size"], D), "model.norm.weight": (D,)}
        for i in range(raw["num_hidden_layers"]):
            shapes |= {f"model.layers.{i}.{n}.weight": shape for n, shape in block.items()}
        tied = raw["tie_word_embeddings"]
    else:
        D = raw["n_embd"]
        I = raw.get("n_inner") or 4 * D  # noqa: E741
        block = {
            "ln_1.weight": (D,), "ln_1.bias": (D,), "ln_2.weight": (D,), "ln_2.bias": (D,),
            "attn.c_attn.weight": (D, 3 * D), "attn.c_attn.bias": (3 * D,),
            "attn.c_proj.weight": (D, D), "attn.c_proj.bias": (D,), "mlp.c_fc.weight": (D, I),
            "mlp.c_fc.bias": (I,), "mlp.c_proj.weight": (I, D), "mlp.c_proj.bias": (D,),
        }  # fmt: skip
        shapes = {
            "transformer.wte.weight": (raw["vocab_size"], D),
            "transformer.wpe.weight": (raw["n_positions"], D),
            "transformer.ln_f.weight": (D,), "transformer.ln_f.bias": (D,),
        }  # fmt: skip
        for i in range(raw["n_layer"]):
            shapes |= {f"transformer.h.{i}.{name}": shape for name, shape in block.items()}
        tied = raw.get("tie_word_embeddings", True)
    return shapes if tied else shapes | {"lm_head.weight": (raw["vocab_size"], D)}


def random_tensors(raw, seed=0, dtype=torch.float32, scale=2.0):
    """{name: values} of a scale at which greedy decoding does not run in circles."""
    rng, tensors = torch.Generator().manual_seed(seed), {}
    for name, shape in published_shapes(raw).items():
        t = torch.randn(shape, generator=rng)
        if len(shape) == 1:
            t = 0.2 * t + name.endswith("weight")
        elif name.endswith(("embed_tokens.weight", "wte.weight", "wpe.weight", "lm_head.weight")):
            t = 0.4 * t
        else:
            t = t * scale * shape[name.startswith("model.")] ** -0.5
        tensors[name] = t.to(dtype)
    return tensors


def embedding(tensors):
    return next(t for n, t in tensors.items() if n.endswith(("embed_tokens.weight", "wte.weight")))


def write_folder(folder, raw, tensors=None, shards=1):
    """A model folder: config.json, and model.safetensors or shards with an index."""
    folder = Path(folder)
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "config.json").write_text(json.dumps(raw))
    if tensors is None:
        return folder
    if shards == 1:
        safetensors.torch.save_file(tensors, folder / "model.safetensors", {"format": "pt"})
        return folder
    names, weight_map = sorted(tensors), {}
    for n in range(shards):
        file = f"model-{n + 1:05}-of-{shards:05}.safetensors"
        part = {name: tensors[name] for name in names[n::shards]}
        safetensors.torch.save_file(part, folder / file, {"format": "pt"})
        weight_map |= dict.fromkeys(part, file)
    (folder / "model.safetensors.index.json").write_text(json.dumps({"weight_map": weight_map}))
    return folder


def load_cpu(folder, dtype="auto"):
    return models.load(str(folder), device="cpu", dtype=dtype)


def read_config(folder, raw):
    return models.read_config(str(write_folder(folder, raw)))


def saved(model):
    """{published name: tensor} of a loaded model."""
    return models.checkpoint(model)


def parameters(model):
    """All weight tensors, each once."""
    fields = (getattr(model, field.name) for field in dataclasses.fields(model))
    leaves = torch.utils._pytree.tree_leaves([f for f in fields if not isinstance(f, str)])
    return list({id(t): t for t in leaves if isinstance(t, torch.Tensor)}.values())


def padded(prompts):
    """Prompts -> ids (B,T) padded on the left, padding of each row."""
    T = max(map(len, prompts))
    pad = [T - len(prompt) for prompt in prompts]
    return torch.tensor([[0] * n + list(p) for n, p in zip(pad, prompts)]), pad


@torch.inference_mode()
def all_logits(model, prompts, cache="none", capacity=None):
    """Logits (B,T,V) of every position of the prompts; `model(...)` gives the last of them."""
    ids, pad = padded(prompts)
    cache = CACHES[cache](model, len(prompts), capacity or ids.shape[1])
    x = model.hidden(*cache.start(ids, pad), cache)
    eps, shape, weight = model.config.eps, x.shape[-1:], model.norm[0]
    if model.config.model_type == "gpt2":
        h = F.layer_norm(x, shape, *model.norm, eps)
    else:
        h = F.rms_norm(x.float(), shape, eps=eps).to(x.dtype) * weight
    logits = F.linear(h, model.lm_head).float()
    rounding = {torch.float32: 1e-5, torch.bfloat16: 2e-2}[model.dtype]
    close(model(*cache.start(ids, pad), cache), logits[:, -1], rounding * logits.abs().max())
    return logits


def forced(model, cache, prompts, fed, compile=False):
    """Yields the logits (B,V) after the prompts and after each column of `fed` (B,N)."""
    yield model(*cache.start(*padded(prompts)), cache)
    for column in torch.as_tensor(fed).split(1, dim=1):
        cache.reserve()
        yield model(*cache.feed(column), cache, compile)


def greedy(model, prompts, n, **options):
    """New ids of every row."""
    return [list(row) for row in zip(*generate(model, prompts, n, **options))]


def random_prompts(seed, lengths, V=96):
    rng = random.Random(seed)
    return [[rng.randrange(V) for _ in range(n)] for n in lengths]


def forget_compiled():
    torch._dynamo.reset()
    models.compiled.cache_clear()


def close(actual, expected, atol=1e-4):
    if isinstance(actual, list):
        actual, expected = torch.stack(list(actual)), torch.stack(list(expected))
    torch.testing.assert_close(actual, expected, atol=atol, rtol=0)


def refused(call, *words, error=ValueError):
    """Asserts that call() raises one line that holds all the words."""
    with pytest.raises(error) as caught:
        call()
    message = str(caught.value)
    assert "\n" not in message
    assert not [word for word in words if word not in message], message


def spy(function, calls):
    """function, with its arguments and result appended to calls."""

    @functools.wraps(function)
    def wrapper(*args, **kwargs):
        result = function(*args, **kwargs)
        calls.append(types.SimpleNamespace(args=args, kwargs=kwargs, result=result))
        return result

    return wrapper


@pytest.fixture(scope="session")
def small(tmp_path_factory):
    """small(arch, **config changes) -> a loaded model, read once."""

    @functools.cache
    def get(arch, dtype="float32", **changes):
        raw = config_json(arch, **changes)
        folder = write_folder(tmp_path_factory.mktemp(arch), raw, random_tensors(raw))
        return load_cpu(folder, dtype)

    return get


@pytest.fixture
def graphs(monkeypatch):
    """torch.compile that translates nothing: the list of the graphs that it was given."""
    seen, real = [], torch.compile

    def backend(graph, inputs):
        seen.append(graph)
        return graph.forward

    def compile(function, *, fullgraph, mode=None, options=None, **kw):
        assert fullgraph, "a graph break would go unnoticed"
        return real(function, fullgraph=True, backend=backend, **kw)

    forget_compiled()
    monkeypatch.setattr(torch, "compile", compile)
    yield seen
    forget_compiled()


class Failing:
    """A model that raises RuntimeError from its n-th call on."""

    def __init__(self, model, n):
        self.model, self.left = model, n
        self.config, self.device, self.dtype = model.config, model.device, model.dtype

    def __call__(self, *args):
        self.left -= 1
        if self.left <= 0:
            raise RuntimeError("called once too often")
        return self.model(*args)


class Scripted:
    """Stands in for a model: row b says script[b][step], then the last of them for ever."""

    def __init__(self, script, vocab_size=50257):
        self.script, self.steps = script, 0
        self.device, self.dtype = torch.device("cpu"), torch.float32
        self.config = models.Config("gpt2", vocab_size, 4, 4, 0, 1, 1, 4, 64, 1e-5, None, True)

    def __call__(self, ids, pos, cache, compile=False):
        ids = [row[min(self.steps, len(row) - 1)] for row in self.script]
        self.steps += 1
        return F.one_hot(torch.tensor(ids), self.config.vocab_size).float()


# --- the same numbers as transformers ---


def random_case(arch, seed):
    """config.json and tensors of a random small model, spelt like some export."""
    rng = random.Random(seed)
    V, layers, positions = rng.randint(60, 130), rng.randint(1, 3), rng.choice((64, 100))
    tied = seed // 4 % 2 == 0
    if arch == "qwen3":
        group, kv_heads, hd = (1, 2, 4, 8)[seed % 4], rng.randint(1, 3), rng.choice((6, 8, 16))
        sizes = [D for D in (16, 24, 40, 56) if D != group * kv_heads * hd]
        rope = {"rope_type": "default", "rope_theta": rng.choice((1e4, 5e5, 1e6))}
        raw = config_json(
            arch, vocab_size=V, hidden_size=rng.choice(sizes), num_hidden_layers=layers,
            intermediate_size=rng.choice((24, 56)), num_attention_heads=group * kv_heads,
            num_key_value_heads=kv_heads, head_dim=hd, max_position_embeddings=positions,
            rms_norm_eps=rng.choice((1e-6, 1e-5)), tie_word_embeddings=tied,
            rope_theta=... if seed % 3 == 1 else rope["rope_theta"],
            rope_parameters=... if seed % 3 == 0 else rope,
        )  # fmt: skip
    else:
        heads = (1, 2, 4, 8)[seed % 4]
        hd = rng.choice((32, 40, 56)) // heads
        raw = config_json(
            arch, vocab_size=V, n_embd=heads * hd, n_head=heads, n_layer=layers, n_ctx=positions,
            n_positions=positions, n_inner=rng.choice((None, 24)), tie_word_embeddings=tied,
            layer_norm_epsilon=rng.choice((1e-6, 1e-5)),
        )  # fmt: skip
    return raw, random_tensors(raw, seed)


def respelt(tensors, seed, positions):
    """The tensors as an old export or one without a prefix would name them."""
    if seed % 5 in (1, 2):
        short = ("model.", "transformer.")
        strip = lambda n: next((n[len(p) :] for p in short if n.startswith(p)), n)  # noqa: E731
        tensors = {strip(name): t for name, t in tensors.items()}
    if seed % 5 in (2, 3):
        for name in list(tensors):
            if name.endswith("attn.c_attn.bias"):
                at = name.removesuffix("c_attn.bias")
                tensors[at + "bias"] = torch.ones(positions, positions).tril()[None, None]
                tensors[at + "masked_bias"] = torch.tensor(-1e4)
            if name.endswith("q_norm.weight"):
                at = name.removesuffix("q_norm.weight")
                tensors[at + "rotary_emb.inv_freq"] = torch.ones(4)
                tensors["model." * (seed % 2) + "rotary_emb.inv_freq"] = torch.ones(4)
        tensors.setdefault("lm_head.weight", embedding(tensors).clone())
    return tensors


def load_reference(folder, dtype=torch.float32):
    """The same folder in transformers; the test is skipped where that is not installed."""
    transformers = pytest.importorskip("transformers", reason="transformers is the reference here")
    transformers.logging.set_verbosity_error()
    transformers.logging.disable_progress_bar()
    load = transformers.AutoModelForCausalLM.from_pretrained
    return load(folder, dtype=dtype, attn_implementation="eager").eval()


@pytest.mark.parametrize("seed", range(20))
@each_arch
def test_parity_with_transformers(arch, seed, tmp_path):
    """Logits of every prompt position and 32 greedy ids, with each cache, alone and in a batch.

    transformers reads the prompt and our ids once: its best token at each position must be the
    one that we took next, which by induction makes them its own greedy ids.
    """
    raw, tensors = random_case(arch, seed)
    folder = write_folder(tmp_path / "a", raw, tensors)
    reference = load_reference(folder)
    if seed % 5 == 4:  # written by transformers
        reference.save_pretrained(tmp_path / "b", max_shard_size="10KB" if seed % 2 else "1GB")
        assert (tmp_path / "b" / "model.safetensors").exists() == (seed % 2 == 0)
        folder = tmp_path / "b"
    else:
        spelt = respelt(tensors, seed, 64)
        folder = write_folder(tmp_path / "b", raw, spelt, shards=1 + 2 * (seed % 2))
    model = load_cpu(folder)
    assert model.dtype == torch.float32

    prompts = random_prompts(seed, random.Random(seed).sample(range(1, 20), 4), raw["vocab_size"])
    new = {cache: greedy(model, prompts, 32, cache=cache) for cache in CACHES}
    for cache in CACHES:
        assert new[cache] == new["none"]
        assert greedy(model, prompts[:1], 32, cache=cache) == new["none"][:1]
    assert sum(len(set(ids)) for ids in new["none"]) > 20, "degenerate: says little"
    batch = {cache: all_logits(model, prompts, cache) for cache in CACHES}
    for row, (prompt, ids) in enumerate(zip(prompts, new["none"])):
        P = len(prompt)
        with torch.inference_mode():
            expected = reference(torch.tensor([prompt + ids[:-1]])).logits[0]
        assert ids == expected[P - 1 :].argmax(dim=-1).tolist()
        for cache in CACHES:
            close(all_logits(model, [prompt], cache)[0], expected[:P])
            close(batch[cache][row, -P:], expected[:P])


@pytest.mark.parametrize("compile", [False, True], ids=["eager", "compiled"])
@each_cache
@each_arch
def test_parity_in_bfloat16(arch, cache, compile, graphs, tmp_path):
    """NUM-1: bf16 logits at every step within 2 % of the largest, alone and in a batch.

    A token differs from the fp32 one only where two logits are that close, then.
    """
    raw = config_json(arch)
    folder = write_folder(tmp_path, raw, random_tensors(raw, 1, torch.bfloat16, scale=1.0))
    reference, model = load_reference(folder), load_cpu(folder, "bfloat16")
    assert model.dtype == torch.bfloat16
    prompts, fed = random_prompts(1, (3, 12, 7)), random_prompts(2, (8, 8, 8))
    expected, scale = [], []
    for prompt, ids in zip(prompts, fed):
        with torch.inference_mode():
            logits = reference(torch.tensor([prompt + ids])).logits[0]
        scale.append(logits.abs().max())
        expected.append(logits / scale[-1])
        close(all_logits(model, [prompt], cache)[0] / scale[-1], expected[-1][:-8], atol=2e-2)
    scale = torch.stack(scale)[:, None]
    for rows in (slice(3), slice(0, 1), slice(1, 2)):
        store = CACHES[cache](model, len(prompts[rows]), 20)
        for step, logits in enumerate(forced(model, store, prompts[rows], fed[rows], compile)):
            assert logits.dtype == torch.float32
            right = torch.stack([e[len(e) - 9 + step] for e in expected[rows]])
            close(logits / scale[rows], right, atol=2e-2)


# --- sizes ---

PUBLISHED_SIZES = {
    "qwen3-0.6b": 596_049_920, "qwen3-1.7b": 1_720_574_976, "qwen3-4b": 4_022_468_096,
    "qwen3-8b": 8_190_735_360, "qwen3-14b": 14_768_307_200, "qwen3-32b": 32_762_123_264,
    "qwen3-0.6b-base": 596_049_920, "qwen3-1.7b-base": 1_720_574_976,
    "qwen3-4b-base": 4_022_468_096, "qwen3-8b-base": 8_190_735_360,
    "qwen3-14b-base": 14_768_307_200, "gpt2": 124_439_808, "gpt2-medium": 354_823_168,
    "gpt2-large": 774_030_080, "gpt2-xl": 1_557_611_200,
}  # fmt: skip


@pytest.mark.parametrize("name", PUBLISHED_SIZES)
def test_parameter_counts(name):
    model = models.load(name, device="meta", random_weights=True)
    assert sum(t.numel() for t in parameters(model)) == PUBLISHED_SIZES[name]
    assert model.dtype == (torch.bfloat16 if name.startswith("qwen3") else torch.float32)


def test_every_built_in_name_has_a_count():
    assert set(models.HUB) == set(PUBLISHED_SIZES)


@pytest.mark.parametrize("name, raw", [("qwen3-0.6b", QWEN3_06B_JSON), ("gpt2", GPT2_124M_JSON)])
def test_published_config_is_what_random_weights_use(name, raw, tmp_path):
    assert read_config(tmp_path, raw) == models.load(name, "meta", random_weights=True).config


def test_cfg_1_shapes_of_the_published_06b():
    """CFG-1: q_proj of 0.6B is 2048 x 1024, as head_dim is 128 and not 1024 / 16."""
    model = models.load("qwen3-0.6b", "meta", random_weights=True)
    shapes = {name: t.shape for name, t in saved(model).items()}
    assert shapes == published_shapes(QWEN3_06B_JSON)
    assert shapes["model.layers.0.self_attn.q_proj.weight"] == (2048, 1024)
    assert shapes["model.layers.0.self_attn.o_proj.weight"] == (1024, 2048)


@each_arch
def test_random_weights_of_a_folder_are_the_same_each_time(arch, tmp_path):
    write_folder(tmp_path, config_json(arch))
    a, b = (models.load(str(tmp_path), "cpu", random_weights=True) for _ in range(2))
    assert all(torch.equal(x, y) for x, y in zip(parameters(a), parameters(b), strict=True))
    assert a.embed_tokens.std().item() == pytest.approx(0.02, rel=0.1)


# --- loading ---


@pytest.fixture(scope="module")
def large_folder(tmp_path_factory):
    """0.6B cut to two layers, random bf16 values: 374 MB, most of it the embedding."""
    folder = tmp_path_factory.mktemp("large")
    raw = QWEN3_06B_JSON | {"num_hidden_layers": 2}
    rng = torch.Generator().manual_seed(0)
    tensors = {
        name: torch.empty(shape, dtype=torch.bfloat16).uniform_(-1, 1, generator=rng)
        for name, shape in published_shapes(raw).items()
    }
    yield write_folder(folder, raw, tensors), tensors
    shutil.rmtree(folder)


def test_published_shapes_are_read_back_equal(large_folder):
    folder, tensors = large_folder
    read = saved(load_cpu(folder, "bfloat16"))
    assert read.keys() == tensors.keys()
    assert all(torch.equal(read[name], tensors[name]) for name in tensors)


@pytest.mark.skipif(sys.platform != "linux", reason="reads the peak from /proc")
def test_loading_peaks_near_the_size_of_the_weights(large_folder):
    """Resident memory, the pages of mapped files included, stays under 1.3 x the weights.

    VmHWM and not ru_maxrss, in which a child starts from the peak of its parent.
    """
    folder, tensors = large_folder
    code = (
        "import sys, re, model\n"
        "def kilobytes(key):\n"
        "    return int(re.search(key + r':\\s+(\\d+)', open('/proc/self/status').read())[1])\n"
        "before = kilobytes('VmRSS')\n"
        "kept = model.load(sys.argv[1], device='cpu', dtype='bfloat16')\n"
        "print(1024 * (kilobytes('VmHWM') - before))\n"
    )
    run = subprocess.run(
        [sys.executable, "-c", code, folder], capture_output=True, text=True,
        cwd=Path(models.__file__).parent,
    )  # fmt: skip
    assert run.returncode == 0, run.stderr
    weights = sum(t.nbytes for t in tensors.values())
    assert 0.95 < int(run.stdout) / weights < 1.3


class Poison(TorchDispatchMode):
    """Fills what is allocated uninitialised with NaN, and refuses any other initial value."""

    allocated = 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        name = func.overloadpacket.__name__
        assert name not in {
            "normal_", "uniform_", "fill_", "zero_", "zeros", "ones", "full", "randn", "rand",
            "zeros_like", "ones_like", "full_like", "new_zeros", "new_ones", "new_full",
        }, f"{name} while loading"  # fmt: skip
        result = func(*args, **(kwargs or {}))
        empty = name in ("empty", "empty_like", "new_empty", "empty_strided")
        if empty and result.is_floating_point():
            self.allocated += 1
            result.fill_(math.nan)
        return result


@pytest.mark.parametrize("shards", [1, 2])
@each_arch
def test_no_parameter_is_initialised_first_or_left_out(arch, shards, tmp_path):
    """CFG-6: whatever is allocated is overwritten from the file."""
    raw = config_json(arch, tie_word_embeddings=False)
    tensors = random_tensors(raw)
    write_folder(tmp_path, raw, tensors, shards)
    with Poison() as poison:
        model = load_cpu(tmp_path, "float32")
    assert poison.allocated >= len(parameters(model))
    read = saved(model)
    assert read.keys() == tensors.keys()
    assert all(torch.equal(read[name], tensors[name]) for name in tensors)


@pytest.fixture
def sharded(tmp_path):
    """Two shards: folder, index as a dict, function that writes a changed index."""
    raw = config_json("qwen3")
    write_folder(tmp_path, raw, random_tensors(raw), shards=2)
    path = tmp_path / "model.safetensors.index.json"
    index = json.loads(path.read_text())
    return tmp_path, index["weight_map"], lambda: path.write_text(json.dumps(index))


SHARD_1, SHARD_2 = (f"model-0000{n}-of-00002.safetensors" for n in (1, 2))


def test_cfg_6_shard_deleted(sharded):
    folder, _, _ = sharded
    (folder / SHARD_2).unlink()
    refused(lambda: load_cpu(folder), SHARD_2, "index.json", "missing", error=FileNotFoundError)


def test_cfg_6_key_deleted_from_the_map(sharded):
    folder, weight_map, write = sharded
    file = weight_map.pop("model.norm.weight")
    write()
    refused(lambda: load_cpu(folder), "model.norm.weight", file, "index.json")


def test_cfg_6_key_mapped_to_a_shard_that_lacks_it(sharded):
    folder, weight_map, write = sharded
    weight_map["model.norm.weight"] = (
        SHARD_1 if weight_map["model.norm.weight"] == SHARD_2 else SHARD_2
    )
    write()
    refused(lambda: load_cpu(folder), "model.norm.weight", "index.json", ".safetensors")


def test_cfg_6_key_mapped_that_no_shard_holds(sharded):
    folder, weight_map, write = sharded
    weight_map["model.layers.9.mlp.up_proj.weight"] = SHARD_1
    write()
    refused(lambda: load_cpu(folder), "model.layers.9.mlp.up_proj.weight", SHARD_1)


@pytest.mark.parametrize("shards", [1, 2])
@pytest.mark.parametrize("key", ["model.layers.0.self_attn.q_proj.bias", "model.layers.2.extra"])
def test_cfg_6_unknown_key(key, shards, tmp_path):
    raw = config_json("qwen3")
    write_folder(tmp_path, raw, random_tensors(raw) | {key: torch.zeros(4)}, shards)
    refused(lambda: load_cpu(tmp_path), key, "unknown", ".safetensors")


@pytest.mark.parametrize("key", ["norm.weight", "layers.1.self_attn.k_norm.weight"])
def test_cfg_6_missing_key(key, tmp_path):
    raw = config_json("qwen3")
    tensors = random_tensors(raw)
    del tensors["model." + key]
    write_folder(tmp_path, raw, tensors)
    refused(lambda: load_cpu(tmp_path), key, "model.safetensors")


def test_cfg_6_untied_head_missing(tmp_path):
    tensors = random_tensors(config_json("qwen3"))
    write_folder(tmp_path, config_json("qwen3", tie_word_embeddings=False), tensors)
    refused(lambda: load_cpu(tmp_path), "lm_head.weight", "model.safetensors")


def test_cfg_6_index_and_a_stray_single_file(sharded):
    """The single file is read, whole or not at all: nothing is filled up from the shards."""
    folder, _, _ = sharded
    tensors = random_tensors(config_json("qwen3"), seed=5)
    safetensors.torch.save_file(tensors, folder / "model.safetensors")
    assert torch.equal(load_cpu(folder).embed_tokens, tensors["model.embed_tokens.weight"])
    del tensors["model.norm.weight"]
    safetensors.torch.save_file(tensors, folder / "model.safetensors")
    refused(lambda: load_cpu(folder), "norm.weight", "model.safetensors")


def test_key_with_and_without_prefix(tmp_path):
    raw = config_json("qwen3")
    write_folder(tmp_path, raw, random_tensors(raw) | {"norm.weight": torch.ones(32)})
    refused(lambda: load_cpu(tmp_path), "norm.weight", "twice", "model.safetensors")


@pytest.mark.parametrize("key", ["model.layers.1.self_attn.k_proj.weight", "model.norm.weight"])
def test_shape_that_differs_from_config(key, tmp_path):
    raw = config_json("qwen3")
    tensors = random_tensors(raw)
    tensors[key] = tensors[key].repeat(2, *[1] * (tensors[key].dim() - 1))
    write_folder(tmp_path, raw, tensors)
    shape = str(tuple(tensors[key].shape))
    refused(lambda: load_cpu(tmp_path), key, shape, "model.safetensors")


@pytest.mark.parametrize("dtype", [torch.int8, torch.float8_e4m3fn])
def test_weights_that_are_quantized_numbers(dtype, tmp_path):
    """Without their scales they would load as noise."""
    raw = config_json("gpt2")
    key = "transformer.h.1.mlp.c_fc.weight"
    tensors = random_tensors(raw)
    write_folder(tmp_path, raw, tensors | {key: tensors[key].to(dtype)})
    refused(lambda: load_cpu(tmp_path), key, "model.safetensors", "dtype")


@pytest.mark.parametrize(
    "name", ["../out.safetensors", "/out.safetensors", "sub/a.safetensors", "..\\a.safetensors"]
)
def test_shard_name_that_leaves_the_folder(name, sharded):
    folder, weight_map, write = sharded
    for place in (folder.parent / "out.safetensors", folder / "sub" / "a.safetensors"):
        place.parent.mkdir(exist_ok=True)
        shutil.copy(folder / SHARD_2, place)
    weight_map.update({key: name for key, file in weight_map.items() if file == SHARD_2})
    write()
    refused(lambda: load_cpu(folder), "index.json", repr(name))


@pytest.mark.parametrize(
    "text", ["", "{", "[]", "{}", '{"weight_map": [1]}', '{"weight_map": {"a": 1}}']
)
def test_broken_index(text, sharded):
    folder, _, _ = sharded
    (folder / "model.safetensors.index.json").write_text(text)
    refused(lambda: load_cpu(folder), "model.safetensors.index.json")


@pytest.mark.parametrize("text", ["", "{", "[]", "null"])
def test_broken_config(text, tmp_path):
    write_folder(tmp_path, {})
    (tmp_path / "config.json").write_text(text)
    refused(lambda: load_cpu(tmp_path), "config.json")


def test_folder_without_weights_or_config(tmp_path):
    refused(lambda: load_cpu(tmp_path), "config.json", error=FileNotFoundError)
    write_folder(tmp_path, config_json("gpt2"))
    (tmp_path / "pytorch_model.bin").write_bytes(b"")
    refused(lambda: load_cpu(tmp_path), "model.safetensors", error=FileNotFoundError)


def overwrite_header(data, change):
    """Bytes of a safetensors file with a changed header."""
    n = int.from_bytes(data[:8], "little")
    header = json.loads(data[8 : 8 + n])
    change(header)
    text = json.dumps(header).encode()
    return len(text).to_bytes(8, "little") + text + data[8 + n :]


BROKEN = {
    "one byte short": lambda d: d[:-1],
    "half": lambda d: d[: len(d) // 2],
    "two bytes more": lambda d: d + b"xx",
    "empty": lambda d: b"",
    "seven bytes": lambda d: d[:7],
    "git-lfs pointer": lambda d: b"version https://git-lfs.github.com/spec/v1\noid sha256:0\n",
    "html": lambda d: b"<!doctype html><title>404</title>",
    "header of 2**40": lambda d: (2**40).to_bytes(8, "little") + d[8:],
    "overlapping": lambda d: overwrite_header(
        d, lambda h: h["model.norm.weight"].update(data_offsets=[0, 128])
    ),
    "shape not its bytes": lambda d: overwrite_header(
        d, lambda h: h["model.norm.weight"].update(shape=[31])
    ),
}


@pytest.mark.parametrize("broken", BROKEN)
def test_cfg_8_broken_file(broken, tmp_path, monkeypatch, capsys):
    """CFG-8: one line with the file's name and a hint; exit status 2 and no traceback."""
    raw = config_json("qwen3")
    path = write_folder(tmp_path, raw, random_tensors(raw)) / "model.safetensors"
    path.write_bytes(BROKEN[broken](path.read_bytes()))
    refused(lambda: load_cpu(tmp_path), str(path), "download it again")

    tokenizer = types.SimpleNamespace(encode=lambda text: [1], stop_ids=(), bos_id=0)
    monkeypatch.setattr(gen, "Tokenizer", lambda name: tokenizer)
    assert gen.main(["--model", str(tmp_path), "--prompt", "a", "--device", "cpu"]) == 2
    out, err = capsys.readouterr()
    assert out == "" and err.startswith("error: ") and err.count("\n") == 1 and str(path) in err


def test_cfg_8_file_without_tensors(tmp_path):
    write_folder(tmp_path, config_json("qwen3"), {})
    refused(lambda: load_cpu(tmp_path), "model.safetensors", ".weight")


@each_arch
def test_cfg_3_tied_head(arch, tmp_path):
    """CFG-3: a tied head may be absent or a copy, shares its storage, and must not differ."""
    raw = config_json(arch)
    tensors = random_tensors(raw)
    embed = embedding(tensors)
    count = sum(math.prod(shape) for shape in published_shapes(raw).values())
    for extra in ({}, {"lm_head.weight": embed.clone()}):
        model = load_cpu(write_folder(tmp_path, raw, tensors | extra))
        assert model.lm_head.data_ptr() == model.embed_tokens.data_ptr()
        assert sum(t.numel() for t in parameters(model)) == count
    different = embed.clone()
    different[-1, -1] += 1
    write_folder(tmp_path, raw, tensors | {"lm_head.weight": different})
    refused(lambda: load_cpu(tmp_path), "lm_head.weight", "model.safetensors")


def test_cfg_4_spellings_of_gpt2(tmp_path):
    """CFG-4: four spellings, the same logits; biases loaded, square projections transposed too."""
    raw = config_json("gpt2")
    plain = random_tensors(raw)
    buffers = {}
    for i in range(2):
        buffers[f"transformer.h.{i}.attn.bias"] = torch.ones(1, 1, 512, 512).tril()
        buffers[f"transformer.h.{i}.attn.masked_bias"] = torch.tensor(-1e4)
    logits = []
    for n, tensors in enumerate((plain, plain | buffers)):
        for prefix in ("transformer.", ""):
            spelt = {prefix + name.removeprefix("transformer."): t for name, t in tensors.items()}
            model = load_cpu(write_folder(tmp_path / f"{n}{prefix}", raw, spelt))
            logits.append(all_logits(model, random_prompts(0, (9,))))
            layer = model.layers[1]
            assert torch.equal(layer.attn_c_attn_bias, plain["transformer.h.1.attn.c_attn.bias"])
            for ours, name in (
                ("attn_c_attn_weight", "attn.c_attn"),
                ("attn_c_proj_weight", "attn.c_proj"),
                ("mlp_c_fc_weight", "mlp.c_fc"),
                ("mlp_c_proj_weight", "mlp.c_proj"),
            ):
                file = plain[f"transformer.h.1.{name}.weight"]
                assert torch.equal(getattr(layer, ours), file.T)
    assert all(torch.equal(other, logits[0]) for other in logits[1:])


# --- config.json ---


def test_cfg_1_head_dim_of_its_own(tmp_path):
    """CFG-1: hidden 16, 4 heads, head_dim 8: q_proj (32,16), and the scale is 1/sqrt(8)."""
    raw = config_json("qwen3", hidden_size=16, head_dim=8)
    tensors = random_tensors(raw)
    shapes = {n.split(".")[-2]: tuple(t.shape) for n, t in tensors.items() if "layers.0" in n}
    assert shapes["q_proj"] == (32, 16) and shapes["k_proj"] == (16, 16)
    assert shapes["o_proj"] == (16, 32)
    model = load_cpu(write_folder(tmp_path, raw, tensors))
    assert {n: t.shape for n, t in saved(model).items()} == {n: t.shape for n, t in tensors.items()}
    q, k = torch.zeros(1, 1, 1, 8), torch.zeros(1, 1, 2, 8)
    q[..., 0], k[0, 0, 1, 0], v = 2, 3, torch.tensor([0.0, 1]).view(1, 1, 2, 1).expand(1, 1, 2, 8)
    y = models.attention(q, k, v, torch.ones(1, 1, 1, 2, dtype=torch.bool))
    assert y[0, 0, 0, 0].item() == pytest.approx(1 / (1 + math.exp(-6 / 8**0.5)), abs=1e-6)


NEEDED = [
    *(("qwen3", key) for key in QWEN3_JSON if key not in (
        "hidden_act", "rms_norm_eps", "tie_word_embeddings")),
    *(("gpt2", key) for key in ("model_type", "vocab_size", "n_embd", "n_layer", "n_head",
                                "n_positions")),
]  # fmt: skip


@pytest.mark.parametrize("value", [..., None], ids=["absent", "null"])
@pytest.mark.parametrize("arch, key", NEEDED)
def test_cfg_1_needed_key(arch, key, value, tmp_path):
    raw = config_json(arch, **{key: value})
    refused(lambda: read_config(tmp_path, raw), key, str(tmp_path / "config.json"))


ROPE = {"rope_type": "default", "rope_theta": 1e6}


@pytest.mark.parametrize(
    "changes",
    [{}, {"rope_theta": ..., "rope_parameters": ROPE}, {"rope_parameters": ROPE}],
    ids=["top level", "nested", "both"],
)
def test_cfg_9_rope_theta(changes, tmp_path):
    """CFG-9: e1 at position 3, head_dim 128, half-split; theta 10000 would give -0.8558."""
    c = read_config(tmp_path, config_json("qwen3", head_dim=128, **changes))
    cos, sin = models.rope_table(torch.tensor([[3]]), c.head_dim, c.rope_theta, torch.float32)
    y = models.rotate(F.one_hot(torch.tensor(1), 128).float().view(1, 1, 1, 128), cos, sin)[0, 0, 0]
    assert y.nonzero().flatten().tolist() == [1, 65]
    assert y[1].item() == pytest.approx(-0.7491, abs=5e-5)
    assert y[65].item() == pytest.approx(0.6624, abs=5e-5)


REFUSALS = [
    ("qwen3", {"rope_theta": ..., "rope_parameters": {"rope_type": "default"}}, "rope_theta"),
    ("qwen3", {"rope_scaling": {"rope_type": "yarn", "factor": 4.0}}, "yarn"),
    ("qwen3", {"rope_scaling": {"type": "yarn", "factor": 4.0}}, "yarn"),
    ("qwen3", {"rope_theta": ..., "rope_parameters": ROPE | {"rope_type": "yarn"}}, "yarn"),
    ("qwen3", {"rope_parameters": ROPE | {"rope_type": "yarn"}}, "yarn"),
    ("qwen3", {"use_sliding_window": True, "sliding_window": 4096}, "use_sliding_window"),
    ("qwen3", {"layer_types": ["full_attention", "sliding_attention"]}, "layer_types"),
    ("qwen3", {"attention_bias": True}, "attention_bias"),
    ("qwen3", {"hidden_act": "gelu"}, "hidden_act"),
    ("qwen3", {"num_attention_heads": 3}, "num_attention_heads"),
    ("qwen3", {"num_key_value_heads": 0}, "num_key_value_heads"),
    ("qwen3", {"rope_parameters": 5}, "int"),
    ("qwen3", {"torch_dtype": ["bfloat16"]}, "['bfloat16'] is not one of"),
    ("qwen3", {"model_type": "qwen3_moe"}, "qwen3_moe"),
    ("qwen3", {"torch_dtype": "float8_e4m3fn"}, "float8_e4m3fn"),
    ("gpt2", {"activation_function": "relu"}, "activation_function"),
    ("gpt2", {"activation_function": "gelu"}, "activation_function"),
    ("gpt2", {"scale_attn_by_inverse_layer_idx": True}, "scale_attn_by_inverse_layer_idx"),
    ("gpt2", {"reorder_and_upcast_attn": True}, "reorder_and_upcast_attn"),
    ("gpt2", {"scale_attn_weights": False}, "scale_attn_weights"),
    ("gpt2", {"n_head": 5}, "n_head"),
    ("gpt2", {"model_type": "llama"}, "llama"),
]


@pytest.mark.parametrize("arch, changes, word", REFUSALS, ids=lambda value: str(value)[:40])
def test_cfg_9_what_is_not_implemented_is_refused_by_name(arch, changes, word, tmp_path):
    raw = config_json(arch, **changes)
    refused(lambda: read_config(tmp_path, raw), word, str(tmp_path / "config.json"))


@pytest.mark.parametrize(
    "changes",
    [
        {"rope_scaling": None, "sliding_window": None, "use_sliding_window": False},
        {"rope_scaling": {"rope_type": "default"}, "attention_bias": False, "sliding_window": 4096},
        {"rope_theta": 1000000, "layer_types": ["full_attention"] * 2, "dtype": "float32"},
        {"hidden_act": ..., "rms_norm_eps": ..., "torch_dtype": "float32"},
    ],
)
def test_settings_that_change_nothing_are_accepted(changes, tmp_path):
    c = read_config(tmp_path, config_json("qwen3", **changes))
    assert dataclasses.replace(c, dtype=None) == read_config(tmp_path, config_json("qwen3"))


def test_cfg_10_gelu_is_the_tanh_form(tmp_path):
    """CFG-10: only the biases of one MLP are not zero, so the activations are gelu(bias)."""
    raw = config_json("gpt2", n_embd=4, n_inner=4, n_head=1, n_layer=1)
    tensors = {name: torch.zeros(shape) for name, shape in published_shapes(raw).items()}
    tensors["transformer.h.0.mlp.c_fc.bias"] = torch.tensor([-3.0, 1, 3, 0])
    tensors["transformer.h.0.mlp.c_proj.weight"] = torch.eye(4)
    model = load_cpu(write_folder(tmp_path, raw, tensors))
    cache = kvcache.NoCache(model)
    x = model.hidden(*cache.start(torch.tensor([[7]]), [0]), cache)
    close(x[0, 0], torch.tensor([-0.0036374, 0.8411920, 2.9963627, 0]), atol=1e-6)


# --- positions and masks ---


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_pos_3_rope_table_in_half_precision(dtype):
    """POS-3: angles from fp32 frequencies and whole positions, cast last."""
    positions = torch.tensor([[100, 257, 1000, 4000]])
    cos, sin = models.rope_table(positions, 128, 1e6, dtype)
    assert cos.dtype == sin.dtype == dtype
    power = torch.arange(0, 128, 2, dtype=torch.float64) / 128
    angles = positions[0, :, None].double() * 1e6**-power
    assert (cos.double().view(4, 64) - angles.cos()).abs().max() < 0.005
    assert (sin.double().view(4, 64) - angles.sin()).abs().max() < 0.005


def test_pos_5_qk_norm_comes_before_rope(tmp_path, monkeypatch):
    """POS-5: the wrong order gives 1.6829 where 3.3659 is right."""
    raw = config_json(
        "qwen3", hidden_size=4, head_dim=4, num_attention_heads=1, num_key_value_heads=1,
        num_hidden_layers=1, intermediate_size=4,
    )  # fmt: skip
    tensors = {name: torch.zeros(shape) for name, shape in published_shapes(raw).items()}
    tensors["model.embed_tokens.weight"][:, 0] = 1
    for name in tensors:
        if name.endswith("layernorm.weight"):
            tensors[name].fill_(1)
        if name.endswith(("q_proj.weight", "k_proj.weight")):
            tensors[name][0, 0] = 1
        if name.endswith(("q_norm.weight", "k_norm.weight")):
            tensors[name] = torch.tensor([2.0, 1, 1, 1])
    model = load_cpu(write_folder(tmp_path, raw, tensors))
    calls = []
    monkeypatch.setattr(models, "attention", spy(models.attention, calls))
    cache = kvcache.GrowingCache(model)
    model(*cache.start(torch.tensor([[5, 6]]), [0]), cache)
    q, k = calls[0].args[:2]
    for x in (q, k):
        close(x[0, 0, 1], torch.tensor([2.1612, 0, 3.3659, 0]))
        close(x[0, 0, 0], torch.tensor([4.0, 0, 0, 0]))


@pytest.mark.parametrize("S", [4, 64])
@pytest.mark.parametrize("pos, expected", [([3], [1.5]), ([2, 3], [1.0, 1.5])])
def test_msk_1_few_queries_many_keys(pos, expected, S):
    """MSK-1, MSK-4: is_causal would give 0.0 and [0.0, 0.5], an inverted mask [3.0, 0.0]."""
    v = torch.arange(S).float().view(1, 1, S, 1).expand(1, 2, S, 4)
    q, k = torch.ones(1, 4, len(pos), 4), torch.zeros(1, 2, S, 4)
    mask = models.visible(torch.tensor(pos), torch.tensor([[0]]), S)
    y = models.attention(q, k, v, mask)
    assert torch.equal(y, torch.tensor(expected).view(1, 1, -1, 1).expand(1, 4, -1, 4))


def test_visible_of_a_padded_row():
    """Slot j for the query in slot i: pad <= j <= i, or j == i."""
    mask = models.visible(torch.tensor([0, 1, 2, 3]), torch.tensor([[2], [0]]), 6)
    assert mask.shape == (2, 1, 4, 6) and mask.dtype == torch.bool
    assert mask[:, 0].int().tolist() == [
        [[1, 0, 0, 0, 0, 0], [0, 1, 0, 0, 0, 0], [0, 0, 1, 0, 0, 0], [0, 0, 1, 1, 0, 0]],
        [[1, 0, 0, 0, 0, 0], [1, 1, 0, 0, 0, 0], [1, 1, 1, 0, 0, 0], [1, 1, 1, 1, 0, 0]],
    ]


@each_cache
@each_arch
def test_msk_2_prompt_does_not_see_its_future(arch, cache, small):
    """MSK-2: with an empty cache attached, later tokens leave earlier rows as they are."""
    a, b = (all_logits(small(arch), [ids], cache)[0] for ids in ([1, 2, 3, 4, 5], [1, 2, 9, 9, 9]))
    close(a[:2], b[:2], atol=1e-5)
    assert (a[2:] - b[2:]).abs().max() > 0.1


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@each_cache
@each_arch
def test_msk_5_padding_stays_finite(arch, cache, dtype, small):
    """MSK-5: with the math backend too, for a row that is all padding, and after more steps."""
    model = small(arch, dtype)
    short, long = random_prompts(3, (2, 6))
    alone = all_logits(model, [short], cache)[0]
    with torch.nn.attention.sdpa_kernel(torch.nn.attention.SDPBackend.MATH):
        logits = all_logits(model, [short, long], cache)
        store = CACHES[cache](model, 2, 80)
        ids, _ = padded([short, long])
        with torch.inference_mode():
            steps = [model(*store.start(ids, [6, 0]), store)]  # row 0 is all padding
            for _ in range(2):
                store.reserve()
                steps.append(model(*store.feed(steps[-1].argmax(dim=-1, keepdim=True)), store))
    assert all(x.isfinite().all() for x in (logits, *steps))
    scale = 1 if dtype == "float32" else alone.abs().max()
    close(logits[0, -2:] / scale, alone / scale, atol=1e-4 if dtype == "float32" else 2e-2)


def test_num_6_never_a_mask_and_is_causal_together(small, monkeypatch):
    """NUM-6"""
    calls = []
    monkeypatch.setattr(
        F, "scaled_dot_product_attention", spy(F.scaled_dot_product_attention, calls)
    )
    for arch in ARCHS:
        for cache in CACHES:
            for lengths in ((1,), (5,), (3, 5)):
                greedy(small(arch), random_prompts(1, lengths), 3, cache=cache)
    assert len(calls) >= 2 * 3 * 3 * 3 * 2
    for call in calls:
        mask = call.kwargs.get("attn_mask", call.args[3] if len(call.args) > 3 else None)
        causal = call.kwargs.get("is_causal", call.args[5] if len(call.args) > 5 else False)
        q, k = (call.args + tuple(call.kwargs[n] for n in ("query", "key") if n in call.kwargs))[:2]
        assert (mask is None) == bool(causal)
        assert not causal or q.shape[2] == k.shape[2]


# --- batches ---


@each_cache
@each_arch
def test_bat_1_positions_of_padded_rows(arch, cache, small, monkeypatch):
    """BAT-1: lengths 3 and 5 have the positions 0 0 0 1 2 and 0 1 2 3 4, then 3 and 5."""
    model, seen = small(arch), []
    if arch == "gpt2":
        monkeypatch.setattr(F, "embedding", spy(F.embedding, seen))
    else:
        monkeypatch.setattr(models, "rope_table", spy(models.rope_table, seen))
    prompts = random_prompts(2, (3, 5))
    new = greedy(model, prompts, 3, cache=cache)
    seen = [call.args[0] for call in seen if call.args[1] is not model.embed_tokens]
    seen = [positions.tolist() for positions in seen]
    assert seen[0] == [[0, 0, 0, 1, 2], [0, 1, 2, 3, 4]]
    assert [[row[-1] for row in positions] for positions in seen[1:]] == [[3, 5], [4, 6]]
    monkeypatch.undo()
    assert new == [greedy(model, [prompt], 3, cache=cache)[0] for prompt in prompts]


@each_cache
@each_arch
def test_bat_1_rows_of_a_batch_equal_their_own_runs(arch, cache, small):
    model, prompts = small(arch), random_prompts(4, (1, 3, 30, 17))
    new = greedy(model, prompts, 40, cache=cache)
    assert new == [greedy(model, [prompt], 40, cache=cache)[0] for prompt in prompts]


@each_cache
@each_pipeline
def test_bat_4_stop_ids_in_the_prompt_stop_nothing(cache, pipeline):
    """BAT-4: padding and prompts may hold the stop id; only new tokens count."""
    prompts = [[50256, 11, 616], [15496, 50256, 0, 3290, 50256]]
    stub = Scripted([[257] * 8, [1310] * 8])
    steps = generate(stub, prompts, 8, cache=cache, pipeline=pipeline, stop_ids=(50256, 0))
    assert list(steps) == [[257, 1310]] * 8


@each_cache
@each_pipeline
def test_bat_5_rows_stop_at_different_steps(cache, pipeline):
    """BAT-5: 2, 5 and 7 tokens; nothing after a row's stop; over once all have stopped."""
    script = [[7, 9, 7], [7, 7, 7, 7, 9, 7], [7]]
    options = {"cache": cache, "pipeline": pipeline, "stop_ids": (9,)}
    steps = list(generate(Scripted(script, 16), [[1], [1, 2], [3]], 7, **options))
    assert [list(row) for row in zip(*steps)] == [
        [7, 9, None, None, None, None, None],
        [7, 7, 7, 7, 9, None, None],
        [7, 7, 7, 7, 7, 7, 7],
    ]
    steps = list(generate(Scripted(script[:2], 16), [[1], [1, 2]], 7, **options))
    assert len(steps) == 5 and steps[-1] == [None, 9]


# --- caches ---


@pytest.mark.parametrize("name", ["growing", "preallocated"])
def test_kv_1_growth_keeps_heads_apart(name):
    """KV-1: arange(8) as (2 heads, 4, 1), grown to 6, stays 0 1 2 3 and 4 5 6 7."""
    config = types.SimpleNamespace(num_hidden_layers=1, num_key_value_heads=2, head_dim=1)
    owner = types.SimpleNamespace(config=config, dtype=torch.float32, device=torch.device("cpu"))
    cache = CACHES[name](owner, 1, 6)
    kv = torch.arange(8.0).view(1, 2, 4, 1)
    with torch.inference_mode():
        _, pos = cache.start(torch.zeros(1, 4, dtype=torch.int64), [0])
        cache.update(cache.layers[0], kv, kv + 10, pos)
        for n in (100, 200):
            cache.reserve()
            _, pos = cache.feed(torch.zeros(1, 1, dtype=torch.int64))
            new = torch.full((1, 2, 1, 1), float(n))
            k, v = cache.update(cache.layers[0], new, new + 10, pos)
    assert k[0, :, :6, 0].tolist() == [[0, 1, 2, 3, 100, 200], [4, 5, 6, 7, 100, 200]]
    assert torch.equal(v[0, :, :6], k[0, :, :6] + 10)


@pytest.mark.parametrize("prompts", [[40], [9, 40, 1]], ids=["single", "batch"])
@each_arch
def test_caches_agree_at_every_step(arch, prompts, small):
    """The same logits as without a cache, across block borders; what is stored stays (KV-1)."""
    model, B, N = small(arch), len(prompts), 2 * kvcache.BLOCK
    prompts = random_prompts(5, prompts)
    fed = random_prompts(6, [N] * B)
    caches = {name: kind(model, B, 40 + N) for name, kind in CACHES.items()}
    before = {}
    with torch.inference_mode():
        runs = [forced(model, cache, prompts, fed) for cache in caches.values()]
        for step, logits in enumerate(zip(*runs)):
            close(logits[1], logits[0])
            close(logits[2], logits[0])
            length = 40 + step
            for name in ("growing", "preallocated"):
                cache = caches[name]
                assert cache.length == length
                old = before.get(name, [])
                new = before[name] = [t[:, :, :length].clone() for kv in cache.layers for t in kv]
                assert all(t.shape[2] == length for t in new)
                assert all(torch.equal(a, b[:, :, : length - 1]) for a, b in zip(old, new))
            close(before["growing"], before["preallocated"])


@pytest.mark.parametrize("name", ["growing", "preallocated", "none"])
def test_kv_3_capacity(name, small):
    """KV-3: 3 prompt and 2 new tokens fit in 4 slots, 3 new ones are refused before the start."""
    model = small("qwen3")
    prompt = random_prompts(7, (3,))
    assert greedy(model, prompt, 2, cache=CACHES[name](model, 1, 4)) == greedy(model, prompt, 2)

    cache = CACHES[name](model, 1, 4)
    refused(lambda: generate(Failing(model, 1), prompt, 3, cache=cache), "5 positions", "has 4")


@pytest.mark.parametrize("name", CACHES)
def test_kv_3_prompt_larger_than_the_cache(name, small):
    cache = CACHES[name](small("gpt2"), 1, 4)
    refused(lambda: cache.start(torch.zeros(1, 5, dtype=torch.int64), [0]), "4", "5")
    refused(lambda: cache.start(torch.zeros(2, 3, dtype=torch.int64), [0, 0]), "1", "2")


def test_kv_3_nothing_is_written_beyond_the_last_slot(small):
    """KV-3: a run that fills the capacity exactly leaves all later slots zero."""
    model = small("qwen3")
    for pipeline in PIPELINES:
        cache = kvcache.PreallocatedCache(model, 1, 20)
        greedy(model, random_prompts(7, (5,)), 16, cache=cache, pipeline=pipeline)
        for t in (t for kv in cache.storage for t in kv):
            assert t[:, :, :20].abs().amin(dim=2).gt(0).all() and not t[:, :, 20:].any()


@pytest.mark.parametrize("P, N, fits", [(5, 4, True), (8, 1, True), (5, 5, False), (9, 1, False)])
@each_cache
@each_arch
def test_length_limit_of_the_model(arch, cache, P, N, fits, small):
    """P + N - 1 positions; one more than the model has is refused with the numbers."""
    limit = {"n_positions" if arch == "gpt2" else "max_position_embeddings": 8}
    model = small(arch, **limit)
    for pipeline in PIPELINES:
        call = lambda: generate(model, random_prompts(8, (P,)), N, cache=cache, pipeline=pipeline)  # noqa: E731, B023
        if fits:
            assert len(list(call())) == N
        else:
            refused(call, f"{P} prompt", str(N), f"{P + N - 1} positions", "8")


@pytest.mark.parametrize(
    "options", [*({"pipeline": mode} for mode in PIPELINES), {"compile": True}], ids=str
)
@each_cache
def test_kv_4_nothing_is_left_of_the_previous_prompt(cache, options, graphs, small):
    """KV-4: A, B, A again with one cache object, with aborted runs in between."""
    model, (a, b) = small("qwen3"), random_prompts(9, (30, 4))
    expected = [greedy(model, [prompt], 12)[0] for prompt in (a, b)]
    store = CACHES[cache](model, 1, 80)

    def run(prompt):
        return greedy(model, [prompt], 12, cache=store, **options)[0]

    assert [run(a), run(b), run(a)] == [*expected, expected[0]]
    steps = generate(model, [a], 40, cache=store, **options)
    next(steps)
    steps.close()
    assert run(b) == expected[1]
    with pytest.raises(RuntimeError, match="once too often"):
        list(generate(Failing(model, 4), [a], 12, cache=store, **options))
    assert [run(b), run(a)] == [expected[1], expected[0]]


@pytest.mark.parametrize("made", ["plain", "no_grad", "inference"])
@pytest.mark.parametrize("used", ["plain", "no_grad", "inference"])
@each_cache
def test_kv_7_inference_mode(cache, made, used, small):
    """KV-7: made in one mode, driven in another, by hand and by generate."""
    model = small("qwen3")
    modes = {
        "plain": torch.enable_grad, "no_grad": torch.no_grad, "inference": torch.inference_mode
    }  # fmt: skip
    prompt, fed = random_prompts(10, (5, 3))
    with modes[made]():
        store = CACHES[cache](model, 1, 80)
    with torch.inference_mode():
        expected = list(forced(model, CACHES["none"](model), [prompt], [fed]))
    with modes[used]():
        for _ in range(2):
            close(list(forced(model, store, [prompt], [fed])), expected)
        store.crop(2)
        a, b = (greedy(model, [prompt], 4, cache=store) for _ in range(2))
        assert a == b == greedy(model, [prompt], 4)
    close(list(forced(model, store, [prompt], [fed])), expected)


@each_cache
@each_arch
def test_kv_8_prompt_already_in_the_cache(arch, cache, small):
    """KV-8: a cache object is emptied first; ids without a column are a ValueError."""
    model, prompt = small(arch), random_prompts(11, (8,))
    store = CACHES[cache](model, 1, 20)
    with torch.inference_mode():
        model(*store.start(*padded(prompt)), store)
    assert store.length == 8
    assert greedy(model, prompt, 6, cache=store) == greedy(model, prompt, 6)
    nothing = torch.zeros(1, 0, dtype=torch.int64)
    refused(lambda: model(nothing, torch.zeros(0, dtype=torch.int64), store), "(1, 0)")
    refused(lambda: generate(model, [[]], 6, cache=store))
    refused(lambda: generate(model, [], 6, cache=store))


@each_cache
def test_cache_made_for_another_model(cache, small):
    """A cache with fewer layers must not shorten the model."""
    store = CACHES[cache](small("qwen3", num_hidden_layers=1), 1, 9)
    refused(lambda: greedy(small("qwen3"), [[1, 2]], 2, cache=store))


@each_pipeline
@each_cache
def test_length_after_a_run(cache, pipeline, small):
    """Steps that ran ahead of a stop are forgotten: P + N - 1 slots, whatever the pipeline."""
    model, (prompt,) = small("qwen3"), random_prompts(12, (5,))
    free = greedy(model, [prompt], 20)[0]
    stop = next(id for n, id in enumerate(free) if n >= 6 and id not in free[:n])
    N = free.index(stop) + 1
    store = CACHES[cache](model, 1, 100)
    new = greedy(model, [prompt], 20, cache=store, pipeline=pipeline, stop_ids=(stop,))[0]
    assert [id for id in new if id is not None] == free[:N]
    assert store.length == (5 + N - 1 if pipeline != "unchecked" else 5 + len(new) - 1)


@pytest.mark.parametrize("keep", [9, 12])
@each_cache
@each_arch
def test_crop_and_go_on(arch, cache, keep, small):
    """After crop(n), feeding on gives what feeding on from n would have given."""
    model, (prompt, wrong, right) = small(arch), random_prompts(13, (9, 60, 5))
    with torch.inference_mode():
        store = CACHES[cache](model, 1, 100)
        list(forced(model, store, [prompt], [right[: keep - 9] + wrong]))
        store.crop(keep)
        assert store.length == keep
        logits = []
        for id in right:
            store.reserve()
            logits.append(model(*store.feed(torch.tensor([[id]])), store))
        fresh = forced(model, CACHES[cache](model, 1, 100), [prompt], [right[: keep - 9] + right])
        close(logits, list(fresh)[-5:])


onednn = torch.backends.mkldnn


@pytest.fixture
def seen_by_product(monkeypatch):
    """What a spied F.linear finds: whether oneDNN is on, and the rows."""
    seen, product = [], F.linear

    def spied(x, weight, bias=None):
        seen.append((onednn.enabled, x.shape[:-1].numel()))
        if torch.isnan(x).any():
            raise RuntimeError("out of memory")
        return product(x, weight, bias)

    monkeypatch.setattr(F, "linear", spied)
    return seen


@pytest.mark.parametrize("bias", [True, False])
@pytest.mark.parametrize("B, T", [(1, 1), (2, 1), (7, 1), (1, 3)])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_linear_is_a_product(B, T, dtype, bias, seen_by_product):
    """Every way through `linear` gives x W^T + b; only a row in bfloat16 goes without oneDNN."""
    draw = torch.Generator().manual_seed(0)
    x, weight, b = (
        torch.randn(shape, generator=draw).to(dtype) for shape in ((B, T, 96), (40, 96), (40,))
    )
    y = models.linear(x, weight, b if bias else None)
    exact = x.double() @ weight.double().T + (b.double() if bias else 0)
    assert y.shape == (B, T, 40) and y.dtype == dtype and y.is_contiguous()
    eps = torch.finfo(dtype).eps
    assert (y.double() - exact).abs().max() <= 4 * eps * exact.abs().max()
    left = dtype == torch.float32 and T == 1 and (B > 1 or torch.get_num_threads() > 1)
    off = dtype == torch.bfloat16 and B * T == 1
    assert seen_by_product == ([] if left else [(not off, B * T)])
    assert onednn.enabled


def test_linear_leaves_onednn_as_it_was(seen_by_product, monkeypatch):
    """After an error, where the user has switched it off, and with another thread at work."""
    x, weight = torch.ones(1, 1, 4, dtype=torch.bfloat16), torch.ones(3, 4, dtype=torch.bfloat16)
    with pytest.raises(RuntimeError, match="out of memory"):
        models.linear(x * math.nan, weight)
    assert onednn.enabled
    try:
        onednn.enabled = False
        models.linear(x, weight)
        assert not onednn.enabled
    finally:
        onednn.enabled = True

    # A thread that begins while another is at work, and ends after it, must not leave it off.
    entered, gates, product = threading.Semaphore(0), {}, F.linear

    def slow(x, weight, bias=None):
        entered.release()
        assert gates[threading.current_thread()].wait(10)
        return product(x, weight, bias)

    monkeypatch.setattr(F, "linear", slow)
    for _ in range(2):
        thread = threading.Thread(target=models.linear, args=(x, weight))
        gates[thread] = threading.Event()
        thread.start()
        assert entered.acquire(timeout=10) and not onednn.enabled
    for thread, gate in gates.items():
        gate.set()
        thread.join()
    assert onednn.enabled


@pytest.mark.parametrize("capacity", [200, 16384])
@each_pipeline
def test_cost_of_a_token_follows_what_is_in_the_cache(capacity, pipeline, small):
    """Attention sees the used length rounded up to a block, whatever the capacity."""
    model, seen = small("qwen3", max_position_embeddings=16384), []

    class Spying(kvcache.PreallocatedCache):
        update = staticmethod(spy(kvcache.PreallocatedCache.update, seen))

    store = Spying(model, 1, capacity)
    greedy(model, random_prompts(14, (5,)), 140, cache=store, pipeline=pipeline)
    assert store.length == 144
    blocks = [-(-length // kvcache.BLOCK) * kvcache.BLOCK for length in range(5, 145)]
    layers = model.config.num_hidden_layers
    assert len(seen) == len(blocks) * layers
    assert all(c.result[0].shape[2] <= blocks[i // layers] for i, c in enumerate(seen))
    assert kvcache.BLOCK <= 128


# --- compiling ---


@each_cache
@each_arch
def test_cmp_1_number_of_graphs(arch, cache, graphs, small):
    """CMP-1: one graph for the block and one for the head, however long, deep, large and often.

    Several rows add as many again, and one more where padding brings a mask, or a first batch of
    another size shows that it varies.
    """
    deep = small(arch, **{"n_layer" if arch == "gpt2" else "num_hidden_layers": 5})
    drawn = {"temperature": 0.7, "top_k": 20}
    requests = {  # model, lengths of the prompts, new tokens, options
        "first": (small(arch), (5,), 6, {}),
        "longer": (small(arch), (9,), 80, {}),
        "shorter, drawn": (small(arch), (3,), 135, drawn),
        "five layers": (deep, (7,), 80, {}),
        "larger cache": (small(arch), (8,), 70, {"cache": CACHES[cache](small(arch), 1, 500)}),
        "pipelined": (small(arch), (4,), 70, {"pipeline": "event"}),
        "batch of 2": (small(arch), (5, 3), 6, {}),
        "batch of 3": (small(arch), (9, 1, 4), 80, drawn),
        "batch of 4, equal lengths": (small(arch), (2, 2, 2, 2), 80, {}),
        "one-token prompt": (small(arch), (1,), 80, {}),
        "five layers, batch of 5": (deep, (9, 1, 4, 2, 30), 80, {}),
        "first again": (small(arch), (5,), 6, {}),
    }
    counts = {}
    for what, (model, lengths, n, options) in requests.items():
        before, prompts = len(graphs), random_prompts(15, lengths)
        options = {"cache": cache, "seed": 0} | options
        new = greedy(model, prompts, n, compile=True, **options)
        counts[what] = len(graphs) - before
        assert new == greedy(model, prompts, n, **options), what
    assert counts.pop("first") == 2
    assert counts.pop("batch of 2") == 2
    expected = dict.fromkeys(counts, 0)
    if cache == "none":
        expected |= {"batch of 3": 1, "batch of 4, equal lengths": 1}
    if cache == "growing":
        expected |= {"one-token prompt": 1}
    assert counts == expected
    check_graphs(graphs)


@each_cache
@each_arch
def test_cmp_1_a_one_token_prompt_comes_first(arch, cache, graphs, small):
    for what, lengths, n in (("first", (1,), 70), ("longer", (5,), 70), ("again", (1,), 90)):
        prompts, options = random_prompts(15, lengths), {"cache": cache}
        new = greedy(small(arch), prompts, n, compile=True, **options)
        assert new == greedy(small(arch), prompts, n, **options), what
    assert len(graphs) == (3 if cache == "growing" else 2)
    check_graphs(graphs)


def check_graphs(graphs):
    """Whole graphs, and NUM-6: no attention with a mask and is_causal."""
    assert not torch._dynamo.utils.counters["graph_break"]
    for graph in graphs:
        for node in graph.graph.nodes:
            if node.target is F.scaled_dot_product_attention:
                mask, causal = (node.kwargs.get(key) for key in ("attn_mask", "is_causal"))
                assert not (mask is not None and causal) and len(node.args) <= 3


ODD = [  # vocabulary, head_dim, heads, key/value heads (GPT-2: heads)
    (97, 6, 3, 3), (61, 48, 4, 2), (64, 80, 8, 1), (66, 34, 5, 5),
]  # fmt: skip


@pytest.mark.parametrize("V, hd, heads, kv_heads", ODD)
@each_arch
def test_compiled_step_of_odd_shapes(arch, V, hd, heads, kv_heads, graphs, small):
    """What is written differently for the compiler gives the same logits at every step."""
    if arch == "qwen3":
        shape = {"head_dim": hd, "num_attention_heads": heads, "num_key_value_heads": kv_heads}
        model = small(arch, vocab_size=V, hidden_size=39, intermediate_size=37, **shape)
    else:
        model = small(arch, vocab_size=V, n_embd=hd * heads, n_head=heads, n_inner=37)
    for lengths in ((5,), (2, 7)):
        prompts, fed = random_prompts(20, lengths, V), random_prompts(21, [3] * len(lengths), V)
        caches = [kvcache.PreallocatedCache(model, len(lengths), 12) for _ in "ab"]
        with torch.inference_mode():
            eager, compiled = (
                list(forced(model, cache, prompts, fed, compile))
                for cache, compile in zip(caches, (False, True))
            )
        close(compiled, eager)
    assert len(graphs) == 4


@pytest.mark.parametrize("lengths", [(5,), (2, 7)], ids=["single", "batch"])
@each_arch
def test_inductor_gives_the_same_tokens(arch, lengths, small):
    """The real compiler, where there is a C++ compiler."""
    from torch._inductor import cpp_builder, exc

    try:
        cpp_builder.get_cpp_compiler()
    except exc.InvalidCxxCompiler:
        pytest.skip("no C++ compiler")
    model, prompts = small(arch), random_prompts(16, lengths)
    forget_compiled()
    try:
        new = greedy(model, prompts, 70, compile=True)
    finally:
        forget_compiled()
    assert new == greedy(model, prompts, 70)


# --- every combination ---


@pytest.mark.parametrize("lengths", [(6,), (6, 2, 11)], ids=["single", "batch"])
@each_cache
@each_arch
def test_num_1_all_combinations_give_the_same_tokens(arch, cache, lengths, graphs, small):
    """NUM-1: cache x compile x pipeline x batch in fp32."""
    model, prompts = small(arch), random_prompts(17, lengths)
    expected = [greedy(model, [prompt], 24, cache="none")[0] for prompt in prompts]
    assert all(len(set(ids)) > 5 for ids in expected)
    for pipeline in PIPELINES:
        for compile in (False, True):
            options = {"cache": cache, "pipeline": pipeline, "compile": compile}
            assert greedy(model, prompts, 24, **options) == expected, options
    assert graphs


class Shapes(TorchDispatchMode):
    """Collects the shapes of all results."""

    def __init__(self):
        super().__init__()
        self.seen = []

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        result = func(*args, **(kwargs or {}))
        leaves = torch.utils._pytree.tree_leaves(result)
        self.seen += [t.shape for t in leaves if isinstance(t, torch.Tensor)]
        return result


@each_cache
def test_num_5_only_the_last_position_counts(cache, tmp_path):
    """NUM-5: the largest value of all is at position 1, id 9; the last position says 3."""
    raw = config_json("qwen3", tie_word_embeddings=False, vocab_size=101)
    tensors = {name: torch.zeros(shape) for name, shape in published_shapes(raw).items()}
    tensors["model.norm.weight"].fill_(1)
    tensors["model.embed_tokens.weight"][[10, 11, 12, 13, 14], range(5)] = 1
    tensors["lm_head.weight"][9, 1] = 50
    tensors["lm_head.weight"][3, 4] = 5
    model = load_cpu(write_folder(tmp_path, raw, tensors))
    prompts = [[10, 11, 12, 13, 14]]
    assert all_logits(model, prompts).argmax().item() == 1 * 101 + 9
    store = CACHES[cache](model, 1, 5)
    with Shapes() as shapes:
        logits = model(*store.start(*padded(prompts)), store)
    assert logits.shape == (1, 101) and logits.dtype == torch.float32
    assert logits.argmax().item() == 3
    assert greedy(model, prompts, 1, cache=cache) == [[3]]
    with_vocabulary = [shape for shape in shapes.seen if shape and shape[-1] == 101]
    # A single row in float32 goes through its product twice (see `linear`); five do not.
    assert with_vocabulary and all(shape.numel() <= 2 * 101 for shape in with_vocabulary)


DTYPE_CASES = [  # config.json, file, asked for, processor has bf16 -> dtype, notice
    ({"torch_dtype": "bfloat16"}, "bfloat16", "auto", True, "bfloat16", False),
    ({"torch_dtype": "bfloat16"}, "bfloat16", "auto", False, "float32", True),
    ({"dtype": "bfloat16"}, "float32", "auto", True, "bfloat16", False),
    ({"dtype": "float32", "torch_dtype": "bfloat16"}, "bfloat16", "auto", True, "float32", False),
    ({}, "bfloat16", "auto", True, "bfloat16", False),
    ({}, "bfloat16", "auto", False, "float32", True),
    ({}, "float32", "auto", False, "float32", False),
    ({"dtype": "float16"}, "float16", "auto", True, "float32", True),
    ({}, "float16", "auto", False, "float32", True),
    ({"dtype": "bfloat16"}, "bfloat16", "float32", True, "float32", False),
    ({"dtype": "float32"}, "float32", "bfloat16", False, "bfloat16", False),
    ({"dtype": "float32"}, "float32", "float16", False, "float16", False),
]


@pytest.mark.parametrize("keys, file, asked, native, expected, notice", DTYPE_CASES)
def test_num_2_dtype(keys, file, asked, native, expected, notice, tmp_path, monkeypatch, capsys):
    """NUM-2: auto never computes in a dtype that the processor emulates, and says so in a line."""
    raw = config_json("gpt2", **keys)
    write_folder(tmp_path, raw, random_tensors(raw, dtype=getattr(torch, file)))
    monkeypatch.setattr(models, "cpu_has_bfloat16", lambda: native)
    model = load_cpu(tmp_path, asked)
    assert model.dtype == getattr(torch, expected)
    assert {t.dtype for t in parameters(model)} == {model.dtype}
    out, err = capsys.readouterr()
    assert out == "" and err.count("\n") == notice


@pytest.mark.skipif(not Path("/dev/full").exists(), reason="no /dev/full here")
def test_num_2_a_notice_that_nobody_can_read(tmp_path, monkeypatch):
    """A full disk behind stderr costs the line, not the model."""
    raw = config_json("gpt2")
    write_folder(tmp_path, raw, random_tensors(raw, dtype=torch.bfloat16))
    monkeypatch.setattr(models, "cpu_has_bfloat16", lambda: False)
    with contextlib.suppress(OSError), open("/dev/full", "w") as full:  # closing it fails, too
        monkeypatch.setattr(sys, "stderr", full)
        assert load_cpu(tmp_path).dtype == torch.float32


def test_num_2_unknown_dtype(tmp_path):
    raw = config_json("gpt2")
    write_folder(tmp_path, raw, random_tensors(raw))
    refused(lambda: load_cpu(tmp_path, "int8"), "int8", "bfloat16")


# --- host reads ---

READS = {"item", "tolist", "__bool__", "__int__", "__float__", "__index__", "cpu", "numpy"}


class HostReads(torch.overrides.TorchFunctionMode):
    """Counts what makes the host wait for a device: from Python, and within torch's own code."""

    class Within(TorchDispatchMode):
        names = {"_local_scalar_dense", "is_nonzero", "nonzero", "masked_select", "equal"}

        def __torch_dispatch__(self, func, types, args=(), kwargs=None):
            name, index = func.overloadpacket.__name__, args[1] if len(args) > 1 else None
            masks = isinstance(index, (list, tuple)) and any(
                isinstance(t, torch.Tensor) and t.dtype == torch.bool for t in index
            )
            if name in self.names or (name.startswith("index") and masks):
                self.reads.append(name)
            return func(*args, **(kwargs or {}))

    def __init__(self):
        super().__init__()
        self.reads, self.within = [], self.Within()
        self.within.reads = self.reads

    def __torch_function__(self, func, types, args=(), kwargs=None):
        if getattr(func, "__name__", "") in READS:
            self.reads.append(func.__name__)
            with _disable_current_modes():
                return func(*args, **(kwargs or {}))
        return func(*args, **(kwargs or {}))

    def __enter__(self):
        self.within.__enter__()
        return super().__enter__()

    def __exit__(self, *error):
        super().__exit__(*error)
        return self.within.__exit__(*error)


def test_host_reads_are_seen():
    x = torch.ones(2)
    with HostReads() as host:
        x.tolist(), x[0].item(), bool(x[0]), torch.nonzero(x), x[x > 0], x.cpu()
    assert len(host.reads) == 6


@pytest.mark.parametrize("lengths", [(5,), (2, 5)], ids=["single", "batch"])
@each_cache
@each_arch
def test_str_5_no_host_read_in_the_model(arch, cache, lengths, small):
    """STR-5: neither in the forward pass nor in the cache."""
    model, prompts = small(arch), random_prompts(18, lengths)
    ids, pad = padded(prompts)
    store = CACHES[cache](model, len(prompts), 80)
    next_ids = torch.ones(len(prompts), 1, dtype=torch.int64)
    with HostReads() as host, torch.inference_mode():
        logits = model(*store.start(ids, pad), store)
        for _ in range(70):
            store.reserve()
            logits = model(*store.feed(next_ids), store)
    assert host.reads == [] and logits.shape == (len(prompts), 96)


@each_pipeline
@each_cache
def test_str_5_one_host_read_a_step(cache, pipeline, small):
    """STR-5: at most one read a step, with stop ids and sampling; all of unchecked's at its end."""
    for options in ({}, {"stop_ids": (500, 501)}, {"temperature": 0.7, "top_p": 0.9, "seed": 1}):
        with HostReads() as host:
            options |= {"cache": cache, "pipeline": pipeline}
            steps = generate(small("gpt2"), random_prompts(19, (5, 3)), 9, **options)
            counts = [0]
            for _ in steps:
                counts.append(len(host.reads))
        assert len(counts) == 10
        assert max(b - a for a, b in zip(counts, counts[1:])) <= 1, host.reads
        assert counts[-1] == 9 and len(host.reads) == 9


def skip_unless_torch_pretends():
    """In a FakeTensorMode: a CPU build has no such device, and torch 2.9 wants a driver."""
    try:
        torch.tensor([0, 0], device=torch.empty(1, device="cuda").device)[:, None]
    except (AssertionError, RuntimeError) as error:
        pytest.skip(f"this torch cannot pretend: {str(error).splitlines()[0]}")


@each_cache
@each_arch
def test_str_5_on_a_pretended_gpu(arch, cache, small):
    """Fake CUDA tensors: operands of two devices raise, and so does reading a value."""
    from torch._subclasses import fake_tensor

    model = small(arch)
    with fake_tensor.FakeTensorMode(allow_non_fake_inputs=False), torch.inference_mode():
        fake = lambda t: (  # noqa: E731
            torch.empty(t.shape, dtype=t.dtype, device="cuda") if isinstance(t, torch.Tensor) else t
        )
        skip_unless_torch_pretends()
        fields = {f.name: getattr(model, f.name) for f in dataclasses.fields(model)}
        model = dataclasses.replace(
            model, **{n: torch.utils._pytree.tree_map(fake, value) for n, value in fields.items()}
        )
        store = CACHES[cache](model, 2, 80)
        ids = torch.zeros(2, 5, dtype=torch.int64, device="cuda")
        logits = model(*store.start(ids, [2, 0]), store)
        for _ in range(3):
            store.reserve()
            logits = model(*store.feed(logits.argmax(dim=-1, keepdim=True)), store)
        assert logits.device.type == "cuda" and logits.shape == (2, 96)
        with pytest.raises(fake_tensor.DataDependentOutputException):
            logits[0, 0].item()


# --- real weights, where the local hub cache has them ---


def cached(name, monkeypatch):
    """The model of a built-in name from the local cache; the test is skipped without it."""
    import huggingface_hub as hub

    for file in ("config.json", "tokenizer.json", "model.safetensors"):
        if not isinstance(hub.try_to_load_from_cache(models.HUB[name], file), str):
            pytest.skip(f"{models.HUB[name]} is not in the local hub cache")
    monkeypatch.setattr(hub.constants, "HF_HUB_OFFLINE", True)
    return load_cpu(name), Tokenizer(name)


def test_golden_qwen3(monkeypatch):
    model, tokenizer = cached("qwen3-0.6b-base", monkeypatch)
    ids = tokenizer.encode("Explain large language models.")
    assert ids == [840, 20772, 3460, 4128, 4119, 13]
    assert greedy(model, [ids], 1) == [[20286]]
    ids = tokenizer.encode("Explain large language models in a single sentence.")
    assert ids == [840, 20772, 3460, 4128, 4119, 304, 264, 3175, 11652, 13]
    (new,) = greedy(model, [ids], 100, stop_ids=(151643,))
    assert new[-1] == 151643
    assert tokenizer.decode(new[:-1]) == (
        " Large language models are artificial intelligence systems that can understand, generate,"
        " and process human language, enabling them to perform a wide range of tasks, from"
        " answering questions to writing articles, and even creating creative content."
    )


def test_golden_gpt2(monkeypatch):
    """BAT-1: a prompt gives the same text alone and beside a longer one."""
    model, _ = cached("gpt2", monkeypatch)
    assert greedy(model, [[100, 200, 300]], 6) == [[84, 12, 75, 84, 12, 75]]
    prompts = [[15496, 11, 616, 3290, 318], [15496, 11, 616, 3290, 318, 257, 1310]]
    assert greedy(model, prompts, 20) == [greedy(model, [p], 20)[0] for p in prompts]


# --- generate.py, pipeline.py ---------------------------------------------------------------------
# Expected tokens come from a script, from a plain loop over the model, or from a run that never
# stops; a pipeline, a cache or a compiler must not change a single one.

needs_cuda = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
MODES = ["off", "event", "ping-pong", "unchecked"]
KINDS = ["qwen3", "gpt2"]
SAMPLED = dict(temperature=0.9, top_k=40, top_p=0.95, seed=7)
EOT, TURN, TURN_END = "<|endoftext|>", "<|im_start|>", "<|im_end|>"
TEMPLATE = (
    "{% for m in messages %}<|im_start|>{{ m.role }}\n{{ m.content }}<|im_end|>\n{% endfor %}"
    "<|im_start|>assistant\n{% if not enable_thinking %}<think>\n\n</think>\n\n{% endif %}"
)


def logits_of(model, ids):
    """(V,) for the id that follows `ids`, computed from nothing."""
    cache = kvcache.NoCache(model)
    return model(*cache.start(torch.tensor([ids]), [0]), cache)[0]


def cache_for(model, name, batch_size, capacity):
    return CACHES[name](model, batch_size, capacity)


def sampled_from(logits, temperature=1.0, top_k=0, top_p=1.0):
    """The distribution that a step draws from."""
    return gen.probabilities(logits, temperature, top_k, top_p)


def without_checks(monkeypatch):
    """Lets generate() take --cuda-graph for a pretended device, which says it is a CPU."""

    def needed(config, device, prompts, new, *rest):
        return max(map(len, prompts)) + max(new, 1) - 1

    monkeypatch.setattr(gen, "check", needed)


def compile_with(monkeypatch, backend):
    """Compiled blocks use `backend` -> list that receives the settings of each torch.compile."""
    compile, seen = torch.compile, []

    def replacement(function, **kwargs):
        seen.append(kwargs)
        return compile(function, backend=backend, fullgraph=kwargs.get("fullgraph", False))

    monkeypatch.setattr(torch, "compile", replacement)
    models.compiled.cache_clear()
    torch._dynamo.reset()
    return seen


def config_keys(kind, V):
    if kind == "gpt2":
        return dict(model_type="gpt2", vocab_size=V, n_embd=16, n_head=2, n_layer=2,
                    n_positions=512)  # fmt: skip
    return dict(
        model_type="qwen3", vocab_size=V, hidden_size=16, intermediate_size=32, head_dim=8,
        num_hidden_layers=2, num_attention_heads=4, num_key_value_heads=2, rope_theta=10000.0,
        max_position_embeddings=512, tie_word_embeddings=True,
    )  # fmt: skip


@pytest.fixture(scope="session")
def folders(tmp_path_factory):
    """{kind: model folder} with random weights and a byte-level BPE of 300 tokens or so."""
    text = "Hello world, once upon a time 日本語 日本 end"
    tk = byte_level_bpe(text, 300, [EOT, TURN, TURN_END])
    paths = {}
    for kind in KINDS:
        path = paths[kind] = tmp_path_factory.mktemp(kind)
        tk.save(str(path / "tokenizer.json"))
        eot = tk.token_to_id(EOT)
        for name, content in {
            "config": config_keys(kind, tk.get_vocab_size()) | dict(eos_token_id=eot),
            "generation_config": dict(eos_token_id=eot, bos_token_id=eot),
            "tokenizer_config": dict(eos_token=TURN_END, chat_template=TEMPLATE),
        }.items():
            (path / f"{name}.json").write_text(json.dumps(content))
        model = models.load(str(path), "cpu", "float32", random_weights=True)
        tensors = models.checkpoint(model)
        for key, t in tensors.items():  # a new model's text would be one token over and over
            tensors[key] = t * (1 if t.dim() == 1 else 3 if "te." in key or "emb" in key else 40)
        save_file(tensors, path / "model.safetensors")
    return paths


@pytest.fixture(scope="session")
def tiny(folders):
    """{kind: model}"""
    return {kind: models.load(str(path), "cpu", "float32") for kind, path in folders.items()}


@pytest.fixture
def folder(folders, tmp_path):
    """A copy of the Qwen3 folder to break; folder(name=content, ...) replaces its JSON files."""

    def make(**files):
        shutil.copytree(folders["qwen3"], tmp_path, dirs_exist_ok=True)
        for name, content in files.items():
            path = tmp_path / f"{name}.json"
            path.unlink() if content is None else path.write_text(json.dumps(content))
        return tmp_path

    return make


class Stub:
    """A model that emits scripted ids: rows[r][n] in row r of call n, then `fill` for ever.

    Or one that always returns `logits` (V,). `fed` lists the last ids and position of each call.
    """

    device, dtype = torch.device("cpu"), torch.float32

    def __init__(self, rows=(), vocab_size=64, fill=1, positions=4096, logits=None):
        self.config = SimpleNamespace(
            vocab_size=vocab_size, max_position_embeddings=positions,
            num_hidden_layers=0, num_key_value_heads=1, head_dim=1,
        )  # fmt: skip
        self.rows, self.fill, self.logits, self.fed = rows, fill, logits, []

    def __call__(self, ids, pos, cache, compile=False):
        n = len(self.fed)
        self.fed.append((ids[:, -1].tolist(), pos[-1].item()))
        if self.logits is not None:
            return self.logits.repeat(len(ids), 1)
        logits = torch.zeros(len(ids), self.config.vocab_size)
        for r in range(len(ids)):
            row = self.rows[r] if self.rows else ()
            logits[r, row[n] if n < len(row) else self.fill] = 9.0
        return logits


class Watched:
    """A model that tells `before` and `after` about every call, by its number."""

    def __init__(self, model, before=None, after=None):
        self.model, self.calls = model, 0
        self.before, self.after = before or (lambda n: None), after or (lambda n: None)
        self.config, self.device, self.dtype = model.config, model.device, model.dtype

    def __call__(self, *args, **kwargs):
        self.before(self.calls)
        result = self.model(*args, **kwargs)
        self.after(self.calls)
        self.calls += 1
        return result


def prompts_for(model, lengths, seed=0):
    rng = random.Random(seed)
    return [[rng.randrange(model.config.vocab_size) for _ in range(n)] for n in lengths]


def new_ids(steps):
    """[[int]] of each row from what generate() yields; nothing follows a row's end."""
    rows = [list(row) for row in zip(*steps)]
    for row in rows:
        assert None not in row[: sum(id is not None for id in row)]
    return [[id for id in row if id is not None] for row in rows]


def run(model, prompts, N, **kwargs):
    return new_ids(gen.generate(model, prompts, N, **kwargs))


def cut(row, stop_ids):
    """row up to and with its first stop id"""
    for n, id in enumerate(row, 1):
        if id in stop_ids:
            return row[:n]
    return row


# --- The decode loop ---


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("cache", CACHES)
def test_greedy_takes_the_best_token_of_each_row(tiny, kind, cache):
    model, expected = tiny[kind], []
    prompts = prompts_for(model, [3, 5, 4])
    for ids in map(list, prompts):
        for _ in range(10):
            ids.append(logits_of(model, ids).argmax().item())
        expected.append(ids[-10:])
    assert len(set(sum(expected, []))) > 8  # not one token over and over
    assert run(model, prompts, 10, cache=cache) == expected


@pytest.mark.parametrize("sampling", [{}, SAMPLED], ids=["greedy", "sampled"])
@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("cache", CACHES)
@pytest.mark.parametrize("kind", KINDS)
def test_eos4_every_mode_stops_where_the_plain_loop_stops(tiny, kind, cache, mode, sampling):
    """The first, second, middle, last step, never; rows that stop at different steps."""
    model, N = tiny[kind], 8
    for prompts in (prompts_for(model, [4]), prompts_for(model, [3, 5, 2])):
        free = run(model, prompts, N, cache="none", **sampling)  # never stops
        last = [row[-1] for row in free]
        late = [row[3 + r] for r, row in enumerate(free)]
        stops = [(), *((id,) for id in free[0]), last, late, (free[-1][1], free[0][2])]
        for stop_ids in stops:
            capacity = max(map(len, prompts)) + N - 1  # exactly
            held = cache_for(model, cache, len(prompts), capacity)
            kwargs = dict(cache=held, pipeline=mode, stop_ids=stop_ids, **sampling)
            steps = list(gen.generate(model, prompts, N, **kwargs))
            expected = [cut(row, stop_ids) for row in free]
            assert new_ids(steps) == expected
            assert len(steps) == max(map(len, expected))
            assert held.length == max(map(len, prompts)) + len(steps) - 1


@pytest.mark.parametrize("seed", range(100))
def test_any_script(seed):
    draw = random.Random(seed)
    rows = [[draw.randrange(5) for _ in range(8)] for _ in range(draw.randint(1, 3))]
    stop_ids = set(draw.sample(range(5), draw.randint(0, 2)))
    N, P = draw.randint(0, 8), draw.randint(1, 3)
    cache, mode = draw.choice(list(CACHES)), draw.choice(MODES)
    stub = Stub(rows, positions=P + max(N, 1) - 1)
    kwargs = dict(cache=cache, pipeline=mode, stop_ids=stop_ids)
    steps = list(gen.generate(stub, [[2] * P] * len(rows), N, **kwargs))
    expected = [cut(row[:N], stop_ids) for row in rows]
    assert (new_ids(steps) or [[] for _ in rows]) == expected
    assert len(steps) == max(map(len, expected))
    ahead = {"off": 0, "event": 1, "ping-pong": 1, "unchecked": N}[mode]
    assert len(stub.fed) == min(N, len(steps) + ahead)
    for n, (ids, pos) in enumerate(stub.fed[1:]):  # each step is fed what the one before chose
        assert pos == P + n
        for fed, row, held in zip(ids, rows, expected):
            assert n >= len(held) or fed == row[n]


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("cache", CACHES)
def test_eos3_max_new_tokens(cache, mode):
    for N in (0, 1, 2):
        stub = Stub([[5, 6, 7]])
        assert list(gen.generate(stub, [[3, 4]], N, cache=cache, pipeline=mode)) == [[5], [6]][:N]
        assert len(stub.fed) == N
    with pytest.raises(ValueError, match="^max_new_tokens must be 0 or more, not -1$"):
        gen.generate(Stub(), [[3]], -1, cache=cache, pipeline=mode)


@pytest.mark.parametrize("mode", MODES)
def test_bat5_rows_that_finish_at_different_steps(mode):
    eos, never = 9, [2] * 7
    rows = [[2, 9, 3, 3, 3, 3, 3], [2, 2, 2, 2, 9, 4, 4], never]
    kwargs = dict(stop_ids=(eos,), pipeline=mode)
    steps = list(gen.generate(Stub(rows), [[1]] * 3, 7, **kwargs))
    assert steps == [
        [2, 2, 2], [9, 2, 2], [None, 2, 2], [None, 2, 2], [None, 9, 2], [None, None, 2],
        [None, None, 2],
    ]  # fmt: skip
    assert len(list(gen.generate(Stub(rows[:2]), [[1]] * 2, 7, **kwargs))) == 5


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize(
    "V, stop_id, prompts",
    [
        (50257, 50256, [[15496, 11, 616], [15496, 11, 616, 257, 1310]]),
        (50257, 50256, [[50256, 50256, 616], [15496, 11, 616, 257, 1310]]),
        (50257, 0, [[15496, 11, 616], [15496, 11, 616, 257, 1310]]),  # whatever fills the left
        (151936, 151645, [[151644, 872, 198, 17, 151645, 198, 151644, 77091, 198]]),
    ],
)
def test_bat4_the_prompt_never_stops_a_row(V, stop_id, prompts, mode):
    stub = Stub(vocab_size=V, fill=318)
    rows = run(stub, prompts, 8, stop_ids=(stop_id,), pipeline=mode)
    assert rows == [[318] * 8] * len(prompts)


def test_tok5_ids_are_those_of_the_output_layer():
    with pytest.raises(ValueError, match="^id 50257 is outside the vocabulary of 50257$"):
        gen.generate(Stub(vocab_size=50257), [[50256, 50257]])
    with pytest.raises(ValueError, match="^id -1 is outside the vocabulary of 50257$"):
        gen.generate(Stub(vocab_size=50257), [[-1]])
    rows = [[9707, 151669, 151935, 1879]]  # the tokenizer ends at 151668
    assert run(Stub(rows, vocab_size=151936), [[151935]], 4) == rows
    tied = torch.zeros(151936)
    tied[151669:] = 1
    for kwargs in ({}, dict(temperature=1.0, top_p=0.5, seed=0)):
        [ids] = run(Stub(vocab_size=151936, logits=tied), [[0]], 2, **kwargs)
        assert len(ids) == 2 and all(0 <= id < 151936 for id in ids)


def limited(model, positions):
    """The model with no room for more than `positions` tokens."""
    config = dataclasses.replace(model.config, max_position_embeddings=positions)
    table = model.embed_positions
    table = None if table is None else table[:positions].clone()
    return dataclasses.replace(model, config=config, embed_positions=table)


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("cache", CACHES)
@pytest.mark.parametrize("kind", KINDS)
def test_cli7_kv3_the_last_position_is_used_and_no_more(tiny, kind, cache, mode):
    model, kwargs = limited(tiny[kind], 8), dict(pipeline=mode)
    for P, N in [(5, 4), (8, 1)]:
        prompts = prompts_for(model, [P])
        assert run(model, prompts, N, cache=cache, **kwargs) == run(tiny[kind], prompts, N)
    for P, N, needed in [(5, 5, 9), (9, 1, 9)]:
        message = (
            f"{P} prompt tokens and {N} new ones need {needed} positions, the model has 8: "
            "shorten the prompt or lower max_new_tokens"
        )
        with pytest.raises(ValueError, match=f"^{message}$"):
            gen.generate(model, prompts_for(model, [P]), N, cache=cache, **kwargs)
    prompts = prompts_for(model, [3])
    held = cache_for(model, cache, 1, 4)
    assert run(model, prompts, 2, cache=held, **kwargs) == run(model, prompts, 2)
    with pytest.raises(ValueError, match="3 new ones need 5 positions, the cache has 4: "):
        gen.generate(model, prompts, 3, cache=held, **kwargs)


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("cache", CACHES)
@pytest.mark.parametrize("kind", KINDS)
def test_kv4_a_cache_remembers_nothing_of_the_last_request(tiny, kind, cache, mode):
    """Long, short, long again; a consumer that leaves early; a step that fails."""
    model = tiny[kind]
    long, short = prompts_for(model, [9, 6], seed=1), prompts_for(model, [2, 3], seed=2)
    expected_long, expected_short = run(model, long, 6), run(model, short, 9)
    held = cache_for(model, cache, 2, 14)
    kwargs = dict(cache=held, pipeline=mode)

    def check():
        assert run(model, short, 9, **kwargs) == expected_short
        assert held.length == 3 + 9 - 1
        assert run(model, long, 6, **kwargs) == expected_long
        assert held.length == 9 + 6 - 1

    check()
    assert run(model, long, 6, **kwargs) == expected_long  # all of the prompt is there already
    for taken in (1, 3):
        steps = gen.generate(model, long, 6, **kwargs)
        assert list(map(list, zip(*itertools.islice(steps, taken)))) == [
            row[:taken] for row in expected_long
        ]
        steps.close()
        assert held.length == 9 + taken - 1
        check()

    def fail(n):
        if n == 3:
            raise RuntimeError("step 3 failed")

    update = held.update

    def fail_in_second_layer(kv, *args):
        if held.length == 9 + 3 and kv is held.layers[1]:
            raise RuntimeError("step 3 failed")
        return update(kv, *args)

    for broken in (Watched(model, before=fail), Watched(model, after=fail), model):
        if broken is model:
            held.update = fail_in_second_layer
        with pytest.raises(RuntimeError, match="^step 3 failed$"):
            run(broken, long, 6, **kwargs)
        held.update = update
        check()


def test_requests_do_not_disturb_each_other(tiny):
    model, state = tiny["qwen3"], torch.get_rng_state()
    prompts = prompts_for(model, [4, 2])
    for mode in MODES:
        kwargs = dict(SAMPLED, pipeline=mode)
        alone = [run(model, prompts, 8, **kwargs | dict(seed=seed)) for seed in (1, 2)]
        assert alone[0] != alone[1]
        both = [gen.generate(model, prompts, 8, **kwargs | dict(seed=seed)) for seed in (1, 2)]
        first, second = zip(*zip(*both))  # in turns
        assert [new_ids(first), new_ids(second)] == alone
        stop_ids = [row[2] for row in alone[0]]  # the step that ran ahead has drawn in vain
        stopped = run(model, prompts, 8, stop_ids=stop_ids, **kwargs | dict(seed=1))
        assert stopped == [cut(row, stop_ids) for row in alone[0]]
        assert run(model, prompts, 8, **kwargs | dict(seed=2)) == alone[1]
    assert torch.equal(torch.get_rng_state(), state)  # nor anything else in the process
    unseeded = [run(model, prompts, 8, temperature=1.0) for _ in range(2)]
    assert unseeded[0] != unseeded[1]


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("cache", CACHES)
def test_the_consumer_keeps_its_own_modes(tiny, cache, mode):
    model = tiny["qwen3"]
    weight = torch.ones(2, requires_grad=True)
    for outside in (torch.enable_grad, torch.no_grad):
        with outside():
            enabled = torch.is_grad_enabled()
            for _ in gen.generate(model, [[1, 2]], 3, cache=cache, pipeline=mode, runners_up=0):
                assert not torch.is_inference_mode_enabled()
                assert torch.is_grad_enabled() == enabled
                assert (weight * 2).requires_grad == enabled
    assert not torch.is_inference_mode_enabled()


BAD = [
    (dict(prompts=[]), "no prompt, or an empty one: each needs at least one id"),
    (dict(prompts=[[1], []]), "no prompt, or an empty one: each needs at least one id"),
    (dict(cache="small"), "cache 'small' is not one of none, growing, preallocated"),
    (dict(compile="reduce-overhead"), "compile 'reduce-overhead' .*: use --cuda-graph instead"),
    (dict(compile="fast"), "compile mode 'fast' is not 'max-autotune'"),
    (dict(cuda_graph=True), "CUDA graphs need a CUDA device, not cpu: drop --cuda-graph"),
    (dict(pipeline="on"), "pipeline 'on' is not one of off, event, ping-pong, unchecked"),
    (dict(temperature=-1.0), r"temperature must be 0 \(greedy\) or more, not -1.0"),
    (dict(temperature=float("nan")), r"temperature must be 0 \(greedy\) or more, not nan"),
    (dict(temperature=float("inf")), r"temperature must be 0 \(greedy\) or more, not inf"),
    (dict(top_k=-1), r"top_k must be 0 \(off\) or more, not -1"),
    (dict(top_p=1.01), r"top_p must lie between 0 and 1.0 \(off\), not 1.01"),
    (dict(top_p=-0.1), r"top_p must lie between 0 and 1.0 \(off\), not -0.1"),
    (dict(top_p=float("nan")), r"top_p must lie between 0 and 1.0 \(off\), not nan"),
    (dict(runners_up=2, pipeline="event"), "showing tokens .* every step: use --pipeline off"),
]


@pytest.mark.parametrize("kwargs, message", BAD, ids=[str(kwargs) for kwargs, _ in BAD])
def test_arguments_are_checked_when_generate_is_called(kwargs, message):
    stub = Stub()
    with pytest.raises(ValueError, match=f"^{message}$"):
        gen.generate(stub, **{"prompts": [[1]]} | kwargs)
    assert stub.fed == []


def test_a_cache_object_must_fit():
    stub = Stub()
    with pytest.raises(ValueError, match="^the cache holds 2 rows, not 1$"):
        gen.generate(stub, [[1]], cache=cache_for(stub, "growing", 2, None))
    with pytest.raises(ValueError, match="^cache must be a name or an object of kvcache.py, not 3"):
        gen.generate(stub, [[1]], cache=3)
    stub.device = torch.device("cuda")
    for cache in ("none", "growing", cache_for(Stub(), "growing", 1, None)):
        message = "^CUDA graphs need fixed addresses: use --cache preallocated$"
        with pytest.raises(ValueError, match=message):
            gen.generate(stub, [[1]], cache=cache, cuda_graph=True)


def test_runners_up_are_the_plain_softmax():
    p = torch.tensor([0.1, 0.4, 0.2, 0.25, 0.05])
    for kwargs in ({}, dict(temperature=0.5, top_k=1, seed=0)):
        stub = Stub(vocab_size=5, logits=p.log())
        for n, others in [(2, [3, 2]), (9, [3, 2, 0, 4])]:
            [[(id, best, rest)]] = gen.generate(stub, [[0]], 1, runners_up=n, **kwargs)
            assert (id, best) == (1, pytest.approx(0.4))
            assert rest == [(i, pytest.approx(p[i].item())) for i in others]
    # A draw that was not the best: the best is then among the others.
    draws = gen.generate(Stub(vocab_size=5, logits=p.log()), [[0]], 50, runners_up=2,
                         temperature=1.0, seed=0)  # fmt: skip
    for [(id, q, rest)] in draws:
        assert q == pytest.approx(p[id].item())
        assert [i for i, _ in rest] == [i for i in (1, 3, 2) if i != id][:2]
    rows = [[3, 9, 3], [3, 3, 3]]
    entries = list(gen.generate(Stub(rows), [[0]] * 2, 3, stop_ids=(9,), runners_up=1))
    assert [[entry and entry[0] for entry in row] for row in entries] == [[3, 3], [9, 3], [None, 3]]


# --- Streams, without a device that has them ---


class Stream:
    """A first-in first-out queue of work, and of points in other queues that must be passed."""

    def __init__(self, gpu):
        self.gpu, self.queue, self.done = gpu, [], 0
        gpu.streams.append(self)

    def __enter__(self):
        self.gpu.entered.append(self)

    def __exit__(self, *error):
        self.gpu.entered.pop()

    def wait_stream(self, other):
        self.queue.append((other, len(other.queue)))

    def synchronize(self):
        self.gpu.waits.append("stream")
        self.gpu.let_time_pass()
        self.work()

    def work(self, until=None, forced=True):
        """Works through the queue. Unless forced, stops where another stream must come first."""
        until = len(self.queue) if until is None else until
        while self.done < until:
            item = self.queue[self.done]
            if isinstance(item, tuple):
                other, point = item
                if not forced and other.done < point:
                    return
                other.work(point)
            else:
                self.gpu.execute(item)
            self.done += 1


class Event:
    """A point in a stream; one that was never recorded has passed."""

    def __init__(self, gpu):
        self.gpu, self.point = gpu, None

    def record(self, stream=None):
        stream = stream or self.gpu.current
        self.point = stream, len(stream.queue)
        self.gpu.let_time_pass()

    def synchronize(self):
        self.gpu.waits.append("event")
        self.gpu.let_time_pass()
        if self.point is not None:
            stream, until = self.point
            stream.work(until)


class Graph:
    """A captured CUDA graph: the queued work, to be queued again by every replay."""

    def __init__(self, gpu):
        self.gpu, self.work, self.replays = gpu, [], 0

    def pool(self):
        return self.memory

    def replay(self):
        self.replays += 1
        self.gpu.queue(lambda: [do() for do in self.work])


class PretendedGPU(TorchDispatchMode):
    """Runs every operator late, on CPU tensors: it goes into the queue of the current stream.

    Until the queue gets there, a result holds NaN or 0 (and pinned memory -1), so whatever is
    read or used too early gives wrong tokens. `pace` says when the queues are worked through:
    "late" not before the host waits for it, "home first" as well, but for the caller's own
    stream, which is never late, "early" at once, and a number at random moments, which it
    decides. All as far as the waits between streams allow.
    """

    def __init__(self, pace):
        super().__init__()
        self.pace, self.rng = pace, random.Random(pace)
        self.streams, self.entered, self.graphs, self.pinned = [], [], [], []
        self.waits = []  # what the host has waited for
        self.capturing, self.executing = None, False
        self.home = Stream(self)

    @property
    def current(self):
        return self.entered[-1] if self.entered else self.home

    def patch(self, monkeypatch):
        """Puts this device's streams, events, pinned memory and graphs into torch."""
        empty = torch.empty

        def empty_or_pinned(*size, pin_memory=False, **kwargs):
            tensor = empty(*size, **kwargs)
            if pin_memory:
                self.execute(lambda: tensor.fill_(-1))
                self.pinned.append(tensor)
            return tensor

        @contextlib.contextmanager
        def capture(graph, pool=None, **kwargs):
            graph.memory = pool or object()
            self.capturing = graph.work
            try:
                yield
            finally:
                self.capturing = None
            self.graphs.append(graph)

        monkeypatch.setattr(launchers, "overlaps", lambda device: True)
        monkeypatch.setattr(torch, "empty", empty_or_pinned)
        monkeypatch.setattr(torch, "Stream", lambda device=None: Stream(self))
        monkeypatch.setattr(torch, "Event", lambda device=None: Event(self))
        monkeypatch.setattr(torch.accelerator, "current_stream", lambda device=None: self.current)
        monkeypatch.setattr(torch.cuda, "CUDAGraph", lambda: Graph(self))
        monkeypatch.setattr(torch.cuda, "graph", capture)
        monkeypatch.setattr(torch.cuda, "Stream", lambda: None)
        return self

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        kwargs = kwargs or {}
        if self.executing:
            return func(*args, **kwargs)
        with self:  # an operator made of others: reshape is a view here, a copy there
            result = func.decompose(*args, **kwargs)
        if result is not NotImplemented:
            return result
        if func is torch.ops.aten._local_scalar_dense.default:
            self.waits.append("item")
            self.current.work()
            return func(*args, **kwargs)
        if func._schema.is_mutable:
            self.queue(lambda: func(*args, **kwargs))
            blocking = func is torch.ops.aten.copy_.default and not (*args, False)[2]
            if blocking and storage(args[0]) in map(storage, self.pinned):
                self.waits.append("copy")
                self.current.work()
            return args[0]
        result = func(*args, **kwargs)  # for its shape: the values may not be there yet
        known = {storage(t) for t in tree_leaves((args, kwargs)) if isinstance(t, torch.Tensor)}
        fresh = [t for t in tree_leaves(result) if isinstance(t, torch.Tensor)]
        if all(storage(t) in known for t in fresh) or "empty" in func.name():
            return result  # views
        for t in fresh:
            t.fill_(float("nan") if t.is_floating_point() else 0)

        def later():
            values = [t for t in tree_leaves(func(*args, **kwargs)) if isinstance(t, torch.Tensor)]
            for t, value in zip(fresh, values):
                t.copy_(value)

        self.queue(later)
        return result

    def queue(self, work):
        (self.current.queue if self.capturing is None else self.capturing).append(work)
        if self.pace in ("early", "home first"):
            self.let_time_pass()

    def execute(self, work):
        before, self.executing = self.executing, True
        with torch.inference_mode():
            work()
        self.executing = before

    def let_time_pass(self):
        if self.pace == "early":
            self.finish()
        elif self.pace == "home first":
            self.home.work(forced=False)  # in `event`, home is where the steps are
        elif self.pace != "late":
            for stream in self.rng.sample(self.streams, len(self.streams)):
                pending = len(stream.queue) - stream.done
                some = self.rng.choice([0, 0, self.rng.randint(0, pending), pending])
                stream.work(stream.done + some, forced=False)

    def finish(self):
        for stream in self.streams:
            stream.work()


def storage(tensor):
    return tensor.untyped_storage().data_ptr()


PACES = ["late", "home first", "early", 0, 1, 2]


@pytest.mark.parametrize("pace", PACES)
@pytest.mark.parametrize("mode", MODES)
def test_str1_launcher_hands_out_each_step_once_it_is_done(monkeypatch, mode, pace):
    N = 9
    with PretendedGPU(pace).patch(monkeypatch) as gpu:
        state = torch.ones(2, 3, dtype=torch.int64)  # prepared on the caller's own stream
        result = torch.zeros_like(state)

        def step():
            result.copy_(state * 2)  # 2, 6, 18, ...
            state.add_(result)  # 1, 3, 9, ...

        launcher = launchers.Launcher(result, mode, N)
        assert gpu.current is gpu.home
        launched = 0
        for i in range(N):
            while launched < min(i + 1 + launcher.ahead, N):
                launcher.launch(launched, step)
                launched += 1
                assert gpu.current is gpu.home
            assert gpu.waits == ["event"] * i  # launching waits for nothing
            ids, stopped = launcher.wait(i)
            assert ids == stopped == [2 * 3**i] * 3
            assert all(type(id) is int for id in ids)
            if pace == "late" and launched > i + 1:  # nor is more waited for than was asked
                assert any(stream.done < len(stream.queue) for stream in gpu.streams)
        launcher.finish()
        assert all(stream.done == len(stream.queue) for stream in gpu.streams)
        assert state.tolist() == [[3**N] * 3] * 2


@pytest.mark.parametrize("mode", MODES)
def test_launcher_is_ahead_by_what_its_mode_says(monkeypatch, mode):
    with PretendedGPU("late").patch(monkeypatch) as gpu:
        result = torch.zeros(2, 1, dtype=torch.int64)
        launcher, order = launchers.Launcher(result, mode, 4), []
        assert launcher.ahead == {"off": 0, "event": 1, "ping-pong": 1, "unchecked": 3}[mode]
        for i in range(launcher.ahead + 1):
            launcher.launch(i, lambda: order.append(gpu.current))
        launcher.finish()  # also when nobody waited
        assert all(stream.done == len(stream.queue) for stream in gpu.streams)
    if mode == "ping-pong":
        assert order[0] is not order[1] and gpu.home not in order
    else:
        assert order == [gpu.home] * (launcher.ahead + 1)


@pytest.mark.parametrize("pace", PACES)
@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("cache", CACHES)
def test_str3_generate_orders_its_streams(tiny, monkeypatch, cache, mode, pace):
    """Two requests with one cache; the first stops while a step is in flight."""
    model, sampling = tiny["qwen3" if cache == "preallocated" else "gpt2"], SAMPLED
    first, second = prompts_for(model, [4, 2]), prompts_for(model, [2, 5], seed=1)
    free = run(model, first, 8, **sampling)
    stop_ids = [row[3] for row in free]
    expected = [cut(row, stop_ids) for row in free]
    expected_second = run(model, second, 5, **sampling)
    with PretendedGPU(pace).patch(monkeypatch) as gpu:
        held = cache_for(model, cache, 2, 11)
        kwargs = dict(cache=held, pipeline=mode, **sampling)
        steps = []
        for entries in gen.generate(model, first, 8, stop_ids=stop_ids, **kwargs):
            steps.append(entries)
            assert gpu.current is gpu.home
            in_flight = sum(len(stream.queue) - stream.done for stream in gpu.streams)
            if pace == "late" and mode == "off":
                assert in_flight == 0
            elif pace == "late" and mode in ("event", "ping-pong"):
                assert in_flight > 0  # the device has work while the host looks
        assert new_ids(steps) == expected
        length = 4 + len(steps) - 1
        gpu.finish()
        assert held.length == length
        if cache == "preallocated":  # the step in flight was not the last to write there
            assert held.pos.tolist() == [length - 1]
        assert set(gpu.waits) <= {"event", "stream"}
        if mode == "unchecked":
            assert gpu.waits == ["event"] * len(steps) + ["stream"]
        assert run(model, second, 5, **kwargs) == expected_second


@pytest.mark.parametrize("sampling", [{}, SAMPLED], ids=["greedy", "sampled"])
@pytest.mark.parametrize("pace", ["late", 0])
@pytest.mark.parametrize("mode", MODES)
def test_cmp3_replayed_steps(tiny, monkeypatch, mode, pace, sampling):
    """One graph for each number of slots read, here 256 and 320; none for a second request."""
    model, N = tiny["gpt2" if sampling else "qwen3"], 12
    first, second = prompts_for(model, [250, 247]), prompts_for(model, [120, 126], seed=1)
    expected = [run(model, prompts, N, **sampling) for prompts in (first, second)]
    without_checks(monkeypatch)
    with PretendedGPU(pace).patch(monkeypatch) as gpu:
        held = cache_for(model, "preallocated", 2, 262)
        calls = []
        watched = Watched(model, before=calls.append)
        kwargs = dict(cache=held, pipeline=mode, cuda_graph=True, **sampling)
        assert run(watched, first, N, **kwargs) == expected[0]
        assert len(gpu.graphs) == 2 and gpu.graphs[0].memory is gpu.graphs[1].memory
        # The prompt, then one live call and one capture for each of the two graphs.
        assert len(calls) == 1 + 2 * 2
        assert [graph.replays for graph in gpu.graphs] == [250 + 6 - 251, 250 + 11 - 257]
        assert run(watched, second, N, **kwargs) == expected[1]
        assert len(gpu.graphs) == 2 and len(calls) == 5 + 1


def test_replayed_steps_forget_who_stopped(tiny, monkeypatch):
    model, prompts = tiny["gpt2"], prompts_for(tiny["gpt2"], [3, 2])
    free = run(model, prompts, 8)
    stop_ids = [row[2 + r] for r, row in enumerate(free)]
    without_checks(monkeypatch)
    with PretendedGPU("early").patch(monkeypatch):
        kwargs = dict(cache=cache_for(model, "preallocated", 2, 10), cuda_graph=True)
        for _ in range(2):
            rows = run(model, prompts, 8, stop_ids=stop_ids, **kwargs)
            assert rows == [cut(row, stop_ids) for row in free]


def test_runners_up_of_replayed_steps(tiny, monkeypatch):
    model, N = tiny["qwen3"], 12
    requests = prompts_for(model, [250]), prompts_for(model, [248], seed=1)

    def ids_and_p(prompts, **kwargs):
        steps = gen.generate(model, prompts, N, runners_up=2, **kwargs)
        pairs = [pair for [(id, p, others)] in steps for pair in [(id, p), *others]]
        return [id for id, _ in pairs], pytest.approx([p for _, p in pairs], rel=1e-4)

    plain = [ids_and_p(prompts) for prompts in requests]
    without_checks(monkeypatch)
    with PretendedGPU("early").patch(monkeypatch):
        kwargs = dict(cache=cache_for(model, "preallocated", 1, 262), cuda_graph=True)
        run(model, requests[0], N, **kwargs)
        for prompts, (ids, p) in zip(requests, plain):
            replayed_ids, replayed_p = ids_and_p(prompts, **kwargs)
            assert replayed_ids == ids and replayed_p.expected == p


def test_replayable_runs_live_then_captures_then_replays(monkeypatch):
    with PretendedGPU("early").patch(monkeypatch) as gpu:
        count, calls, graphs = torch.zeros(1), [], {}

        def step():
            calls.append(1)
            count.add_(1)

        def step_that_fails():
            raise RuntimeError("cannot be captured")

        keys = [256, 256, 256, 256, 320, 320, 320]
        for n, (key, total) in enumerate(zip(keys, [1, 2, 2, 2, 3, 4, 4])):
            if n == 1:
                with pytest.raises(RuntimeError, match="^cannot be captured$"):
                    launchers.replayable(step_that_fails, graphs, key)()
            launchers.replayable(step, graphs, key)()
            assert len(calls) == total  # Python runs in the first two calls of a key only
            assert count.item() == n + 1  # each is one step, also the one that captures
        assert [graph.replays for graph in gpu.graphs] == [3, 2]
        assert gpu.graphs[0].memory is gpu.graphs[1].memory


# --- Nothing waits for the device by accident ---


@contextlib.contextmanager
def reads_logged(log):
    """Appends "R" to the log whenever the host reads a value of a tensor."""
    aten = torch.ops.aten
    reads = {aten.item, aten._local_scalar_dense, aten.is_nonzero, aten.nonzero, aten.equal}

    class Functions(TorchFunctionMode):
        def __torch_function__(self, func, types, args=(), kwargs=None):
            if getattr(func, "__name__", "") in ("tolist", "numpy", "cpu", "__array__"):
                log.append("R")
            return func(*args, **kwargs or {})

    class Operators(TorchDispatchMode):
        def __torch_dispatch__(self, func, types, args=(), kwargs=None):
            if func.overloadpacket in reads:
                log.append("R")
            return func(*args, **kwargs or {})

    with Functions(), Operators():
        yield


@pytest.mark.parametrize("sampling", [{}, SAMPLED], ids=["greedy", "sampled"])
@pytest.mark.parametrize("cache", CACHES)
@pytest.mark.parametrize("kind", KINDS)
def test_str5_one_read_a_step_and_none_in_the_model(tiny, kind, cache, sampling):
    log, prompts = [], [[5, 6], [7]]
    free = run(tiny[kind], prompts, 6, **sampling)
    model = Watched(tiny[kind], lambda n: log.append("("), lambda n: log.append(")"))
    for mode, expected in {
        "off": "()R" * 6,
        "event": "()" + "()R" * 5 + "R",
        "ping-pong": "()" + "()R" * 5 + "R",
        "unchecked": "()" * 6 + "R" * 6,
    }.items():
        never = next(id for id in range(99) if id not in sum(free, []))
        for stop_ids in ((), (never,)):
            log.clear()
            with reads_logged(log):
                kwargs = dict(cache=cache, pipeline=mode, stop_ids=stop_ids, **sampling)
                list(gen.generate(model, prompts, 6, **kwargs))
            assert "".join(log) == expected


class DeviceOnly(TorchDispatchMode):
    """Once `strict`, refuses every operator that touches a tensor of the CPU."""

    strict = False

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        kwargs = kwargs or {}
        if func.overloadpacket is torch.ops.aten.exponential_:
            kwargs.pop("generator")  # a CPU's here, and pretended tensors take none
        result = func(*args, **kwargs)
        tensors = [t for t in tree_leaves((args, kwargs, result)) if isinstance(t, torch.Tensor)]
        if self.strict and any(t.device.type != "cuda" for t in tensors):
            raise AssertionError(f"{func} touches the CPU: {[t.device for t in tensors]}")
        return result


class Pinned:
    """Host memory that takes copies without waiting, and says that id 1 was chosen."""

    def __init__(self, shape):
        self.shape = shape

    def copy_(self, source, non_blocking=False):
        assert non_blocking and source.device.type == "cuda" and source.shape == self.shape

    def tolist(self):
        return [[1] * self.shape[1], [0] * self.shape[1]]


def map_tensors(value, function):
    """A model with every tensor replaced."""
    if isinstance(value, torch.Tensor):
        return function(value)
    if isinstance(value, tuple) and hasattr(value, "_fields"):
        return type(value)(*(map_tensors(v, function) for v in value))
    if isinstance(value, (list, tuple)):
        return type(value)(map_tensors(v, function) for v in value)
    if dataclasses.is_dataclass(value) and not isinstance(value, models.Config):
        fields = {f.name: getattr(value, f.name) for f in dataclasses.fields(value)}
        return dataclasses.replace(
            value, **{name: map_tensors(v, function) for name, v in fields.items()}
        )
    return value


@pytest.fixture
def fake_cuda(monkeypatch):
    """Shapes without values on a "cuda" device that need not exist -> DeviceOnly, entered."""
    if torch.version.cuda is None:
        pytest.skip("pretended cuda tensors need a CUDA build of torch")
    from torch._subclasses import FakeTensorMode

    PretendedGPU("late").patch(monkeypatch)
    empty, generator = torch.empty, torch.Generator
    monkeypatch.setattr(torch, "Generator", lambda device: generator())
    monkeypatch.setattr(
        torch,
        "empty",
        lambda *size, pin_memory=False, **kw: Pinned(*size) if pin_memory else empty(*size, **kw),
    )
    with FakeTensorMode():
        skip_unless_torch_pretends()
        with DeviceOnly() as mode:
            yield mode


@pytest.mark.parametrize("sampling", [{}, SAMPLED], ids=["greedy", "sampled"])
@pytest.mark.parametrize("cache", CACHES)
@pytest.mark.parametrize("kind", KINDS)
def test_str5_a_step_stays_on_the_device(tiny, fake_cuda, kind, cache, sampling):
    on_cuda = lambda t: torch.empty(t.shape, dtype=t.dtype, device="cuda")  # noqa: E731
    model = map_tensors(tiny[kind], on_cuda)
    assert model.device.type == "cuda"

    def from_the_second_call_on(n):
        fake_cuda.strict = n > 0

    watched = Watched(model, before=from_the_second_call_on)
    for mode in MODES if cache == "preallocated" else ["event"]:
        kwargs = dict(cache=cache, pipeline=mode, stop_ids=(3, 4), **sampling)
        watched.calls, fake_cuda.strict = 0, False
        assert list(gen.generate(watched, [[5, 6, 7], [8]], 4, **kwargs)) == [[1, 1]] * 4
        assert watched.calls == 4 and fake_cuda.strict


# --- The same on a CUDA device ---


@pytest.fixture(scope="session")
def on_cuda(folders):
    """A tiny model in fp32 on the GPU."""
    return models.load(str(folders["qwen3"]), "cuda", "float32")


@needs_cuda
@pytest.mark.parametrize("mode", ["event", "ping-pong", "unchecked"])
@pytest.mark.parametrize("cache", ["growing", "preallocated"])
def test_str1_str3_a_slow_gpu_changes_nothing(on_cuda, monkeypatch, cache, mode):
    """1,000 short runs in all, with random delays and a -1 in all pinned memory."""
    rng, empty, pinned = random.Random(0), torch.empty, []

    def empty_or_minus_one(*size, pin_memory=False, **kwargs):
        tensor = empty(*size, pin_memory=pin_memory, **kwargs)
        if pin_memory:
            pinned.append(tensor.fill_(-1))
        return tensor

    def delay(n):
        torch.cuda._sleep(rng.choice([0, 1_000, 50_000, 200_000]))
        for _ in range(4):  # takes over whatever memory was given back too early
            torch.full((2, 2), -1, device="cuda", dtype=torch.int64)

    prompts = prompts_for(on_cuda, [3, 2])
    free = run(on_cuda, prompts, 4)
    slow = Watched(on_cuda, before=delay, after=delay)
    with monkeypatch.context() as patch:
        patch.setattr(torch, "empty", empty_or_minus_one)
        for i in range(167):
            stop_ids = ((), free[i % 2][1:3])[i % 3 > 0]
            tokens = run(slow, prompts, 4, cache=cache, pipeline=mode, stop_ids=stop_ids)
            assert tokens == [cut(row, stop_ids) for row in free]
    assert pinned


@needs_cuda
@pytest.mark.parametrize("sampling", [{}, SAMPLED], ids=["greedy", "sampled"])
@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("cache", CACHES)
def test_str5_no_hidden_synchronisation(on_cuda, cache, mode, sampling):
    prompts, N = prompts_for(on_cuda, [3, 2]), 8
    expected = run(on_cuda, prompts, N, **sampling)
    strict = Watched(on_cuda, lambda n: torch.cuda.set_sync_debug_mode("error" if n else "default"))
    steps = []
    try:
        for entries in gen.generate(strict, prompts, N, cache=cache, pipeline=mode, **sampling):
            steps.append(entries)
            if len(steps) == N:  # the end does wait, once
                torch.cuda.set_sync_debug_mode("default")
    finally:
        torch.cuda.set_sync_debug_mode("default")
    assert new_ids(steps) == expected


@needs_cuda
@pytest.mark.parametrize("compile", [False, True])
def test_cmp3_graphs_on_a_gpu(on_cuda, monkeypatch, compile):
    """Eager tokens, one graph for each number of slots, none for a second request."""
    first, second = prompts_for(on_cuda, [250, 247]), prompts_for(on_cuda, [120, 126], seed=1)
    graph, captured = torch.cuda.CUDAGraph, []
    monkeypatch.setattr(torch.cuda, "CUDAGraph", lambda: captured.append(graph()) or captured[-1])
    for sampling in ({}, SAMPLED):
        expected = [run(on_cuda, prompts, 12, **sampling) for prompts in (first, second)]
        held = cache_for(on_cuda, "preallocated", 2, 262)
        captured.clear()
        for mode in MODES:
            for _ in range(2):
                for prompts, tokens in zip((first, second), expected):
                    kwargs = dict(cache=held, pipeline=mode, compile=compile, **sampling)
                    assert run(on_cuda, prompts, 12, cuda_graph=True, **kwargs) == tokens
            assert len(captured) == 2  # for 256 and for 320 slots


@needs_cuda
def test_num4_a_gpu_draws_what_the_seed_says(on_cuda):
    prompts = prompts_for(on_cuda, [3, 2])
    draws = [run(on_cuda, prompts, 20, **SAMPLED, pipeline=mode) for mode in MODES]
    assert draws == [draws[0]] * len(MODES)


# --- Sampling ---


@pytest.mark.parametrize(
    "p, settings, kept",
    [
        ([0.5, 0.3, 0.15, 0.05], dict(top_p=0.6), {0, 1}),
        ([0.5, 0.3, 0.15, 0.05], dict(top_p=0.85), {0, 1, 2}),
        ([0.5, 0.3, 0.15, 0.05], dict(top_p=1.0), {0, 1, 2, 3}),
        ([0.5, 0.3, 0.15, 0.05], dict(top_p=0.0), {0}),
        ([0.5, 0.3, 0.15, 0.05], dict(top_p=1e-8), {0}),
        ([0.5, 0.35, 0.1, 0.05], dict(top_p=0.9), {0, 1, 2}),
        ([0.5, 0.3, 0.15, 0.05], dict(top_k=0), {0, 1, 2, 3}),
        ([0.5, 0.3, 0.15, 0.05], dict(top_k=1), {0}),
        ([0.5, 0.3, 0.15, 0.05], dict(top_k=3), {0, 1, 2}),
        ([0.5, 0.3, 0.15, 0.05], dict(top_k=4), {0, 1, 2, 3}),
        ([0.5, 0.3, 0.15, 0.05], dict(top_k=100), {0, 1, 2, 3}),
        ([0.4, 0.3, 0.2, 0.1], dict(top_k=2, top_p=0.5), {0}),  # 4/7 of the two kept is enough
        ([0.4, 0.3, 0.2, 0.1], dict(top_k=2, top_p=0.6), {0, 1}),
        ([0.4, 0.3, 0.2, 0.1], dict(top_p=0.35, temperature=0.5), {0}),  # 16, 9, 4, 1 of 30
        ([0.4, 0.3, 0.2, 0.1], dict(top_p=0.6, temperature=0.5), {0, 1}),
    ],
)
def test_cli4_kept_tokens(p, settings, kept):
    order = torch.tensor([[0, 1, 2, 3], [2, 0, 3, 1], [3, 2, 1, 0]])  # best first in one row only
    p = torch.tensor(p, dtype=torch.float64)
    mass = p ** (1 / settings.get("temperature", 1.0))
    mass = mass * torch.tensor([i in kept for i in range(4)])
    drawn = sampled_from(p.log().float()[order] + 5, **settings)
    torch.testing.assert_close(drawn, (mass / mass.sum()).float()[order], atol=1e-6, rtol=0)
    assert (drawn > 0).tolist() == [[i in kept for i in row] for row in order.tolist()]


@pytest.mark.parametrize("temperature", [1e-3, 1e-20, 1e-40, 5e-324])
def test_cli2_any_temperature_above_zero_has_a_distribution(temperature):
    stub = Stub(vocab_size=4, logits=torch.tensor([-30.0, 2.0, 40.0, 39.0]))
    assert run(stub, [[0]], 20, temperature=temperature, seed=0) == [[2] * 20]


@pytest.mark.parametrize("settings", [dict(temperature=0), dict(temperature=0.0), dict(top_k=1)])
def test_cli2_greedy_is_argmax_and_draws_nothing(tiny, monkeypatch, settings):
    model, prompts = tiny["gpt2"], [[1, 2, 3]]
    expected = run(model, prompts, 8)
    if "temperature" in settings:
        monkeypatch.setattr(torch.Tensor, "exponential_", None)
    assert run(model, prompts, 8, **settings) == expected
    if "top_k" in settings:
        assert run(model, prompts, 8, temperature=2.0, seed=1, **settings) == expected


def test_num4_only_kept_tokens_in_the_right_ratio():
    logits = torch.randn(1000, generator=torch.Generator().manual_seed(0))
    logits[[17, 930]] = torch.tensor([5.0, 5.0 + torch.tensor(0.75).log()])  # 4 to 3
    settings = dict(temperature=1.0, top_k=2)
    rows = run(Stub(vocab_size=1000, logits=logits), [[0]] * 1000, 20, seed=3, **settings)
    draws = torch.tensor(rows)
    assert set(draws.unique().tolist()) == {17, 930}
    observed = (draws == 17).sum().item()
    expected = 20000 * 4 / 7
    chi_square = (observed - expected) ** 2 * (1 / expected + 1 / (20000 - expected))
    assert chi_square < 15.1  # one degree of freedom: p = 0.0001
    assert rows == run(Stub(vocab_size=1000, logits=logits), [[0]] * 1000, 20, seed=3, **settings)
    # Rows and steps are independent: neighbours agree as often as chance has it.
    chance = (4 / 7) ** 2 + (3 / 7) ** 2
    for same in ((draws[1:] == draws[:-1]), (draws[:, 1:] == draws[:, :-1])):
        assert abs(same.float().mean().item() - chance) < 4 * (0.25 / same.numel()) ** 0.5


def test_draws_follow_the_distribution():
    p = torch.tensor([0.02, 0.5, 0.08, 0.3, 0.1])
    expected = 20000 * p**2 / (p**2).sum()  # temperature 0.5
    stub = Stub(vocab_size=5, logits=p.log())
    rows = run(stub, [[0]] * 1000, 20, temperature=0.5, seed=5)
    observed = torch.tensor(rows).flatten().bincount(minlength=5)
    assert ((observed - expected) ** 2 / expected).sum() < 23.5  # four degrees: p = 0.0001


@pytest.mark.parametrize("kind", KINDS)
def test_compiled_and_eager_steps_give_the_same_tokens(tiny, monkeypatch, kind):
    model, prompts = tiny[kind], prompts_for(tiny[kind], [4])
    settings = [{}, SAMPLED]
    eager = [run(model, prompts, 8, **sampling) for sampling in settings]
    seen = compile_with(monkeypatch, "eager")
    for mode in ("off", "event"):
        kwargs = dict(compile=True, pipeline=mode)
        assert [run(model, prompts, 8, **kwargs, **sampling) for sampling in settings] == eager
    assert seen and not any("max_autotune" in kwargs["options"] for kwargs in seen)
    seen.clear()
    run(model, prompts, 2, compile="max-autotune")
    assert all(kwargs["options"]["max_autotune"] for kwargs in seen)
    assert not any("triton.cudagraphs" in kwargs["options"] for kwargs in seen)
    models.compiled.cache_clear()


# --- The command line ---


@pytest.fixture
def cli(capsys, monkeypatch):
    """cli(argument, ..., stdin=bytes) -> exit status, stdout, stderr"""
    precision = torch.get_float32_matmul_precision()

    def call(*arguments, stdin=b""):
        monkeypatch.setattr(sys, "stdin", io.TextIOWrapper(io.BytesIO(stdin)))
        try:
            status = gen.main([str(argument) for argument in arguments])
        except SystemExit as exit:
            status = exit.code
        return status, *capsys.readouterr()

    yield call
    torch.set_float32_matmul_precision(precision)


@pytest.fixture
def as_json(cli):
    """as_json(argument, ...) -> the object that --json prints"""

    def call(*arguments, **kwargs):
        status, out, err = cli(*arguments, "--json", **kwargs)
        assert (status, out.count("\n")) == (0, 1), err

        def refuse(constant):
            raise AssertionError(f"{constant} is not JSON")

        return json.loads(out, parse_constant=refuse)

    return call


@pytest.fixture
def no_weights(monkeypatch):
    """Reading weights fails the test."""

    def refuse(*args, **kwargs):
        raise AssertionError("the weights were read")

    monkeypatch.setattr(models, "load", refuse)


@pytest.fixture
def script(folders, monkeypatch):
    """script(row, ...) -> the stub that main() will load in place of the Qwen3 folder's model"""

    def make(*rows, **kwargs):
        V = json.loads((folders["qwen3"] / "config.json").read_text())["vocab_size"]
        stub = Stub(rows, **dict(vocab_size=V) | kwargs)
        monkeypatch.setattr(models, "load", lambda *args, **kwargs: stub)
        return stub

    return make


@pytest.fixture(scope="session")
def bpe(folders):
    return tokenizers.Tokenizer.from_file(str(folders["qwen3"] / "tokenizer.json"))


def ids_of(bpe, text):
    return bpe.encode(text, add_special_tokens=False).ids


@pytest.mark.parametrize("kind", KINDS)
def test_main_streams_text_and_ends_with_statistics(folders, tiny, bpe, cli, kind):
    folder = folders[kind]
    arguments = ("--model", folder, "--prompt", "Hello world", "--device", "cpu")
    status, out, err = cli(*arguments, "--max-new-tokens", 8)
    ids = ids_of(bpe, "Hello world")
    [tokens] = run(tiny[kind], [ids], 8, stop_ids=[bpe.token_to_id(EOT)])
    assert (status, out) == (0, bpe.decode(tokens) + "\n")
    assert re.fullmatch(
        rf"\[{re.escape(str(folder))}, cpu, float32, preallocated cache\] {len(ids)} prompt \+ "
        r"8 new tokens, first token after [\d.]+ s, then [\d.]+ tokens/s, "
        r"peak memory [\d,]+ MiB; loaded in [\d.]+ s\n", err,
    )  # fmt: skip
    assert len(cli(*arguments)[1]) > len(out)  # 100 tokens unless told otherwise


def test_json_schema(folders, tiny, bpe, as_json):
    folder = folders["qwen3"]
    arguments = ("--model", folder, "--device", "cpu", "--prompt", "Hello", "--prompt", "日本")
    flags = ("--max-new-tokens", 5, "--cache", "growing", "--pipeline", "event")
    result = as_json(*arguments, *flags)
    prompt_ids = [ids_of(bpe, "Hello"), ids_of(bpe, "日本")]
    tokens = run(tiny["qwen3"], prompt_ids, 5)
    stats = result.pop("stats")
    assert result == {
        "model": str(folder), "device": "cpu", "dtype": "float32", "cache": "growing",
        "compile": False, "cuda_graph": False, "pipeline": "event", "prompts": ["Hello", "日本"],
        "prompt_ids": prompt_ids, "new_ids": tokens, "texts": [bpe.decode(ids) for ids in tokens],
        "finish": ["length", "length"],
    }  # fmt: skip
    assert list(stats) == [
        "prompt_tokens", "new_tokens", "load_s", "prefill_s", "decode_s", "time_to_first_token_s",
        "decode_tokens_per_s", "end_to_end_tokens_per_s", "peak_memory_bytes",
    ]  # fmt: skip
    assert stats["prompt_tokens"] == sum(map(len, prompt_ids)) and stats["new_tokens"] == 10
    assert stats["time_to_first_token_s"] == stats["prefill_s"] > 0 and stats["load_s"] > 0
    assert stats["decode_tokens_per_s"] == pytest.approx(8 / stats["decode_s"])
    total = stats["prefill_s"] + stats["decode_s"]
    assert stats["end_to_end_tokens_per_s"] == pytest.approx(10 / total)
    assert type(stats["peak_memory_bytes"]) is int
    for N, nulls in [
        (1, {"decode_s", "decode_tokens_per_s"}),
        (0, {*list(stats)[3:8]}),
    ]:
        stats = as_json("--model", folder, "--prompt", "x", "--max-new-tokens", N)["stats"]
        assert {key for key, value in stats.items() if value is None} == nulls


def test_ben4_rates():
    times = [4.409816 - 3.751546 + i * 3.751546 / 189 for i in range(190)]
    cpu = torch.device("cpu")
    stats = gen.statistics([[1] * 32], [[1] * 190], 0.0, 0.0, times, cpu)
    assert stats["end_to_end_tokens_per_s"] == pytest.approx(43.09, abs=0.005)
    assert stats["decode_tokens_per_s"] == pytest.approx(50.38, abs=0.005)


@pytest.mark.parametrize(
    "flags",
    [
        ["--device", "auto"], ["--dtype", "float32"], ["--matmul-precision", "high"],
        ["--cache", "none"], ["--cache", "growing"], ["--pipeline", "event"],
        ["--pipeline", "ping-pong"], ["--compile"], ["--compile", "max-autotune"],
        ["--top-k", 3], ["--top-p", 0.5], ["--seed", 3], ["--ignore-eos"],
    ],
    ids=lambda flags: " ".join(map(str, flags)),
)  # fmt: skip
def test_flags_that_change_no_token(folders, tiny, bpe, as_json, monkeypatch, flags):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    seen = compile_with(monkeypatch, "eager") if "--compile" in flags else []
    result = as_json("--model", folders["qwen3"], "--prompt", "Hello", "--max-new-tokens", 6,
                     *flags)  # fmt: skip
    assert result["new_ids"] == run(tiny["qwen3"], [ids_of(bpe, "Hello")], 6)
    name, value = flags[0][2:].replace("-", "_"), flags[-1]
    if name in ("cache", "pipeline", "dtype"):
        assert result[name] == value
    assert result["compile"] == (False if name != "compile" else [True, value][len(flags) - 1])
    assert bool(seen) == (name == "compile")
    assert torch.get_float32_matmul_precision() == ("high" if value == "high" else "highest")
    if name == "compile":
        models.compiled.cache_clear()


def test_flags_that_change_tokens(folders, tiny, bpe, as_json):
    arguments = ("--model", folders["qwen3"], "--prompt", "Hello", "--max-new-tokens", 6)
    sampling = ("--temperature", 0.9, "--top-k", 40, "--top-p", 0.95, "--seed")
    ids = [ids_of(bpe, "Hello")]
    expected = run(tiny["qwen3"], ids, 6, **SAMPLED)
    assert expected != run(tiny["qwen3"], ids, 6)
    for _ in range(2):
        assert as_json(*arguments, *sampling, 7)["new_ids"] == expected
    assert as_json(*arguments, *sampling, 8)["new_ids"] != expected
    assert as_json(*arguments, "--dtype", "bfloat16")["dtype"] == "bfloat16"


@pytest.mark.parametrize("temperature, said", [((), True), ((0,), True), ((0.5,), False)])
@pytest.mark.parametrize("flag", [("--top-k", 5), ("--top-p", 0.9), ("--top-p", 1.0)])
def test_sampling_flags_without_temperature(flag, temperature, said, folders, cli):
    """Greedy decoding looks at neither: it says so, and the text is the same."""
    arguments = ("--model", folders["qwen3"], "--prompt", "Hello", "--max-new-tokens", 2)
    temperature = ("--temperature", *temperature) if temperature else ()
    status, text, notices = cli(*arguments, *flag, *temperature)
    said = said and flag[1] != 1.0
    expected = "--top-k and --top-p change nothing at temperature 0: add --temperature 1\n"
    assert status == 0 and notices.count(expected) == said and notices.count("\n") == 1 + said
    if said:
        assert text == cli(*arguments)[1]


def test_chat(folders, bpe, as_json):
    arguments = ("--model", folders["qwen3"], "--prompt", "Hello", "--max-new-tokens", 0)
    assert as_json(*arguments)["prompt_ids"] == [ids_of(bpe, "Hello")]
    turn = "<|im_start|>{}\n{}<|im_end|>\n".format
    answer = "<|im_start|>assistant\n"
    for flags, text in [
        (["--chat"], turn("user", "Hello") + answer),
        (["--chat", "--system", "Be"], turn("system", "Be") + turn("user", "Hello") + answer),
        (["--chat", "--system", ""], turn("system", "") + turn("user", "Hello") + answer),
        (["--chat", "--no-think"], turn("user", "Hello") + answer + "<think>\n\n</think>\n\n"),
    ]:
        result = as_json(*arguments, *flags)
        [ids] = result["prompt_ids"]
        assert bpe.decode(ids, skip_special_tokens=False) == text
        assert ids.count(bpe.token_to_id(TURN)) == text.count(TURN)
        assert result["prompts"] == ["Hello"]


def test_eos1_which_ids_stop(folder, bpe, script, as_json):
    eot, turn_end = bpe.token_to_id(EOT), bpe.token_to_id(TURN_END)
    a, b = ids_of(bpe, "a") + ids_of(bpe, "b")
    config = config_keys("qwen3", bpe.get_vocab_size())
    script([a, eot, b, turn_end, b], [a, b, b, b, b], fill=b)

    def lengths(*flags, **files):
        path = folder(**files)
        result = as_json("--model", path, "--prompt", "a", "--prompt", "b", "--max-new-tokens", 5,
                         *flags)  # fmt: skip
        script([a, eot, b, turn_end, b], [a, b, b, b, b], fill=b)
        stopped = len(result["new_ids"][0])
        kept = [id for id in [a, eot, b, turn_end, b][:stopped] if id in (a, b)]
        assert result["texts"] == [bpe.decode(kept), bpe.decode([a, b, b, b, b])]
        assert result["stats"]["new_tokens"] == stopped + 5
        return stopped, result["finish"]

    none = dict(generation_config=None)
    assert lengths(config=config | dict(eos_token_id=eot), **none) == (2, ["stop", "length"])
    assert lengths(config=config | dict(eos_token_id=[turn_end]), **none) == (4, ["stop", "length"])
    assert lengths(config=config, **none) == (4, ["stop", "length"])  # the tokenizer's
    other = dict(generation_config=dict(eos_token_id=[b + 1, turn_end]))
    assert lengths(config=config | dict(eos_token_id=eot), **other) == (4, ["stop", "length"])
    never = dict(config=config | dict(eos_token_id=[]), **none)
    assert lengths(**never) == (5, ["length", "length"])
    assert lengths("--chat", **never) == (4, ["stop", "length"])  # end of turn
    both = dict(config=config | dict(eos_token_id=eot), **none)
    assert lengths("--chat", **both) == (2, ["stop", "length"])
    assert lengths("--ignore-eos", "--chat", **both) == (5, ["length", "length"])


@pytest.mark.parametrize("mode", ["off", "event", "ping-pong"])
def test_tok3_each_token_is_written_and_flushed_at_once(folders, bpe, script, monkeypatch, mode):
    a, eot = ids_of(bpe, "a")[0], bpe.token_to_id(EOT)
    log = []
    stub = Watched(script([a] * 50 + [eot]), before=lambda n: log.append("step"))
    monkeypatch.setattr(models, "load", lambda *args: stub)
    arguments = ["--model", str(folders["qwen3"]), "--prompt", "x"]
    stdout = SimpleNamespace(write=log.append, flush=lambda: log.append("flush"))
    with monkeypatch.context() as patch:
        patch.setattr(sys, "stdout", stdout)
        assert gen.main([*arguments, "--pipeline", mode]) == 0
    written = [entry for entry in log if entry not in ("step", "flush")]
    assert written == ["a"] * 50 + ["\n"]
    ahead = 0 if mode == "off" else 1
    expected = ["step"] * (1 + ahead) + ["a", "flush", "step"] * 50
    assert log[: len(expected)] == expected
    assert log[len(expected)] in ("step", "\n") and log[-1] == "flush"


def test_tok5_ids_that_the_tokenizer_lacks(folders, bpe, script, cli, as_json):
    known = bpe.get_vocab_size()
    row = [ids_of(bpe, "Hello")[0], known, known + 266, ids_of(bpe, " world")[0]]
    arguments = ("--model", folders["qwen3"], "--prompt", "x", "--max-new-tokens", 4)
    script(row, vocab_size=known + 267)
    result = as_json(*arguments)
    assert result["new_ids"] == [row] and result["stats"]["new_tokens"] == 4
    assert result["texts"] == [bpe.decode([row[0], row[3]])]
    script(row, vocab_size=known + 267)
    assert cli(*arguments)[1] == bpe.decode([row[0], row[3]]) + "\n"
    script(row, vocab_size=known + 267)
    status, out, err = cli(*arguments, "--show-tokens")
    assert status == 0 and "<unknown" in out


def test_output_of_a_batch(folders, bpe, script, cli):
    a, b, eot = ids_of(bpe, "a")[0], ids_of(bpe, "b")[0], bpe.token_to_id(EOT)
    script([a, b, eot], [b, a, a, a])
    status, out, err = cli("--model", folders["qwen3"], "--prompt", "x", "--prompt", "y",
                           "--max-new-tokens", 4)  # fmt: skip
    assert (status, out) == (0, "[1]\nab\n[2]\nbaaa\n")
    assert "2 prompt + 7 new tokens" in err


def columns(line):
    """How wide a terminal shows it."""
    wide = sum(unicodedata.east_asian_width(char) in "WF" for char in line)
    return len(line) + wide


def test_show_tokens(folders, bpe, script, cli):
    ids = [ids_of(bpe, text)[0] for text in ("a", "b", "c", "d", "e")]
    p = torch.full((bpe.get_vocab_size(),), 1e-6)
    p[ids] = torch.tensor([0.5, 0.2, 0.15, 0.1, 0.05])
    script(logits=p.log())
    status, out, err = cli("--model", folders["qwen3"], "--prompt", "日本 x\n<|endoftext|>",
                           "--max-new-tokens", 2, "--show-tokens")  # fmt: skip
    assert status == 0
    prompt = ids_of(bpe, "日本 x\n<|endoftext|>")
    rows = [line.split() for line in out.splitlines()]
    for id in prompt:
        assert any(row[:1] == [str(id)] for row in rows)
    assert [str(prompt[-1]), f'"{EOT}"'] in rows and r'"\n"' in out
    a, b, c, d, e = map(str, ids)
    chosen = [a, '"a"', "50.0%", '"b"', "20%", '"c"', "15%", '"d"', "10%", '"e"', "5%"]
    assert rows[-2:] == [["1", *chosen], ["2", *chosen]]


def test_show_tokens_keeps_to_100_columns(folder, bpe, script, cli):
    """Every token of the vocabulary, one of 150 characters, and a batch of ten to step 1000."""
    words = ["x" * 150, "漢" * 70]
    long = tokenizers.Tokenizer.from_str(bpe.to_str())
    long.add_tokens(words)
    V = long.get_vocab_size()
    path = folder(config=config_keys("qwen3", V) | dict(max_position_embeddings=2048))
    long.save(str(path / "tokenizer.json"))
    arguments = ["--model", path, "--show-tokens"]
    script(list(range(V)), vocab_size=V)
    status, out, err = cli(*arguments, "--prompt", "".join(words), "--ignore-eos",
                           "--max-new-tokens", V)  # fmt: skip
    assert status == 0, err
    lines = out.split("\n")
    starts = [line.split()[:2] for line in lines]
    assert [[str(n + 1), str(n)] in starts for n in range(V)] == [True] * V
    assert max(map(columns, lines)) <= 100
    # Wide and cut pieces do not move the column behind them.
    ends = [re.search(r"\d+\.\d%(?=   )", line) for line in lines]
    assert len({columns(line[: end.end()]) for line, end in zip(lines, ends) if end}) == 1
    script(vocab_size=V, fill=ids_of(bpe, "a")[0])
    status, out, err = cli(*arguments, *["--prompt", "x"] * 10, "--max-new-tokens", 1000,
                           "--cache", "none")  # fmt: skip
    assert (status, out.count("\n") > 10_000) == (0, True)
    assert max(map(columns, out.split("\n"))) <= 100


def test_show_tokens_of_a_prompt_needs_no_weights(folder, bpe, cli):
    path = folder()
    (path / "model.safetensors").unlink()
    arguments = ("--model", path, "--prompt", "Hello world", "--show-tokens")
    status, out, err = cli(*arguments, "--max-new-tokens", 0)
    assert (status, err) == (0, "")
    pairs = [line.split(maxsplit=1) for line in out.splitlines()][1:]
    ids = ids_of(bpe, "Hello world")
    assert pairs == [[str(id), json.dumps(bpe.decode([id]))] for id in ids]
    status, out, err = cli(*arguments, "--max-new-tokens", 1)
    assert (status, err) == (2, f"error: {path} has no model.safetensors and no index of shards; "
                                "other formats are not read\n")  # fmt: skip


@pytest.mark.parametrize(
    "data, text",
    [
        (b"Hello", "Hello"), (b"Hello\n", "Hello"), (b"Hello\n\n", "Hello\n"), (b"", ""),
        (b"\n", ""), (b"a\0b\n", "a\0b"), (b"a\r\nb\r\n", "a\r\nb"),
        ("日本\n".encode(), "日本"), (b" x ", " x "),
    ],
)  # fmt: skip
def test_cli6_standard_input(folders, bpe, as_json, data, text):
    arguments = ("--model", folders["qwen3"], "--prompt", "-", "--max-new-tokens", 1)
    result = as_json(*arguments, stdin=data)
    assert result["prompts"] == [text]
    assert result["prompt_ids"] == [ids_of(bpe, text) or [bpe.token_to_id(EOT)]]


@pytest.mark.parametrize("kind", KINDS)
def test_cli1_an_empty_prompt_starts_a_text(folders, bpe, as_json, kind):
    eot = bpe.token_to_id(EOT)
    arguments = ("--model", folders[kind], "--prompt", "", "--prompt", "Hello")
    result = as_json(*arguments, "--max-new-tokens", 2)
    assert result["prompt_ids"] == [[eot], ids_of(bpe, "Hello")]
    result = as_json("--model", folders[kind], "--prompt", "", "--chat", "--max-new-tokens", 1)
    assert len(result["prompt_ids"][0]) > 1


def test_pipeline_without_streams_says_so_once(folders, cli):
    arguments = ("--model", folders["qwen3"], "--prompt", "x", "--max-new-tokens", 3)
    for mode in ("event", "ping-pong"):
        status, out, err = cli(*arguments, "--device", "cpu", "--pipeline", mode)
        notice, statistics = err.splitlines()
        assert notice == f"--pipeline {mode}: cpu has no streams, nothing overlaps"
        assert f"preallocated cache, {mode}]" in statistics
    assert len(cli(*arguments, "--device", "cpu")[2].splitlines()) == 1


def test_cli8_a_cpu_run_never_touches_cuda(folders, monkeypatch, cli):
    def refuse(*args, **kwargs):
        raise AssertionError("CUDA was touched")

    for name in ("_lazy_init", "init", "current_stream", "synchronize", "set_device"):
        monkeypatch.setattr(torch.cuda, name, refuse)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    for flags in ([], ["--device", "cpu"], ["--pipeline", "event"], ["--temperature", 1, "--json"]):
        arguments = ("--model", folders["qwen3"], "--prompt", "x", "--max-new-tokens", 3)
        assert cli(*arguments, *flags)[0] == 0


@pytest.mark.parametrize(
    "flags, message",
    [
        (["--model", "nope"], "no model or folder 'nope'; known names: tiny-qwen3, tiny-gpt2, .*"),
        (["--model", "caf\udce9"], r"no model or folder 'caf\\udce9'; .*"),
        *(
            (["--device", name], f"device '{name}' is not there; this machine has: cpu")
            for name in ("cuda", "mps", "xpu", "cuda:7", "foo", "cpu:1", "")
        ),
        (["--device", "meta"], "device 'meta' holds shapes only: nothing can run there"),
        (["--max-new-tokens", "-1"], "max_new_tokens must be 0 or more, not -1"),
        (["--max-new-tokens", "x"], "argument --max-new-tokens: invalid int value: 'x' .*"),
        (["--max-new-tokens", "513"], ".* and 513 new ones need 51[3-9] positions, the model has "
                                      "512: shorten the prompt or lower max_new_tokens"),
        (["--prompt", "Hello world " * 84_000], r"\d+ prompt tokens and 1 new ones need \d+ "
                                                "positions, the model has 512: .*"),
        (["--temperature", "-1"], r"temperature must be 0 \(greedy\) or more, not -1.0"),
        (["--temperature", "nan"], r"temperature must be 0 \(greedy\) or more, not nan"),
        (["--temperature", "inf"], r"temperature must be 0 \(greedy\) or more, not inf"),
        (["--temperature", "warm"], "argument --temperature: invalid float value: 'warm' .*"),
        (["--top-k", "-1"], r"top_k must be 0 \(off\) or more, not -1"),
        (["--top-p", "1.5"], r"top_p must lie between 0 and 1.0 \(off\), not 1.5"),
        (["--top-p", "-0.1"], r"top_p must lie between 0 and 1.0 \(off\), not -0.1"),
        (["--top-p", "nan"], r"top_p must lie between 0 and 1.0 \(off\), not nan"),
        (["--seed", str(2**64)], f"seed {2**64} does not fit in 64 bits"),
        (["--seed", str(-(2**63) - 1)], f"seed {-(2**63) - 1} does not fit in 64 bits"),
        (["--cache", "paged"], "argument --cache: invalid choice: 'paged' .*"),
        (["--dtype", "int8"], "argument --dtype: invalid choice: 'int8' .*"),
        (["--pipeline", "unchecked"], "argument --pipeline: invalid choice: 'unchecked' .*"),
        (["--matmul-precision", "low"], "argument --matmul-precision: invalid choice: 'low' .*"),
        (["--compile", "reduce-overhead"], ".*'reduce-overhead' .*: use --cuda-graph instead"),
        (["--compile", "fast"], "compile mode 'fast' is not 'max-autotune'"),
        (["--cuda-graph"], "CUDA graphs need a CUDA device, not cpu: drop --cuda-graph"),
        (["--system", "x"], "--system and --no-think need --chat .*"),
        (["--system", ""], "--system and --no-think need --chat .*"),
        (["--no-think"], "--system and --no-think need --chat .*"),
        (["--json", "--show-tokens"], "--json and --show-tokens exclude each other .*"),
        (["--show-tokens", "--pipeline", "event"], "showing tokens .*: use --pipeline off"),
        (["--prompt", "caf\udce9"], r"text is not valid Unicode: '\\udce9' at position 3"),
        (["--chat", "--system", "caf\udce9"], r"text is not valid Unicode: '\\udce9' at pos.* 3"),
        (["--prompt", "-"], "standard input is not UTF-8: .* byte 0xe9 in position 3: .*"),
        (["--unknown"], "unrecognized arguments: --unknown .*"),
    ],
    ids=lambda value: " ".join(value)[:40] if isinstance(value, list) else "",
)  # fmt: skip
def test_cli_errors_are_one_line_and_come_before_the_weights(
    folders, monkeypatch, cli, no_weights, flags, message
):
    for kind in ("cuda", "mps", "xpu"):
        monkeypatch.setattr(getattr(torch, kind), "is_available", lambda: False)
    base = ["--model", folders["qwen3"], "--prompt", "Hello", "--max-new-tokens", 1]
    status, out, err = cli(*base, *flags, stdin=b"caf\xe9\n")
    assert (status, out) == (2, "")
    assert re.fullmatch(f"error: {message}\n", err), err


def test_cli_errors_about_files(folder, cli, no_weights, monkeypatch):
    path = folder(config=None)
    arguments = ("--model", path, "--prompt", "x")
    assert cli(*arguments) == (2, "", f"error: {path} has no config.json\n")
    path = folder(tokenizer=None)
    assert cli(*arguments) == (2, "", f"error: {path} has no tokenizer.json\n")
    path = folder(tokenizer_config={})
    message = f"error: {path} has no chat template: leave out --chat\n"
    assert cli(*arguments, "--chat") == (2, "", message)
    assert cli("--model", path)[::2] == (
        2, "error: the following arguments are required: --prompt (see --help)\n"
    )  # fmt: skip
    cuda = torch.device("cuda")
    monkeypatch.setattr(models, "choose_device", lambda name="auto": cuda)
    for cache in ("none", "growing"):
        message = "error: CUDA graphs need fixed addresses: use --cache preallocated\n"
        assert cli(*arguments, "--cuda-graph", "--cache", cache) == (2, "", message)


def test_compile_without_a_compiler(folders, cli, no_weights):
    import torch._inductor.config as config

    with config.patch("cpp.cxx", ("no-such-compiler",)):
        result = cli("--model", folders["qwen3"], "--prompt", "x", "--device", "cpu", "--compile")
    message = "error: --compile needs a C++ compiler (g++ or clang++): none found\n"
    assert result == (2, "", message)


def test_ctrl_c_keeps_the_text_so_far(folders, bpe, script, cli, monkeypatch):
    def interrupt(n):
        if n == 3:
            raise KeyboardInterrupt

    stub = Watched(script(ids_of(bpe, "abcd")), before=interrupt)
    monkeypatch.setattr(models, "load", lambda *args: stub)
    assert cli("--model", folders["qwen3"], "--prompt", "x") == (130, "abc\n", "\n")


# --- The command line as its own process ---


def process(*arguments, code=None, **kwargs):
    """Exit status, stdout and stderr of generate.py, or of Python code; another current folder."""
    script = ["-c", code] if code else [gen.__file__]
    folder = Path(gen.__file__).parent
    env = os.environ | dict(OMP_NUM_THREADS="1", HF_HUB_OFFLINE="1", PYTHONPATH=str(folder),
                            PYTHONUTF8="1")  # fmt: skip
    kwargs = dict(capture_output=True) | kwargs
    command = [sys.executable, *script, *arguments]
    done = subprocess.run(command, env=env, timeout=120, **kwargs)
    return done.returncode, done.stdout, done.stderr


def test_process_reads_a_pipe_in_any_folder(folders, tiny, bpe, tmp_path):
    arguments = ("--model", folders["gpt2"], "--prompt", "-", "--max-new-tokens", "5")
    status, out, err = process(*arguments, input="日本\n".encode(), cwd=tmp_path)
    [tokens] = run(tiny["gpt2"], [ids_of(bpe, "日本")], 5)
    assert (status, out.decode()) == (0, bpe.decode(tokens) + "\n"), err
    assert len(err.splitlines()) == 1


@pytest.mark.skipif(os.name == "nt", reason="arguments are Unicode on Windows")
def test_cli6_process_with_an_argument_that_is_not_utf8(folders):
    result = process("--model", folders["qwen3"], "--prompt", b"caf\xe9")
    assert result == (2, b"", b"error: text is not valid Unicode: '\\udce9' at position 3\n")


def test_process_without_network_names_the_model_that_needs_none(tmp_path, monkeypatch):
    monkeypatch.setenv("HF_HOME", str(tmp_path))
    status, out, err = process("--model", "org/name", "--prompt", "x")
    message = (
        f"error: org/name: config.json is not in {tmp_path / 'hub'} and cannot be downloaded "
        r"\(.*offline mode is enabled.*\); --model tiny-qwen3 needs no download\n"
    )
    assert (status, out) == (2, b"") and re.fullmatch(message, err.decode()), err


@pytest.mark.skipif(os.name == "nt", reason="pipes end differently on Windows")
def test_process_is_quiet_when_its_reader_goes_away(folders):
    reader, writer = os.pipe()
    os.close(reader)
    arguments = ("--model", folders["qwen3"], "--prompt", "x")
    kwargs = dict(capture_output=False, stdout=writer, stderr=subprocess.PIPE)
    status, _, err = process(*arguments, **kwargs)
    os.close(writer)
    assert (status, err) == (0, b"")


@pytest.mark.skipif(os.name == "nt", reason="no SIGINT of one's own on Windows")
def test_process_ends_with_130_on_ctrl_c(folders):
    code = (
        "import os, signal, sys, time, generate, model\n"
        "signal.signal(signal.SIGINT, signal.default_int_handler)\n"  # ignored in the background
        "def load(*args):\n"
        f"    os.kill(os.getpid(), {int(signal.SIGINT)})\n"
        "    time.sleep(60)\n"
        "model.load = load\n"
        f"sys.exit(generate.main(['--model', {str(folders['qwen3'])!r}, '--prompt', 'x']))"
    )
    assert process(code=code) == (130, b"", b"\n")


# --- bench.py, measure.py -------------------------------------------------------------------------
# The clock, the decode loop and the processes are replaced where exact numbers are asserted.

BENCH = Path(bench.__file__)
CPU = torch.device("cpu")
CONTRACT = """model device device_name dtype matmul_precision torch threads cache compile cuda_graph
    pipeline batch_size prompt_tokens new_tokens runs status reason notes warmup_s compile_cache
    prefill_s time_to_first_token_s decode_tokens_per_s end_to_end_tokens_per_s total_s step_s
    ms_by_position peak_allocated_bytes peak_reserved_bytes fragmentation_bytes peak_rss_bytes
    compiled_graphs captured_graphs recompiles_while_timed same_tokens_as_first_row
    first_difference bandwidth_fraction""".split()
SMALL = {
    "model_type": "qwen3", "vocab_size": 128, "hidden_size": 32, "intermediate_size": 64,
    "num_hidden_layers": 2, "num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 8,
    "max_position_embeddings": 256, "rms_norm_eps": 1e-6, "rope_theta": 10000.0,
    "tie_word_embeddings": True, "torch_dtype": "float32",
}  # fmt: skip


@pytest.fixture
def small_model(tmp_path):
    """A folder with nothing but a config.json: random weights in small shapes."""
    folder = tmp_path / "small"
    folder.mkdir()
    (folder / "config.json").write_text(json.dumps(SMALL))
    return str(folder)


@pytest.fixture
def counters(monkeypatch):
    """What torch.compile has counted: {group: {name: count}}, nothing at first."""
    fake = {}
    monkeypatch.setattr(torch._dynamo.utils, "counters", fake)
    return fake


@pytest.fixture
def clock(monkeypatch, counters):
    """A clock that moves when told to: clock.now += seconds."""
    fake = SimpleNamespace(now=100.0)
    monkeypatch.setattr(measure, "time", SimpleNamespace(perf_counter=lambda: fake.now))
    return fake


def job(**changes):
    """A job as `plan` makes it, for one small row."""
    return {
        "model": "small", "device": "cpu", "dtype": "float32", "matmul_precision": "highest",
        "random_weights": True, "prompt_ids": [], "stop_ids": [-1], "cache": "growing",
        "compile": "off", "cuda_graph": "off", "pipeline": "off", "batch_size": 1, "runs": 3,
        "prompt_tokens": 4, "new_tokens": 20, "warmup": 1, "expandable_segments": False,
        "reference": None, "bandwidth": 1e9,
    } | changes  # fmt: skip


def steps(clock, prefill, step, batch=1):
    """A fake `produce`: every call takes `prefill` and then `step` seconds a token."""

    def produce(new):
        for i in range(new):
            clock.now += step if i else prefill
            yield [7] * batch

    return produce


def measured(**changes):
    """What `measure_row` returns for an ok row."""
    return {
        "status": "ok", "reason": None, "notes": [], "warmup_s": 1.5, "compile_cache": None,
        "prefill_s": 0.01, "time_to_first_token_s": 0.011, "decode_tokens_per_s": 99.0,
        "end_to_end_tokens_per_s": 50.0, "new_ids": [[1, 2, 3]],
        "total_s": {"mean": 2.0, "std": 0.1, "min": 1.9, "max": 2.1, "median": 2.0},
        "step_s": {"median": 0.01, "p10": 0.01, "p90": 0.01}, "ms_by_position": [10.0, 11.0],
        "peak_rss_bytes": 300 * 2**20, "compiled_graphs": 0, "captured_graphs": 0,
        "recompiles_while_timed": 0,
    } | changes  # fmt: skip


@pytest.fixture
def jobs(monkeypatch):
    """Runs no process: hands jobs to jobs.answer and keeps them in jobs.seen."""
    fake = SimpleNamespace(seen=[], answer=lambda job: measured())
    machine = {"device_name": "a CPU", "threads": 2, "bandwidth": 2e10}

    def in_process(task, job):
        if task is measure.describe:
            return {"status": "ok", "reason": None} | machine
        fake.seen.append(job)
        return fake.answer(job)

    monkeypatch.setattr(bench, "in_process", in_process)
    return fake


def run_bench(*argv):
    """main() in this process -> exit status, stdout, stderr."""
    out, err = io.StringIO(), io.StringIO()
    with contextlib.redirect_stdout(out), contextlib.redirect_stderr(err):
        status = bench.main([str(a) for a in argv])
    return status, out.getvalue(), err.getvalue()


def strict_json(path):
    """The document; NaN or infinity in it is an error."""

    def refuse(name):
        raise AssertionError(f"{name} in JSON")

    return json.loads(Path(path).read_text("utf-8"), parse_constant=refuse)


def settings_of(row):
    return tuple(row[key] for key in ("cache", "compile", "cuda_graph", "pipeline"))


# What is timed


def test_ben1_compiling_is_no_part_of_the_rate(clock):
    """First call 0.5 s late, then 1 ms a token, 20 tokens, 3 runs: 1000 tokens/s, not 40."""
    plain, calls = steps(clock, 0.001, 0.001), []

    def produce(new):
        clock.now += 0 if calls else 0.5
        calls.append(new)
        return plain(new)

    row = measure.measure(produce, job(), CPU)
    assert row["decode_tokens_per_s"] == pytest.approx(1000)
    assert row["end_to_end_tokens_per_s"] == pytest.approx(1000)
    assert row["warmup_s"] == pytest.approx(0.5 + 0.020 + 0.001)
    assert row["prefill_s"] == row["time_to_first_token_s"] == pytest.approx(0.001)
    assert calls == [20, 1, *[1, 20] * 3]  # the warm-up runs the very shapes that are timed
    assert row["total_s"] == pytest.approx(dict.fromkeys(
        ("mean", "min", "max", "median"), 0.020) | {"std": 0})  # fmt: skip
    assert row["ms_by_position"] == [1.0] * 19
    assert row["step_s"] == pytest.approx({"median": 0.001, "p10": 0.001, "p90": 0.001})


def test_ben1_spread_over_the_runs(clock):
    """Runs of 1, 2 and 6 s: mean 3, sample deviation sqrt(7), median 2; one run has no std."""
    slow = iter([0, 0, 0, 1, 0, 2, 0, 6])  # warm-up 20 and 1 tokens, then prefill and run in turn

    def produce(new):
        clock.now += next(slow)
        return [[7]] * new

    total = measure.measure(produce, job(), CPU)["total_s"]
    expected = {"mean": 3, "std": math.sqrt(7), "min": 1, "max": 6, "median": 2}
    assert total == pytest.approx(expected)
    row = measure.measure(steps(clock, 1, 1), job(runs=1), CPU)
    assert row["total_s"]["std"] is None and row["total_s"]["mean"] == 20


def test_ben2_clock_is_read_when_the_device_is_done(monkeypatch):
    log = []
    monkeypatch.setattr(measure, "synchronize", lambda device: log.append("sync"))
    tick = lambda: log.append("clock") or float(len(log))  # noqa: E731
    monkeypatch.setattr(measure, "time", SimpleNamespace(perf_counter=tick))

    def produce(new):
        log.append("generate")
        yield from [[7]] * new

    measure.timed(produce, 2, CPU)
    assert log == ["sync", "clock", "generate", "clock", "clock", "sync", "clock"]


@pytest.mark.parametrize(
    "device, expected",
    [("cpu", []), ("cuda:1", [("cuda", "cuda:1")]), ("mps", [("mps",)]), ("xpu", [("xpu", "xpu")])],
)
def test_ben2_backend_that_is_waited_for(monkeypatch, device, expected):
    log = []
    for kind in ("cuda", "mps", "xpu"):
        patched = lambda *a, kind=kind: log.append((kind, *map(str, a)))  # noqa: E731
        monkeypatch.setattr(getattr(torch, kind), "synchronize", patched)
    measure.synchronize(torch.device(device))
    assert log == expected


@pytest.mark.parametrize("bandwidth, fraction, flagged", [(1e10, 0.5, False), (2e9, 2.5, True)])
def test_ben2_rate_above_the_roofline_is_flagged(
    monkeypatch, clock, small_model, bandwidth, fraction, flagged
):
    """2 GB a step at 5 steps/s, read in two rows at once, is 10 GB/s whatever the batch."""
    monkeypatch.setattr(measure, "bytes_per_step", lambda model, job: 1e9)
    monkeypatch.setattr(measure, "generate", lambda *a, **k: steps(clock, 0.2, 0.2, 2)(a[2]))
    row = measure.measure_row(job(model=small_model, batch_size=2, bandwidth=bandwidth))
    assert row["decode_tokens_per_s"] == pytest.approx(10)
    assert row["bandwidth_fraction"] == pytest.approx(fraction)
    assert any("faster than memory" in note for note in row["notes"]) == flagged


def test_ben2_no_roofline_for_what_fits_in_a_cache(monkeypatch, clock, small_model):
    monkeypatch.setattr(measure, "generate", lambda *a, **k: steps(clock, 0.2, 0.2)(a[2]))
    for size, given in ((1e9 - 1, False), (1e9, True)):
        monkeypatch.setattr(measure, "bytes_per_step", lambda model, job, size=size: size)
        row = measure.measure_row(job(model=small_model))
        assert (row.get("bandwidth_fraction") is not None) == given


def test_ben4_two_rates_published_case(clock):
    """190 tokens, 4409.816 ms in all, 3751.546 ms of them decoding: 43.09 and 50.38."""
    produce = steps(clock, 4.409816 - 3.751546, 3.751546 / 189)
    row = measure.measure(produce, job(new_tokens=190, prompt_tokens=1000), CPU)
    assert round(row["end_to_end_tokens_per_s"], 2) == 43.09
    assert round(row["decode_tokens_per_s"], 2) == 50.38
    assert row["prefill_s"] == pytest.approx(0.65827)


def test_ben4_batch_counts_every_row(clock):
    row = measure.measure(steps(clock, 1, 0.1, batch=3), job(batch_size=3, new_tokens=11), CPU)
    assert row["decode_tokens_per_s"] == pytest.approx(3 * 10 / 1)
    assert row["end_to_end_tokens_per_s"] == pytest.approx(3 * 11 / 2)
    row = measure.measure(steps(clock, 1, 0.1), job(new_tokens=1), CPU)
    assert row["decode_tokens_per_s"] is None and row["step_s"] is None
    assert row["end_to_end_tokens_per_s"] == pytest.approx(1)


def test_unchecked_decodes_for_what_is_left_after_a_prefill(clock):
    """Everything is handed over at the end: 1 s prefill and 19 steps of 0.1 s."""

    def produce(new):
        clock.now += 1 + 0.1 * (new - 1)
        return [[7]] * new

    for at_once in ({"pipeline": "unchecked"}, {"cache": "transformers dynamic"}):
        row = measure.measure(produce, job(**at_once), CPU)
        assert row["decode_tokens_per_s"] == pytest.approx(10)
        assert row["prefill_s"] == pytest.approx(1)
        assert row["time_to_first_token_s"] == pytest.approx(2.9)
        assert row["ms_by_position"] == [] and row["step_s"] is None


def test_tokens_are_counted_as_produced(clock):
    """Row 0 stops after one token, row 1 after three: four tokens, two of them decoded."""

    def produce(new):
        for ids in [[5, 6], [None, 7], [None, 8]][:new]:
            clock.now += 1
            yield ids

    row = measure.measure(produce, job(batch_size=2), CPU)
    assert row["new_ids"] == [[5], [6, 7, 8]]
    assert row["decode_tokens_per_s"] == pytest.approx(2 / 2)
    assert row["end_to_end_tokens_per_s"] == pytest.approx(4 / 3)
    assert "stopped after 3 of 20 tokens" in row["notes"]


def test_runs_that_differ_are_noted(clock):
    number = itertools.count()
    row = measure.measure(lambda new: [[next(number)] for _ in range(new)], job(), CPU)
    assert row["notes"] == ["its runs gave different tokens"]


def test_stop_check_stays_on(monkeypatch, counters, small_model):
    """Stop ids that never come, unless the workload stops; the same cache serves all requests."""
    seen = []

    def generate(model, prompts, new, **settings):
        seen.append((prompts, new, settings))
        return [[7]] * new

    monkeypatch.setattr(measure, "generate", generate)
    measure.measure_row(job(model=small_model, cache="preallocated", compile="off", runs=1))
    assert [new for _, new, _ in seen] == [20, 1, 1, 20]
    assert {id(s["cache"]) for _, _, s in seen} == {id(seen[0][2]["cache"])}
    assert seen[0][2]["cache"].capacity == 4 + 20 - 1
    assert all(s["stop_ids"] == [-1] and s["pipeline"] == "off" for _, _, s in seen)
    assert all(s["compile"] is False and s["cuda_graph"] is False for _, _, s in seen)


@pytest.mark.parametrize("setting, expected", [("on", True), ("max-autotune", "max-autotune")])
def test_settings_reach_generate(monkeypatch, clock, small_model, setting, expected):
    seen = {}
    monkeypatch.setattr(measure, "check_compiler", lambda device: None)
    monkeypatch.setattr(measure, "generate", lambda *a, **k: seen.update(k) or [[7]] * a[2])
    row = measure.measure_row(job(model=small_model, compile=setting, pipeline="event"))
    assert seen["compile"] == expected and seen["pipeline"] == "event"
    assert row["notes"] == ["cpu has no streams: nothing overlaps"]


def test_a_captured_row_warms_up_once_more(clock):
    """A graph is captured the second time that its length is met."""
    calls = []
    produce = lambda new: calls.append(new) or [[7]] * new  # noqa: E731
    cache = SimpleNamespace(graphs={"settings": ("buffers", {256: object(), 512: None})})
    row = measure.measure(produce, job(cuda_graph="on", runs=1), CPU, cache)
    assert calls == [20, 1, 20, 1, 1, 20]
    assert row["captured_graphs"] == 1 and row["notes"] == []


def test_captures_while_timed_are_noted(clock):
    graphs, calls = {}, []

    def produce(new):
        calls.append(new)
        if len(calls) == 6:
            graphs[256] = object()
        return [[7]] * new

    cache = SimpleNamespace(graphs={"settings": ("buffers", graphs)})
    row = measure.measure(produce, job(cuda_graph="on"), CPU, cache)
    assert row["notes"] == ["captured CUDA graphs while timed"]


@pytest.mark.parametrize(
    "inductor, expected",
    [
        ({"fxgraph_cache_miss": 1, "fxgraph_cache_hit": 3}, "cold"),
        ({"fxgraph_cache_hit": 4}, "warm"),
        ({"fxgraph_cache_bypass": 4}, "cold"),
    ],
)
def test_compile_cache_is_cold_or_warm(counters, clock, inductor, expected):
    counters |= {"stats": Counter(unique_graphs=4), "inductor": Counter(inductor)}
    row = measure.measure(steps(clock, 1, 1), job(compile="on"), CPU)
    assert row["compile_cache"] == expected
    assert row["compiled_graphs"] == 4 and row["recompiles_while_timed"] == 0
    assert row["notes"] == []


def test_nothing_compiled_is_no_compile_cache(clock):
    row = measure.measure(steps(clock, 1, 1), job(), CPU)
    assert row["compile_cache"] is None and row["compiled_graphs"] == 0


def test_compiler_trouble_is_noted(counters, clock):
    counters |= {
        "stats": Counter(unique_graphs=2),
        "graph_break": Counter(print=2, input=1),
        "inductor": Counter(cudagraph_skips=5),  # on a CPU there are none to skip
        "unimplemented": Counter(["Dynamo recompile limit exceeded\n  more", "something else"]),
    }
    calls = []

    def produce(new):
        calls.append(new)
        counters["stats"]["unique_graphs"] += len(calls) in (1, 4, 6)
        return [[7]] * new

    row = measure.measure(produce, job(compile="on"), CPU)
    assert row["recompiles_while_timed"] == 2 and row["compiled_graphs"] == 5
    assert row["notes"] == [
        "compiled 2 more graphs while timed",
        "the compiler gave up: partly uncompiled",
        "3 graph breaks",
    ]


def test_skipped_cuda_graphs_are_noted(monkeypatch, counters, clock):
    counters |= {"inductor": Counter(cudagraph_skips=5)}
    monkeypatch.setattr(measure, "synchronize", lambda device: None)
    monkeypatch.setattr(measure, "memory", lambda device: {})
    monkeypatch.setattr(torch.cuda, "reset_peak_memory_stats", lambda device: None)
    row = measure.measure(steps(clock, 1, 1), job(), torch.device("cuda"))
    assert row["notes"] == ["the compiler skipped CUDA graphs"]


def test_memory_of_cuda_and_of_the_process(monkeypatch, clock):
    log = []
    monkeypatch.setattr(measure, "synchronize", lambda device: None)
    for name, value in (("max_memory_allocated", 300), ("max_memory_reserved", 500)):
        monkeypatch.setattr(torch.cuda, name, lambda device, value=value: value)
    reset = lambda device: log.append(len(calls))  # noqa: E731
    monkeypatch.setattr(torch.cuda, "reset_peak_memory_stats", reset)
    calls = []
    produce = lambda new: calls.append(new) or [[7]] * new  # noqa: E731
    row = measure.measure(produce, job(), torch.device("cuda"))
    assert (row["peak_allocated_bytes"], row["peak_reserved_bytes"]) == (300, 500)
    assert row["fragmentation_bytes"] == 200
    assert log == [2]  # after the warm-up, before anything is timed
    row = measure.measure(produce, job(), CPU)
    assert "peak_allocated_bytes" not in row and log == [2]
    assert 2**25 < row["peak_rss_bytes"] < 2**36


def bytes_of(name, dtype, **changes):
    model = models.load(name, "meta", dtype, random_weights=True)
    return measure.bytes_per_step(model, job(**changes))


def test_roofline_counts_what_a_token_must_read():
    """Qwen3-0.6B: 596,049,920 parameters, tied head read once; 57,344 numbers of K, V a slot."""
    one = {"prompt_tokens": 10, "new_tokens": 41}
    assert bytes_of("qwen3-0.6b-base", "bfloat16", cache="none", **one) == 1_192_101_888
    cached = 2 * (596_049_920 + 1024 + 57_344 * (10 + 20))
    assert cached == 1_195_542_528
    assert bytes_of("qwen3-0.6b-base", "bfloat16", cache="growing", **one) == cached
    assert bytes_of("qwen3-0.6b-base", "float32", cache="preallocated", **one) == 2 * cached
    batch = bytes_of("qwen3-0.6b-base", "bfloat16", cache="growing", batch_size=4, **one)
    assert batch == 2 * (596_049_920 + 4 * (1024 + 57_344 * 30))
    # A head of its own: the embedding, as large again, gives only a row.
    own = 2 * (8_190_735_360 - 151_936 * 4096 + 4096)
    assert bytes_of("qwen3-8b", "bfloat16", cache="none") == own
    # GPT-2: of 1024 learned positions one row is read.
    gpt2 = 4 * (124_439_808 - 1024 * 768 + 2 * 768)
    assert bytes_of("gpt2", "float32", cache="none") == gpt2


def test_first_difference_names_row_position_and_gap(small_model):
    """The gap is the distance of the two best logits where the tokens part."""
    model = models.load(small_model, "cpu", "float32", random_weights=True)
    prompts = [[3, 1, 4], [1, 5, 9]]
    run = [list(ids) for ids in zip(*measure.generate(model, prompts, 6, cache="growing"))]
    assert measure.first_difference(model, prompts, run, run) is None
    other = [run[0], run[1][:4] + [(run[1][4] + 1) % 128] + run[1][5:]]
    cache = kvcache.NoCache(model)
    logits = model(*cache.start(torch.tensor([prompts[1] + run[1][:4]]), [0]), cache)[0]
    best = logits.topk(2).values.tolist()
    found = measure.first_difference(model, prompts, run, other)
    assert (found["row"], found["position"]) == (1, 4)
    assert found["top2_gap"] == pytest.approx(best[0] - best[1], abs=1e-5)
    shorter = [run[0][:2], run[1]]
    assert measure.first_difference(model, prompts, run, shorter)["position"] == 2


def test_tokens_are_compared_with_the_reference(monkeypatch, clock, small_model):
    monkeypatch.setattr(measure, "first_difference", lambda *a: None if a[2] == a[3] else "where")
    monkeypatch.setattr(measure, "generate", lambda *a, **k: steps(clock, 1, 1)(a[2]))
    for reference, same, where in (
        (None, None, None),
        ([[7] * 20], True, None),
        ([[8] * 20], False, "where"),
    ):
        row = measure.measure_row(job(model=small_model, reference=reference))
        assert row.get("same_tokens_as_first_row") is same
        assert row.get("first_difference") == where


def test_prompts_are_the_published_ids_or_the_same_random_ones(small_model):
    ids = [3, 1, 4, 1]
    _, prompts, _, _, notes = measure.prepare(job(model=small_model, prompt_ids=ids, batch_size=2))
    assert prompts == [ids, ids] and notes == []
    _, first, *_ = measure.prepare(job(model=small_model, batch_size=2))
    _, again, *_ = measure.prepare(job(model=small_model, batch_size=2, cache="none"))
    assert first == again and len({tuple(p) for p in first}) == 2
    assert all(len(p) == 4 and max(p) < 128 for p in first)
    _, prompts, _, _, notes = measure.prepare(
        job(model=small_model, prompt_ids=[3, 999, 4, 1], batch_size=2)
    )
    assert prompts == first and notes == ["random prompt ids instead of the published ones"]


def test_text_of_a_workload_that_stops(monkeypatch, clock, small_model):
    fake = SimpleNamespace(decode=lambda ids: f" {len(ids)} tokens\nof text ")
    monkeypatch.setattr(measure, "Tokenizer", lambda name: fake)
    monkeypatch.setattr(measure, "generate", lambda *a, **k: steps(clock, 1, 1)(a[2]))
    monkeypatch.setattr(
        measure.models, "load",
        lambda *a, load=models.load: load(*a[:3], random_weights=True),
    )  # fmt: skip
    row = measure.measure_row(job(model=small_model, stop_ids=[5], random_weights=False))
    assert row["notes"] == ["text: 20 tokens of text"]
    row = measure.measure_row(job(model=small_model, stop_ids=[5]))
    assert row["notes"] == []


def test_describe_measures_a_read_rate(monkeypatch):
    sizes = []

    def ones(n, device):
        sizes.append(n)
        if n > 2**25:
            raise RuntimeError("no memory")
        return torch.zeros(n // 2**10)

    monkeypatch.setattr(torch, "ones", ones)
    result = measure.describe({"device": "cpu"})
    assert sizes == [2**28, 2**25]
    assert result["threads"] == torch.get_num_threads() and result["device_name"].strip()
    assert 0 < result["bandwidth"] < 1e13


# Which rows there are


def planned(dtypes, done, *argv):
    args = bench.parse_arguments([str(a) for a in argv])
    rows = list(bench.plan(args, dtypes, done))
    return [r for r in rows if not r["reason"]], [r for r in rows if r["reason"]]


BASIC = [
    (cache, compile, "off", pipeline)
    for cache in ("none", "growing", "preallocated")
    for compile in ("off", "on")
    for pipeline in ("off", "unchecked")
]


def test_default_matrix_of_a_cpu():
    """Caches x compile x {off, unchecked}; what a CPU cannot do comes once, with the reason."""
    rows, skipped = planned({"cpu": "float32"}, [])
    assert [settings_of(row) for row in rows] == BASIC
    assert [row["reason"] for row in skipped] == [
        "event and ping-pong: cpu has no streams, nothing would overlap",
        "CUDA graphs need CUDA, not cpu",
    ]
    assert [row["pipeline"] for row in skipped] == ["event", "off"]
    assert {row["model"] for row in rows} == {"tiny-qwen3"}
    assert {tuple(row[k] for k in bench.WORKLOAD) for row in rows} == {("cpu", 1, 32, 100)}
    assert rows[0]["stop_ids"] == [-1] and rows[0]["warmup"] == 1 and rows[0]["runs"] == 3


def done_row(cache, compile, rate, pipeline="off", device="cuda", **changes):
    return {
        "status": "ok", "cache": cache, "compile": compile, "pipeline": pipeline,
        "cuda_graph": "off", "device": device, "batch_size": 1, "prompt_tokens": 32,
        "new_tokens": 100, "end_to_end_tokens_per_s": rate,
    } | changes  # fmt: skip


def test_default_matrix_of_cuda_goes_on_with_the_fastest():
    done = [
        done_row("growing", "off", 30),
        done_row("growing", "on", 20),
        done_row("none", "on", 99, pipeline="unchecked"),  # looks at nothing: not a contender
        done_row("none", "on", 98, device="cpu"),
        done_row("none", "on", 97, batch_size=2),
        done_row("none", "on", 96, status="failed"),
        done_row("transformers static", "on", 95),
    ]
    rows, skipped = planned({"cuda": "bfloat16"}, done)
    graphs = [("preallocated", "off", "on", mode) for mode in bench.MODES]
    best = [("growing", "off", "off", "event"), ("growing", "off", "off", "ping-pong")]
    assert [settings_of(row) for row in rows] == BASIC + best + graphs
    assert skipped == [] and len(rows) == 18


def test_the_fastest_is_looked_up_when_it_is_known():
    """`done` is empty when the plan starts and filled before it asks."""
    args, done = bench.parse_arguments([]), []
    seen = []
    for row in bench.plan(args, {"cuda": "bfloat16"}, done):
        seen.append(settings_of(row))
        done.append(row | {"status": "ok", "end_to_end_tokens_per_s": 1.0})
        if settings_of(row) == ("none", "on", "off", "off"):
            done[-1]["end_to_end_tokens_per_s"] = 5.0
    assert seen[12:14] == [("none", "on", "off", "event"), ("none", "on", "off", "ping-pong")]


def test_asking_for_values_gives_their_full_product():
    argv = "--cache growing preallocated --compile on --compile max-autotune --cuda-graph off on"
    rows, skipped = planned({"cuda": "bfloat16"}, [], *argv.split(), "--pipeline", "off", "event")
    product = itertools.product(
        ("growing", "preallocated"), ("on", "max-autotune"), ("off", "on"), ("off", "event")
    )
    expected = [p for p in product if p[0] == "preallocated" or p[2] == "off"]
    assert [settings_of(row) for row in rows] == expected and len(expected) == 12
    assert [row["reason"] for row in skipped] == [
        "CUDA graphs need the preallocated cache, which never moves"
    ]


def test_what_is_not_asked_for_is_everything_that_the_device_can_do():
    rows, skipped = planned({"cuda": "bfloat16"}, [], "--cache", "preallocated")
    assert len(rows) == 2 * 2 * 4 and skipped == []
    rows, skipped = planned({"cpu": "bfloat16"}, [], "--cache", "preallocated")
    assert len(rows) == 2 * 2 and len(skipped) == 2


def test_pipelines_asked_for_run_without_streams():
    rows, skipped = planned(
        {"cpu": "float32"}, [], "--pipeline", "event", "--cache", "growing", "--compile", "off",
        "--cuda-graph", "off",
    )  # fmt: skip
    assert [settings_of(row) for row in rows] == [("growing", "off", "off", "event")]
    assert skipped == []


def test_several_workloads_and_devices():
    """Tables one after the other, each workload whole; reasons still come once a device."""
    rows, skipped = planned(
        {"cpu": "float32", "mps": "bfloat16"}, [], "--batch-size", 2, 1, "--prompt-tokens", 8,
        "--new-tokens", 5, 50,
    )  # fmt: skip
    tables = [
        key for key, _ in itertools.groupby(tuple(r[k] for k in bench.WORKLOAD) for r in rows)
    ]
    assert tables == [
        (device, batch, 8, new) for device in ("cpu", "mps") for batch in (1, 2) for new in (5, 50)
    ]
    assert len(rows) == 8 * 12 and len(skipped) == 2 * 2
    assert {row["dtype"] for row in rows if row["device"] == "mps"} == {"bfloat16"}


def test_a_missing_compiler_is_one_skipped_row(monkeypatch):
    def none_found(device):
        raise ValueError("--compile needs a C++ compiler")

    monkeypatch.setattr(bench, "check_compiler", none_found)
    rows, skipped = planned({"cpu": "float32"}, [])
    assert {row["compile"] for row in rows} == {"off"} and len(rows) == 6
    assert "--compile needs a C++ compiler" in [row["reason"] for row in skipped]


def test_expandable_segments_belong_to_cuda():
    rows, skipped = planned({"cpu": "float32"}, [], "--expandable-segments")
    assert rows == [] and len(skipped) == 1 and "CUDA allocator" in skipped[0]["reason"]
    rows, _ = planned({"cuda": "float32"}, [], "--expandable-segments")
    assert len(rows) == 18 and all(row["expandable_segments"] for row in rows)


EXPLAIN = [840, 20772, 3460, 4128, 4119, 304, 264, 3175, 11652, 13]


@pytest.mark.parametrize(
    "name, model, precision, runs, ids, cuda_rows, cpu_rows",
    [
        ("three-steps", "qwen3-0.6b-base", "highest", 2, EXPLAIN, 2, 2),
        ("kv-caching", "gpt2-medium", "highest", 5,
         [18438, 391, 509, 53, 40918, 287, 6121, 364, 13], 3, 3),
        ("token-generation", "gpt2", "high", 10, [50256], 12 + 12 + 4 + 3, 9 + 8),
        ("device-table", "qwen3-0.6b-base", "highest", 2, EXPLAIN, 6, 5),
    ],
)  # fmt: skip
def test_experiments(name, model, precision, runs, ids, cuda_rows, cpu_rows):
    rows, skipped = planned({"cuda": "float32"}, [], "--experiment", name)
    first = rows[0]
    assert (first["model"], first["matmul_precision"], first["runs"]) == (model, precision, runs)
    assert first["prompt_ids"] == ids and first["prompt_tokens"] == len(ids)
    assert first["stop_ids"] == ([151643] if name == "three-steps" else [-1])
    assert len(rows) == cuda_rows and skipped == []
    rows, _ = planned({"cpu": "float32"}, [], "--experiment", name)
    assert len(rows) == cpu_rows
    smaller, _ = planned(
        {"cpu": "float32"}, [], "--experiment", name, "--new-tokens", 5, "--runs", 1,
        "--batch-size", 2, "--model", "tiny-gpt2",
    )  # fmt: skip
    assert {(r["new_tokens"], r["runs"], r["batch_size"], r["model"]) for r in smaller} == {
        (5, 1, 2, "tiny-gpt2")
    }


def test_experiment_rows():
    """Published figures stand beside the rows that they belong to."""
    rows, _ = planned({"cuda": "float32"}, [], "--experiment", "kv-caching")
    assert [(r["cache"], r["new_tokens"], r["published"]) for r in rows] == [
        ("none", 1000, "more than 107 s"),
        ("growing", 1000, "21.7 s: 5 times as fast"),
        ("preallocated", 1000, ""),
    ]
    rows, _ = planned({"cuda": "bfloat16"}, [], "--experiment", "device-table")
    assert rows[3]["published"] == "M4 CPU 68, M4 GPU 71, H100 141 tok/s (1.81 GiB)"
    assert settings_of(rows[3]) == ("growing", "on", "off", "off") and rows[3]["new_tokens"] == 41
    rows, _ = planned({"cuda": "float32"}, [], "--experiment", "token-generation")
    assert [r["new_tokens"] for r in rows if r["cache"] == "none"] == [100, 200, 400]
    assert [r["cache"] for r in rows if r["expandable_segments"]] == ["growing"] * 3
    assert sorted({r["batch_size"] for r in rows}) == [16, 32, 64, 128]
    assert {r["batch_size"] for r in rows if "11.6 %" in r["published"]} == {16, 32, 64, 128}
    _, skipped = planned({"cpu": "float32"}, [], "--experiment", "token-generation")
    assert [r["reason"].split()[0] for r in skipped] == ["event", "expandable", "CUDA"]


def test_peers_are_rows_of_every_table():
    rows, _ = planned({"cpu": "float32"}, [], "--peers", "--cache", "growing", "--compile", "off")
    assert [settings_of(row) for row in rows if "transformers" in row["cache"]] == [
        ("transformers dynamic", "off", "off", "off"),
        ("transformers static", "off", "off", "off"),
        ("transformers static", "on", "off", "off"),
    ]


# The run


def test_a_run_reports_every_row(jobs, tmp_path, small_model):
    files = [tmp_path / name for name in ("a.json", "a.md")]
    status, out, err = run_bench(
        "--model", small_model, "--random-weights", "--device", "cpu", "--new-tokens", 3,
        "--json", files[0], "--markdown", files[1],
    )  # fmt: skip
    assert status == 0
    rows = strict_json(files[0])["rows"]
    assert len(rows) == 14 and all(set(CONTRACT) <= set(row) for row in rows)
    assert [row["status"] for row in rows] == ["ok"] * 12 + ["skipped"] * 2
    assert rows[0]["device_name"] == "a CPU" and rows[0]["threads"] == 2
    assert rows[0]["torch"] == torch.__version__ and rows[0]["dtype"] == "float32"
    assert rows[-1]["warmup_s"] is None and rows[-1]["reason"]
    assert files[1].read_text("utf-8").strip() == out.strip()
    assert "new_ids" not in rows[0]
    progress = [line for line in err.splitlines() if line.startswith("[")]
    assert [line.split("]")[0] for line in progress] == [f"[{n}/12" for n in range(1, 13)]
    assert all(re.search(r"about \d+ s left", line) for line in progress[1:])
    assert "cache none, compile off, cuda graph off, pipeline off" in progress[0]


def test_table_says_what_was_measured_where(jobs, small_model):
    parted = {"position": 17, "top2_gap": 0.0312}
    jobs.answer = lambda job: measured(
        decode_tokens_per_s=33.3 if job["cache"] == "growing" else 66.6,
        total_s=measured()["total_s"] | {"median": 4.0 if job["cache"] == "growing" else 1.0},
        bandwidth_fraction=0.615, same_tokens_as_first_row=job["cache"] != "preallocated",
        first_difference=parted if job["cache"] == "preallocated" else None,
        notes=["a note"], peak_allocated_bytes=None,
    )  # fmt: skip
    _, out, _ = run_bench(
        "--model", small_model, "--random-weights", "--device", "cpu", "--cache", "growing",
        "preallocated", "--compile", "off", "--cuda-graph", "off", "--pipeline", "off",
        "--batch-size", 3, "--prompt-tokens", 11, "--new-tokens", 7,
    )  # fmt: skip
    heading, _, header, dashes, first, second = out.strip().splitlines()
    for part in (
        "(random weights) on cpu (a CPU, reads 20.0 GB/s, 2 threads)", torch.__version__, "float32",
        "matmul precision highest", "batch 3", "11 prompt + 7 new tokens", "3 runs after a warm-up",
    ):  # fmt: skip
        assert part in heading
    names, cells, other = (
        [cell.strip() for cell in line.strip("|").split("|")] for line in (header, first, second)
    )
    assert len(names) == len(cells) == 15 and set(dashes) == {"|", "-", " "}
    row = dict(zip(names, cells))
    assert row == {
        "cache": "growing", "compile": "off", "graph": "off", "pipeline": "off",
        "prefill ms": "10.0", "TTFT ms": "11.0", "decode tok/s": "33.3",
        "end-to-end tok/s": "50.0", "total s (std)": "2.000 ± 0.100", "speed-up": "1.00",
        "peak MiB": "300", "roofline": "62%", "same tokens": "yes", "warm-up s": "1.5",
        "notes": "a note",
    }  # fmt: skip
    assert dict(zip(names, other))["speed-up"] == "4.00"
    assert dict(zip(names, other))["same tokens"] == "to 17, gap 0.031"


def test_cuda_memory_in_the_table(jobs, monkeypatch, small_model):
    row = dict.fromkeys(bench.FIELDS) | measured(
        peak_allocated_bytes=100 * 2**20, peak_reserved_bytes=140 * 2**20, cache="growing"
    )
    assert bench.figures(row, row)[6] == "100 / 140"


def test_a_failing_row_keeps_its_error_and_the_run_goes_on(jobs, tmp_path, small_model):
    oom = {"status": "failed", "reason": "OutOfMemoryError: tried to allocate 3 | GiB"}
    jobs.answer = lambda job: oom if job["cache"] == "none" else measured()
    path = tmp_path / "a.json"
    status, out, _ = run_bench(
        "--model", small_model, "--random-weights", "--device", "cpu", "--json", path
    )
    rows = strict_json(path)["rows"]
    assert status == 0
    assert [row["status"] for row in rows] == ["failed"] * 4 + ["ok"] * 8 + ["skipped"] * 2
    assert rows[0]["reason"] == oom["reason"] and rows[0]["decode_tokens_per_s"] is None
    assert "failed: OutOfMemoryError: tried to allocate 3 / GiB" in out
    assert all(line.count("|") == 16 for line in out.splitlines() if line.startswith("|"))


def test_references_are_handed_to_equal_rows_only(jobs, small_model):
    """Random weights differ between kinds of device, so each has a first row of its own."""
    jobs.answer = lambda job: measured(new_ids=[[len(jobs.seen)]])
    run_bench(
        "--model", small_model, "--random-weights", "--device", "cpu", "--cache", "growing",
        "--compile", "off", "on", "--cuda-graph", "off", "--pipeline", "off",
        "--new-tokens", 3, 4,
    )  # fmt: skip
    assert [(j["new_tokens"], j["reference"]) for j in jobs.seen] == [
        (3, None), (3, [[1]]), (4, None), (4, [[3]]),
    ]  # fmt: skip
    assert jobs.seen[0]["bandwidth"] == 2e10


@pytest.mark.parametrize("random_weights", [True, False])
def test_reference_across_devices(jobs, random_weights):
    args = bench.parse_arguments(["--cache", "growing", "--compile", "off", "--pipeline", "off"])
    args.random_weights = random_weights
    with contextlib.redirect_stdout(io.StringIO()), contextlib.redirect_stderr(io.StringIO()):
        bench.run(args, {"cpu": "float32", "mps": "float32"}, {"devices": {}, "rows": []}, [])
    assert [j["reference"] for j in jobs.seen] == [None, None if random_weights else [[1, 2, 3]]]


def test_a_failed_row_is_no_reference(jobs, small_model):
    jobs.answer = lambda job: (
        {"status": "failed", "reason": "no"} if len(jobs.seen) == 1 else measured(new_ids=[[9]])
    )
    run_bench("--model", small_model, "--random-weights", "--device", "cpu")
    assert [j["reference"] for j in jobs.seen][:3] == [None, None, [[9]]]


def test_ctrl_c_keeps_what_was_measured(jobs, tmp_path, small_model):
    def answer(job):
        if len(jobs.seen) == 3:
            raise KeyboardInterrupt
        return measured()

    jobs.answer, path = answer, tmp_path / "a.json"
    status, out, err = run_bench(
        "--model", small_model, "--random-weights", "--device", "cpu", "--json", path
    )
    assert status == 130 and "interrupted" in err
    assert [row["status"] for row in strict_json(path)["rows"]] == ["ok", "ok"]
    assert out.count("| none ") == 2


def test_files_are_written_row_by_row(jobs, tmp_path, small_model):
    """So that even a killed run leaves what it had measured."""
    files, seen = [tmp_path / "a.json", tmp_path / "a.md"], []

    def answer(job):
        if jobs.seen[1:]:
            table = re.findall(r"^\| (?!cache)", files[1].read_text("utf-8"), re.MULTILINE)
            seen.append((len(strict_json(files[0])["rows"]), len(table) - 1))  # but the dashes
        return measured()

    jobs.answer = answer
    run_bench(
        "--model", small_model, "--random-weights", "--device", "cpu", "--json", files[0],
        "--markdown", files[1],
    )  # fmt: skip
    assert seen == [(n, n) for n in range(1, 12)]


def test_nan_and_infinity_never_reach_json(jobs, tmp_path, small_model):
    jobs.answer = lambda job: measured(
        decode_tokens_per_s=math.inf, step_s={"median": math.nan, "p10": -math.inf, "p90": 1.0}
    )
    path = tmp_path / "a.json"
    run_bench("--model", small_model, "--random-weights", "--device", "cpu", "--json", path)
    row = strict_json(path)["rows"][0]
    assert row["decode_tokens_per_s"] is None
    assert row["step_s"] == {"median": None, "p10": None, "p90": 1.0}


def test_trace_takes_the_fastest_row_that_looks(monkeypatch, tmp_path, small_model):
    tasks = []

    def in_process(task, job):
        tasks.append((task, job))
        rate = {"growing": 5.0, "none": 1.0}.get(job.get("cache"), 2.0)
        rate += 10 * (job.get("pipeline") == "unchecked")
        return measured(end_to_end_tokens_per_s=rate)

    monkeypatch.setattr(bench, "in_process", in_process)
    path = tmp_path / "t.json"
    _, _, err = run_bench(
        "--model", small_model, "--random-weights", "--device", "cpu", "--trace", path
    )
    task, job = tasks[-1]
    assert task is measure.trace and job["trace"] == str(path)
    assert settings_of(job) == ("growing", "off", "off", "off")
    assert f"profile of growing, off, off, off: {path}" in err


@pytest.mark.parametrize(
    "argv, text",
    [
        (["--model", "nope"], "nope"),
        (["--runs", "0"], "'0' is not a whole number above 0"),
        (["--batch-size", "1", "x"], "'x' is not a whole number above 0"),
        (["--cache", "static"], "static"),
        (["--compile", "reduce-overhead"], "--cuda-graph on"),
        (["--experiment", "nope"], "token-generation"),
        (["--bogus"], "--bogus"),
        (["--device", "foo"], "foo"),
        (["--device", "meta"], "holds shapes only"),
        (["--dtype", "int8"], "int8"),
        (["--prompt-tokens", "200", "--new-tokens", "58"], "257 positions"),
        (["--json", "/nonexistent/a.json"], "cannot write /nonexistent/a.json"),
        (["--markdown", "/"], "cannot write /"),
    ],
)
def test_errors_of_the_user_are_one_line_before_any_work(jobs, small_model, argv, text):
    if "--model" not in argv:
        argv = ["--model", small_model, *argv]
    status, out, err = run_bench("--random-weights", "--device", "cpu", *argv)
    assert status == 2 and out == "" and jobs.seen == []
    assert err.startswith("error: ") and err.count("\n") == 1 and text in err


def test_the_last_position_that_fits_is_accepted(jobs, small_model):
    argv = ["--model", small_model, "--random-weights", "--device", "cpu", "--cache", "none"]
    status, *_ = run_bench(*argv, "--prompt-tokens", 200, "--new-tokens", 57)
    assert status == 0


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a CUDA device")
def test_absent_device_is_named(jobs, small_model):
    status, _, err = run_bench("--model", small_model, "--random-weights", "--device", "cuda")
    assert status == 2 and "device 'cuda' is not there; this machine has: cpu" in err


@pytest.mark.parametrize(
    "flag, package", [("--plot=a.png", "matplotlib"), ("--peers", "transformers")]
)
def test_missing_packages_are_named(jobs, monkeypatch, small_model, flag, package):
    monkeypatch.setattr(bench, "find_spec", lambda name: None)
    status, _, err = run_bench("--model", small_model, "--random-weights", flag)
    assert status == 2 and err == f"error: {package} is not installed: pip install {package}\n"


def test_real_weights_are_not_asked_for_in_vain(jobs, small_model):
    """A folder with a config.json only has no weights: an error unless they may be random."""
    status, _, err = run_bench("--model", small_model, "--device", "cpu")
    assert status == 2 and "no model.safetensors" in err


@pytest.mark.parametrize("cached", [None, "/some/file"])
def test_experiments_use_random_weights_unless_downloaded(jobs, monkeypatch, cached):
    import huggingface_hub

    looked = []
    fake = lambda repository, file: looked.append((repository, file)) or cached  # noqa: E731
    monkeypatch.setattr(huggingface_hub, "try_to_load_from_cache", fake)
    monkeypatch.setattr(models, "find_weights", lambda *a: looked.append("weights"))
    monkeypatch.setattr(models, "read_config", models.known_config)
    argv = ["--experiment", "device-table", "--device", "cpu", "--dtype", "float32"]
    status, _, err = run_bench(*argv, "--new-tokens", 2)
    assert status == 0 and looked[0] == ("Qwen/Qwen3-0.6B-Base", "model.safetensors")
    assert ("random weights" in err) == (cached is None)
    assert ("weights" in looked) == (cached is not None)
    assert {job["random_weights"] for job in jobs.seen} == {cached is None}


# Processes


def good(job):
    return {"value": job["value"] + 1, "allocator": os.environ.get("PYTORCH_CUDA_ALLOC_CONF")}


def bad(job):
    raise ValueError("no\nluck")


def dead(job):
    os.kill(os.getpid(), signal.SIGKILL)


def quits(job):
    os._exit(3)


@pytest.mark.skipif(sys.platform == "win32", reason="signals")
@pytest.mark.parametrize(
    "task, expected",
    [
        (good, {"status": "ok", "reason": None, "value": 2,
                "allocator": "expandable_segments:True"}),
        (bad, {"status": "failed", "reason": "ValueError: no luck"}),
        (dead, {"status": "failed",
                "reason": "its process ended with status -9 (killed: out of memory?)"}),
        (quits, {"status": "failed", "reason": "its process ended with status 3"}),
    ],
)  # fmt: skip
def test_a_row_in_its_own_process(task, expected):
    before = dict(os.environ)
    assert bench.in_process(task, {"value": 1, "expandable_segments": True}) == expected
    assert os.environ == before


def start_bench(*argv):
    """`python bench.py` in its own process group, with Ctrl-C working as in a terminal."""
    return subprocess.Popen(
        [sys.executable, str(BENCH), *map(str, argv)], stdout=subprocess.PIPE,
        stderr=subprocess.PIPE, text=True, start_new_session=True,
        env=os.environ | {"OMP_NUM_THREADS": "1"},
        preexec_fn=lambda: signal.signal(signal.SIGINT, signal.SIG_DFL),
    )  # fmt: skip


@pytest.mark.skipif(sys.platform == "win32", reason="signals")
@pytest.mark.parametrize("to_group", [True, False])
def test_real_ctrl_c(tmp_path, small_model, to_group):
    """From a terminal the whole group gets it, from `kill` only the parent."""
    path = tmp_path / "a.json"
    process = start_bench(
        "--model", small_model, "--random-weights", "--device", "cpu", "--cache", "growing",
        "--compile", "off", "--pipeline", "off", "unchecked", "--cuda-graph", "off",
        "--new-tokens", 200, "--runs", 500, "--json", path,
    )  # fmt: skip
    for line in process.stderr:
        if line.startswith("[1/2]"):
            break
    time.sleep(4)  # while the row starts or runs
    (os.killpg if to_group else os.kill)(process.pid, signal.SIGINT)
    _, err = process.communicate(timeout=60)
    assert process.returncode == 130
    assert "interrupted" in err
    assert all(row["status"] == "ok" for row in strict_json(path)["rows"])


@pytest.fixture(scope="module")
def real_run(tmp_path_factory):
    """Two small rows for real, with every file."""
    folder = tmp_path_factory.mktemp("bench")
    plot = ["--plot", folder / "a.png"] if importlib.util.find_spec("matplotlib") else []
    (folder / "small").mkdir()
    (folder / "small" / "config.json").write_text(json.dumps(SMALL))
    process = start_bench(
        "--model", folder / "small", "--random-weights", "--device", "cpu", "--cache", "growing",
        "preallocated", "--compile", "off", "--pipeline", "off", "--cuda-graph", "off",
        "--new-tokens", 20, "--batch-size", 2, "--runs", 2, "--json", folder / "a.json",
        "--markdown", folder / "a.md", "--trace", folder / "t.json", *plot,
    )  # fmt: skip
    out, err = process.communicate(timeout=300)
    assert process.returncode == 0, err
    return folder, out, err


def test_real_rows(real_run):
    folder, out, err = real_run
    document = strict_json(folder / "a.json")
    assert document["devices"]["cpu"]["bandwidth"] > 1e8
    for row, cache in zip(document["rows"], ("growing", "preallocated"), strict=True):
        assert row["status"] == "ok" and row["notes"] == []
        assert settings_of(row) == (cache, "off", "off", "off")
        assert set(CONTRACT) <= set(row)
        assert len(row["ms_by_position"]) == 19
        total = row["total_s"]
        assert 0 < total["min"] <= total["median"] <= total["max"]
        rate = 2 * 20 / total["median"]
        assert row["end_to_end_tokens_per_s"] == pytest.approx(rate)
        assert row["decode_tokens_per_s"] > 0 and row["warmup_s"] > 0
        assert 0 < row["prefill_s"] and 0 < row["time_to_first_token_s"] < total["max"]
        assert row["peak_allocated_bytes"] is None and row["peak_rss_bytes"] > 2**25
        assert row["compile_cache"] is None and row["bandwidth_fraction"] is None
    assert [r["same_tokens_as_first_row"] for r in document["rows"]] == [None, True]
    assert (folder / "a.md").read_text("utf-8").strip() == out.strip()
    assert "Traceback" not in err and f", off, off, off: {folder}" in err


def test_real_picture(real_run):
    pytest.importorskip("matplotlib")
    folder, _, _ = real_run
    assert (folder / "a.png").read_bytes()[:8] == b"\x89PNG\r\n\x1a\n"


def test_real_trace_has_named_ranges(real_run):
    """Steps 6 to 10 of 20: four passes of the loop, each with its parts."""
    folder, _, _ = real_run
    events = json.loads((folder / "t.json").read_text("utf-8"))["traceEvents"]
    names = Counter(e.get("name") for e in events if e.get("cat") == "user_annotation")
    assert names["step"] == names["forward"] == 4
    assert 4 <= names["stop check"] <= 5


def test_plot_of_every_kind_of_row(tmp_path):
    pytest.importorskip("matplotlib")
    row = dict.fromkeys(bench.FIELDS) | done_row("growing", "off", 3.0)
    row |= measured(model="m", dtype="float32", device_name="a CPU")
    rows = [row, row | {"cache": "transformers dynamic", "decode_tokens_per_s": None},
            row | {"pipeline": "unchecked", "ms_by_position": [], "batch_size": 2}]  # fmt: skip
    bench.plot(rows, tmp_path / "a.png")
    bench.plot(rows[2:], tmp_path / "b.png")
    assert (tmp_path / "a.png").stat().st_size > 5000 < (tmp_path / "b.png").stat().st_size


def test_real_compiled_row(small_model):
    torch._dynamo.reset()
    torch._dynamo.utils.counters.clear()
    row = measure.measure_row(job(model=small_model, compile="on", cache="preallocated", runs=1))
    assert row["compiled_graphs"] >= 1 and row["recompiles_while_timed"] == 0
    assert row["compile_cache"] in ("cold", "warm") and row["notes"] == []


@pytest.mark.parametrize("name", ["dynamic", "static"])
@pytest.mark.parametrize("kind", ["qwen3", "gpt2"])
def test_peers_give_the_same_tokens(tmp_path, name, kind):
    pytest.importorskip("transformers")
    config = SMALL
    if kind == "gpt2":
        config = {
            "model_type": "gpt2", "vocab_size": 128, "n_embd": 32, "n_layer": 2, "n_head": 4,
            "n_positions": 256, "torch_dtype": "float32",
        }  # fmt: skip
    (tmp_path / "config.json").write_text(json.dumps(config))
    changes = dict(model=str(tmp_path), batch_size=2, runs=1, new_tokens=12)
    ours = measure.measure_row(job(**changes))
    peer = job(cache=f"transformers {name}", reference=ours["new_ids"], **changes)
    theirs = measure.measure_row(peer)
    assert theirs["new_ids"] == ours["new_ids"] and theirs["same_tokens_as_first_row"]
    assert theirs["ms_by_position"] == [] and theirs["decode_tokens_per_s"] > 0


def test_help_names_every_flag(capsys):
    with pytest.raises(SystemExit) as stop:
        bench.main(["--help"])
    text = capsys.readouterr().out
    assert stop.value.code == 0
    for flag in """device model random-weights dtype matmul-precision cache compile cuda-graph
        pipeline batch-size prompt-tokens new-tokens runs warmup experiment expandable-segments
        peers json markdown plot trace""".split():
        assert f"--{flag}" in text


TINY = Path(__file__).resolve().parent / "tiny"
END = "<|endoftext|>"
HELD_OUT_BITS = {"tiny-qwen3": 0.8596, "tiny-gpt2": 0.8990}  # per byte of tiny/heldout.txt, in fp32
GREEDY_PROMPT = "Once upon a time"
GREEDY = {  # the first ids of its tiny_greedy continuation in fp32
    "tiny-qwen3": [11, 415, 293, 258, 391, 639, 604, 619, 13, 443, 806, 269],
    "tiny-gpt2": [11, 415, 293, 258, 391, 639, 604, 619, 13, 443, 806, 269],
}
both = pytest.mark.parametrize("name", ["tiny-qwen3", "tiny-gpt2"])


def held_out_documents():
    return (TINY / "heldout.txt").read_text("utf-8").split(f"\n{END}\n")[:-1]


@torch.inference_mode()
def held_out_bits(model, tokenizer, T=512):
    """Bits per byte of the documents end to end, in rows of T tokens, as tiny/train.py does it."""
    docs = held_out_documents()
    ids = torch.tensor([i for d in docs for i in tokenizer.encode(d + END)], device=model.device)
    nats = 0.0
    for i in range(0, len(ids) - 1, T):
        target = ids[i + 1 : i + T + 1]
        cache = NoCache(model)
        x = model.hidden(*cache.start(ids[None, i : i + len(target)], [0]), cache)
        logits = head(x, model.norm, model.lm_head, model.config)[0]
        nats += F.cross_entropy(logits, target, reduction="sum").item()
    return nats / math.log(2) / sum(len(d.encode()) for d in docs)


def tiny_greedy(model, ids, n, stop_ids=()):
    """The plainest loop: feed everything, take the best, append it."""
    cache = NoCache(model)
    fed, pos = cache.start(torch.tensor([ids], device=model.device), [0])
    new = []
    while len(new) < n and not (new and new[-1] in stop_ids):
        new.append(int(model(fed, pos, cache).argmax()))
        cache.reserve()
        fed, pos = cache.feed(torch.tensor([new[-1:]], device=model.device))
    return new


@both
def test_tiny_model_is_a_published_folder(name):
    folder = TINY / name.removeprefix("tiny-")
    assert (folder / "model.safetensors").stat().st_size < 12e6
    config = json.loads((folder / "config.json").read_text())
    assert config["model_type"] == name.removeprefix("tiny-")
    tokenizer = Tokenizer(name)
    end = tokenizer.encode(END)
    assert end == [config["eos_token_id"]] == list(tokenizer.stop_ids) == [tokenizer.bos_id]
    model = load(name, device="cpu")
    assert model.config.max_position_embeddings >= 512
    assert model.config.vocab_size == config["vocab_size"] == max(end) + 1
    assert Tokenizer(str(folder)).encode("A fox. ") == tokenizer.encode("A fox. ")


@both
@pytest.mark.parametrize("dtype, tolerance", [("float32", 1e-3), ("bfloat16", 1e-2)])
def test_tiny_model_predicts_held_out_text_as_well_as_stated(name, dtype, tolerance):
    bits = held_out_bits(load(name, device="cpu", dtype=dtype), Tokenizer(name))
    assert bits == pytest.approx(HELD_OUT_BITS[name], rel=tolerance)


@both
def test_tiny_model_continues_greedily_as_pinned(name):
    model, tokenizer = load(name, device="cpu", dtype="float32"), Tokenizer(name)
    ids = tiny_greedy(model, tokenizer.encode(GREEDY_PROMPT), len(GREEDY[name]))
    assert ids == GREEDY[name], tokenizer.decode(ids)


@both
def test_tiny_model_stops(name):
    model, tokenizer = load(name, device="cpu", dtype="float32"), Tokenizer(name)
    prompt = tokenizer.encode(held_out_documents()[0])  # a whole story: little is left to say
    new = tiny_greedy(model, prompt, 512 - len(prompt), tokenizer.stop_ids)
    assert new[-1] in tokenizer.stop_ids


@both
def test_tiny_model_is_the_same_in_transformers(name):
    transformers = pytest.importorskip("transformers")
    folder = str(TINY / name.removeprefix("tiny-"))
    theirs = transformers.AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    model, tokenizer = load(name, device="cpu", dtype="float32"), Tokenizer(name)
    text = held_out_documents()[0]
    ids = tokenizer.encode(text)
    assert transformers.AutoTokenizer.from_pretrained(folder)(text).input_ids == ids
    assert theirs.generation_config.eos_token_id == tokenizer.stop_ids[0]
    cache = NoCache(model)
    with torch.inference_mode():
        expected = theirs.eval()(torch.tensor([ids])).logits
        x = model.hidden(*cache.start(torch.tensor([ids]), [0]), cache)
        actual = head(x, model.norm, model.lm_head, model.config)
    torch.testing.assert_close(actual, expected, atol=1e-4, rtol=1e-4)


# ---------------------------------------------------------------------------------------------
# tiny/train.py


def train_command(*arguments):
    return [sys.executable, str(TINY / "train.py"), *map(str, arguments), "--device", "cpu"]


@pytest.fixture
def train_main(monkeypatch, capsys):
    """tiny/train.py in this process: arguments -> (exit status, standard error)."""

    def run(*arguments):
        spec = importlib.util.spec_from_file_location("tiny_train", TINY / "train.py")
        module = importlib.util.module_from_spec(spec)
        monkeypatch.setattr(sys, "path", list(sys.path))
        monkeypatch.setattr(sys, "argv", train_command(*arguments)[1:])
        spec.loader.exec_module(module)
        with pytest.raises(SystemExit) as stopped:
            module.main()
        return stopped.value.code, capsys.readouterr().err

    return run


@pytest.fixture
def stories(tmp_path):
    """120 short documents, enough for a few steps."""
    path = tmp_path / "stories.txt"
    docs = held_out_documents()[:4]
    names = ["Ann", "Bo", "Cy", "Di", "Ed", "Flo"]
    many = [f"{names[i % 6]} had {i} apples. {docs[i % 4]}" for i in range(120)]
    path.write_text("".join(f"{d}\n{END}\n" for d in many), "utf-8")
    return path


def test_train_writes_a_model_that_loads_and_has_learnt(stories, tmp_path, train_main):
    out = tmp_path / "model"
    arguments = "--text", stories, "--minutes", 0.04, "--out", out
    command = train_command("--arch", "qwen3", *arguments)
    done = subprocess.run(command, capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stderr
    assert f"held-out bits per byte: {{{str(stories)!r}: " in done.stdout
    model, tokenizer = load(str(out), device="cpu", dtype="float32"), Tokenizer(str(out))
    assert tokenizer.decode(tokenizer.encode("Ann had ½ apple.")) == "Ann had ½ apple."
    assert tokenizer.stop_ids == tuple(tokenizer.encode(END))
    assert held_out_bits(model, tokenizer) < math.log2(model.config.vocab_size) / 2

    status, error = train_main("--arch", "gpt2", *arguments)
    assert status == 2 and "holds a run of qwen3" in error
    status, error = train_main("--arch", "qwen3", *arguments)
    assert status == 2 and "has had its 0.04 minutes" in error


@pytest.mark.skipif(os.name == "nt", reason="Ctrl-C is sent in another way")
def test_train_stopped_by_ctrl_c_goes_on_where_it_was(stories, tmp_path):
    out = tmp_path / "model"
    command = train_command("--arch", "gpt2", "--text", stories, "--minutes", 9, "--out", out)
    run = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
    for line in run.stdout:
        if line.startswith("step 10 "):
            break
    run.send_signal(signal.SIGINT)
    output, errors = run.communicate(timeout=120)
    assert run.returncode == 130, errors
    state = torch.load(out / "state.pt")
    assert f"stopped after step {state['step']};" in errors and state["step"] >= 10
    assert any(v["exp_avg"].any() for v in state["adamw"]["state"].values())
    load(str(out))
    run = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
    for line in run.stdout:
        if "from step" in line:
            break
    run.kill()
    run.communicate()
    assert line.strip().endswith(f"from step {state['step']}")


@pytest.mark.parametrize("case", ["no file", "one document", "little text", "not UTF-8", "folder"])
def test_train_says_what_is_wrong_in_one_line(case, tmp_path, train_main):
    text, out = tmp_path / "text.txt", tmp_path / "model"
    content = f"Hello.\n{END}\nGood bye.\n{END}\n".encode()
    content = {"one document": b"Hello.", "not UTF-8": b"\xff\xfe"}.get(case, content)
    if case != "no file":
        text.write_bytes(content)
    if case == "folder":  # a trained model is not to be written over
        out.mkdir()
        (out / "model.safetensors").touch()
    status, error = train_main("--arch", "gpt2", "--text", text, "--minutes", 1, "--out", out)
    assert status == 2
    assert error.startswith("error: ") and error.count("\n") == 1
    named = {"folder": str(out), "little text": "too little text"}.get(case, str(text))
    assert named in error


@pytest.mark.parametrize("kind", KINDS)
def test_nan_does_not_outlive_its_request(tiny, kind):
    """KV-4: an object is emptied first; what is masked would still be multiplied."""
    cache = kvcache.PreallocatedCache(tiny[kind], 1, 100)
    expected = list(gen.generate(tiny[kind], [[1, 2, 3]], 20))
    list(gen.generate(tiny[kind], [[5] * 60], 30, cache=cache))
    with torch.inference_mode():
        for tensor in (tensor for kv in cache.storage for tensor in kv):
            tensor[:, :, :89] = math.nan
    assert list(gen.generate(tiny[kind], [[1, 2, 3]], 20, cache=cache)) == expected


def test_stop_ids_that_are_no_ids(folder, cli):
    path = folder(generation_config={"eos_token_id": "x"})
    status, out, err = cli("--model", path, "--prompt", "x")
    assert (status, out) == (2, "")
    assert err == f"error: {path}: eos_token_id 'x' or bos_token_id 0 is no id\n"


# --- a hub on this machine ------------------------------------------------------------------------

COMMIT = "0123456789abcdef0123456789abcdef01234567"
SMALL_FILES = ["config.json", "tokenizer.json", "tokenizer_config.json", "generation_config.json"]


class Hub(http.server.BaseHTTPRequestHandler):
    """What hub clients need: metadata in the headers of HEAD, large files on another host.

    The server holds `repos` {name: {file: bytes}}, `log` [(method, file, headers)] and `faults`
    {(method, file): function(handler, data)}, which answers in place of the hub.
    """

    protocol_version = "HTTP/1.1"

    def answer(self, status, data=b"", **headers):
        self.send_response(status)
        for name, value in ({"Content-Length": len(data), "Connection": "close"} | headers).items():
            self.send_header(name.replace("_", "-"), str(value))
        self.end_headers()
        if self.command == "GET":
            self.wfile.write(data)

    def deny(self, status, code):
        self.answer(status, b'{"error": "no"}', X_Error_Code=code, X_Repo_Commit=COMMIT)

    def serve(self):
        server = self.server.state
        _, place, *rest = self.path.split("/")
        if place == "api":  # the library's own business, such as what it is run by
            return self.answer(404)
        if place == "cdn":
            repo, file = "/".join(rest[:2]), rest[2]
        else:
            repo, file = f"{place}/{rest[0]}", "/".join(rest[3:])
            assert rest[1:3] == ["resolve", "main"], self.path
        server.log.append(
            (self.command, file, {k.lower(): v for k, v in self.headers.items()}, place == "cdn")
        )
        data = server.repos.get(repo, {}).get(file)
        if fault := server.faults.get((self.command, file)):
            return fault(self, data)
        if repo not in server.repos:
            return self.deny(401, "RepoNotFound")
        if data is None:
            return self.deny(404, "EntryNotFound")
        etag = f'"{hashlib.sha256(data).hexdigest()}"'
        if place != "cdn" and file.endswith(".safetensors"):
            return self.answer(
                302, Location=f"http://localhost:{self.server.server_port}/cdn/{repo}/{file}",
                X_Repo_Commit=COMMIT, X_Linked_Etag=etag, X_Linked_Size=len(data),
            )  # fmt: skip
        self.answer_from(data, ETag=etag, X_Repo_Commit=COMMIT)

    def answer_from(self, data, **headers):
        """All of it, or what the client still lacks."""
        if wanted := re.fullmatch(r"bytes=(\d+)-", self.headers.get("Range", "")):
            start = int(wanted[1])
            headers["Content_Range"] = f"bytes {start}-{len(data) - 1}/{len(data)}"
            return self.answer(206, data[start:], **headers)
        if self.command == "HEAD":
            return self.answer(200, **{"Content-Length": len(data)}, **headers)
        self.answer(200, data, **headers)

    do_GET = do_HEAD = serve

    def log_message(self, *args):
        pass


def contents(folder):
    return {path.name: path.read_bytes() for path in sorted(folder.iterdir())}


@pytest.fixture
def server(folders):
    state = SimpleNamespace(repos={"org/name": contents(folders["qwen3"])}, log=[], faults={})
    server = http.server.ThreadingHTTPServer(("127.0.0.1", 0), Hub)
    server.state = state
    thread = threading.Thread(target=server.serve_forever, kwargs=dict(poll_interval=0.01))
    thread.start()

    def stop():
        server.shutdown()
        server.server_close()
        thread.join()

    state.url, state.stop = f"http://127.0.0.1:{server.server_port}", stop
    state.asked = lambda: [(method, file) for method, file, _, _ in state.log]
    state.fetched = lambda: [file for method, file, _, _ in state.log if method == "GET"]
    yield state
    if thread.is_alive():
        stop()


@pytest.fixture
def hub(server, tmp_path, monkeypatch):
    """The server, and this process as if started with HF_ENDPOINT and HF_HOME; waits are counted.

    `endpoint(url)` points somewhere else, `offline()` is HF_HUB_OFFLINE=1.
    """
    constants = huggingface_hub.constants

    def endpoint(url):
        monkeypatch.setattr(constants, "ENDPOINT", url)
        template = url + "/{repo_id}/resolve/{revision}/{filename}"
        monkeypatch.setattr(constants, "HUGGINGFACE_CO_URL_TEMPLATE", template)

    monkeypatch.setattr(constants, "HF_HUB_CACHE", str(tmp_path / "cache"))
    monkeypatch.setattr(constants, "HF_TOKEN_PATH", str(tmp_path / "token"))
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", False)
    monkeypatch.delenv("HF_TOKEN", raising=False)
    server.waited = []
    monkeypatch.setattr(time, "sleep", server.waited.append)
    endpoint(server.url)
    server.endpoint, server.cache = endpoint, tmp_path / "cache"
    server.offline = lambda: monkeypatch.setattr(constants, "HF_HUB_OFFLINE", True)
    yield server
    huggingface_hub.utils.close_session()


def ask(cli, name, *flags):
    return cli("--model", name, "--prompt", "Hello", "--max-new-tokens", 4, *flags)


def shard(files):
    """The files of a model with its tensors in two shards and an index."""
    files = dict(files)
    tensors = safetensors.torch.load(files.pop("model.safetensors"))
    weight_map = {}
    for n in range(2):
        name = f"model-{n + 1:05}-of-00002.safetensors"
        part = {key: tensors[key] for key in sorted(tensors)[n::2]}
        files[name] = safetensors.torch.save(part)
        weight_map |= dict.fromkeys(part, name)
    files["model.safetensors.index.json"] = json.dumps({"weight_map": weight_map}).encode()
    return files


@pytest.mark.parametrize("sharded", [False, True])
def test_hub_model_is_downloaded_once_and_then_needs_no_network(folders, hub, cli, sharded):
    """Only the documented names are asked for, each is fetched once."""
    expected = ask(cli, folders["qwen3"])[:2]
    assert expected[0] == 0 and expected[1]
    weights = ["model.safetensors"]
    if sharded:
        hub.repos["org/name"] = shard(hub.repos["org/name"])
        weights = sorted(name for name in hub.repos["org/name"] if "model" in name)
    hub.repos["org/name"] |= {"pytorch_model.bin": b"x", "README.md": b"x"}
    assert ask(cli, "org/name")[:2] == expected
    assert sorted(hub.fetched()) == sorted([*SMALL_FILES, *weights])
    names = {file for _, file in hub.asked()}
    assert names == {*SMALL_FILES, "model.safetensors", *weights}
    assert {method for method, _ in hub.asked()} == {"GET", "HEAD"}

    hub.log.clear()
    assert ask(cli, "org/name")[:2] == expected
    assert hub.fetched() == [] and len(hub.asked()) < 25
    for make_unreachable in (hub.stop, hub.offline):
        hub.log.clear()
        make_unreachable()
        assert ask(cli, "org/name")[:2] == expected
        assert hub.log == hub.waited == []
    status, out, err = ask(cli, "org/name", "--chat")  # the template is in tokenizer_config.json
    assert status == 0, err


def dropped(handler, data):
    """Half of what was asked for, then the line goes dead."""
    start = int(re.sub(r"\D", "", handler.headers.get("Range", "0")))
    handler.send_response(206 if start else 200)
    handler.send_header("Content-Length", str(len(data) - start))
    if start:
        handler.send_header("Content-Range", f"bytes {start}-{len(data) - 1}/{len(data)}")
    handler.end_headers()
    handler.wfile.write(data[start : start + (len(data) - start) // 2])
    handler.close_connection = True


def test_hub_download_goes_on_where_the_connection_dropped(folders, hub, cli, monkeypatch):
    expected = ask(cli, folders["qwen3"])[:2]
    monkeypatch.setattr(huggingface_hub.constants, "DOWNLOAD_CHUNK_SIZE", 1)  # keep every byte
    drops = [dropped, dropped, dropped, Hub.answer_from]
    hub.faults["GET", "model.safetensors"] = lambda handler, data: drops.pop(0)(handler, data)
    assert ask(cli, "org/name")[:2] == expected and not drops
    size, got = len(hub.repos["org/name"]["model.safetensors"]), 0
    ranges = [h.get("range") for _, file, h, on_cdn in hub.log if file == WEIGHTS and on_cdn]
    for wanted in ranges:
        assert wanted == (f"bytes={got}-" if got else None)
        got += (size - got) // 2
    assert len(ranges) == 4


def test_hub_files_that_arrived_are_kept_when_the_next_one_fails(folders, hub, cli):
    expected = ask(cli, folders["qwen3"])[:2]
    fail = hub.faults["GET", "model.safetensors"] = lambda handler, data: handler.answer(500)
    assert fail and ask(cli, "org/name")[0] == 2
    assert sorted(hub.fetched()) == sorted([*SMALL_FILES, "model.safetensors"])
    hub.faults.clear()
    hub.log.clear()
    assert ask(cli, "org/name")[:2] == expected and hub.fetched() == ["model.safetensors"]


def test_hub_token_goes_to_the_hub_and_nowhere_else(hub, cli, monkeypatch):
    monkeypatch.setenv("HF_TOKEN", "hf_secret")
    assert ask(cli, "org/name")[0] == 0
    assert {on_cdn for *_, on_cdn in hub.log} == {True, False}
    for _, _, headers, on_cdn in hub.log:
        assert headers.get("authorization") == (None if on_cdn else "Bearer hf_secret")


DENIED = "error: org/name needs permission: accept its terms and set HF_TOKEN"
FAILED = (
    r"error: org/name: {} is not in .*cache and cannot be downloaded \({}\); "
    r"--model tiny-qwen3 needs no download"
)
WEIGHTS = "model.safetensors"
HUB_FAULTS = {
    "unknown": (
        "config.json",
        None,
        r"error: no repository org/other \(or it is private: .*HF_TOKEN\)",
    ),
    "gated 401": ("config.json", lambda h, d: h.deny(401, "GatedRepo"), DENIED),
    "gated 403": ("config.json", lambda h, d: h.deny(403, "GatedRepo"), DENIED),
    "forbidden": (
        "config.json",
        lambda h, d: h.answer(403),
        FAILED.format("config.json", ".*403.*"),
    ),
    "server error": (
        "config.json",
        lambda h, d: h.answer(503),
        FAILED.format("config.json", ".*503.*"),
    ),
    "too many": (
        "config.json",
        lambda h, d: h.answer(429),
        FAILED.format("config.json", ".*429.*"),
    ),
    "no hub": (
        "config.json",
        lambda h, d: h.answer(200, d),
        FAILED.format("config.json", ".*X-Repo-Commit.*"),
    ),
    "late error": (
        "generation_config.json",
        lambda h, d: h.answer(500),
        FAILED.format("generation_config.json", ".*500.*"),
    ),
    "dropped": (WEIGHTS, dropped, FAILED.format(WEIGHTS, "peer closed .*")),
    "dead": (WEIGHTS, lambda h, d: h.connection.close(), FAILED.format(WEIGHTS, ".*")),
    "short": (
        WEIGHTS,
        lambda h, d: h.answer(200, d[:-9]),
        FAILED.format(WEIGHTS, r".*be of size \d+ but .*"),
    ),
    "long": (
        WEIGHTS,
        lambda h, d: h.answer(200, d + b"x"),
        FAILED.format(WEIGHTS, r".*be of size \d+ but .*"),
    ),
    "silent": (
        WEIGHTS,
        lambda h, d: h.server.state.silence.wait(60),
        FAILED.format(WEIGHTS, ".*time.*"),
    ),
}


@pytest.mark.parametrize("fault", HUB_FAULTS)
def test_hub_faults_are_one_line(fault, hub, cli, monkeypatch):
    file, answer, message = HUB_FAULTS[fault]
    hub.silence = threading.Event()
    monkeypatch.setattr(huggingface_hub.constants, "HF_HUB_DOWNLOAD_TIMEOUT", 0.1)
    if answer and file != WEIGHTS:
        hub.faults["HEAD", file] = answer
    elif answer:
        hub.faults["GET", file] = answer
    status, out, err = ask(cli, "org/name" if answer else "org/other")
    hub.silence.set()
    assert (status, out) == (2, "")
    assert re.fullmatch(message + "\n", err), err
    assert sum(hub.waited) <= 10  # seconds
    assert not list(hub.cache.rglob("*.incomplete"))


class FullDisk(io.BytesIO):
    def write(self, data):
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))


def test_hub_full_disk(hub, cli, monkeypatch):
    open_path = Path.open

    def open_full(path, *args, **kwargs):
        full = path.suffix == ".incomplete"
        return FullDisk() if full else open_path(path, *args, **kwargs)

    monkeypatch.setattr(Path, "open", open_full)
    status, out, err = ask(cli, "org/name")
    message = FAILED.format("config.json", r"\[Errno 28\] No space left on device")
    assert (status, out) == (2, "") and re.fullmatch(message + "\n", err), err


def test_hub_without_network(hub, cli, monkeypatch):
    """At once, and without the library's retries: 23 s, or minutes where packets are lost."""
    hub.stop()
    status, out, err = ask(cli, "org/name")
    message = FAILED.format("config.json", ".*Connection refused")
    assert (status, out, hub.waited) == (2, "", []) and re.fullmatch(message + "\n", err), err
    hub.offline()
    status, out, err = ask(cli, "org/name")
    message = FAILED.format("config.json", ".*offline mode is enabled.*HF_HUB_OFFLINE.*")
    assert (status, out, hub.waited) == (2, "", []) and re.fullmatch(message + "\n", err), err


def test_hub_lost_while_downloading_is_no_missing_file(hub, cli):
    """What the hub may have is not taken for absent because the rest has arrived."""
    assert ask(cli, "org/name")[0] == 0
    for path in hub.cache.rglob("generation_config.json"):
        path.resolve().unlink()
        path.unlink()
    hub.faults["GET", "generation_config.json"] = lambda handler, data: handler.answer(500)
    status, out, err = ask(cli, "org/name")
    assert (status, out) == (2, "") and "generation_config.json is not in" in err
    hub.stop()  # now nobody knows, and the rest was asked for earlier
    assert ask(cli, "org/name")[0] == 0


def test_hub_of_another_kind_says_404_and_no_more(hub, cli):
    """A mirror need not know the hub's error codes."""
    for file in ("tokenizer_config.json", "chat_template.jinja"):
        hub.faults["HEAD", file] = lambda handler, data: handler.answer(404)
    assert ask(cli, "org/name")[0] == 0
    status, out, err = ask(cli, "org/name", "--chat")
    assert (status, err) == (2, "error: org/name has no chat template: leave out --chat\n")


def test_hub_shard_that_is_missing_on_the_hub(hub, cli):
    hub.repos["org/name"] = files = shard(hub.repos["org/name"])
    del files["model-00001-of-00002.safetensors"]
    status, out, err = ask(cli, "org/name")
    assert (status, out, err.count("\n")) == (2, "", 1)
    assert re.search(r"index.json names 'model-\d+-of-00002.safetensors', which is missing", err), (
        err
    )


@pytest.mark.parametrize("name", ["../x.safetensors", "pytorch_model.bin", "a/../../x.safetensors"])
def test_hub_index_that_names_other_files(name, hub, cli):
    """An index decides what is downloaded: nothing but weights of this folder."""
    hub.repos["org/name"] = files = shard(hub.repos["org/name"])
    index = json.loads(files["model.safetensors.index.json"])
    index["weight_map"]["model.norm.weight"] = name
    files["model.safetensors.index.json"] = json.dumps(index).encode()
    status, out, err = ask(cli, "org/name")
    assert (status, out, err.count("\n")) == (2, "", 1) and repr(name) in err, err
    assert not any("x.safetensors" in file or file.endswith(".bin") for _, file in hub.asked())


@pytest.mark.parametrize("url", ["foo", "", "http://", "ftp://127.0.0.1", "http://127.0.0.1:x"])
def test_hub_endpoint_that_is_no_address(url, hub, cli):
    hub.endpoint(url)
    status, out, err = ask(cli, "org/name")
    assert (status, out, err.count("\n"), hub.log) == (2, "", 1, [])
    assert err.startswith("error: org/name: config.json is not in"), err


@pytest.mark.parametrize(
    "name", ["org/na--me", "org/a..b", "org/" + "n" * 200, "org/name.git", "örg/x"]
)
def test_hub_names_that_cannot_be(name, hub, cli):
    status, out, err = ask(cli, name)
    assert (status, out, err.count("\n")) == (2, "", 1) and err.startswith("error: "), err


# --- the same in processes of their own ---


def hub_process(server, home, *arguments, **env):
    """generate.py as a process that knows the server; text of both streams."""
    kept = {k: v for k, v in os.environ.items() if not k.startswith(("HF_", "HUGGING"))}
    env = kept | dict(HF_ENDPOINT=server.url, HF_HOME=str(home), OMP_NUM_THREADS="1") | env
    arguments = ["--model", "org/name", "--prompt", "Hello", "--max-new-tokens", "4", *arguments]
    command = [sys.executable, gen.__file__, *arguments]
    done = subprocess.run(command, capture_output=True, timeout=300, env=env)
    return done.returncode, done.stdout.decode(), done.stderr.decode()


def test_process_downloads_and_then_needs_no_network(folders, server, cli, tmp_path):
    expected = ask(cli, folders["qwen3"])[1]
    status, out, err = hub_process(server, tmp_path, HF_TOKEN="hf_secret")
    assert (status, out, err.count("\n")) == (0, expected, 1), err
    assert sorted(server.fetched()) == sorted([*SMALL_FILES, WEIGHTS])
    assert server.log[0][2]["authorization"] == "Bearer hf_secret"
    server.stop()
    assert hub_process(server, tmp_path)[:2] == (0, expected)


def test_process_with_an_endpoint_that_is_no_address(server, tmp_path):
    status, out, err = hub_process(server, tmp_path, HF_ENDPOINT="foo")
    message = FAILED.format("config.json", ".*protocol.*").replace("cache", "hub")
    assert (status, out) == (2, "") and re.fullmatch(message + "\n", err), err


@pytest.mark.skipif(os.name == "nt", reason="pseudo-terminals are Unix's")
def test_process_shows_progress_on_a_terminal(server, tmp_path):
    """A bar with name and size per file, on stderr, where a person watches."""
    import fcntl
    import termios

    main, terminal = os.openpty()
    fcntl.ioctl(terminal, termios.TIOCSWINSZ, struct.pack("4H", 25, 100, 0, 0))
    chunks = []

    def read():
        while b"tokens/s" not in b"".join(chunks[-2:]):
            chunks.append(os.read(main, 4096))

    reader = threading.Thread(target=read, daemon=True)
    reader.start()
    env = os.environ | dict(HF_ENDPOINT=server.url, HF_HOME=str(tmp_path), HF_HUB_OFFLINE="0")
    command = [sys.executable, gen.__file__, "--model", "org/name", "--prompt", "a"]
    done = subprocess.run(command, stdout=subprocess.PIPE, stderr=terminal, timeout=300, env=env)
    reader.join(60)
    os.close(terminal)
    os.close(main)
    shown = b"".join(chunks).decode()
    assert done.returncode == 0 and not reader.is_alive()
    for name in [*SMALL_FILES, WEIGHTS]:
        assert re.search(rf"{re.escape(name)}: 100%.*B/s", shown), shown


# --- files from strangers -------------------------------------------------------------------------
# Whatever a folder holds, a run ends in the undamaged model's result, in that of a model that the
# change legitimately makes, or in one line. Fixed seeds: a failure names the case to run again.

NAN, INF = float("nan"), float("inf")
DEEP = "[" * 500 + "]" * 500
ODD_VALUES = [
    None, True, False, 0, 1, 2, -1, 3, 7, 17, 2**31, 2**63, 2**70, 10**12, -(10**400), 10**400,
    0.5, 1.0, -0.0, 1e-320, 1e308, NAN, INF, -INF, "", "x", "1", "16", "NaN", "true", "a\nb\0",
    "\ud800", [], [1], ["full_attention"], {}, {"a": 1}, {"content": 5}, json.loads(DEEP),
]  # fmt: skip
BROKEN_TEXTS = [
    b"", b"{", b"null", b"[]", b"5", b'"x"', b"\xff\xfe{}", b"\xef\xbb\xbf{}", b"\0" * 100,
    b"[" * 100_000, b'{"a":' * 100_000, b"{" + b'"a":1,' * 1000, b"<html>", b"9" * 5000,
    b"version https://git-lfs.github.com/spec/v1\noid sha256:0\nsize 9\n",
]  # fmt: skip
ANOTHER_MODEL, OTHER_TOKENS = "another model", "other tokens"  # what a change may make
LEGITIMATE = {  # keys of config.json that make another model of the same shapes
    "rope_theta", "rms_norm_eps", "layer_norm_epsilon", "n_head",
}  # fmt: skip


def edit_json(path, change):
    value = json.loads(path.read_text("utf-8"))
    change(value)
    path.write_text(json.dumps(value))


def set_key(file, key, value):
    """A case that sets (or with ... removes) one key of a JSON file."""

    def change(folder):
        def apply(data):
            data[key] = value
            if value is ...:
                del data[key]

        edit_json(folder / file, apply)

    return (
        f"{file}: {key} = {str(value)[:40]!r}",
        change,
        key in LEGITIMATE and ANOTHER_MODEL,
    )


def replace_text(file, text):
    return f"{file}: {text[:20]!r}", lambda folder: (folder / file).write_bytes(text), ""


def json_cases(rng, base):
    """Every key with every odd value would take minutes: some of each."""
    for file in ("config.json", "generation_config.json", "tokenizer_config.json"):
        keys = list(json.loads((base / file).read_text()))
        if file == "config.json":
            keys += ["dtype", "rope_scaling", "rope_parameters", "layer_types", "n_inner", "n_ctx"]
        for key in keys:
            for value in rng.sample(ODD_VALUES, 8):
                yield set_key(file, key, value)
        yield set_key(file, rng.choice(list(json.loads((base / file).read_text()))), ...)
        for text in rng.sample(BROKEN_TEXTS, 6):
            yield replace_text(file, text)
        text = (base / file).read_bytes()
        yield replace_text(file, text[: rng.randrange(1, len(text))])


@pytest.mark.parametrize("key", ["eos_token_id", "bos_token_id"])
def test_strangers_stop_and_begin_ids(key, folder, cli):
    """The ids of an empty prompt and of the end of a text go to the device as they are."""
    for value in [*ODD_VALUES, [2**70], [True], [-1], [[1]], ["x"], [1, None], [1, 2]]:
        path = folder(generation_config={key: value})
        ids = value if isinstance(value, list) and key == "eos_token_id" else [value]
        good = value is None or all(type(id) is int and 0 <= id < 2**31 for id in ids)
        result = cli("--model", path, "--prompt", "", "--max-new-tokens", 2, "--json")
        assert result[0] == (0 if good else 2), (value, result)
        if not good:
            assert re.fullmatch(rf"error: .* {key} .* is no id\n", result[2]), result


class SmallOnly(torch.utils._python_dispatch.TorchDispatchMode):
    """Fails when anything larger than these models need is allocated."""

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        result = func(*args, **(kwargs or {}))
        for t in result if isinstance(result, (list, tuple)) else [result]:
            assert not isinstance(t, torch.Tensor) or t.nbytes <= 2**23, (func, t.shape)
        return result


@pytest.fixture
def little_memory():
    """No allocation of GiB succeeds, of tensors or anything else (where the system can do that)."""
    resource = pytest.importorskip("resource", reason="this system has no limits")
    if not Path("/proc/self/statm").exists():
        yield
        return
    used = int(Path("/proc/self/statm").read_text().split()[0]) * resource.getpagesize()
    soft, hard = resource.getrlimit(resource.RLIMIT_AS)
    resource.setrlimit(resource.RLIMIT_AS, (used + 2**30, hard))
    yield
    resource.setrlimit(resource.RLIMIT_AS, (soft, hard))


def three_logits(model):
    cache = gen.kvcache.NoCache(model)
    return model(*cache.start(torch.tensor([[5, 9, 2]]), [0]), cache)


@pytest.fixture
def stranger(cli, monkeypatch, tmp_path, little_memory):
    """stranger(base, change, *flags) -> (error line or None, JSON or None, logits or None)."""
    loaded = []
    load = models.load

    def keep(*args):
        with SmallOnly():
            loaded.append(load(*args))
        return loaded[-1]

    monkeypatch.setattr(models, "load", keep)
    count = iter(range(10**6))

    def call(base, change, *flags):
        path = tmp_path / str(next(count))
        shutil.copytree(base, path)
        change(path)
        loaded.clear()
        flags = ("--model", path, "--max-new-tokens", 3, "--ignore-eos", "--json", *flags)
        status, out, err = cli(*flags, *([] if "--prompt" in flags else ["--prompt", "Hello"]))
        shutil.rmtree(path)
        if status == 0:
            return None, json.loads(out), three_logits(loaded[-1])
        assert (status, out, err.count("\n")) == (2, "", 1), (status, out, err)
        assert err.startswith("error: ") and len(err) < 2000, err
        return err, None, None

    return call


def check_cases(cases, base, stranger, *flags):
    """Each case is (label, function that changes a copy of base, what it may change)."""
    _, expected, logits = stranger(base, lambda folder: None, *flags)
    faults, ran, refused = [], 0, 0
    for label, change, may_change in cases:
        try:
            error, result, got = stranger(base, change, *flags)
            ran, refused = ran + (error is None), refused + (error is not None)
            if error is None and may_change != ANOTHER_MODEL:
                assert torch.equal(got, logits), "another model"
                if may_change != OTHER_TOKENS:
                    for key in ("prompt_ids", "new_ids", "texts", "dtype"):
                        assert result[key] == expected[key], key
            elif error is None:
                assert torch.isfinite(got).all()
        except KeyboardInterrupt:
            raise
        except BaseException as fault:  # a panic of Rust code is no Exception
            faults.append(f"{label!r}: {fault!r}"[:500])
    assert not faults, "\n".join(faults)
    return ran, refused


@pytest.mark.parametrize("kind", KINDS)
def test_strangers_json(kind, folders, stranger):
    cases = json_cases(random.Random(kind), folders[kind])
    ran, refused = check_cases(cases, folders[kind], stranger)
    assert ran > 40 and refused > 80


CONFIGS = [  # (kind, changes to config.json, words of the error)
    ("qwen3", {"head_dim": 7}, "head_dim 7 is odd"),
    ("qwen3", {"rope_theta": 1e4, "rope_parameters": {"rope_theta": 5e5}}, "rope_theta is"),
    ("qwen3", {"rope_theta": 0, "rope_parameters": {"rope_theta": 1e4}}, "rope_theta is"),
    ("qwen3", {"rope_theta": "1e4"}, "rope_theta = '1e4'"),
    ("qwen3", {"rope_theta": -1e4}, "rope_theta = -10000.0"),
    ("qwen3", {"rms_norm_eps": NAN}, "rms_norm_eps = nan"),
    ("gpt2", {"layer_norm_epsilon": INF}, "layer_norm_epsilon = inf"),
    ("gpt2", {"layer_norm_epsilon": True}, "layer_norm_epsilon = True"),
    ("qwen3", {"tie_word_embeddings": "false"}, "tie_word_embeddings = 'false'"),
    ("gpt2", {"n_inner": 0}, "n_inner = 0"),
    ("gpt2", {"n_head": -2}, "n_head = -2"),
    ("gpt2", {"n_layer": 1000}, "n_layer = 1000"),
    ("qwen3", {"num_hidden_layers": True}, "num_hidden_layers = True"),
    ("qwen3", {"vocab_size": 2**31}, "vocab_size = 2147483648"),
    ("qwen3", {"hidden_size": 16.0}, "hidden_size = 16.0"),
    ("qwen3", {"model_type": []}, "model_type \\[\\]"),
]


@pytest.mark.parametrize("kind, changes, words", CONFIGS, ids=lambda value: str(value)[:40])
def test_config_of_values_that_mean_nothing(kind, changes, words, folders, stranger):
    path = folders[kind]
    error, *_ = stranger(path, lambda f: edit_json(f / "config.json", lambda d: d.update(changes)))
    assert re.fullmatch(f"error: .*/config.json: .*{words}.*\n", error), error


def change_header(change):
    def apply(folder):
        path = folder / "model.safetensors"
        path.write_bytes(overwrite_header(path.read_bytes(), change))

    return apply


def change_bytes(change):
    def apply(folder):
        path = folder / "model.safetensors"
        path.write_bytes(change(path.read_bytes()))

    return apply


def safetensors_cases(rng, base):
    data = (base / "model.safetensors").read_bytes()
    n = int.from_bytes(data[:8], "little")
    header = json.loads(data[8 : 8 + n])
    keys = sorted(header.keys() - {"__metadata__"})

    def entry(field, value):
        key = rng.choice(keys)
        change = change_header(lambda h: h[key].update({field: value}))
        return f"{key} {field} {value}"[:80], change, ""

    for shape in ([-1], [2**63], [2**70], [], [0], [16, 16, 0], [[16]], "x", None, [1.5], [1] * 64):
        yield entry("shape", shape)
        yield entry("shape", [1, *header[rng.choice(keys)]["shape"]])
    for dtype in (
        "F64",
        "I32",
        "BOOL",
        "F8_E4M3",
        "F4",
        "U8",
        "F16",
        "BF16",
        "XX",
        "",
        5,
        None,
        [],
    ):
        yield entry("dtype", dtype)
    for offsets in ([0, 0], [9, 1], [-4, 0], [0, 2**63], [0, 2**64 + 4], [0.5, 1], ["a"], None, []):
        yield entry("data_offsets", offsets)
    for extra in (
        "",
        "x",
        "lm_head.weight",
        "model.lm_head.weight",
        "h.0.attn.bias.x",
        "a\n" * 999,
    ):
        new = dict(dtype="F32", shape=[0], data_offsets=[0, 0])
        yield f"extra {extra!r:.20}", change_header(lambda h, e=extra: h.update({e: new})), ""
    for key in rng.sample(keys, 4):
        yield f"without {key}", change_header(lambda h, k=key: h.pop(k)), ""
        yield f"renamed {key}", change_header(lambda h, k=key: h.update({k[:-1]: h.pop(k)})), ""
    for metadata in (5, None, {"a": 1}, {"a": "x" * 2**20}, {f"{i}": "" for i in range(10**5)}, []):
        label = f"metadata {metadata!r:.20}"
        yield label, change_header(lambda h, m=metadata: h.update(__metadata__=m)), ""
    for size in (0, 1, n - 1, n + 1, len(data) - 8, len(data), 10**8, 2**63, 2**64 - 1):
        change = change_bytes(lambda d, s=size: s.to_bytes(8, "little") + d[8:])
        yield f"header of {size} bytes", change, ""
    for text in (
        b"[" * 10_000,
        b'{"a":' * 10_000,
        b"{}",
        b"null",
        b"\xff" * 10,
        b" " * n,
        b'{"a":5}',
    ):
        change = change_bytes(lambda d, t=text: len(t).to_bytes(8, "little") + t + d[8 + n :])
        yield f"header {text[:9]}", change, ""
    for _ in range(12):
        end = rng.choice([rng.randrange(n), rng.randrange(len(data))])
        yield f"cut at {end}", change_bytes(lambda d, e=end: d[:e]), ""
    for _ in range(12):
        at, new = rng.randrange(8, 8 + n), rng.randrange(256)
        change = change_bytes(lambda d, a=at, b=new: d[:a] + bytes([b]) + d[a + 1 :])
        yield f"byte {at} is {new}", change, ""


def test_header_of_a_safetensors_file_is_no_larger_than_headers_are(folders, stranger):
    """The library would take minutes: it parses the header each time the file is opened."""
    for size, accepted in ((2**19, True), (2**20, False)):
        change = change_header(lambda h, n=size: h.update(__metadata__={"a": "x" * n}))
        error, *_ = stranger(folders["qwen3"], change)
        assert accepted == (error is None)
    assert re.search("model.safetensors is not a whole .*header too large.*download it", error)


@pytest.mark.parametrize("kind", KINDS)
def test_strangers_safetensors(kind, folders, stranger):
    cases = safetensors_cases(random.Random(kind), folders[kind])
    ran, refused = check_cases(cases, folders[kind], stranger)
    assert refused > 80


def link(file, target):
    def change(folder):
        (folder / file).unlink(missing_ok=True)
        (folder / file).symlink_to(target)

    return f"{file} -> {target}", change, ""


def fifo(file):
    def change(folder):
        (folder / file).unlink(missing_ok=True)
        os.mkfifo(folder / file)

    return f"{file} is a FIFO", change, ""


def directory(file):
    def change(folder):
        (folder / file).unlink(missing_ok=True)
        (folder / file).mkdir()

    return f"{file} is a folder", change, ""


def sparse(file):
    def change(folder):
        with open(folder / file, "ab") as f:
            f.truncate(2**40)

    return f"{file} is of 1 TiB", change, ""


@pytest.mark.skipif(os.name == "nt", reason="links and devices of Unix")
def test_strangers_links_and_devices(folders, stranger, tmp_path):
    base, outside = tmp_path / "base", tmp_path / "outside"
    base.mkdir()
    for name, data in shard(contents(folders["qwen3"])).items():
        (base / name).write_bytes(data)
    shutil.copytree(base, outside)
    shard_1 = "model-00001-of-00002.safetensors"
    index = "model.safetensors.index.json"

    def map_to(name):
        def change(folder):
            rename = {shard_1: name}
            edit_json(
                folder / index,
                lambda d: d.update(
                    weight_map={k: rename.get(v, v) for k, v in d["weight_map"].items()}
                ),
            )
            (folder / "x.safetensors").symlink_to("/dev/zero")

        return f"index names {name!r}"[:60], change, ""

    cases = []
    for file in [*contents(base), "chat_template.jinja"]:
        cases += [fifo(file), directory(file), link(file, "/dev/zero"), link(file, file)]
        cases += [link(file, "/dev/null"), link(file, "nowhere"), link(file, "/dev/stdin")]
        if (base / file).exists():
            cases += [link(file, outside / file), sparse(file)]  # a link to the same is no fault
    names = ["", ".", "..", "/dev/zero", f"../{shard_1}", str(outside / shard_1), f"./{shard_1}"]
    names += ["\\\\host\\x.safetensors", "C:x.safetensors", "a\0b.safetensors", "x.safetensors"]
    names += [
        "config.json",
        index,
        "x" * 300 + ".safetensors",
        "\ud800.safetensors",
        ".safetensors",
    ]
    names += [5, None, ["a.safetensors"], {"a": 1}, True, f"{shard_1}\n", "model.safetensors"]
    cases += [map_to(name) for name in names]
    swap = {
        "model-00002-of-00002.safetensors": shard_1,
        shard_1: "model-00002-of-00002.safetensors",
    }
    cases.append(
        ("shards swapped", lambda f: [shutil.copy(base / a, f / b) for a, b in swap.items()], "")
    )
    for text in BROKEN_TEXTS:
        cases.append(replace_text(index, text))
    for value in (None, [], {}, 5, "x", {"a": "b"}, json.loads(DEEP)):
        cases.append(set_key(index, "weight_map", value))
    ran, refused = check_cases(cases, base, stranger)
    assert ran >= len(contents(base)) and refused > 60


def json_paths(value, path=()):
    """Paths of all places of a JSON value, at most 8 of the items of each list or map."""
    yield path
    if isinstance(value, (dict, list)):
        items = value.items() if isinstance(value, dict) else enumerate(value)
        for key, item in list(items)[:8]:
            yield from json_paths(item, (*path, key))


def tokenizer_cases(rng, base):
    text = (base / "tokenizer.json").read_bytes()
    places = [path for path in json_paths(json.loads(text)) if path]

    def set_at(path, value):
        def change(folder):
            def apply(data):
                for key in path[:-1]:
                    data = data[key]
                data[path[-1]] = value

            edit_json(folder / "tokenizer.json", apply)

        return f"{path} = {value!r:.60}", change, OTHER_TOKENS

    for place in rng.sample(places, min(40, len(places))):
        yield set_at(place, rng.choice(ODD_VALUES))
    for pattern in (
        "(a+)+$",
        "(a|a)*$",
        "(a*)*b",
        r"(a+)\1+$",
        "(x+x+)+y",
        "(?:.*)*x",
        "(((",
        "",
        "\\p{Zzz}",
        "(?<=a+)b",
        "a{1,9999999}",
    ):
        split = {
            "type": "Split",
            "pattern": {"Regex": pattern},
            "behavior": "Isolated",
            "invert": False,
        }
        both = {
            "type": "Sequence",
            "pretokenizers": [
                split,
                {"type": "ByteLevel", "add_prefix_space": False, "trim_offsets": True},
            ],
        }
        yield set_at(("pre_tokenizer",), both)
    for content in ("", " ", "H", "Hello", "a" * 10_000, "\0", "(", "|", "\ud800", "<|im_start|>"):
        token = dict(
            id=0,
            content=content,
            single_word=False,
            lstrip=False,
            rstrip=False,
            normalized=False,
            special=True,
        )
        for id in (0, 291, 292, 2**31, 2**32 - 1, -1):
            yield set_at(("added_tokens",), [token | {"id": id}])
    for normalizer in (
        {"type": "Prepend", "prepend": "x" * 10_000},
        {"type": "Lowercase"},
        {"type": "Replace", "pattern": {"String": ""}, "content": "y" * 1000},
        {"type": "Replace", "pattern": {"Regex": ".*"}, "content": "y"},
    ):
        yield set_at(("normalizer",), normalizer)
    for model in (
        {"type": "WordLevel", "vocab": {"Hello": 0}, "unk_token": "Hello"},
        {"type": "WordLevel", "vocab": {}, "unk_token": "x"},
        {"type": "BPE", "vocab": {}, "merges": []},
        {"type": "BPE", "vocab": {"H": 2**32 - 1}, "merges": []},
        {"type": "BPE", "vocab": {"H": 0, "e": 0}, "merges": ["H e"]},
        {"type": "Unigram", "unk_id": 0, "vocab": [["x", NAN]]},
        {"type": "Unigram", "unk_id": 9, "vocab": []},
        {
            "type": "WordPiece",
            "vocab": {},
            "unk_token": "",
            "continuing_subword_prefix": "",
            "max_input_chars_per_word": 0,
        },
    ):
        yield set_at(("model",), model)
    for decoder in ({"type": "Sequence", "decoders": []}, {"type": "ByteLevel"}, {"type": "Fuse"}):
        yield set_at(("decoder",), decoder)
    for broken in BROKEN_TEXTS:
        yield (
            replace_text("tokenizer.json", broken)[0],
            replace_text("tokenizer.json", broken)[1],
            "",
        )
    for _ in range(15):
        at, new = rng.randrange(len(text)), rng.randrange(256)
        changed = text[:at] + bytes([new]) + text[at + 1 :]
        label, change, _ = replace_text("tokenizer.json", changed)
        yield f"byte {at} is {new}", change, OTHER_TOKENS


def test_strangers_tokenizer_of_another_model(folders, stranger):
    """One with more ids than the model has is refused by the first id that is too large."""
    tiny = Path(models.__file__).parent / "tiny" / "qwen3"
    larger = lambda folder: shutil.copy(tiny / "tokenizer.json", folder)  # noqa: E731
    error, *_ = stranger(folders["qwen3"], larger)
    assert re.fullmatch("error: id \\d+ is outside the vocabulary of 292\n", error)
    smaller = folders["qwen3"] / "tokenizer.json"
    case = ("smaller", lambda folder: shutil.copy(smaller, folder), OTHER_TOKENS)
    assert check_cases([case], tiny, stranger) == (1, 0)


def test_strangers_tokenizer(folders, stranger):
    cases = tokenizer_cases(random.Random(1), folders["qwen3"])
    prompt = ["--prompt", "a" * 40 + "! Hello <|im_start|>"]
    ran, refused = check_cases(cases, folders["qwen3"], stranger, *prompt)
    assert ran > 20 and refused > 40


ENDLESS = "{% for i in range(99999) %}{% for j in range(99999) %}{% endfor %}{% endfor %}"
HOSTILE_TEMPLATES = {  # template: what the error line says, or None where it is harmless
    ENDLESS: "does not come to an end",
    "{% macro m() %}{{ m() }}{% endmacro %}{{ m() }}": "recursion",
    "{{ " + "(" * 5000 + "1" + ")" * 5000 + " }}": "recursion",
    "{% if 1 %}" * 300 + "{% endif %}" * 300: "",
    "{% for a in messages %}" * 30 + "{% endfor %}" * 30: "nested",
    "{% for i in range(10 ** 12) %}{% endfor %}": "the result of ** is too large",
    "{% for i in range(1000000000000) %}{% endfor %}": "Range too big",
    "{{ 10 ** 10 ** 10 }}": "the result of ** is too large",
    "{{ 'a' * 10000000000 }}": "the result of * is too large",
    "{{ 1000 * ('a' * 1000 * 1000 * 1000) }}": "the result of * is too large",
    "{{ [0] * 10000000000 }}": "the result of * is too large",
    "{{ ''.__class__.__mro__ }}": "unsafe",
    "{{ messages.__class__ }}{{ lipsum.__globals__['os'].system('echo') }}": "unsafe",
    "{{ cycler.__init__.__globals__.os.popen('id').read() }}": "unsafe",
    "{{ raise_exception.__globals__.sys }}": "unsafe",
    "{{ strftime_now.__self__.x.y }}": "unsafe",
    "{{ messages.append(1) }}": "unsafe",
    "{{ ''.format.__self__.x }}": "no attribute",
    "{% include '/etc/passwd' %}": "no loader",
    "{% import 'os' as os %}": "no loader",
    "{% extends '../x' %}": "no loader",
    "{{ raise_exception('no\nsuch\nturn') }}": "no such turn",
    "{{ 1 / 0 }}": "division",
    "{{ messages.x.y }}": "no attribute",
    "{{": "unexpected",
    "{{ '-' * 40 }}{{ 6 * 7 }}": None,
    "{{ messages | tojson }}": None,
    "a\0b": None,
    "{{ '{0.__class__}'.format(1) }}a": None,
}


@pytest.mark.parametrize("place", ["tokenizer_config.json", "chat_template.jinja"])
def test_strangers_chat_template(place, folders, stranger):
    def change(template):
        def in_config(folder):
            edit_json(folder / place, lambda data: data.update(chat_template=template))

        def as_file(folder):
            (folder / place).write_bytes(template.encode())

        return in_config if place == "tokenizer_config.json" else as_file

    for template, message in HOSTILE_TEMPLATES.items():
        if template == ENDLESS and place == "chat_template.jinja":
            continue  # takes some seconds
        error, result, _ = stranger(folders["qwen3"], change(template), "--chat")
        if message is None:
            assert error is None, (template[:60], error)
        else:
            assert error and error.startswith("error: chat template: "), (template[:60], error)
            assert message in error, (template[:60], error)
    trace = sys.gettrace()
    stranger(folders["qwen3"], change("a"), "--chat")
    assert sys.gettrace() is trace  # a debugger or a coverage tool goes on


def test_strangers_chat_templates_that_are_none(folders, stranger):
    def as_bytes(folder):
        (folder / "chat_template.jinja").write_bytes(b"\xff\xfe")

    cases = [("bytes", as_bytes, "")]
    lists = [[5], [{}], [{"name": 5}], [{"name": [], "template": "x"}], [["default", "x"]]]
    for value in [*ODD_VALUES, *lists, [{"name": "default", "template": 5}]]:
        if value not in ("x", "1", "16", "NaN", "true", "a\nb\0", "\ud800"):  # these are templates
            cases.append(set_key("tokenizer_config.json", "chat_template", value))
    for label, change, _ in cases:
        error, *_ = stranger(folders["qwen3"], change, "--chat")
        assert error, label
        assert re.search("chat template: |has no chat template: leave out --chat", error), error


# --- command lines --------------------------------------------------------------------------------

WHOLE = [
    "0",
    "1",
    "3",
    "+2",
    " 4 ",
    "1_0",
    "-1",
    "1e3",
    "0x10",
    "٣",
    "²",
    "",
    "nan",
    "x",
    "--",
    "a\nb",
    "-0",
    "513",
    str(2**63),
    str(2**70),
    "9" * 5000,
]
REAL = [
    "0",
    "0.7",
    "1",
    "1.0",
    "1e-3",
    "1e-320",
    "5",
    "-1",
    "nan",
    "inf",
    "-inf",
    "1e400",
    "",
    "x",
    "0,5",
    "٣",
    "--",
    "\udce9",
    "1_0",
    "-0.0",
]
ODD_TEXTS = [
    "Hello",
    "",
    "-",
    "Hello world, once",
    "日本",
    "😀",
    "a\0b",
    "\udce9",
    "\n",
    "<|endoftext|>",
    "--",
    "-x",
    "a" * 600,
    " ",
    "\ud83d",
    "a\r\nb",
]
FLAGS = {
    "--model": [
        "",
        ".",
        "/",
        "..",
        "nope",
        "a/b/c",
        "~",
        "org/name",
        "org/na--me",
        "a\0b",
        "x" * 5000,
        "a\nb",
        "-",
        "tiny-qwen3 ",
        "日/本",
        "\udce9",
        "/dev/null",
        __file__,
    ],
    "--prompt": ODD_TEXTS,
    "--max-new-tokens": WHOLE,
    "--device": [
        "auto",
        "cpu",
        "cpu:0",
        "cpu:1",
        "cuda",
        "CPU",
        "",
        "meta",
        "meta:0",
        "mkldnn",
        "hpu",
        "a\0b",
        "\udce9",
        "cpu:" + "9" * 50,
        "privateuseone",
        "xla",
        "a\nb",
        "--",
        "cpu ",
    ],
    "--dtype": ["auto", "float32", "float32", "bfloat16", "float16", "int8", "", "float64", "a\nb"],
    "--matmul-precision": ["highest", "high", "medium", ""],
    "--cache": ["none", "growing", "preallocated", "paged", "", "NONE"],
    "--compile": [None, None, "max-autotune", "reduce-overhead", "default", "", "a\nb"],
    "--cuda-graph": [None],
    "--pipeline": ["off", "event", "ping-pong", "unchecked", ""],
    "--temperature": REAL,
    "--top-k": WHOLE,
    "--top-p": REAL,
    "--seed": WHOLE,
    "--chat": [None, None, None, "x"],
    "--system": ODD_TEXTS,
    "--no-think": [None],
    "--ignore-eos": [None],
    "--show-tokens": [None],
    "--json": [None],
    "--nonsense": [None, "x"],
    "stray": [None],
}


def random_command(rng, folders):
    """A command line around a working one: some flags of any value, repeated, in any order."""
    command = []
    for flag in rng.sample(sorted(FLAGS), rng.randrange(1, 6)):
        # Mostly the values that come first, so that many command lines do something.
        values = FLAGS[flag]
        value = rng.choice(values if rng.random() < 0.4 else values[:4])
        command.append([flag] if value is None else [flag, value])
        if value is not None and value.startswith("-") and rng.random() < 0.5:
            command[-1] = [f"{flag}={value}"]
    model = folders[rng.choice(KINDS)]
    command += [["--model", model]] * (rng.random() < 0.97 and "--model" not in str(command))
    command += [["--prompt", "Hello"]] * (rng.random() < 0.97)
    command += [["--max-new-tokens", "3"]] * ("--max-new-tokens" not in str(command))
    rng.shuffle(command)
    return [word for words in command for word in words]


@pytest.mark.parametrize("seed", range(4))
def test_strangers_command_lines(seed, folders, cli, monkeypatch, little_memory):
    """Each gives what a plain run gives for its settings, or one line and exit status 2."""
    monkeypatch.setattr(models, "compiled", lambda function, *_: function)  # minutes otherwise
    monkeypatch.setattr(gen, "check_compiler", lambda device: None)
    monkeypatch.setattr(huggingface_hub.constants, "HF_HUB_OFFLINE", True)
    loaded, load = [], models.load

    def keep(*args):
        with SmallOnly():
            loaded.append(load(*args))
        return loaded[-1]

    monkeypatch.setattr(models, "load", keep)
    rng = random.Random(seed)
    faults, ran, refused = [], 0, 0
    for _ in range(75):
        command = random_command(rng, folders)
        try:
            status, out, err = cli(*command, stdin=rng.choice([b"Hello\n", b"", b"\xff", b"a\0b"]))
            if status == 2:
                refused += 1
                assert out == "" and err.startswith("error: ") and err.count("\n") == 1, err
                assert len(err) < 10_000
                continue
            ran += 1
            assert status == 0
            notices = err.splitlines()
            assert all(not line.startswith("error") and "Traceback" not in line for line in notices)
            args = gen.parse_arguments([str(word) for word in command])
            if args.json:
                result = json.loads(out)
                check_against_a_plain_run(args, result, loaded[-1])
        except KeyboardInterrupt:
            raise
        except BaseException as fault:
            faults.append(f"{command!r:.300}: {fault!r:.300}")
    assert not faults, "\n".join(faults)
    assert ran > 10 and refused > 15


def check_against_a_plain_run(args, result, model):
    if args.temperature and args.seed is None or result["dtype"] != "float32":
        return
    tokenizer = gen.Tokenizer(args.model)
    stop = () if args.ignore_eos else tokenizer.stop_ids
    stop += (tokenizer.end_of_turn,) * (args.chat and not args.ignore_eos)
    settings = dict(
        temperature=args.temperature, top_k=args.top_k, top_p=args.top_p, seed=args.seed
    )
    rows = list(zip(*gen.generate(
        model, result["prompt_ids"], args.max_new_tokens, cache="none", stop_ids=stop, **settings
    )))  # fmt: skip
    rows = [[id for id in row if id is not None] for row in rows]
    assert result["new_ids"] == (rows or [[] for _ in args.prompt])


# --- reported kinds of faults, where else they could enter this code ------------------------------

needs_mps = pytest.mark.skipif(not torch.backends.mps.is_available(), reason="needs an Apple GPU")
needs_xpu = pytest.mark.skipif(not torch.xpu.is_available(), reason="needs an Intel GPU")


@each_cache
def test_pos_3_a_half_precision_model_counts_beyond_256(cache, small, monkeypatch):
    """POS-3: bf16 holds no odd number above 256, so positions stay whole and angles fp32."""
    model, calls = small("qwen3", "bfloat16", head_dim=128), []
    monkeypatch.setattr(models, "rope_table", spy(models.rope_table, calls))
    with torch.inference_mode():
        store = CACHES[cache](model, 1, 262)
        list(forced(model, store, random_prompts(30, (255,)), random_prompts(31, (7,))))
        assert [call.args[0][0, -1].item() for call in calls] == list(range(254, 262))
        store, positions = kvcache.NoCache(model), torch.tensor([100, 257, 1000, 4000])
        ids, _ = store.start(torch.ones(1, 4, dtype=torch.int64), [0])
        model.hidden(ids, positions, store)
    angles = positions[:, None] * 1e6 ** -(torch.arange(0, 128, 2, dtype=torch.float64) / 128)
    for table, right in zip(calls[-1].result, (angles.cos(), angles.sin()), strict=True):
        assert table.dtype == torch.bfloat16
        assert (table[0, 0].double() - right).abs().max() < 0.005


@pytest.mark.parametrize("S", [4, 64])
def test_msk_1_msk_4_the_row_written_for_the_compiler(S):
    """MSK-1, MSK-4: 1.5, where no mask gives the mean of all and an inverted one nothing."""
    q, k = torch.ones(1, 2, 2, 4), torch.zeros(1, 2, S, 4)
    v = torch.arange(S).float().view(1, 1, S, 1).expand(1, 2, S, 4)
    mask = models.visible(torch.tensor([3]), torch.tensor([[0]]), S).repeat(1, 1, 2, 1)
    assert torch.equal(models.attention_of_one_token(q, k, v, mask), torch.full_like(q, 1.5))


@each_cache
@each_arch
def test_msk_2_a_padded_prompt_does_not_see_its_future(arch, cache, small):
    """MSK-2: a batch takes another way through the mask than a prompt alone."""
    other = random_prompts(32, (8,))[0]
    a, b = (
        all_logits(small(arch), [ids, other], cache)[0, -5:]
        for ids in ([1, 2, 3, 4, 5], [1, 2, 9, 9, 9])
    )
    close(a[:2], b[:2], atol=1e-5)
    assert (a[2:] - b[2:]).abs().max() > 0.1


def attention_by_hand(q, k, v, attn_mask=None, is_causal=False, enable_gqa=False):
    """As some backends and releases compute it: a row without anything to see is NaN."""
    if enable_gqa:
        k, v = (t.repeat_interleave(q.shape[1] // k.shape[1], dim=1) for t in (k, v))
    if is_causal:
        attn_mask = torch.ones(q.shape[2], k.shape[2], dtype=torch.bool).tril()
    scores = (q @ k.mT).float() * q.shape[3] ** -0.5
    return scores.masked_fill(~attn_mask, -math.inf).softmax(dim=-1).to(v.dtype) @ v


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@each_cache
@each_arch
def test_msk_5_padding_stays_finite_without_a_careful_softmax(
    arch, cache, dtype, small, monkeypatch
):
    """MSK-5: lengths 2 and 6, and a row that is all padding, through a plain softmax."""
    model, (short, long) = small(arch, dtype), random_prompts(3, (2, 6))
    q = torch.ones(1, 1, 1, 4)
    nothing = attention_by_hand(q, q, q, torch.zeros(1, 1, 1, 1, dtype=torch.bool))
    assert nothing.isnan().all()
    monkeypatch.setattr(F, "scaled_dot_product_attention", attention_by_hand)
    alone = all_logits(model, [short], cache)[0]
    logits = all_logits(model, [short, long], cache)
    store = CACHES[cache](model, 2, 80)
    with torch.inference_mode():
        steps = [model(*store.start(padded([short, long])[0], [6, 0]), store)]
        for _ in range(2):
            store.reserve()
            steps.append(model(*store.feed(steps[-1].argmax(dim=-1, keepdim=True)), store))
    assert all(x.isfinite().all() for x in (alone, logits, *steps))
    scale = 1 if dtype == "float32" else alone.abs().max()
    close(logits[0, -2:] / scale, alone / scale, atol=1e-4 if dtype == "float32" else 2e-2)


def test_kv_4_replayed_steps_are_those_of_the_request(tiny, monkeypatch):
    """KV-4: graphs on a cache object hold the stop ids, sampling and model they were made with."""
    model, N = tiny["qwen3"], 7
    twin = dataclasses.replace(model, lm_head=model.lm_head.flip(0))
    prompts = prompts_for(model, [3, 2])
    first, second = run(model, prompts, N)
    drawn = SAMPLED | {"top_k": 2}
    requests = [
        (model, {}), (model, {"stop_ids": (first[4], second[3])}), (model, SAMPLED),
        (model, drawn), (twin, drawn), (twin, {}), (model, {}),
    ]  # fmt: skip
    expected = [run(of, prompts, N, **options) for of, options in requests]
    assert len({str(rows) for rows in expected}) == 6
    without_checks(monkeypatch)
    with PretendedGPU("early").patch(monkeypatch):
        held = cache_for(model, "preallocated", 2, 9)
        for (of, options), rows in zip(requests, expected):
            # A step runs live, the next is captured, the others are replayed.
            assert run(of, prompts, N, cache=held, cuda_graph=True, **options) == rows
            assert len(held.graphs) == 1  # what belongs to other settings would stay for ever


def test_kv_4_a_request_compiled_otherwise_captures_its_own_steps(monkeypatch):
    """KV-4: the tokens are the same, so only the calls of the model tell."""
    without_checks(monkeypatch)
    with PretendedGPU("early").patch(monkeypatch):
        stub = Stub()
        held = cache_for(stub, "preallocated", 1, 9)
        for compile, calls in ((False, 3), (True, 3), (True, 1), ("max-autotune", 3), (True, 3)):
            stub.fed.clear()
            run(stub, [[1, 2]], 8, cache=held, cuda_graph=True, compile=compile)
            assert len(stub.fed) == calls  # the prompt, a live step, one that is captured


@pytest.mark.parametrize("flags, ids", [([], [9707, 151643]), (["--chat"], [9707, 151645])])
def test_eos_1_a_base_folder_stops_at_what_its_model_emits(flags, ids, tmp_path, monkeypatch, cli):
    """EOS-1: config.json says 151643, the tokenizer 151645, which only a chat may end with."""
    shutil.copytree(real_folder("qwen3"), tmp_path / "base", copy_function=os.symlink)
    raw = config_json("qwen3", vocab_size=151936, eos_token_id=151643)
    (tmp_path / "base/config.json").write_text(json.dumps(raw))
    rows = [ids if flags else [9707, 151643], [9707, 151645, 9707, 151643]][: 1 + (not flags)]
    monkeypatch.setattr(models, "load", lambda *args: Stub(rows, vocab_size=151936))
    prompts = [text for row in rows for text in ("--prompt", "Hello")]
    arguments = ("--model", tmp_path / "base", *prompts, "--max-new-tokens", 5, "--json")
    status, out, err = cli(*arguments, *flags)
    assert status == 0, err
    result = json.loads(out)
    assert result["new_ids"] == rows and set(result["finish"]) == {"stop"}
    assert result["texts"] == ["Hello", "HelloHello"][: len(rows)]


@pytest.mark.parametrize("kind, begin, hello", [("qwen3", 151643, 9707), ("gpt2", 50256, 15496)])
def test_cli_1_an_empty_prompt_is_the_published_id(kind, begin, hello, tmp_path, monkeypatch, cli):
    """CLI-1: "" and an empty standard input, beside a prompt that is not; a chat may be empty."""
    shutil.copytree(real_folder(kind), tmp_path / "m", copy_function=os.symlink)
    raw = config_json(kind, vocab_size=151936 if kind == "qwen3" else 50257)
    (tmp_path / "m/config.json").write_text(json.dumps(raw))
    stub = Stub(vocab_size=raw["vocab_size"], fill=hello)
    monkeypatch.setattr(models, "load", lambda *args: stub)
    arguments = ("--model", tmp_path / "m", "--json", "--max-new-tokens", 1, "--prompt")
    status, out, err = cli(*arguments, "", "--prompt", "-", "--prompt", "Hello")
    assert status == 0, err
    assert json.loads(out)["prompt_ids"] == [[begin], [begin], [hello]]
    if kind == "qwen3":
        status, out, err = cli(*arguments, "", "--chat")
        [ids] = json.loads(out)["prompt_ids"]
        assert ids == [151644, 872, 198, 151645, 198, 151644, 77091, 198]


@each_pipeline
def test_eos_4_gpt2_ends_at_its_last_position(pipeline, small):
    """EOS-4: 1000 prompt and 25 new tokens are all of 1024 positions; a step ahead has none."""
    model, prompts = small("gpt2", n_positions=1024), random_prompts(33, (1000,))
    for options in ({}, SAMPLED):
        expected = greedy(model, prompts, 25, cache="growing", **options)
        store = kvcache.PreallocatedCache(model, 1, 1024)
        assert greedy(model, prompts, 25, cache=store, pipeline=pipeline, **options) == expected
        assert store.length == 1024
        for t in (t for kv in store.storage for t in kv):
            assert t[:, :, 1023].any() and not t[:, :, 1024:].any()
    call = lambda: generate(model, prompts, 26, pipeline=pipeline)  # noqa: E731
    refused(call, "1000 prompt", "26 new", "1025 positions", "1024")


def test_tok_1_rows_of_a_batch_do_not_share_bytes(folders, bpe, script, cli):
    """TOK-1: the bytes of two characters come in turns; one stays unfinished."""
    spelt = [[bpe.token_to_id(char) for char in row] for row in ("ðŁĺĬa", "æĹ¥a")]
    assert [bpe.decode(row) for row in spelt] == ["😊a", "日a"]
    script(*spelt, fill=bpe.token_to_id("ð"))
    arguments = ("--model", folders["qwen3"], "--prompt", "x", "--prompt", "y")
    status, out, err = cli(*arguments, "--max-new-tokens", 5)
    assert (status, out) == (0, "[1]\n😊a\n[2]\n日a\ufffd\n"), err


def test_tok_7_help_says_when_a_prompt_is_wrapped(cli):
    status, out, err = cli("--help")
    assert (status, err) == (0, "")
    text = " ".join(out.split())
    assert "--chat wrap the prompt in the model's chat template" in text
    assert "A base model continues the prompt. --chat is for models trained to answer." in text


@each_cache
def test_cmp_1_max_autotune_compiles_as_seldom(cache, graphs, small):
    """CMP-1: two graphs for all lengths, and none for a second, longer request."""
    for lengths, n, drawn in (((5,), 33, {}), ((9,), 70, {"temperature": 0.7, "seed": 0})):
        prompts, options = random_prompts(15, lengths), {"cache": cache} | drawn
        new = greedy(small("qwen3"), prompts, n, compile="max-autotune", **options)
        assert new == greedy(small("qwen3"), prompts, n, **options)
        assert len(graphs) == 2


@each_cache
@each_arch
def test_cli_7_the_longest_prompt_of_a_batch_counts(arch, cache, small):
    """CLI-7: 2 and 5 prompt tokens and 4 new ones fill 8 positions, 5 new ones do not fit."""
    limit = {"n_positions" if arch == "gpt2" else "max_position_embeddings": 8}
    model, prompts = small(arch, **limit), random_prompts(35, (2, 5))
    assert [len(ids) for ids in greedy(model, prompts, 4, cache=cache)] == [4, 4]
    for rows in (prompts, prompts[::-1]):
        refused(lambda: generate(model, rows, 5, cache=cache), "5 prompt", "9 positions", "has 8")
        held = cache_for(model, cache, 2, 7)
        refused(lambda: generate(model, rows, 4, cache=held), "8 positions", "cache has 7")


def test_cli_7_old_files_call_the_limit_n_ctx(tmp_path):
    raw = config_json("gpt2", n_positions=..., n_ctx=8)
    assert read_config(tmp_path, raw).max_position_embeddings == 8
    assert read_config(tmp_path, raw | {"n_positions": 9}).max_position_embeddings == 9


@pytest.mark.parametrize("dtype", ["bfloat16", "float16", "float32"])
def test_num_2_a_row_of_the_benchmark_computes_in_the_dtype_it_shows(dtype, folders):
    """NUM-2: what was asked for, also where the processor is slow at it."""
    for random_weights in (False, True):
        row = job(model=str(folders["gpt2"]), dtype=dtype, random_weights=random_weights)
        assert measure.prepare(row)[0].dtype == getattr(torch, dtype)


@pytest.mark.parametrize("top_p, kept", [(0.30015, 3002), (0.50005, 5001), (0.70025, 7003)])
def test_cli_4_the_mass_of_many_tokens_is_summed_in_full_precision(top_p, kept):
    """CLI-4: 10,000 equal scores; half precision does not tell 0.5 from 0.5001."""
    p = gen.probabilities(torch.zeros(2, 10_000), 1.0, 0, top_p)
    assert (p > 0).sum(dim=-1).tolist() == [kept, kept]
    close(p[p > 0], torch.full((2 * kept,), 1 / kept), atol=1e-8)


@pytest.mark.parametrize("value", [0.5, 0.25])
def test_cfg_9_a_partly_rotated_head_is_refused(value, tmp_path):
    """CFG-9: like a scaled rope, it would be read as something else in silence."""
    raw = config_json("qwen3", partial_rotary_factor=value)
    refused(lambda: read_config(tmp_path, raw), "partial_rotary_factor", str(value), "config.json")
    raw["partial_rotary_factor"] = 1.0
    assert read_config(tmp_path, raw) == read_config(tmp_path, config_json("qwen3"))


def test_ben_1_rates_are_those_of_the_median_run(clock):
    """Runs of 1, 2 and 6 s, half a second of each for the first of 20 tokens."""
    totals = iter([9, 1, 2, 6])  # the warm-up first

    def produce(new):
        step = (next(totals) - 0.5) / 19 if new > 1 else 0
        for i in range(new):
            clock.now += step if i else 0.5
            yield [7]

    row = measure.measure(produce, job(), torch.device("cpu"))
    assert row["end_to_end_tokens_per_s"] == pytest.approx(20 / 2)
    assert row["decode_tokens_per_s"] == pytest.approx(19 / 1.5)
    assert row["time_to_first_token_s"] == row["prefill_s"] == pytest.approx(0.5)


def test_ben_2_the_read_rate_comes_from_the_same_clock(monkeypatch):
    """BEN-1, BEN-2: the median of whole, awaited sums; the first one, which is slow, is not it."""
    seconds, sums = iter([9, 1, 2, 2, 2, 2, 1]), []

    def timed(produce, new, device):
        sums.extend(produce(new))
        return next(seconds), [0.0], [sums[-1]]

    monkeypatch.setattr(measure, "timed", timed)
    monkeypatch.setattr(torch, "ones", lambda n, device: torch.full((1000,), 1.0))
    assert measure.describe({"device": "cpu"})["bandwidth"] == 4 * 1000 / 2
    assert [x.item() for x in sums] == [1000] * 7


@pytest.mark.parametrize("smallest", [1e-38, -0.0], ids=["tiny", "zero"])
def test_num_4_no_noise_makes_a_filtered_token_the_first(smallest, monkeypatch):
    """NUM-4: the noise of all that is filtered is as small as it gets. (mps draws -0.0.)"""
    stub = Stub(vocab_size=8, logits=torch.tensor([0.0, 2, 1, 3, 0, 0, 0, 0]))

    def least(noise, generator):
        return noise.fill_(smallest).index_fill_(-1, torch.tensor([1, 3]), 80.0)

    monkeypatch.setattr(torch.Tensor, "exponential_", least)
    assert run(stub, [[0]], 3, temperature=1.0, top_k=2) == [[3, 3, 3]]
    assert run(stub, [[0]], 3, temperature=1.0, top_p=0.7) == [[3, 3, 3]]


def test_num_4_zero_is_a_seed(tiny):
    """NUM-4: and so are the smallest and the largest."""
    for seed in (0, -(2**63), 2**64 - 1):
        draws = [run(tiny["gpt2"], [[1, 2]], 8, temperature=2.0, seed=seed) for _ in range(2)]
        assert draws[0] == draws[1]


class LateCopies(TorchFunctionMode):
    """Collects calls that copy without waiting, whatever the device makes of that."""

    def __init__(self):
        super().__init__()
        self.seen = []

    def __torch_function__(self, func, types, args=(), kwargs=None):
        name = getattr(func, "__name__", "")
        if (kwargs or {}).get("non_blocking") or (
            name in ("copy_", "to") and any(arg is True for arg in args[1:])
        ):
            self.seen.append((name, *args))
        return func(*args, **(kwargs or {}))


def test_late_copies_are_seen():
    x = torch.ones(2)
    with LateCopies() as copies:
        x.to("cpu", non_blocking=True), x.copy_(x, non_blocking=True), x.copy_(x, True), x.to("cpu")
    assert [call[0] for call in copies.seen] == ["to", "copy_", "copy_"]


@each_cache
def test_str_4_nothing_is_copied_late_without_streams(cache, folders):
    """STR-4: on mps the source of such a copy may be freed before it is read."""
    with LateCopies() as copies:
        model = load(str(folders["gpt2"]), "cpu", "float32")
        for pipeline in MODES:
            options = {"cache": cache, "pipeline": pipeline, "stop_ids": (500,)} | SAMPLED
            assert len(run(model, [[1, 2], [3]], 4, **options)[0]) == 4
    assert copies.seen == []


@pytest.mark.parametrize("mode", ["event", "ping-pong"])
def test_str_3_what_is_copied_late_is_kept(tiny, monkeypatch, mode):
    """STR-3: all steps leave their result in one tensor, whose memory nobody gets meanwhile."""
    with PretendedGPU("late").patch(monkeypatch), LateCopies() as copies:
        run(tiny["gpt2"], [[1, 2], [3]], 6, pipeline=mode)
    sources = {storage(source) for _, _, source, *_ in copies.seen}  # all alive, in `seen`
    assert len(copies.seen) == 6 and len(sources) == 1


@each_pipeline
def test_str_5_replayed_steps_wait_for_their_event_only(pipeline, tiny, monkeypatch):
    """STR-5: nothing on the host's side of a replay looks at the device."""
    without_checks(monkeypatch)
    options = {"pipeline": pipeline, "cuda_graph": True, "stop_ids": (500,)} | SAMPLED
    with PretendedGPU("late").patch(monkeypatch) as gpu:
        assert len(run(tiny["gpt2"], [[1, 2], [3]], 7, **options)[0]) == 7
    assert gpu.waits[:7] == ["event"] * 7 and set(gpu.waits[7:]) == {"stream"}
    assert [graph.replays for graph in gpu.graphs] == [5]


class OnDevice:
    """Two rows of numbers that say they are on a device of some kind, and nothing else."""

    shape, dtype = (2, 1), torch.int64

    def __init__(self, kind):
        self.device, self.values = torch.device(kind), [[0], [0]]

    def clone(self):
        return torch.tensor(self.values)


def refuse_backends(monkeypatch, *names):
    """Whatever of these names in torch is called fails the test."""
    for name in names:
        holder, _, attribute = name.rpartition(".")
        holder = getattr(torch, holder) if holder else torch

        def refuse(*args, name=name, **kwargs):
            raise AssertionError(f"torch.{name} was used")

        monkeypatch.setattr(holder, attribute, refuse)


OF_CUDA = [f"cuda.{x}" for x in ("Stream", "Event", "current_stream", "synchronize", "_lazy_init")]


def test_cli_8_no_figure_of_a_cpu_run_is_asked_of_cuda(folders, cli, monkeypatch):
    """CLI-8: nor of the benchmark; a build of torch without CUDA raises at each such call."""
    figures = ("max_memory_allocated", "max_memory_reserved", "reset_peak_memory_stats")
    more = ("memory_stats", "get_device_name", "get_device_properties", "mem_get_info")
    refuse_backends(monkeypatch, *OF_CUDA, *(f"cuda.{name}" for name in figures + more))
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    arguments = ("--model", folders["qwen3"], "--prompt", "x", "--max-new-tokens", 3)
    status, out, err = cli(*arguments, "--json")
    assert status == 0, err
    assert json.loads(out)["stats"]["peak_memory_bytes"] > 2**20
    row = measure.measure_row(job(model=str(folders["qwen3"]), new_tokens=3))
    assert row["peak_rss_bytes"] > 2**20 and "peak_allocated_bytes" not in row


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("kind", ["mps", "cpu"])
def test_str_4_a_device_without_streams_needs_none(kind, mode, monkeypatch):
    """STR-4: no stream, event or pinned memory; the results come in order all the same."""
    refuse_backends(
        monkeypatch, "Stream", "Event", "empty", "accelerator.current_stream", *OF_CUDA
    )  # fmt: skip
    result, seen, launched = OnDevice(kind), [], 0
    assert not launchers.overlaps(result.device)
    launcher = launchers.Launcher(result, mode, 5)

    def step():
        result.values = [[result.values[0][0] + 1], [0]]

    for i in range(5):
        while launched < min(i + 1 + launcher.ahead, 5):
            launcher.launch(launched, step)
            launched += 1
        seen.append(launcher.wait(i))
    launcher.finish()
    assert seen == [[[n], [0]] for n in range(1, 6)]


@pytest.mark.parametrize("mode", MODES)
def test_str_4_xpu_is_driven_by_what_all_devices_share(mode, monkeypatch):
    """STR-4: torch.Stream and torch.Event for that device, and nothing of CUDA's."""
    asked = []

    class Double:
        def __init__(self, device=None):
            asked.append(device)

        __enter__ = record = wait_stream = synchronize = lambda self, *args: None
        __exit__ = record

    monkeypatch.setattr(torch, "Stream", Double)
    monkeypatch.setattr(torch, "Event", Double)
    monkeypatch.setattr(torch.accelerator, "current_stream", Double)
    pinned = SimpleNamespace(copy_=lambda source, non_blocking: None, tolist=lambda: [[1], [0]])
    monkeypatch.setattr(torch, "empty", lambda *size, pin_memory, **kwargs: pinned)
    xpu = [f"xpu.{name}" for name in ("Stream", "Event", "current_stream", "synchronize")]
    refuse_backends(monkeypatch, *OF_CUDA, *xpu)
    launcher = launchers.Launcher(OnDevice("xpu"), mode, 3)
    for i in range(launcher.ahead + 1):
        launcher.launch(i, lambda: None)
    assert launcher.wait(0) == [[1], [0]]
    launcher.finish()
    assert len(asked) >= 2 and set(asked) == {torch.device("xpu")}


@pytest.mark.parametrize("mode", ["event", "ping-pong"])
@pytest.mark.parametrize("kind, overlaps", [("cpu", False), ("mps", False), ("xpu", True)])
def test_str_4_a_row_says_that_nothing_overlaps(kind, overlaps, mode, monkeypatch):
    stub = Stub(vocab_size=128)
    stub.device = torch.device(kind)
    monkeypatch.setattr(models, "load", lambda *args: stub)
    *_, notes = measure.prepare(job(device=kind, pipeline=mode))
    assert notes == ([] if overlaps else [f"{kind} has no streams: nothing overlaps"])


def test_str_4_the_command_line_says_that_nothing_overlaps(folders, script, cli, monkeypatch):
    monkeypatch.setattr(models, "choose_device", lambda name: torch.device("mps"))
    script()
    arguments = ("--model", folders["qwen3"], "--prompt", "x", "--max-new-tokens", 2)
    status, _, err = cli(*arguments, "--pipeline", "event")
    assert (status, err.splitlines()[0]) == (
        0, "--pipeline event: mps has no streams, nothing overlaps"
    )  # fmt: skip


@needs_mps
def test_str_4_short_lived_sources_on_mps():
    for n in range(1000):
        ids, _ = gen.left_pad([[n, n + 1, n + 2], [n]], torch.device("mps"))
        junk = [torch.full((2, 3), -1) for _ in range(4)]  # takes over what was freed early
        assert ids.tolist() == [[n, n + 1, n + 2], [0, 0, n]] and junk


@needs_xpu
@pytest.mark.parametrize("mode", MODES)
def test_str_4_every_pipeline_on_xpu(folders, mode):
    model = load(str(folders["qwen3"]), "xpu", "float32")
    prompts = prompts_for(model, [3, 2])
    assert run(model, prompts, 8, pipeline=mode, **SAMPLED) == run(model, prompts, 8, **SAMPLED)


@needs_mps
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("hd", [64, 128])
@pytest.mark.parametrize("T, S", [(1, 38), (64, 38 + 64), (38, 38), (64, 64)])
def test_num_6_attention_on_mps_equals_that_of_the_cpu(T, S, hd, dtype):
    """NUM-6: transposed views, 38 keys, which no kernel has as its block."""
    rng = torch.Generator().manual_seed(0)
    q, k, v = (
        torch.randn(2, n, heads, hd, generator=rng).to(dtype)
        for n, heads in ((T, 4), (S + 27, 2), (S + 27, 2))
    )
    pos, pad = torch.arange(S - T, S), torch.zeros(2, 1, dtype=torch.int64)
    results = []
    for device in ("cpu", "mps"):
        # Longer keys, cut: those of a preallocated cache are views with gaps.
        views = [t.to(device).transpose(1, 2) for t in (q, k, v)]
        mask = None if T == S else models.visible(pos.to(device), pad.to(device), S)
        y = models.attention(views[0], *(t[:, :, :S] for t in views[1:]), mask)
        results.append(y.cpu().float())
    close(results[1], results[0], atol=1e-4 if dtype == torch.float32 else 2e-2)


def test_num_1_a_compiled_row_multiplies_in_full_precision():
    """NUM-1: 2**-14 is left of two products that bf16 cannot tell apart."""
    x = torch.tensor([[[1 + 2**-7, -1.0]]], dtype=torch.bfloat16)
    weight = torch.tensor([[1 + 2**-7, 1 + 2**-6]] * 3, dtype=torch.bfloat16)
    torch._dynamo.reset()
    row = torch.compile(models.linear, backend="eager", fullgraph=True)
    for bias, right in ((None, 2**-14), (torch.ones(3, dtype=torch.bfloat16), 1.0)):
        for linear in (row, models.linear):
            y = linear(x, weight, bias)
            assert y.dtype == torch.bfloat16 and y.tolist() == [[[right] * 3]]
    torch._dynamo.reset()


@pytest.mark.parametrize(
    "cache, compile", [*((cache, False) for cache in CACHES), ("preallocated", True)]
)
@each_arch
def test_num_1_pipelining_changes_no_bit(arch, cache, compile, graphs, small, monkeypatch):
    """NUM-1: the very same logits at every step, alone and in a batch."""
    calls, choose = [], gen.choose

    def recorded(logits, *args):
        calls.append(logits.clone())
        choose(logits, *args)

    monkeypatch.setattr(gen, "choose", recorded)
    for lengths in ((5,), (2, 6))[: 2 - compile]:
        prompts, expected = random_prompts(34, lengths), None
        for pipeline in MODES:
            calls.clear()
            greedy(small(arch), prompts, 6, cache=cache, compile=compile, pipeline=pipeline)
            logits = torch.stack(calls)
            expected = logits if expected is None else expected
            assert len(calls) == 6 and torch.equal(logits, expected)


# Used from test_all.py: config_json, random_tensors, write_folder, load_cpu, load_reference,
# logits_of, forget_compiled, graphs, small, CACHES, ARCHS, MODES, new_ids, run, cut, Stub, Watched,
# cli, folders, tiny, process, small_model, jobs, measured, run_bench, start_bench, strict_json.


# --- every combination, of everything ---


def random_request(rng):
    """config.json and tensors of a small model, prompts, number of new tokens, sampling."""
    arch, V, layers = rng.choice(ARCHS), rng.randint(20, 60), rng.randint(1, 2)
    rows, new = rng.randint(1, 3), rng.randint(1, 12)
    # A prompt near 64 makes the preallocated cache read a second block.
    longest = rng.choice([1, 5, 12, 58, 64])
    lengths = [longest, *(rng.randint(1, longest) for _ in range(rows - 1))]
    positions = longest + new - 1 + rng.randint(0, 1)
    shape = {"vocab_size": V, "tie_word_embeddings": rng.random() < 0.5}
    if arch == "qwen3":
        kv_heads, group, hd = rng.randint(1, 3), rng.randint(1, 5), 2 * rng.randint(2, 6)
        shape |= {"num_attention_heads": kv_heads * group, "num_key_value_heads": kv_heads}
        shape |= {"hidden_size": rng.randint(9, 30), "intermediate_size": rng.randint(9, 30)}
        shape |= {"head_dim": hd, "rope_theta": rng.choice([100.0, 1e4, 1e6])}
        shape |= {"num_hidden_layers": layers, "max_position_embeddings": positions}
    else:
        heads = rng.randint(1, 5)
        shape |= {"n_head": heads, "n_embd": heads * rng.randint(5, 9), "n_layer": layers}
        shape |= {"n_inner": rng.choice([None, 7, 24]), "n_positions": positions}
    raw, sampling = config_json(arch, **shape), {}
    if rng.random() < 0.5:
        sampling = {"temperature": rng.choice([0.7, 1.5]), "top_k": rng.randint(0, 9)}
        sampling |= {"top_p": rng.choice([1.0, 0.9, 0.5]), "seed": rng.randint(0, 99)}
    prompts = [[rng.randrange(V) for _ in range(n)] for n in rng.sample(lengths, rows)]
    return raw, random_tensors(raw, rng.randint(0, 99)), prompts, new, sampling


def plain_tokens(next_logits, V, prompts, new, temperature=0, top_k=0, top_p=1.0, seed=0):
    """The rule itself: everything is computed again for every token, one row after the other."""
    rng = torch.Generator().manual_seed(seed)
    rows = [list(prompt) for prompt in prompts]
    for _ in range(new):
        noise = torch.empty(len(rows), V).exponential_(generator=rng) if temperature else None
        for row, ids in enumerate(rows):
            scores = next_logits(ids)
            if temperature:
                p, order = (scores / temperature).softmax(dim=-1).sort(descending=True)
                p[top_k or V :] = 0
                p[p.cumsum(dim=-1) - p >= top_p * p.sum()] = 0
                scores = torch.zeros(V).scatter(0, order, p) / noise[row]
            ids.append(scores.argmax().item())
    return [ids[-new:] for ids in rows]


def test_num_1_any_request_gives_the_same_tokens_in_every_combination(graphs, tmp_path):
    """Against transformers where it is installed, else against a plain loop over our own model.

    Heads odd and shared, head_dim of its own, tied and not, prompts of unequal lengths, the last
    position of the model; each with every cache and pipeline, eager and compiled, and stop ids.
    """
    hypothesis = pytest.importorskip("hypothesis", reason="hypothesis makes up the requests here")
    fixed = {"derandomize": True, "database": None, "deadline": None, "max_examples": 14}
    fixed["phases"] = [hypothesis.Phase.generate]  # to make a failure smaller would take minutes

    @hypothesis.settings(suppress_health_check=[*hypothesis.HealthCheck], **fixed)
    @hypothesis.given(hypothesis.strategies.randoms(use_true_random=True))
    def check(rng):
        raw, tensors, prompts, new, sampling = random_request(rng)
        V = raw["vocab_size"]
        folder = write_folder(tmp_path, raw, tensors)
        model = load_cpu(folder)
        next_logits = functools.partial(logits_of, model)
        if importlib.util.find_spec("transformers"):
            reference = load_reference(folder)
            next_logits = lambda ids: reference(torch.tensor([ids])).logits[0, -1]  # noqa: E731
        with torch.inference_mode():
            free = plain_tokens(next_logits, V, prompts, new, **sampling)
        stop_ids = rng.sample([*sum(free, []), 0], rng.randint(0, 2))
        expected = [cut(row, stop_ids) for row in free]
        steps = max(map(len, expected))
        forget_compiled()
        compiled = rng.choice([*CACHES])  # one of them: tracing takes nearly all of the time
        for cache, mode, compile in itertools.product(CACHES, MODES, (False, True)):
            if compile and cache != compiled:
                continue
            held = CACHES[cache](model, len(prompts), max(map(len, prompts)) + new - 1)
            options = {"cache": held, "pipeline": mode, "compile": compile, "stop_ids": stop_ids}
            what = (raw, prompts, sampling, options)
            assert run(model, prompts, new, **options, **sampling) == expected, what
            assert held.length == max(map(len, prompts)) + steps - 1, what

    check()
    assert graphs


# --- caches ---


CHANGES = [  # what differs, and how the message names it
    ({"num_hidden_layers": 1}, "layers 1, the model has 2"),
    ({"num_key_value_heads": 1}, "num_key_value_heads 1, the model has 2"),
    ({"head_dim": 8}, "head_dim 8, the model has 16"),
    ({"dtype": "bfloat16"}, "dtype torch.bfloat16, the model has torch.float32"),
]


@pytest.mark.parametrize("changes, words", CHANGES, ids=lambda value: str(value)[:24])
@each_cache
def test_kv_cache_of_another_model_is_refused_by_name(cache, changes, words, small):
    """torch would say that some index is out of range, or nothing and convert."""
    store = CACHES[cache](small("qwen3", **changes), 1, 9)
    generate_with = functools.partial(generate, small("qwen3"), [[1, 2]], 2, cache=store)
    refused(generate_with, f"the cache was made for {words}")
    other = CACHES[cache](small("qwen3", num_attention_heads=2, vocab_size=50), 1, 9)
    expected = greedy(small("qwen3"), [[1, 2]], 2)
    assert greedy(small("qwen3"), [[1, 2]], 2, cache=other) == expected


@each_pipeline
@each_cache
def test_kv_4_two_requests_at_once_on_one_cache(cache, pipeline, small):
    """The first is told that it lost the cache, and its end does not touch the second."""
    model, (a, b) = small("gpt2"), random_prompts(30, (7, 3))
    expected = greedy(model, [b], 12)
    store = CACHES[cache](model, 1, 40)
    options = {"cache": store, "pipeline": pipeline}
    if pipeline == "unchecked":  # is over with the first token it hands out
        first = generate(model, [a], 1, **options)
    else:
        first = generate(model, [a], 20, **options)
    next(first)
    second = generate(model, [b], 12, **options)
    new = [next(second)]
    if pipeline != "unchecked":
        with pytest.raises(RuntimeError, match="^another request has taken the cache: give each"):
            list(first)
    first.close()
    assert [list(row) for row in zip(*new, *second)] == expected
    assert store.length == 3 + 12 - 1

    abandoned = generate(model, [a], 20, **options)
    next(abandoned)
    second = generate(model, [b], 12, **options)
    new = [next(second)]
    abandoned.close()
    assert [list(row) for row in zip(*new, *second)] == expected
    assert store.length == 3 + 12 - 1

    abandoned = generate(model, [a], 20, **options)
    next(abandoned)
    with torch.inference_mode():  # driven by hand
        ids = store.start(torch.tensor([b]), [0])[0]
    abandoned.close()
    assert store.length == ids.shape[1] == 3


@each_cache
def test_prompts_belong_to_the_caller(cache, small):
    """Who appends each new id to the prompt, as in a chat, changes neither request nor cache."""
    model, (prompt,) = small("qwen3"), random_prompts(31, (5,))
    expected, ids, stop_ids = greedy(model, [prompt], 10), list(prompt), []
    store = CACHES[cache](model, 1, 14)
    steps = generate(model, [ids], 10, cache=store, stop_ids=stop_ids)
    ids[0], stop_ids[:] = 0, [expected[0][3]]
    for [id] in steps:
        ids.append(id)
    assert ids[5:] == expected[0]
    assert store.length == 14


@pytest.mark.parametrize(
    "kwargs", [{"prompts": prompts} for prompts in ([1, 2], 3, "ab", ["ab"], [[1.5]], None)]
    + [{"stop_ids": stop_ids} for stop_ids in (3, None, "a", (1.5,))], ids=str,
)  # fmt: skip
def test_prompts_and_stop_ids_that_are_no_ids(kwargs):
    stub = Stub()
    refused(lambda: generate(stub, **{"prompts": [[1]]} | kwargs), "prompts are lists of ids")
    assert stub.fed == []


def test_prompts_of_any_integers(small):
    """Tuples, a generator, one-element tensors: whatever counts as an index."""
    model = small("qwen3")
    expected = greedy(model, [[1, 2], [3]], 4)
    prompts = (row for row in ((1, torch.tensor(2)), torch.tensor([3])))
    assert greedy(model, prompts, 4, stop_ids=iter([])) == expected
    refused(lambda: generate(model, [[1]], runners_up=-1), "runners_up must be 0 or more, not -1")


def test_a_thousand_requests_leave_nothing_behind(graphs, small):
    """Every cache, pipeline, compilation and way to draw in turn, and cache objects used again.

    Live tensors and compiled graphs are the same after the second round as after the sixth;
    a request that kept a kilobyte would show in the resident size.
    """
    models_of = [small(arch, vocab_size=64) for arch in ARCHS]
    held = {
        (model.config.model_type, cache, rows): CACHES[cache](model, rows, 40)
        for model, cache, rows in itertools.product(models_of, CACHES, (1, 3))
    }
    prompts = {1: random_prompts(32, (6,), 64), 3: random_prompts(33, (4, 9, 1), 64)}
    drawn = [{}, {"temperature": 0.8, "top_k": 9, "top_p": 0.9, "seed": 3}]
    combinations = [*itertools.product(models_of, CACHES, (1, 3), MODES, (False, True), drawn)]
    left, requests = [], 0
    for _ in range(6):
        for n, (model, cache, rows, mode, compile, sampling) in enumerate(combinations):
            if n % 2:
                cache = held[model.config.model_type, cache, rows]
            options = {"cache": cache, "pipeline": mode, "compile": compile, "stop_ids": [63]}
            steps = generate(model, prompts[rows], 3, **options, **sampling)
            next(steps) if n % 5 == 0 else list(steps)  # every fifth consumer leaves early
            requests += 1
            del steps
        gc.collect()
        tensors = sum(issubclass(type(thing), torch.Tensor) for thing in gc.get_objects())
        left.append((tensors, len(graphs), resident_bytes()))
    assert requests > 1000
    (tensors, compiled, resident), (tensors_then, compiled_then, resident_then) = left[1], left[-1]
    assert (tensors_then, compiled_then) == (tensors, compiled)
    assert resident_then - resident < 4 * 2**20, left


def resident_bytes():
    """Linux only; elsewhere 0, which never grows."""
    statm = Path("/proc/self/statm")
    return int(statm.read_text().split()[1]) * os.sysconf("SC_PAGESIZE") if statm.exists() else 0


# --- the command line, interrupted, and with streams that fail ---


posix = pytest.mark.skipif(os.name == "nt", reason="signals and devices of POSIX")
full_disk = pytest.mark.skipif(not Path("/dev/full").exists(), reason="no /dev/full here")


def test_ctrl_c_keeps_what_a_batch_has_written(folders, bpe, script, cli, monkeypatch):
    def interrupt(n):
        if n == 3:
            raise KeyboardInterrupt

    stub = Watched(script(ids_of(bpe, "abcd"), ids_of(bpe, "efgh")), before=interrupt)
    monkeypatch.setattr(models, "load", lambda *args: stub)
    arguments = ("--model", folders["qwen3"], "--prompt", "x", "--prompt", "y")
    assert cli(*arguments) == (130, "[1]\nabc\n[2]\nefg\n", "\n")
    stub.calls = 0
    assert cli(*arguments, "--json") == (130, "", "\n")  # half an object is of no use


INTERRUPTED = """
import atexit, os, runpy, signal, sys, time
import generate, model
signal.signal(signal.SIGINT, signal.default_int_handler)

def again():  # a second Ctrl-C, while Python and torch come to their end
    os.kill(os.getpid(), signal.SIGINT)
    time.sleep(0.2)

atexit.register(again)
call, calls = model.Model.__call__, []

def counted(*args):
    calls.append(0)
    if len(calls) == {n}:
        os.kill(os.getpid(), signal.SIGINT)
        time.sleep(60)
    return call(*args)

model.Model.__call__ = counted
sys.argv[0] = generate.__file__
runpy.run_path(generate.__file__, run_name="__main__")
"""


@posix
@pytest.mark.parametrize("n, text", [(1, ""), (4, " upon a time\n")], ids=["prefill", "decode"])
def test_process_interrupted_twice(n, text):
    """In a step, and once more at the end: text kept, status 130, no traceback."""
    arguments = ("--prompt", "Once", "--device", "cpu", "--dtype", "float32")
    status, out, err = process(*arguments, code=INTERRUPTED.replace("{n}", str(n)))
    assert (status, out.decode(), err) == (130, text, b"\n")


def fake_compiler(tmp_path, monkeypatch, script):
    """A C++ compiler that says its version and then does what the shell script says."""
    path = tmp_path / "c++"
    path.write_text(
        f'#!/bin/sh\ncase "$*" in *--version*) echo g++ 13.0; exit 0;; esac\n{script}\n'
    )
    path.chmod(0o755)
    monkeypatch.setenv("CXX", str(path))
    monkeypatch.setenv("TORCHINDUCTOR_CACHE_DIR", str(tmp_path / "cache"))
    return path


@posix
def test_process_interrupted_while_compiling(tmp_path, monkeypatch):
    """As in a terminal: Ctrl-C reaches the compiler and all processes of torch."""
    fake_compiler(tmp_path, monkeypatch, "kill -INT 0; sleep 60")
    arguments = ("--prompt", "Once", "--device", "cpu", "--dtype", "float32", "--compile")
    restore = lambda: signal.signal(signal.SIGINT, signal.SIG_DFL)  # noqa: E731
    kwargs = dict(start_new_session=True, preexec_fn=restore)
    assert process(*arguments, **kwargs) == (130, b" upon\n", b"\n")


@posix
@pytest.mark.parametrize(
    "script, complaint",
    [
        ("exit 1", ""),
        ('case "$*" in *"-E "*) while [ "$1" != -o ]; do shift; done; echo > "$2"; exit;; esac\n'
         "echo 'c++: error: bad option -std=c++20' >&2; exit 1",
         "c++: error: bad option -std=c++20"),
    ],
    ids=["broken", "old"],
)  # fmt: skip
def test_a_compiler_that_fails_is_one_line(script, complaint, tmp_path, monkeypatch):
    path = fake_compiler(tmp_path, monkeypatch, script)
    arguments = ("--prompt", "Once", "--device", "cpu", "--dtype", "float32", "--compile")
    status, out, err = process(*arguments)
    assert (status, out) == (2, b" upon\n"), err
    assert err.startswith(f"error: --compile failed ({complaint}".encode())
    assert err.endswith(f"): check the compiler, {path}, or drop --compile\n".encode())
    assert err.count(b"\n") == 1


def shell(command, *arguments, **env):
    """Exit status, stdout and stderr of generate.py with streams as the shell leaves them."""
    words = [sys.executable, gen.__file__, "--device", "cpu", "--dtype", "float32", *arguments]
    command = " ".join(map(shlex.quote, words)) + f" {command}"
    env = os.environ | {"OMP_NUM_THREADS": "1"} | env
    done = subprocess.run(["sh", "-c", command], env=env, capture_output=True, timeout=300)
    return done.returncode, done.stdout, done.stderr


ONCE = ("--prompt", "Once", "--max-new-tokens", "3")


@posix
@pytest.mark.parametrize(
    "command, expected",
    [
        (">&-", (0, b"", "statistics")),
        ("2>&-", (0, b" upon a time\n", "")),
        (">&- 2>&-", (0, b"", "")),
        pytest.param(">/dev/full", (2, b"", "No space left on device: 'standard output'"),
                     marks=full_disk),
        pytest.param("2>/dev/full", (0, b" upon a time\n", ""), marks=full_disk),
    ],
)  # fmt: skip
def test_process_with_streams_that_are_closed_or_full(command, expected):
    status, out, err = shell(command, *ONCE)
    assert (status, out) == expected[:2], err
    if expected[2] == "statistics":
        assert re.fullmatch(rb"\[tiny-qwen3, cpu, [^\n]*\n", err)
    else:
        assert err.decode().removeprefix("error: [Errno 28] ").strip() == expected[2]


@posix
def test_process_notices_never_go_to_stdout():
    """With stderr closed, print(file=sys.stderr) would spoil the JSON."""
    flags = (*ONCE, "--json", "--pipeline", "event")
    status, out, err = shell("2>&-", *flags)
    assert status == 0 and json.loads(out)["texts"] == [" upon a time"] and out.count(b"\n") == 1
    assert shell("2>&-", *flags, "--top-k", "-1") == (2, b"", b"")
    if Path("/dev/full").exists():
        assert shell(">/dev/full", *flags)[0] == 2
    message = b"error: --prompt - reads standard input, which is closed\n"
    assert shell("<&-", "--prompt", "-") == (2, b"", message)


@posix
@pytest.mark.parametrize("encoding", ["ascii", "latin-1", "ascii:strict"])
def test_process_whose_terminal_cannot_show_the_text(folders, bpe, encoding):
    flags = ("--model", folders["qwen3"], "--prompt", "x", "--max-new-tokens", 40, "--ignore-eos")
    flags = tuple(map(str, flags))
    status, whole, _ = shell("", *flags, PYTHONIOENCODING="utf-8")
    text = whole.decode()
    assert status == 0 and any(ord(char) > 255 for char in text)
    status, out, err = shell("", *flags, PYTHONIOENCODING=encoding)
    assert (status, out) == (0, text.encode(encoding.split(":")[0], "replace")), err


@pytest.mark.skipif(not Path("/proc/self/status").exists(), reason="needs Linux's /proc")
def test_peak_memory_is_not_that_of_the_parent(folders):
    """A process starts with its parent's figure, which here is a gigabyte."""
    code = (
        "import subprocess, sys, torch\n"
        "x = torch.ones(2**28)\n"
        "code = 'import generate, torch; print(generate.peak_memory(torch.device(\"cpu\")))'\n"
        "subprocess.run([sys.executable, '-c', code])"
    )
    status, out, err = process(code=code)
    assert status == 0 and 2**26 < int(out) < 2**30, err


def test_load_s_is_no_time_of_the_user(folders, as_json, monkeypatch):
    """Who types the prompt for a while has not loaded a model meanwhile."""
    now, ticks = [], itertools.count()
    clock = SimpleNamespace(perf_counter=lambda: 100 * len(now) + next(ticks))
    monkeypatch.setattr(gen, "time", clock)
    monkeypatch.setattr(gen, "read_stdin", lambda: now.append(0) or "x")
    flags = ("--model", folders["qwen3"], "--prompt", "-", "--max-new-tokens", 1)
    assert as_json(*flags)["stats"]["load_s"] == 1 and now


# --- the benchmark, interrupted, and with files that fail ---


BENCH_FLAGS = (
    "--random-weights", "--device", "cpu", "--cache", "growing", "preallocated", "--compile", "off",
    "--pipeline", "off", "--cuda-graph", "off",
)  # fmt: skip


@full_disk
@pytest.mark.parametrize(
    "flag, message",
    [
        ("--json", "cannot write /dev/full: No space left on device"),
        ("--markdown", "cannot write /dev/full: No space left on device"),
        ("--trace", "cannot write /dev/full: No space left on device"),
        ("--plot", "--plot /dev/full: the name must end in .png, .pdf or .svg"),
    ],
)
def test_bench_full_disk_is_noticed_before_the_run(flag, message, jobs, small_model, monkeypatch):
    monkeypatch.setattr(bench, "find_spec", lambda name: True)
    result = run_bench("--model", small_model, *BENCH_FLAGS, flag, "/dev/full")
    assert result == (2, "", f"error: {message}\n") and jobs.seen == []
    assert not Path("/dev/full").is_file() and not Path("/dev/full.part").exists()


def test_bench_disk_that_fills_up_costs_no_row(jobs, tmp_path, small_model, monkeypatch):
    """The file keeps the rows of the last time that there was room; the run goes on."""
    path, real_open, room = tmp_path / "a.json", open, [2]  # for one row

    class Full(io.StringIO):
        def write(self, text):
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    def open_until_full(name, mode="r", **kwargs):
        if "w" in mode:
            room[0] -= 1
        if "w" in mode and room[0] < 1:
            real_open(name, mode).close()
            return Full()
        return real_open(name, mode, **kwargs)

    monkeypatch.setattr("builtins.open", open_until_full)
    status, out, err = run_bench("--model", small_model, *BENCH_FLAGS, "--json", path)
    monkeypatch.undo()
    assert status == 2 and len(jobs.seen) == 2
    assert [row["cache"] for row in strict_json(path)["rows"]] == ["growing"]
    assert out.count("| growing ") == out.count("| preallocated ") == 1
    assert err.splitlines()[-1] == f"error: cannot write {path}: No space left on device"
    assert [p.name for p in tmp_path.iterdir() if p.is_file()] == ["a.json"]


@posix
def test_bench_result_through_a_link_and_into_a_pipe(jobs, tmp_path, small_model):
    """The file that a link names is replaced, not the link; a pipe cannot be replaced."""
    (tmp_path / "real").mkdir()
    (tmp_path / "a.json").symlink_to(tmp_path / "real" / "b.json")
    status, *_ = run_bench("--model", small_model, *BENCH_FLAGS, "--json", tmp_path / "a.json")
    assert status == 0 and (tmp_path / "a.json").is_symlink()
    assert len(strict_json(tmp_path / "real" / "b.json")["rows"]) == 2
    reader, writer = os.pipe()
    status, *_ = run_bench("--model", small_model, *BENCH_FLAGS, "--markdown", f"/dev/fd/{writer}")
    os.close(writer)
    with os.fdopen(reader) as pipe:
        assert status == 0 and "| preallocated " in pipe.read()


@pytest.mark.parametrize("error, expected", [(BrokenPipeError(), 0), (OSError(28, "full"), 2)])
def test_bench_table_that_cannot_be_written_is_in_the_files(
    error, expected, jobs, tmp_path, small_model, monkeypatch
):
    """Of the row that stdout did not take, too; a reader that has gone is no error."""
    path, out, err = tmp_path / "a.json", open(os.devnull, "w"), io.StringIO()

    def write(text):
        raise error

    monkeypatch.setattr(sys, "stdout", SimpleNamespace(write=write, fileno=out.fileno))
    monkeypatch.setattr(sys, "stderr", err)
    arguments = ("--model", small_model, *BENCH_FLAGS, "--json", path)
    assert bench.main([*map(str, arguments)]) == expected
    assert [row["cache"] for row in strict_json(path)["rows"]] == ["growing"]
    assert ("error: [Errno 28] full: 'standard output'" in err.getvalue()) == (expected == 2)
    out.close()


def test_bench_trace_that_fails_is_an_error(tmp_path, small_model, monkeypatch):
    """After everything else has been written."""
    pytest.importorskip("matplotlib")

    def in_process(task, job):
        failed = {"status": "failed", "reason": "OSError: no room"}
        return failed if task is measure.trace else measured()

    monkeypatch.setattr(bench, "in_process", in_process)
    paths = [tmp_path / name for name in ("a.png", "t.json")]
    flags = ("--plot", paths[0], "--trace", paths[1])
    status, _, err = run_bench("--model", small_model, *BENCH_FLAGS, *flags)
    last = "error: no profile of growing, off, off, off: OSError: no room"
    assert (status, err.splitlines()[-1]) == (2, last)
    assert paths[0].stat().st_size > 5000
    flags = ("--pipeline", "unchecked", "--trace", paths[1])
    status, _, err = run_bench("--model", small_model, *BENCH_FLAGS[:-4], *flags)
    assert (status, err.splitlines()[-1]) == (
        2, "error: --trace: no row that could be profiled was measured"
    )  # fmt: skip


def test_bench_trace_of_a_single_token(tmp_path, small_model):
    """Its request has no step to profile; one of two tokens has."""
    path = tmp_path / "t.json"
    kwargs = dict(model=small_model, new_tokens=1, trace=str(path))
    assert measure.trace(job(**kwargs)) == {"steps": [0, 1]}
    names = {event.get("name") for event in json.loads(path.read_text("utf-8"))["traceEvents"]}
    assert {"step", "forward"} <= names


TASKS = """
import multiprocessing, sys, time
if "importing" in sys.argv and multiprocessing.parent_process():
    print("here", flush=True)
    time.sleep(600)

def sleeps(job):
    print("here", flush=True)
    time.sleep(600)
"""
RUN_TASK = """
import sys
import bench, tasks
if __name__ == "__main__":
    try:
        bench.in_process(tasks.sleeps, {})
    except KeyboardInterrupt:
        sys.exit(130)
"""


@posix
@pytest.mark.parametrize(
    "what, where",
    [("killed", "measuring"), ("interrupted", "measuring"), ("interrupted", "importing")],
)
def test_bench_process_ends_with_its_parent(what, where, tmp_path):
    """Whatever happens to the parent, and without a word: both hold the same stdout."""
    for name, text in (("tasks", TASKS), ("run", RUN_TASK)):
        (tmp_path / f"{name}.py").write_text(text)
    path = os.pathsep.join([str(BENCH.parent), str(tmp_path)])
    parent = subprocess.Popen(
        [sys.executable, str(tmp_path / "run.py"), where], stdout=subprocess.PIPE,
        stderr=subprocess.PIPE, text=True, start_new_session=True,
        env=os.environ | {"OMP_NUM_THREADS": "1", "PYTHONPATH": path},
        preexec_fn=lambda: signal.signal(signal.SIGINT, signal.default_int_handler),
    )  # fmt: skip
    assert parent.stdout.readline() == "here\n"
    if what == "killed":
        parent.kill()
    else:
        os.killpg(parent.pid, signal.SIGINT)
    _, err = parent.communicate(timeout=300)  # less than the sleep
    assert (parent.returncode, err) == (-9 if what == "killed" else 130, "")


@posix
@pytest.mark.parametrize("program", [gen, bench], ids=["generate", "bench"])
def test_help_that_nobody_reads(program, capsys, monkeypatch):
    """argparse itself swallows the error, and Python ends with another."""
    out = open(os.devnull, "w")
    for error, expected in ((BrokenPipeError(), 0), (OSError(28, "full"), 2)):

        def write(text, error=error):
            raise error

        monkeypatch.setattr(sys, "stdout", SimpleNamespace(write=write, fileno=out.fileno))
        assert program.main(["--help"]) == expected
        message = "error: [Errno 28] full: 'standard output'\n" if expected else ""
        assert capsys.readouterr().err == message
    out.close()


def test_kv_3_driven_by_hand_past_the_end(small):
    """KV-3: the block that holds the last slot has room for more, which nothing would notice."""
    cache = kvcache.PreallocatedCache(small("qwen3"), 1, 5)
    with torch.inference_mode():
        cache.start(torch.tensor([[1, 2, 3, 4]]), [0])
        cache.reserve()
        refused(cache.reserve, "the cache is full: it has room for 5 tokens")
    assert cache.length == 5


def test_bench_that_does_not_start_keeps_the_former_results(jobs, tmp_path, small_model):
    path = tmp_path / "a.json"
    path.write_text("{}")
    argv = ("--model", small_model, *BENCH_FLAGS, "--json", path, "--markdown", tmp_path)
    status, _, err = run_bench(*argv)
    assert (status, err) == (2, f"error: cannot write {tmp_path}: Is a directory\n")
    assert path.read_text() == "{}"


# --- README.md ------------------------------------------------------------------------------------

ROOT = Path(models.__file__).parent
README = (ROOT / "README.md").read_text("utf-8")


def readme_commands():
    """Every `python …` of the README: in shell blocks, indented, or in backticks, over lines."""
    blocks = re.findall(r"(?m)^(?:    (?:\$ )?|)((?:echo .* \| )?python .*)$", README)
    inline = re.findall(r"(?s)`(python .*?)`", README)
    return [" ".join(command.split()) for command in dict.fromkeys(blocks + inline)]


def words_of(command):
    """`echo "a" | python generate.py …` -> (standard input, [generate.py, …])."""
    text, _, command = command.rpartition(" | ")
    given = shlex.split(text)[1] + "\n" if text else None
    return given, [word for word in shlex.split(command) if word != "…"][1:]


def test_readme_has_the_commands():
    commands = readme_commands()
    assert len(commands) > 15 and any("| python" in command for command in commands)
    scripts = {words_of(command)[1][0] for command in commands}
    assert {"generate.py", "bench.py", "-m", "results/cpu_peers.py"} <= scripts


@pytest.mark.parametrize("command", readme_commands())
def test_readme_command(command, monkeypatch, tmp_path):
    """Parsed, and run where that takes seconds and no download."""
    given, (script, *arguments) = words_of(command)
    if script == "-m":
        assert arguments[0] == "pytest" and (ROOT / "test_all.py").exists()
        if "-k" in arguments:
            subprocess_ok("-m", *arguments, "--collect-only")
        return
    assert (ROOT / script).exists(), script
    if script == "bench.py":
        args = bench.parse_arguments(arguments)
        for path in filter(None, (args.json, args.markdown, args.plot, args.trace)):
            assert (ROOT / path).parent.is_dir()
    elif script == "generate.py" and "--help" not in arguments:
        args = gen.parse_arguments(arguments)
        if args.model.startswith("tiny"):
            out = subprocess_ok(script, *arguments, given=given)
            assert len(out) > 20
        else:
            assert args.model in models.HUB or args.model.startswith("./")
    else:
        assert subprocess_ok(script, "--help").startswith("usage")


def subprocess_ok(*arguments, given=None):
    done = subprocess.run(
        [sys.executable, *arguments], cwd=ROOT, input=given, capture_output=True, text=True
    )
    assert done.returncode == 0, done.stderr
    return done.stdout


def test_readme_python():
    """The example runs; every other excerpt stands in one of the files as it is."""
    blocks = re.findall(r"(?s)```python\n(.*?)```", README)
    assert len(blocks) >= 5
    source = "".join((ROOT / f"{name}.py").read_text("utf-8") for name in SOURCES)
    lines = {line.strip() for line in source.splitlines()}
    for block in blocks:
        if block.startswith("from "):
            exec(block, {})
        else:
            assert {line.strip() for line in block.splitlines()} <= lines, block


SOURCES = "model kvcache tokenizer generate pipeline bench measure".split()


def test_readme_is_short_and_its_links_lead_somewhere():
    assert README.count("\n") <= 350
    for target in re.findall(r"\]\(([^)#]+)", README):
        if not target.startswith("https://"):
            assert (ROOT / target).exists(), target


def test_readme_line_counts():
    """Within a tenth: the table is for planning an hour of reading."""
    rows = re.findall(r"(?m)^\| (\[\w+\.py\].*?) \| ([\d,]+) \|", README)
    rows = [row for row in rows if "half" not in row[0]]
    assert len(rows) >= 5
    for names, stated in rows:
        files = re.findall(r"\((\w+\.py|tiny/train\.py)\)", names)
        lines = sum((ROOT / file).read_text("utf-8").count("\n") for file in files)
        assert int(stated.replace(",", "")) == pytest.approx(lines, rel=0.1), names


def test_readme_models():
    """Parameters, weights, and K and V of a token, as the meta device has them."""
    cell = r" \| "
    pattern = cell.join(
        (r"(?m)^\| (`(?:qwen3|gpt2).*?)", r"([\d,]+)", r"([\d.]+) GiB.*?", r"(\d+) KiB")
    )
    rows = re.findall(pattern, README)
    named = [re.findall(r"`([\w.-]+)`", row[0]) for row in rows]
    named = [[n if not n.startswith("-") else names[0] + n for n in names] for names in named]
    assert sorted(sum(named, [])) == sorted(models.HUB)
    for names, (_, parameters, weights, per_token) in zip(named, rows):
        for name in names:
            model = models.load(name, device="meta", random_weights=True)
            c, size = model.config, model.dtype.itemsize
            count = sum(t.numel() for t in models.checkpoint(model).values())
            assert f"{count:,}" == parameters, name
            assert f"{count * size / 2**30:.2f}" == weights, name
            kv = 2 * c.num_hidden_layers * c.num_key_value_heads * c.head_dim * size
            assert kv == int(per_token) * 1024, name


def test_readme_comparison_is_what_was_measured():
    """Each row of the table of peers: rate, ratio to ours, first request."""
    measured = json.loads((ROOT / "results/cpu_peers.json").read_text())
    rates, first = measured["rates"], measured["warm_up_s"]
    rows = [line for line in README.splitlines() if line.endswith(" s |")]
    assert len(rows) == len(rates) - 1  # "read" is no implementation
    for row, name in zip(rows, [name for name in rates if name != "read"]):
        _, rate, ratio, _, seconds = (cell.strip() for cell in row.strip("|").split("|"))
        assert rate == f"{statistics.median(rates[name]):.1f}", row
        assert seconds == f"{first[name]:.1f} s", row
        expected = statistics.median(a / b for a, b in zip(rates["ours"], rates[name]))
        assert ratio == (f"{expected:.2f}" if name != "ours" else ""), row
