"""Qwen3 and GPT-2 as functions of tensors: configuration, forward pass, weights, devices.

A decoder is a stack of equal blocks between an embedding and an output head. Here a block is a
function of the activations `x`, its weights `w` and one layer's keys and values `kv`; nothing is
remembered between two calls except by the cache that is passed in (kvcache.py).

Qwen3: https://arxiv.org/abs/2505.09388. GPT-2: "Language Models are Unsupervised Multitask
Learners" (Radford et al., 2019). Sizes: B batch, T tokens fed, S slots attended to,
D hidden_size, I intermediate_size, H heads, KV key/value heads, hd head_dim, V vocabulary.
"""

import functools
import gc
import json
import math
import re
import sys
from contextlib import contextmanager, nullcontext, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple

import torch
import torch.nn.functional as F
from safetensors import SafetensorError, safe_open
from torch import Tensor

# ---------------------------------------------------------------------------------------------
# The forward pass


@dataclass(frozen=True)
class Config:
    """The shape of a model, in the names of transformers; `read_config` reads a config.json."""

    model_type: str  # "qwen3" or "gpt2"
    vocab_size: int
    hidden_size: int
    intermediate_size: int
    num_hidden_layers: int
    num_attention_heads: int
    num_key_value_heads: int  # fewer than heads: several query heads share one key/value head
    head_dim: int  # its own key in Qwen3: 0.6B has 128, not hidden_size / heads = 64
    max_position_embeddings: int
    eps: float  # of the norms
    rope_theta: float | None  # None: learned positions (GPT-2)
    tie_word_embeddings: bool  # the output head is the embedding itself
    dtype: torch.dtype | None = None  # what config.json names, if anything


class Qwen3Layer(NamedTuple):
    """Weights of one Qwen3 block; q, k, v and gate, up are stacked so that each is one product."""

    input_layernorm: Tensor  # (D,)
    qkv_proj: Tensor  # ((H + 2 KV) hd, D)
    q_norm: Tensor  # (hd,)
    k_norm: Tensor  # (hd,)
    o_proj: Tensor  # (D, H hd)
    post_attention_layernorm: Tensor  # (D,)
    gate_up_proj: Tensor  # (2 I, D)
    down_proj: Tensor  # (D, I)


class GPT2Layer(NamedTuple):
    """Weights of one GPT-2 block, projections as (out, in); the published files hold (in, out)."""

    ln_1_weight: Tensor  # (D,)
    ln_1_bias: Tensor
    attn_c_attn_weight: Tensor  # (3 D, D): q, k, v
    attn_c_attn_bias: Tensor
    attn_c_proj_weight: Tensor  # (D, D)
    attn_c_proj_bias: Tensor
    ln_2_weight: Tensor  # (D,)
    ln_2_bias: Tensor
    mlp_c_fc_weight: Tensor  # (I, D)
    mlp_c_fc_bias: Tensor
    mlp_c_proj_weight: Tensor  # (D, I)
    mlp_c_proj_bias: Tensor


@dataclass(eq=False)  # compared by identity, as a key of captured graphs
class Model:
    """Weights and their configuration. `model(ids, pos, cache)` is the forward pass."""

    config: Config
    embed_tokens: Tensor  # (V, D)
    embed_positions: Tensor | None  # (max_position_embeddings, D), GPT-2 only
    layers: list  # of Qwen3Layer or GPT2Layer
    norm: tuple  # final norm: (weight,) or (weight, bias)
    lm_head: Tensor  # (V, D); the very tensor embed_tokens when tied

    @property
    def device(self):
        return self.embed_tokens.device

    @property
    def dtype(self):
        return self.embed_tokens.dtype

    @torch.inference_mode()
    def __call__(self, ids, pos, cache, compile=False):
        """ids (B,T), their slots pos (T,), a cache -> logits (B,V) in fp32 for the last position.

        Only the last row goes through the head: for 6 prompt tokens of Qwen3 that is 151,936
        scores instead of 911,616, and only they say anything about the next token.
        compile: False, True or a mode of torch.compile. Raises ValueError if ids has no column.
        """
        if ids.shape[1] == 0:
            raise ValueError(f"no ids to feed: ids has the shape {tuple(ids.shape)}")
        with no_garbage_collection() if compile else nullcontext():
            x = self.hidden(ids, pos, cache, compile)
            # A copy, as the strides of a slice would tell the compiler what T was.
            x = x[:, -1:].clone(memory_format=torch.contiguous_format)  # (B,1,D)
            run_head = compiled(head, compile, x.device.type) if compile else head
            return run_head(x, self.norm, self.lm_head, self.config)[:, 0]

    def hidden(self, ids, pos, cache, compile=False):
        """ids (B,T), pos (T,) -> activations (B,T,D) after the last block, before the head."""
        c = self.config
        positions = (pos - cache.pad).clamp(min=0)  # (B,T): the slots, less the left padding
        x = F.embedding(ids, self.embed_tokens)
        if c.rope_theta is None:
            block, rope = gpt2_block, None
            x = x + F.embedding(positions, self.embed_positions)
        else:
            block, rope = qwen3_block, rope_table(positions, c.head_dim, c.rope_theta, x.dtype)
        # A whole unpadded sequence can use SDPA's own triangle; everything else needs a mask.
        mask = None
        if cache.slots != ids.shape[1] or cache.padded:
            mask = visible(pos, cache.pad, cache.slots)
        if compile:
            block = compiled(block, compile, x.device.type)
            mark_lengths_dynamic(x, pos, mask, rope, cache.layers[0])
        for w, kv in zip(self.layers, cache.layers, strict=True):
            x = block(x, w, kv, cache.update, pos, mask, rope, c)
        return x


