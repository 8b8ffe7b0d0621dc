"""Text to token ids and back: a thin layer on the `tokenizers` library.

GPT-2 and Qwen3 use byte-level BPE. A token is a run of UTF-8 bytes and need not begin or end where
a character does: an emoji may be three tokens, none of which is text by itself.
"""

import codecs
import json
import math
import re
import sys
from contextlib import contextmanager
from datetime import datetime
from functools import partial

import tokenizers
from tokenizers.decoders import ByteLevel

from model import find_file, read_json

# Put inside the name of a special token to make it plain text for a while. Half a surrogate pair is
# in no valid text, so taking it out again removes nothing else.
BREAK = "\ud800"


class Tokenizer:
    """The tokenizer of a model: a built-in name, a hub id or a local folder.

    `stop_ids` (tuple) end a text. `end_of_turn` (id or None) is the tokenizer's own eos: it ends a
    message of a chat, and a base model's stop ids need not hold it.
    Raises FileNotFoundError without a tokenizer.json, ValueError if a file is broken.
    """

    def __init__(self, name_or_folder):
        self._name = name_or_folder
        self._path = path = find_file(name_or_folder, "tokenizer.json")
        if path is None:
            raise FileNotFoundError(f"{name_or_folder} has no tokenizer.json")
        with blamed_on(path):
            self._tk = tokenizers.Tokenizer.from_file(str(path))
        if not isinstance(self._tk.decoder, ByteLevel):
            raise ValueError(f"{path} is not a byte-level tokenizer, as GPT-2 and Qwen3 have")
        self._tk.no_truncation()  # training settings that some files carry along
        self._tk.no_padding()
        self._byte_of = byte_of_char()

        added = self._tk.get_added_tokens_decoder().items()
        self._special = {token.content: id for id, token in added if token.special}
        # Longest first, as the library matches them; `(?!)` matches nothing.
        names = sorted(map(re.escape, self._special), key=len, reverse=True)
        self._any_special = "|".join(names) or "(?!)"

        self._config = settings(name_or_folder, "tokenizer_config.json")
        self._named = {  # bos_token, eos_token and so on: the text, or a dict that holds it
            key: text
            for key, value in self._config.items()
            if key.endswith("_token")
            and isinstance(text := value.get("content") if isinstance(value, dict) else value, str)
        }
        self.end_of_turn = self._tk.token_to_id(self._named.get("eos_token", ""))
        config = settings(name_or_folder, "config.json")
        self._settings = config | settings(name_or_folder, "generation_config.json")
        # The first source that has one, no union: base and chat models share a tokenizer file.
        stop = self._settings.get("eos_token_id", self.end_of_turn)
        self.stop_ids = () if stop is None else tuple(stop) if isinstance(stop, list) else (stop,)
        bos = self._settings.get("bos_token_id", 0)
        if not all(type(id) is int and 0 <= id < 2**31 for id in (bos, *self.stop_ids)):
            raise ValueError(
                f"{name_or_folder}: eos_token_id {stop!r:.80} or bos_token_id {bos!r:.80} is no id"
            )

    @property
    def bos_id(self):
        """The id that an empty prompt starts from; ValueError if the model names none."""
        # Qwen3's tokenizer names no bos: a text begins with the token that ends one, as in GPT-2.
        texts = (self._named.get("bos_token", ""), "<|endoftext|>")
        ids = (self._settings.get("bos_token_id"), *map(self._tk.token_to_id, texts))
        for id in (*ids, *self.stop_ids):
            if id is not None:
                return id
        raise ValueError(f"{self._name} names no begin-of-text token: the prompt needs some text")

    def encode(self, text):
        """Ids of a raw prompt: special tokens are parsed as written, none are added.

        Raises ValueError if the text is not valid Unicode, as an argument that is not UTF-8.
        """
        return self._encode(check_unicode(text), parse_special=True)

    def decode(self, ids):
        """Text of the ids, without special tokens and ids beyond the vocabulary.

        The latter do occur: an output layer may be wider than the vocabulary (Qwen3's by 267).
        """
        return self._tk.decode(list(ids), skip_special_tokens=True)

    def piece(self, id):
        """One token to look at: special tokens are shown, and loose bytes as <0xE5>."""
        if self._tk.id_to_token(id) is None:
            return f"<unknown {id}>"
        text = self._bytes(id).decode("utf-8", "surrogateescape")  # a loose byte b is U+DC00 + b
        return re.sub("[\udc80-\udcff]", lambda m: f"<0x{ord(m[0]) - 0xDC00:02X}>", text)

    def stream(self):
        """A new `Stream`, which turns ids into text one by one."""
        special = set(self._special.values())
        return Stream(lambda id: b"" if id in special else self._bytes(id))

    def chat(self, messages, think=True):
        """Ids of a chat, up to where the answer begins. Messages are dicts of role and content.

        `think=False` asks a thinking model to answer at once. Special tokens inside a message are
        text, so it cannot end its own turn; otherwise the ids equal those of transformers.
        Raises ValueError without a chat template, or with the reason if the template fails.
        """
        ids = []
        text = self._render(self._as_text(messages), think)
        for i, part in enumerate(re.split(f"({self._any_special})", text)):
            if i % 2:  # a special token between two stretches of text: the template's own
                ids.append(self._special[part])
            else:
                ids += self._encode(part.replace(BREAK, ""), parse_special=False)
        return ids

    def _as_text(self, value):
        """A copy of `value` in which no string spells a special token."""
        if isinstance(value, str):
            # The lookahead consumes nothing, so a token that overlaps another is broken as well.
            return re.sub(f"(?s)(?={self._any_special}).", rf"\g<0>{BREAK}", check_unicode(value))
        if isinstance(value, dict):
            return {key: self._as_text(item) for key, item in value.items()}
        return [self._as_text(item) for item in value] if isinstance(value, list) else value

    def _render(self, messages, think):
        import jinja2  # only chat needs it
        from jinja2.sandbox import ImmutableSandboxedEnvironment as Sandbox

        def raise_exception(message):
            raise jinja2.TemplateError(message)

        def multiply(context, operator, left, right):
            # The sandbox limits loops over a range, but a single product can fill the memory.
            sizes = (len(v) if hasattr(v, "__len__") else v for v in (left, right))
            if operator == "**" or math.prod(sizes) > 10**7:
                raise_exception(f"the result of {operator} is too large")
            return left * right

        # Templates are written for these settings, which are those of transformers.
        env = Sandbox(trim_blocks=True, lstrip_blocks=True, extensions=["jinja2.ext.loopcontrols"])
        env.intercepted_binops, env.call_binop = frozenset({"*", "**"}), multiply
        env.filters["tojson"] = partial(json.dumps, ensure_ascii=False)
        env.globals.update(raise_exception=raise_exception, strftime_now=datetime.now().strftime)
        values = dict(self._named, messages=messages, tools=None, documents=None)
        # Off is what adds something to the prompt: an empty block of thoughts.
        values.update(add_generation_prompt=True, enable_thinking=think)
        path = find_file(self._name, "chat_template.jinja")
        try:
            template = path.read_text("utf-8") if path else self._config.get("chat_template")
            if isinstance(template, list):
                template = {entry["name"]: entry["template"] for entry in template}.get("default")
            if template:
                return limited(lambda: env.from_string(template).render(values))
        except Exception as error:  # a template is a program and may fail in any way
            raise ValueError(f"chat template: {' '.join(str(error).split())}") from None
        raise ValueError(f"{self._name} has no chat template: leave out --chat")

    def _encode(self, text, parse_special):
        self._tk.encode_special_tokens = not parse_special  # its flag says: as plain text
        with blamed_on(self._path):
            return self._tk.encode(text, add_special_tokens=False).ids

    def _bytes(self, id):
        token = self._tk.id_to_token(id) or ""
        try:
            return bytes(self._byte_of[char] for char in token)
        except KeyError:  # an added token that is spelt as plain text
            return token.encode()