def qwen3_block(x, w, kv, update, pos, mask, rope, c):
    """x (B,T,D) -> (B,T,D). Pre-norm, grouped-query attention with QK-norm, gated MLP.

    w: weights of this layer; kv: its [k, v], which `update`, the cache's, extends; pos (T,): slots;
    mask as in `attention`; rope: (cos, sin); c: Config. All arguments, as `compiled` explains.
    """
    B, T, _ = x.shape
    H, KV = c.num_attention_heads, c.num_key_value_heads

    h = rms_norm(x, w.input_layernorm, c.eps)
    qkv = linear(h, w.qkv_proj).view(B, T, -1, c.head_dim).transpose(1, 2)
    q, k, v = qkv.split((H, KV, KV), dim=1)  # (B,H,T,hd), (B,KV,T,hd), (B,KV,T,hd)
    q = rotate(rms_norm(q, w.q_norm, c.eps), *rope)  # norm first: the two do not commute
    k = rotate(rms_norm(k, w.k_norm, c.eps), *rope)
    k, v = update(kv, k, v, pos)  # (B,KV,S,hd)
    y = attention(q, k, v, mask).transpose(1, 2).reshape(B, T, -1)  # (B,T,H hd)
    x = x + linear(y, w.o_proj)

    h = rms_norm(x, w.post_attention_layernorm, c.eps)
    gate, up = linear(h, w.gate_up_proj).chunk(2, dim=-1)  # (B,T,I) each
    return x + linear(F.silu(gate) * up, w.down_proj)


def gpt2_block(x, w, kv, update, pos, mask, rope, c):
    """x (B,T,D) -> (B,T,D). Pre-norm, multi-head attention, MLP with tanh-approximated GELU."""
    B, T, D = x.shape

    h = F.layer_norm(x, (D,), w.ln_1_weight, w.ln_1_bias, c.eps)
    qkv = linear(h, w.attn_c_attn_weight, w.attn_c_attn_bias)
    q, k, v = qkv.view(B, T, 3, -1, c.head_dim).permute(2, 0, 3, 1, 4)  # (B,H,T,hd) each
    k, v = update(kv, k, v, pos)  # (B,H,S,hd)
    y = attention(q, k, v, mask).transpose(1, 2).reshape(B, T, D)
    x = x + linear(y, w.attn_c_proj_weight, w.attn_c_proj_bias)

    h = F.layer_norm(x, (D,), w.ln_2_weight, w.ln_2_bias, c.eps)
    h = F.gelu(linear(h, w.mlp_c_fc_weight, w.mlp_c_fc_bias), approximate="tanh")
    return x + linear(h, w.mlp_c_proj_weight, w.mlp_c_proj_bias)


def head(x, norm, lm_head, c):
    """x (B,T,D) -> logits (B,T,V) in fp32. A norm with a bias is GPT-2's LayerNorm."""
    if len(norm) == 2:
        h = F.layer_norm(x, x.shape[-1:], *norm, c.eps)
    else:
        h = rms_norm(x, *norm, c.eps)
    return linear(h, lm_head).float()


def rms_norm(x, weight, eps):
    """x / sqrt(mean(x^2)) * weight over the last axis, computed in fp32."""
    return F.rms_norm(x.float(), x.shape[-1:], None, eps).to(x.dtype) * weight


def rope_table(positions, head_dim, theta, dtype):
    """positions (B,T) -> cos, sin (B,1,T,hd/2): angles in fp32 (bf16 lacks 257), cast last."""
    power = torch.arange(0, head_dim, 2, device=positions.device).float() / head_dim
    angles = positions[:, None, :, None].float() * theta**-power  # (B,1,T,hd/2)
    return angles.cos().to(dtype), angles.sin().to(dtype)


def rotate(x, cos, sin):
    """Rotary position embedding of x (B,n,T,hd); channel i is paired with channel i + hd/2."""
    x1, x2 = x.chunk(2, dim=-1)
    return torch.cat((x1 * cos - x2 * sin, x2 * cos + x1 * sin), dim=-1)


def visible(pos, pad, S):
    """Which slots each query may see: (B,1,T,S) bool, True = attend.

    The query in slot i sees slot j when pad <= j <= i. A padding query sees itself: a row with
    nothing to look at would be NaN.
    """
    slot = torch.arange(S, device=pos.device)
    query = pos[None, :, None]  # (1,T,1)
    mask = (slot <= query) & (slot >= pad[:, :, None]) | (slot == query)  # (B,T,S)
    return mask[:, None]


def attention(q, k, v, mask):
    """q (B,H,T,hd), k and v (B,KV,S,hd), mask (B,1,T,S) or None -> (B,H,T,hd).

    None means T == S and causal; with T < S SDPA's triangle would start at the wrong corner. Never
    both: backends differ in what a mask and is_causal together mean.
    """
    B, H, T, hd = q.shape
    KV = k.shape[1]
    if mask is None:  # a prompt, once a request: copies made for enable_gqa do not matter
        return F.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=H != KV)
    # The H / KV query heads that share a key head become rows of one product: `enable_gqa`
    # would copy K and V for each of them, or fall back to a slow kernel.
    q = q.reshape(B, KV, -1, hd)  # (B,KV,H/KV T,hd)
    if T > 1:  # a single row of the mask serves all
        mask = mask[:, :, None].expand(-1, -1, H // KV, -1, -1).flatten(2, 3)  # (B,1,H/KV T,S)
    if T == 1 and torch.compiler.is_compiling():
        y = attention_of_one_token(q, k, v, mask)
    else:
        y = F.scaled_dot_product_attention(q, k, v, attn_mask=mask)
    return y.reshape(B, H, T, hd)


def attention_of_one_token(q, k, v, mask):
    """q (B,KV,G,hd), k and v (B,KV,S,hd), mask (B,1,1,S) -> (B,KV,G,hd), under torch.compile.

    As in `linear`, reading is what costs, so K and V are read once, in order, for all G query
    heads that share them: sums over the same range become one loop. The sum over slots would
    walk down V 32 columns at a time; all parts of that width, side by side, take whole rows.
    """
    q32, k32, v32 = q.float(), k.float(), v.float()
    rows = q32[:, :, :, None].unbind(2)  # G of (B,KV,1,hd)
    scores = torch.stack([(row * k32).sum(dim=-1) for row in rows], dim=2)
    p = (scores * q.shape[3] ** -0.5).masked_fill(~mask, -math.inf).softmax(dim=-1)  # (B,KV,G,S)
    columns, parts = p[..., None].unbind(2), v32.split(32, dim=-1)  # G of (B,KV,S,1), (B,KV,S,32)
    y = [torch.cat([(c * part).sum(dim=-2) for part in parts], dim=-1) for c in columns]
    return torch.stack(y, dim=2).to(q.dtype)


def linear(x, weight, bias=None):
    """x (B,T,in) times weight (out,in) -> (B,T,out), with ways of its own for a step (T = 1).

    The product of a single row reads every weight once and does next to nothing with it: its
    cost is reading memory. A matrix library, built to reuse what it loads, reaches half of the
    bandwidth here. Compiled, the product is written as a reduction, of which the compiler makes
    one plain loop over the weights. It would also inline what produced x (a norm, a silu) into
    that loop and compute it anew for every weight. `as_strided` prevents that: it addresses
    memory, so x must be in it. Without compiling, other kernels of torch do better on a CPU.
    """
    B, T, D = x.shape
    if B * T == 1 and torch.compiler.is_compiling():
        row = x.float().as_strided((D,), (1,))
        # Two halves share a loop: two streams of memory, and twice the sums in flight.
        y = torch.cat([(half * row).sum(dim=-1) for half in weight.chunk(2)])  # fp32 by promotion
        if bias is not None:
            y = y + bias
        return y.to(x.dtype).view(1, 1, -1)
    left = T == 1 and (B > 1 or torch.get_num_threads() > 1)
    if left and x.device.type == "cpu" and x.dtype == torch.float32:
        # With the weights on the left, up to 32 rows (no more were tried) take up to a third less
        # time. One row alone would be another kernel's, which uses a single thread: two equal ones.
        rows = x[:, 0] if B > 1 else x[:, 0].expand(2, D).contiguous()
        y = (weight @ rows.T).T[:B].contiguous()[:, None]
        return y if bias is None else y + bias
    onednn = torch.backends.mkldnn
    if B * T == 1 and x.device.type == "cpu" and x.dtype == torch.bfloat16 and onednn.enabled:
        # torch's own kernel streams the weights; oneDNN's packs them into another order first.
        try:
            onednn.enabled = False
            return F.linear(x, weight, bias)
        finally:  # True, not what was read before: another thread may have been here, too
            onednn.enabled = True
    return F.linear(x, weight, bias)


@contextmanager
def no_garbage_collection():
    """Off in all threads meanwhile: a compiler's millions of objects take long to look through."""
    collects = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if collects:
            gc.enable()


@functools.cache
def compiled(function, mode, device_type):
    """torch.compile of a block or head: compiled once, called for every layer and request.

    That needs weights, keys and values to come in as arguments, as nothing about them is then
    guarded but shape and dtype; it takes a fifth of the time of compiling the whole step.
    """
    import torch._inductor.compile_fx

    # One graph per cache, dtype and kind of batch that a process uses; the default limit is 8.
    torch._dynamo.config.recompile_limit = max(64, torch._dynamo.config.recompile_limit)
    options = torch._inductor.list_mode_options(mode) if isinstance(mode, str) else {}
    if device_type == "cpu":  # a second less to wait: no compiling to test the compiler, and no
        # search for patterns of operators that have a faster kernel, as the blocks have none
        options = options | {"cpp.vec_isa_ok": True, "pattern_matcher": False}
    return torch.compile(function, fullgraph=True, options=options)


def mark_lengths_dynamic(x, pos, mask, rope, kv):
    """Tells the compiler which sizes change, so that the first graph serves every length.

    Of the first layer only: that is where a graph is made, and all other layers use it.
    """
    lengths = [(mask, 3), *((t, 2) for t in kv or ())]  # tensor, axis of S
    if x.shape[1] > 1:  # and of T
        lengths += [(x, 1), (pos, 0), (mask, 2), *((t, 2) for t in rope or ())]
    for tensor, axis in lengths:
        if tensor is not None:
            torch._dynamo.maybe_mark_dynamic(tensor, axis)


# ---------------------------------------------------------------------------------------------
# Names, configuration, weights

# hidden_size, intermediate_size, layers, heads, key/value heads, tied head
QWEN3_SIZES = {
    "0.6": (1024, 3072, 28, 16, 8, True),
    "1.7": (2048, 6144, 28, 16, 8, True),
    "4": (2560, 9728, 36, 32, 8, True),
    "8": (4096, 12288, 36, 32, 8, False),
    "14": (5120, 17408, 40, 40, 8, False),
    "32": (5120, 25600, 64, 64, 8, False),
}
GPT2_SIZES = {  # hidden_size, layers, heads
    "": (768, 12, 12),
    "-medium": (1024, 24, 16),
    "-large": (1280, 36, 20),
    "-xl": (1600, 48, 25),
}
HUB = {  # built-in name: repository
    **{f"qwen3-{n}b": f"Qwen/Qwen3-{n}B" for n in QWEN3_SIZES},
    **{f"qwen3-{n}b-base": f"Qwen/Qwen3-{n}B-Base" for n in QWEN3_SIZES if n != "32"},
    **{f"gpt2{n}": f"openai-community/gpt2{n}" for n in GPT2_SIZES},
}
TINY = {"tiny-qwen3": "qwen3", "tiny-gpt2": "gpt2"}  # built-in name: folder in tiny/
DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}