class Stream:
    """Text of ids that come one by one: all returned strings joined are `Tokenizer.decode(ids)`.

    A character comes with the id that completes it. Python's decoder takes each byte once and
    replaces invalid ones exactly as the tokenizers library does.
    """

    def __init__(self, bytes_of):
        self._bytes_of = bytes_of
        self._utf8 = codecs.getincrementaldecoder("utf-8")("replace")
        self._space = ""

    def put(self, id):
        """The text that this id completes, which may be none."""
        text = self._space + self._utf8.decode(self._bytes_of(id))
        unfinished = self._utf8.getstate()[0]
        # Tokens often are a space and half a character: show the two together.
        self._space = " " if text == " " and unfinished else ""
        return "" if self._space else text

    def end(self):
        """The rest: U+FFFD for a character that was never finished."""
        text, self._space = self._space + self._utf8.decode(b"", final=True), ""
        return text


def byte_of_char():
    """The byte that each character in a token's spelling stands for, as a dict.

    A character below U+0100 is its own byte; the rest stand in order for the bytes this leaves.
    """
    alphabet = sorted(tokenizers.pre_tokenizers.ByteLevel.alphabet())
    left = sorted(set(range(256)) - set(map(ord, alphabet)))
    return {char: ord(char) if ord(char) < 256 else left[ord(char) - 256] for char in alphabet}


def limited(function, steps=10**7):
    """function(), or TimeoutError once so many lines of Python have run: some seconds."""

    def count(frame, event, arg):
        nonlocal steps
        steps -= 1
        if steps < 0:
            raise TimeoutError("it does not come to an end")
        return count

    trace = sys.gettrace()
    sys.settrace(count)
    try:
        return function()
    finally:
        sys.settrace(trace)


@contextmanager
def blamed_on(path):
    """Whatever the tokenizers library raises is a ValueError that names its file."""
    try:
        yield
    except KeyboardInterrupt:
        raise
    except BaseException as error:  # a panic of its Rust code is no Exception
        raise ValueError(f"{path} is not a valid tokenizer: {error}") from None


def check_unicode(text):
    """`text`, or ValueError if it holds half a surrogate pair (bytes that were not UTF-8)."""
    if bad := re.search("[\ud800-\udfff]", text):
        raise ValueError(f"text is not valid Unicode: {bad[0]!r} at position {bad.start()}")
    return text


def settings(name_or_folder, filename):
    """A model's JSON file as a dict without nulls, {} without a file; ValueError if broken."""
    path = find_file(name_or_folder, filename)
    return read_json(path) if path else {}