def load(name_or_folder, device="auto", dtype="auto", random_weights=False):
    """A Model from a built-in name, a hub id `org/name`, or a local folder.

    device: "auto" or a torch device; dtype: "auto", "float32", "bfloat16", "float16".
    random_weights: fixed random values in the shapes of a known name (no download) or of the
    folder's config.json. Every parameter is allocated once, uninitialised, and then filled from
    the file. Raises FileNotFoundError or ValueError with one line that names the file and the key.
    """
    device = choose_device(device)
    config = known_config(name_or_folder) if random_weights else None
    config = config or read_config(name_or_folder)
    if random_weights:
        values = random_values(config, choose_dtype(dtype, config, None, device), device)
    else:
        found = find_weights(name_or_folder, config)
        values = read_weights(config, found, choose_dtype(dtype, config, found, device), device)
    return assemble(config, values)


def assemble(config, values):
    """A Model from {our name: tensor}, the names of `layout`; also how training starts one."""
    c = config
    layer_type = Qwen3Layer if c.model_type == "qwen3" else GPT2Layer
    layers = [
        layer_type(*(values[f"{i}.{field}"] for field in layer_type._fields))
        for i in range(c.num_hidden_layers)
    ]
    norm = tuple(values[n] for n in ("norm", "norm_bias") if n in values)
    embed = values["embed_tokens"]
    lm_head = values.get("lm_head", embed)
    return Model(c, embed, values.get("embed_positions"), layers, norm, lm_head)


def layout(c):
    """{our name: [(checkpoint name, shape), ...]}: where each parameter is kept on disk.

    Several entries are stacked along the output axis. Shapes are (out, in) or (out,); of those
    that are `transposed` the file holds (in, out). The order is that of loading: largest first.
    """
    D, inner, hd = c.hidden_size, c.intermediate_size, c.head_dim
    if c.model_type == "qwen3":
        q, kv = c.num_attention_heads * hd, c.num_key_value_heads * hd
        names = {"embed_tokens": [("embed_tokens.weight", (c.vocab_size, D))]}
        last = {"norm": [("norm.weight", (D,))]}
        attn = [(f"self_attn.{x}_proj.weight", (n, D)) for x, n in zip("qkv", (q, kv, kv))]
        layer = {
            "input_layernorm": [("input_layernorm.weight", (D,))],
            "qkv_proj": attn,
            "q_norm": [("self_attn.q_norm.weight", (hd,))],
            "k_norm": [("self_attn.k_norm.weight", (hd,))],
            "o_proj": [("self_attn.o_proj.weight", (D, q))],
            "post_attention_layernorm": [("post_attention_layernorm.weight", (D,))],
            "gate_up_proj": [(f"mlp.{x}_proj.weight", (inner, D)) for x in ("gate", "up")],
            "down_proj": [("mlp.down_proj.weight", (D, inner))],
        }
    else:
        names = {"embed_tokens": [("wte.weight", (c.vocab_size, D))]}
        names["embed_positions"] = [("wpe.weight", (c.max_position_embeddings, D))]
        last = {"norm": [("ln_f.weight", (D,))], "norm_bias": [("ln_f.bias", (D,))]}
        shapes = {"ln_1": (D,), "ln_2": (D,), "attn.c_attn": (3 * D, D), "attn.c_proj": (D, D)}
        shapes |= {"mlp.c_fc": (inner, D), "mlp.c_proj": (D, inner)}
        layer = {}
        for name, shape in shapes.items():
            ours = name.replace(".", "_")
            layer[f"{ours}_weight"] = [(f"{name}.weight", shape)]
            layer[f"{ours}_bias"] = [(f"{name}.bias", shape[:1])]
    if not c.tie_word_embeddings:
        names["lm_head"] = [("lm_head.weight", (c.vocab_size, D))]
    stack = "layers" if c.model_type == "qwen3" else "h"
    for i in range(c.num_hidden_layers):
        for ours, pieces in layer.items():
            names[f"{i}.{ours}"] = [(f"{stack}.{i}.{name}", shape) for name, shape in pieces]
    return names | last


def transposed(checkpoint_name):
    """Whether the file holds (in, out): GPT-2's `Conv1D`. A square one shows no wrong shape."""
    return re.search(r"\.c_(attn|proj|fc)\.weight$", checkpoint_name) is not None


def as_stored(pieces, whole):
    """(checkpoint name, view of `whole` in the orientation of the file) for each entry."""
    for part, (name, _) in zip(whole.split([shape[0] for _, shape in pieces]), pieces):
        yield name, part.T if transposed(name) else part


def empty_parameter(pieces, dtype, device):
    """Uninitialised storage, (out, in) or (out,), for one parameter of `layout`."""
    rows, inputs = sum(shape[0] for _, shape in pieces), pieces[0][1][1:]
    return torch.empty(rows, *inputs, dtype=dtype, device=device)


def random_values(config, dtype, device):
    """The same values for the same shapes, dtype and kind of device: normal(0, 0.02), norms one."""
    generator = torch.Generator(device).manual_seed(0) if device.type != "meta" else None
    values = {}
    for ours, pieces in layout(config).items():
        p = values[ours] = empty_parameter(pieces, dtype, device)
        if p.dim() == 2:
            p.normal_(0, 0.02, generator=generator)
        else:
            p.fill_(0 if ours.endswith("bias") else 1)
    return values


def checkpoint(model):
    """{checkpoint name: tensor}, the published layout: the inverse of `load`, for saving."""
    values = {"embed_tokens": model.embed_tokens, "embed_positions": model.embed_positions}
    values |= {"lm_head": model.lm_head} | dict(zip(("norm", "norm_bias"), model.norm))
    for i, w in enumerate(model.layers):
        values |= {f"{i}.{field}": tensor for field, tensor in w._asdict().items()}
    prefix = "model." if model.config.model_type == "qwen3" else "transformer."
    tensors = {}
    for ours, pieces in layout(model.config).items():
        for name, part in as_stored(pieces, values[ours].detach()):
            name = name if name == "lm_head.weight" else prefix + name
            tensors[name] = part.contiguous()
    return tensors


def find_weights(name, config):
    """{checkpoint name: (file, key in it)}, checked against `layout` by the headers alone.

    (Of a tied head that is stored twice, both copies are read and compared.) Raises ValueError or
    FileNotFoundError for a file, key or shape that is missing, wrong or unknown.
    """
    headers, listing = read_headers(name)
    found = {}
    for path, key in sorted(headers):
        short = re.sub(r"^(model|transformer)\.", "", key)
        if re.search(r"\.attn\.(masked_)?bias$|\brotary_emb\.inv_freq$", short):
            continue  # buffers of old exports: the mask (not c_attn.bias), the rotary frequencies
        if short in found:
            raise ValueError(f"{path}: {key} is there twice")
        found[short] = (path, key)
    expected = dict(piece for pieces in layout(config).values() for piece in pieces)
    embed = layout(config)["embed_tokens"][0][0]
    second_head = config.tie_word_embeddings and "lm_head.weight" in found
    if second_head:
        expected["lm_head.weight"] = expected[embed]
    for short in sorted(found.keys() | expected.keys()):
        if short not in found:
            raise ValueError(f"{listing}: no {short}")
        path, key = found[short]
        if short not in expected:
            raise ValueError(f"{path}: unknown key {key!r:.100}")
        wanted = expected[short][::-1] if transposed(short) else expected[short]
        shape, dtype = headers[path, key]
        if shape != wanted:
            raise ValueError(f"{path}: {key} has the shape {shape}, config.json says {wanted}")
        if dtype not in ("F32", "BF16", "F16"):
            raise ValueError(f"{path}: {key} has the dtype {dtype}, not a float")
    if second_head:
        path, key = found.pop("lm_head.weight")
        if not torch.equal(read_tensor(path, key), read_tensor(*found[embed])):
            raise ValueError(
                f"{path}: {key} differs from the embedding although config.json ties them"
            )
    return found


def read_headers(name):
    """{(file, key): (shape, dtype)} of all tensors of a model, and the file that lists them.

    That is one model.safetensors, or else model.safetensors.index.json with the shards it names.
    """
    listing, shards = find_file(name, "model.safetensors"), {"model.safetensors": None}
    if listing is None and (listing := find_file(name, "model.safetensors.index.json")):
        shards = read_index(listing)
    if listing is None:
        raise FileNotFoundError(
            f"{name} has no model.safetensors and no index of shards; other formats are not read"
        )
    headers = {}
    for shard, listed in sorted(shards.items()):
        path = listing if listed is None else find_file(name, shard)
        if path is None:
            raise FileNotFoundError(
                f"{listing} names {shard!r}, which is missing; download it again"
            )
        with open_safetensors(path) as file:
            tensors = {key: file.get_slice(key) for key in file.keys()}
        if listed is not None and (wrong := listed ^ tensors.keys()):
            raise ValueError(f"{listing} and {shard} disagree about {min(wrong)}")
        headers |= {(path, k): (tuple(t.get_shape()), t.get_dtype()) for k, t in tensors.items()}
    return headers, listing


def read_index(path):
    """{file name: the keys it should hold} from the index of a checkpoint in several files."""
    weight_map, shards = read_json(path).get("weight_map"), {}
    if not isinstance(weight_map, dict):
        raise ValueError(f"{path}: weight_map is not a map of keys to file names")
    for key, shard in weight_map.items():  # before any is downloaded or opened
        if not re.fullmatch(r"[^/\\:]+\.safetensors", str(shard)):
            raise ValueError(f"{path}: {shard!r:.80} is no safetensors file of this folder")
        shards.setdefault(shard, set()).add(key)
    return shards


def read_weights(config, found, dtype, device):
    """{our name: tensor}, each allocated once and filled in slices of 64 MiB.

    The file is opened anew for every slice: the pages of a mapped file count as the process's
    memory until it is closed, and would double the peak.
    """
    values = {}
    for ours, pieces in layout(config).items():
        values[ours] = whole = empty_parameter(pieces, dtype, device)
        for name, part in as_stored(pieces, whole):
            path, key = found[name]
            rows = max(1, 2**26 * len(part) // part.nbytes)
            for i in range(0, len(part), rows):
                with open_safetensors(path) as file:
                    part[i : i + rows].copy_(file.get_slice(key)[i : i + rows])
    return values


def open_safetensors(path):
    """An open safetensors file; a damaged one is a ValueError that names it."""
    try:
        with open(path, "rb") as file:
            if int.from_bytes(file.read(8), "little") > 2**20:  # of some 9,000 tensors
                raise SafetensorError("header too large")
        return safe_open(path, framework="pt")
    except (SafetensorError, OSError, MemoryError) as e:
        raise ValueError(f"{path} is not a whole safetensors file ({e}); download it again") from e


def read_tensor(path, key):
    with open_safetensors(path) as file:
        return file.get_tensor(key)


def read_json(path):
    """The JSON object in a file, without nulls; a broken one is a ValueError that names it."""
    try:
        value = json.loads(path.read_text(encoding="utf-8"))
    except (ValueError, RecursionError) as error:
        raise ValueError(f"{path} is not a valid JSON object: {error}") from error
    if not isinstance(value, dict):
        raise ValueError(f"{path} is not a valid JSON object: it holds a {type(value).__name__}")
    return {key: item for key, item in value.items() if item is not None}


def read_config(name):
    """Config from the model's config.json; raises ValueError that names the file and the key."""
    path = find_file(name, "config.json")
    if path is None:
        raise FileNotFoundError(f"{name} has no config.json")
    raw = read_json(path)
    try:
        return parse_config(raw)
    except Exception as error:  # values of any type, where only some make sense
        raise ValueError(f"{path}: {error}") from error


IMPLEMENTED = {  # model_type: {key of config.json: values that are what this code computes}
    "qwen3": {
        "tie_word_embeddings": (True, False),
        "hidden_act": ("silu",),
        "attention_bias": (False,),
        "partial_rotary_factor": (1,),
        "use_sliding_window": (False,),
    },
    "gpt2": {
        "tie_word_embeddings": (True, False),
        "activation_function": ("gelu_new", "gelu_pytorch_tanh"),
        "scale_attn_weights": (True,),
        "scale_attn_by_inverse_layer_idx": (False,),
        "reorder_and_upcast_attn": (False,),
        "add_cross_attention": (False,),
    },
}


def parse_config(raw):
    """Config from the keys of a config.json; what is not implemented is refused by name."""

    def size(*keys, below=2**31):  # of layers below 1000: a list of 2**31 would fill the memory
        value = next((raw[k] for k in keys if k in raw), None)
        if type(value) is not int or not 0 < value < below:
            raise ValueError(f"{keys[0]} = {value!r:.80} is no whole number from 1 to {below - 1}")
        return value

    def number(key, value):
        if type(value) not in (int, float) or not 0 < value < 1e30:
            raise ValueError(f"{key} = {value!r:.80} is not a positive number")
        return float(value)

    dtype = raw.get("dtype") or raw.get("torch_dtype")
    if dtype is not None and dtype not in list(DTYPES):  # a list: it need not be hashable
        raise ValueError(f"dtype {dtype!r:.80} is not one of {', '.join(DTYPES)}")
    model_type = raw.get("model_type")
    if model_type not in list(IMPLEMENTED):
        raise ValueError(f"model_type {model_type!r:.80} is not supported (only 'qwen3', 'gpt2')")
    for key, values in IMPLEMENTED[model_type].items():
        if key in raw and raw[key] not in values:
            only = " or ".join(map(repr, values))
            raise ValueError(f"{key} = {raw[key]!r:.80} is not supported (only {only})")
    if model_type == "qwen3":
        if set(raw.get("layer_types") or ()) - {"full_attention"}:
            raise ValueError("layer_types other than 'full_attention' are not supported")
        heads, kv_heads, hd = map(size, ("num_attention_heads", "num_key_value_heads", "head_dim"))
        if heads % kv_heads or hd % 2:
            raise ValueError(
                f"num_attention_heads {heads} is not a multiple of num_key_value_heads {kv_heads}, "
                f"or head_dim {hd} is odd"
            )
        return Config(
            model_type, size("vocab_size"), size("hidden_size"), size("intermediate_size"),
            size("num_hidden_layers", below=1000), heads, kv_heads, hd,
            size("max_position_embeddings"),
            number("rms_norm_eps", raw.get("rms_norm_eps", 1e-6)),
            number("rope_theta", rope_theta(raw)),
            raw.get("tie_word_embeddings", False), DTYPES.get(dtype),
        )  # fmt: skip
    D, heads = size("n_embd"), size("n_head")
    if D % heads:
        raise ValueError(f"n_embd {D} is not a multiple of n_head {heads}")
    return Config(
        model_type, size("vocab_size"), D, size("n_inner") if "n_inner" in raw else 4 * D,
        size("n_layer", below=1000), heads, heads, D // heads, size("n_positions", "n_ctx"),
        number("layer_norm_epsilon", raw.get("layer_norm_epsilon", 1e-5)), None,
        raw.get("tie_word_embeddings", True), DTYPES.get(dtype),
    )  # fmt: skip


def rope_theta(raw):
    """The base of the rotary frequencies, at the top level or in rope_parameters; no scaling."""
    thetas = {raw.get("rope_theta")}
    for rope in (raw.get("rope_parameters") or {}, raw.get("rope_scaling") or {}):
        default = "default" if rope.keys() <= {"rope_theta"} else None
        kind = rope.get("rope_type") or rope.get("type") or default
        if kind != "default":
            raise ValueError(f"rope type {kind!r:.80} is not supported (only 'default')")
        thetas.add(rope.get("rope_theta"))
    thetas.discard(None)
    if len(thetas) != 1:  # no default: a wrong one reads well for a few words
        raise ValueError("rope_theta is missing, or rope_parameters gives another")
    return thetas.pop()


def known_config(name):
    """Config of a published size, without a file; None for other names."""
    if name not in HUB:
        return None
    if name.startswith("gpt2"):
        D, layers, heads = GPT2_SIZES[name.removeprefix("gpt2")]
        return Config(
            "gpt2", 50257, D, 4 * D, layers, heads, heads, D // heads, 1024, 1e-5, None, True
        )
    _, size, *base = name.split("-")
    D, inner, layers, heads, kv_heads, tied = QWEN3_SIZES[size.removesuffix("b")]
    return Config(
        "qwen3", 151936, D, inner, layers, heads, kv_heads, 128, 32768 if base else 40960,
        1e-6, 1e6, tied, torch.bfloat16,
    )  # fmt: skip


def find_file(name, filename):
    """The path of one file of a model, downloaded if need be, or None if the model lacks it.

    Built-in names win over folders of the same name (write ./gpt2 for the folder).
    """
    folder = Path(__file__).resolve().parent / "tiny" / TINY[name] if name in TINY else Path(name)
    if name in TINY or (name and name not in HUB and folder.is_dir()):
        path = folder / filename
        if not path.is_file():
            return None
        if path.suffix != ".safetensors" and path.stat().st_size > 2**27:  # it is read at once
            raise ValueError(f"{path} is larger than any such file: {path.stat().st_size} bytes")
        return path
    repository = HUB.get(name, name)
    if not re.fullmatch(r"\w[\w.-]*/\w[\w.-]*", str(repository)):
        known = ", ".join([*TINY, *HUB])
        raise FileNotFoundError(
            f"no model or folder {name!r}; known names: {known}; or a hub id org/name"
        )
    return download(repository, filename)


def download(repository, filename):
    """The path of a file in the cache of huggingface_hub, or None if the repository lacks it."""
    import huggingface_hub as hub  # takes a second to import, and most runs do not need it
    from huggingface_hub import constants, errors
    from huggingface_hub.utils import logging as hub_logging

    def cached(filename):
        return isinstance(hub.try_to_load_from_cache(repository, filename), str)

    hub_logging.set_verbosity_error()  # it warns of every retry: one line is enough
    exists = cached(filename)
    try:
        if not exists:  # fails at once, where the download would try for half a minute
            exists = hub.get_hf_file_metadata(hub.hf_hub_url(repository, filename))
        return Path(hub.hf_hub_download(repository, filename))
    except errors.GatedRepoError as e:
        raise PermissionError(
            f"{repository} needs permission: accept its terms and set HF_TOKEN"
        ) from e
    except errors.RepositoryNotFoundError as e:
        raise FileNotFoundError(
            f"no repository {repository} (or it is private: set HF_TOKEN)"
        ) from e
    except Exception as error:  # the library's, its HTTP client's, or the file system's
        if getattr(getattr(error, "response", None), "status_code", None) == 404:
            return None
        # No network. Weights are read last: where they are, the rest was asked for, and what is
        # not there does not exist.
        sharded = cached("model.safetensors.index.json")
        optional = ["generation_config.json", "tokenizer_config.json", "chat_template.jinja"]
        optional += ["model.safetensors"] * sharded
        if not exists and (sharded or cached("model.safetensors")) and filename in optional:
            return None
        reason = (str(error).strip() or repr(error)).splitlines()[0]
        raise ConnectionError(
            f"{repository}: {filename} is not in {constants.HF_HUB_CACHE} and cannot be "
            f"downloaded ({reason}); --model tiny-qwen3 needs no download"
        ) from error


def choose_device(name="auto"):
    """torch.device for a name; "auto" takes the first present. Absent ones are a ValueError.

    "meta" holds shapes only, for counting parameters.
    """
    present = present_devices()
    if name == "auto":
        return torch.device(present[0])
    with suppress(RuntimeError):  # no device's name
        device = torch.device(name)
        count = getattr(torch, device.type).device_count() if device.type in present else 0
        if device.type == "meta" or (device.index or 0) < count:
            return device
    raise ValueError(f"device {name!r} is not there; this machine has: {', '.join(present)}")


def present_devices():
    """Kinds of device on this machine, the fastest first."""
    # Not device_count: cuda's also counts devices whose driver is too old for this torch.
    kinds = ("cuda", "mps", "xpu", "cpu")
    return [kind for kind in kinds if getattr(torch, kind).is_available()]


def choose_dtype(name, config, found, device):
    """torch.dtype for a name; "auto" takes what config.json names, then what the file holds.

    On a CPU, "auto" turns float16 into float32, and bfloat16 too unless the processor computes
    with it; half precision is emulated there and can be a hundred times slower.
    """
    if name != "auto":
        if name not in DTYPES:
            raise ValueError(f"dtype {name!r} is not one of auto, {', '.join(DTYPES)}")
        return DTYPES[name]
    dtype = config.dtype
    if dtype is None and found:
        path, key = next(iter(found.values()))
        with open_safetensors(path) as file:
            dtype = file.get_slice(key)[:0].dtype
    dtype = dtype or torch.float32
    native = dtype == torch.float32 or (dtype == torch.bfloat16 and cpu_has_bfloat16())
    if device.type == "cpu" and not native:
        with suppress(OSError):  # nobody reads it, or a full disk
            print(f"no native {dtype} on this CPU: computing in float32 (--dtype overrides)",
                  file=sys.stderr, flush=True)  # fmt: skip
        dtype = torch.float32
    return dtype


def cpu_has_bfloat16():
    """Whether this processor multiplies bfloat16 itself (AVX512-BF16 or AMX)."""
    return torch.cpu._is_avx512_bf16_supported() or torch.cpu._is_amx_tile_supported()
