"""Trains a small Qwen3 or GPT-2 on text files, with the model code of ../model.py.

    python tiny/train.py --arch qwen3 --text stories.txt --minutes 60 --out my-model
    python generate.py --model ./my-model --prompt "Once upon a time"

A line `<|endoftext|>` ends each document of a text file; the model learns to emit it, and so to
stop. A file named twice is read twice as often. About one document in a hundred is held out, by a
checksum of its text: the same ones in every run, whatever the order of the files.

The folder gets the published layout (config.json, tokenizer.json, model.safetensors in bf16, ...)
with the weights of the lowest held-out loss so far. `state.pt` beside them is what a stopped run
continues from, after Ctrl-C or the end of its minutes: give the same command again, with more
minutes if they had run out.
"""

import argparse
import json
import math
import signal
import statistics
import sys
import time
import zlib
from dataclasses import replace
from pathlib import Path

import numpy as np
import torch
import torch.nn.functional as F
from safetensors.torch import save_file
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))
from kvcache import NoCache  # noqa: E402, I001
from model import Config, assemble, checkpoint, choose_device, cpu_has_bfloat16  # noqa: E402
from model import head, random_values, read_config  # noqa: E402

END = "<|endoftext|>"
CONTEXT = 512  # positions of the model, and tokens in a training row
SHAPES = {  # vocab_size, hidden_size, intermediate_size, layers, heads, key/value heads, head_dim
    "qwen3": Config("qwen3", 4096, 256, 640, 4, 4, 2, 32, CONTEXT, 1e-6, 10000.0, True),
    "gpt2": Config("gpt2", 4096, 256, 1024, 4, 4, 4, 64, CONTEXT, 1e-5, None, True),
}
LEARNING_RATE = 3e-3  # the peak
ROWS = 8  # rows in a step
MICRO = 2  # rows in one pass on a CPU, whose cache holds the scores (1024, V) of two
WARMUP, DECAY = 100, 0.3  # learning rate: steps of warm-up; share of the minutes it decays in
EVALUATE_EVERY = 240  # seconds


def main():
    p = argparse.ArgumentParser(description="Trains a small Qwen3 or GPT-2 on text files.")
    p.add_argument("--arch", choices=SHAPES, required=True)
    p.add_argument("--text", type=Path, nargs="+", required=True, metavar="FILE")
    p.add_argument("--minutes", type=float, required=True, help="of training, pauses not counted")
    p.add_argument("--out", type=Path, required=True, metavar="FOLDER")
    p.add_argument("--device", default="auto")
    p.add_argument("--compile", action="store_true", help="pays in long runs (see README.md)")
    try:
        train(p.parse_args())
    except (OSError, ValueError) as error:
        print(f"error: {error}", file=sys.stderr)
        sys.exit(2)


def train(args):
    device, out = choose_device(args.device), args.out
    config, state = SHAPES[args.arch], None
    if (out / "state.pt").exists():
        config = read_config(str(out))
        if config.model_type != args.arch:
            raise ValueError(f"{out} holds a run of {config.model_type}: choose another folder")
        state = torch.load(out / "state.pt", map_location=device)
        if state["seconds"] >= args.minutes * 60:
            raise ValueError(f"{out} has had its {args.minutes:g} minutes: give it more in all")
    elif (out / "model.safetensors").exists():
        raise ValueError(f"{out} holds a model, but no state.pt to continue: choose another folder")

    # Tokens
    texts = {path: read_documents(path) for path in args.text}
    if state:
        tokenizer = Tokenizer.from_file(str(out / "tokenizer.json"))
    else:
        print("training the tokenizer", flush=True)
        tokenizer = train_tokenizer([d for docs, _ in texts.values() for d in docs], config)
        config = replace(config, vocab_size=tokenizer.get_vocab_size())
        write_description(config, tokenizer, out)
    end = tokenizer.token_to_id(END)

    def encode(docs):
        return [np.array([*e.ids, end], np.uint16) for e in tokenizer.encode_batch_fast(docs)]

    encoded = {path: encode(docs) for path, (docs, _) in texts.items()}
    documents = [ids for path in args.text for ids in encoded[path]]
    held_out = {str(path): (np.concatenate(encode(h)), h) for path, (_, h) in texts.items()}
    n_rows = (sum(map(len, documents)) - 1) // CONTEXT
    if n_rows < ROWS:
        raise ValueError(f"too little text: {n_rows} rows of {CONTEXT} tokens, a step takes {ROWS}")

    # Model and optimizers: the weights stay in fp32, autocast multiplies them in bf16
    values = state["values"] if state else initial_values(config, device)
    for value in values.values():
        value.requires_grad_(True)
    model = assemble(config, values)
    optimizers = make_optimizers(values)
    for name, optimizer in optimizers.items() if state else ():
        optimizer.load_state_dict(state[name])
    bf16 = device.type in ("cuda", "xpu") or (device.type == "cpu" and cpu_has_bfloat16())
    micro = MICRO if device.type == "cpu" else ROWS

    def to_device(rows):
        return torch.from_numpy(rows.astype(np.int64)).to(device)

    def loss_of(rows):
        """rows (B,T+1) of ids -> sum of the cross-entropies of all but the first, in nats."""
        cache = NoCache(model, len(rows))
        ids, pos = cache.start(rows[:, :-1], [0] * len(rows))
        with torch.autocast(device.type, torch.bfloat16, enabled=bf16):
            x = model.hidden(ids, pos, cache)
            logits = head(x, model.norm, model.lm_head, config)  # (B,T,V) in fp32
        return F.cross_entropy(logits.flatten(0, 1), rows[:, 1:].flatten(), reduction="sum")

    loss_of_batch = torch.compile(loss_of) if args.compile else loss_of

    @torch.no_grad()
    def evaluate():
        """{file: bits per byte of its held-out documents}"""
        bits = {}
        for name, (ids, docs) in held_out.items():
            rows = [ids[None, i : i + CONTEXT + 1] for i in range(0, len(ids) - 1, CONTEXT)]
            nats = sum(loss_of(to_device(row)).item() for row in rows)
            bits[name] = nats / math.log(2) / sum(len(d.encode()) for d in docs)
        return bits

    # The loop
    budget = args.minutes * 60
    step, seconds, best = (state[k] for k in ("step", "seconds", "best")) if state else (0, 0, 1e9)
    batches = read_batches(documents, n_rows, step)
    next_evaluation = seconds + min(EVALUATE_EVERY, budget / 10)
    losses, durations, interrupted = [], [], []
    print(f"{sum(v.numel() for v in values.values())} parameters, {len(documents)} documents, "
          f"{n_rows * CONTEXT} tokens, from step {step}", flush=True)  # fmt: skip

    def interrupt(*_):
        signal.signal(signal.SIGINT, signal.default_int_handler)  # a second Ctrl-C does not wait
        interrupted.append(True)

    signal.signal(signal.SIGINT, interrupt)
    while seconds < budget and not interrupted:
        began = time.perf_counter()
        rows = to_device(next(batches))
        losses.append(0.0)
        for part in rows.split(micro):
            loss = loss_of_batch(part) / (ROWS * CONTEXT)
            loss.backward()
            losses[-1] += loss.item()
        torch.nn.utils.clip_grad_norm_(values.values(), 1.0)
        # Warm-up, a plateau, a straight way down: a plateau can be prolonged by resuming
        rate = min((step + 1) / WARMUP, 1, (1 - seconds / budget) / DECAY) * LEARNING_RATE
        for optimizer in optimizers.values():
            for group in optimizer.param_groups:
                group["lr"] = rate * group["scale"]
            optimizer.step()
            optimizer.zero_grad()
        step += 1

        # A step that takes far longer than others was compiled, or the process was suspended
        usual = statistics.median(durations) if durations else 0
        durations = (durations + [time.perf_counter() - began])[-50:]
        seconds += min(durations[-1], 3 * usual)
        if step % 10 == 0:
            speed = ROWS * CONTEXT / statistics.median(durations)
            line = f"step {step}  loss {np.mean(losses[-50:]):.3f}  learning rate {rate:.1e}  "
            print(f"{line}{speed:.0f} tokens/s  {(budget - seconds) / 60:.1f} min left", flush=True)
        if interrupted or seconds >= min(next_evaluation, budget):
            next_evaluation = seconds + EVALUATE_EVERY
            bits = evaluate()
            print("held-out bits per byte:", {k: round(v, 4) for k, v in bits.items()}, flush=True)
            if sum(bits.values()) / len(bits) < best:
                best = sum(bits.values()) / len(bits)
                tensors = {n: t.to("cpu", torch.bfloat16) for n, t in checkpoint(model).items()}
                save_file(tensors, out / "model.safetensors", metadata={"format": "pt"})
            state = {"values": {name: value.detach() for name, value in values.items()}}
            state |= {name: optimizer.state_dict() for name, optimizer in optimizers.items()}
            state |= {"step": step, "seconds": seconds, "best": best}
            torch.save(state, out / "state.tmp")
            (out / "state.tmp").replace(out / "state.pt")  # a stop before this loses nothing
    if interrupted:
        print(f"stopped after step {step}; the same command continues", file=sys.stderr)
        sys.exit(130)


def make_optimizers(values):
    """Muon (https://kellerjordan.github.io/posts/muon) for the blocks' matrices, AdamW otherwise.

    `scale` is a group's share of the learning rate: a position gets one token of gradient per row,
    and at the full rate the noise would drown it.
    """
    matrices, others = [], []
    for name, value in values.items():
        if value.dim() == 2 and "embed" not in name:
            matrices.append(value)
        else:
            decay, scale = 0.1 * (name == "embed_tokens"), 0.1 if "position" in name else 1.0
            others.append({"params": [value], "weight_decay": decay, "scale": scale})
    matrices = [{"params": matrices, "weight_decay": 0.1, "scale": 1.0}]
    return {
        "muon": torch.optim.Muon(matrices, adjust_lr_fn="match_rms_adamw"),
        "adamw": torch.optim.AdamW(others, betas=(0.9, 0.95), fused=True),
    }


def read_batches(documents, n_rows, step):
    """Yields (ROWS,CONTEXT+1) ids for each step from `step` on, the same in every run.

    An epoch is the documents in random order, end to end, cut into rows, these shuffled too.
    """
    epoch = None
    while True:
        if step * ROWS // n_rows != epoch:
            epoch = step * ROWS // n_rows
            rng = np.random.default_rng(epoch)
            stream = np.concatenate([documents[i] for i in rng.permutation(len(documents))])
            starts = rng.permutation(n_rows) * CONTEXT
        chosen = starts[np.arange(step * ROWS, (step + 1) * ROWS) % n_rows]
        yield np.stack([stream[i : i + CONTEXT + 1] for i in chosen])
        step += 1


def read_documents(path):
    """The documents of a text file, as ([to train on], [held out])."""
    try:
        text = path.read_text("utf-8")
    except UnicodeDecodeError as error:
        raise ValueError(f"{path} is not UTF-8: {error}") from None
    docs = [d for d in (d.strip("\n") for d in text.split(END)) if d]
    checksum = {d: zlib.crc32(d.encode()) for d in docs}
    if len(checksum) < 2:
        raise ValueError(f"{path} needs two documents or more, each ended by a line {END}")
    held_out = [d for d in checksum if checksum[d] % 100 == 0] or [min(docs, key=checksum.get)]
    return [d for d in docs if d not in held_out], held_out


def train_tokenizer(docs, config):
    """Byte-level BPE, split into words as in GPT-2; the end-of-text token comes last, as there."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    settings = {"initial_alphabet": pre_tokenizers.ByteLevel.alphabet(), "show_progress": False}
    trainer = trainers.BpeTrainer(vocab_size=config.vocab_size - 1, **settings)
    tokenizer.train_from_iterator(docs, trainer)
    tokenizer.add_special_tokens([END])
    return tokenizer


def initial_values(config, device):
    """As in GPT-2: normal(0, 0.02), less for what adds to the residual stream (2 per layer)."""
    values = random_values(config, torch.float32, device)
    for name, value in values.items():
        if name.endswith(("o_proj", "down_proj", "c_proj_weight")):
            value.div_(math.sqrt(2 * config.num_hidden_layers))
    if config.model_type == "gpt2":
        previous_token_heads(values, config.head_dim)
    return values


def previous_token_heads(values, hd):
    """Lets GPT-2 start out with positions that are waves and heads that see the tokens before.

    From noise it takes millions of tokens to find out which token is the previous one, something
    that rotary positions have built in. Head h of the first layer starts at h + 1 tokens back:
    its query is the wave of its own position, turned back by as much.
    """
    tokens, positions = values["embed_tokens"], values["embed_positions"]
    P, D = positions.shape
    rate = P ** -(torch.arange(0, D, 2) / D)  # (D/2,), from 1 to 1 / P
    angle = torch.arange(P)[:, None] * rate
    positions.copy_(0.05 * torch.cat((angle.sin(), angle.cos()), dim=1))
    rate, sin, cos = rate[: hd // 2], slice(0, hd // 2), slice(D // 2, (D + hd) // 2)
    tokens[:, sin] = tokens[:, cos] = 0  # no noise where those heads look
    # (q, k or v; head; sine or cosine half; hd/2; D). Waves of 0.05, larger than the noise of 0.02,
    # and weights of 1.7 make a head prefer its token from the start, but not sharply.
    query, key, _ = values["0.attn_c_attn_weight"].view(3, D // hd, 2, hd // 2, D)
    for h in range(D // hd):
        turn = rate * (h + 1)
        query[h, 0, :, sin], query[h, 0, :, cos] = 1.7 * turn.cos().diag(), -1.7 * turn.sin().diag()
        query[h, 1, :, sin], query[h, 1, :, cos] = 1.7 * turn.sin().diag(), 1.7 * turn.cos().diag()
        key[h, 0, :, sin] = key[h, 1, :, cos] = 1.7 * torch.eye(hd // 2)


def write_description(c, tokenizer, folder):
    """The folder, tokenizer.json and three config files, with the keys of the published models."""
    end = tokenizer.token_to_id(END)
    config = {"model_type": c.model_type, "vocab_size": c.vocab_size, "dtype": "bfloat16"}
    config |= {"bos_token_id": end, "eos_token_id": end, "tie_word_embeddings": True}
    if c.model_type == "qwen3":
        same = "hidden_size intermediate_size num_hidden_layers num_attention_heads head_dim "
        same += "num_key_value_heads max_position_embeddings rope_theta"
        config |= {key: getattr(c, key) for key in same.split()}
        config |= {"architectures": ["Qwen3ForCausalLM"], "rms_norm_eps": c.eps}
        config |= {"hidden_act": "silu", "attention_bias": False, "attention_dropout": 0.0}
        config |= {"rope_scaling": None, "use_sliding_window": False, "sliding_window": None}
    else:
        config |= {"architectures": ["GPT2LMHeadModel"], "layer_norm_epsilon": c.eps}
        config |= {"n_embd": c.hidden_size, "n_inner": c.intermediate_size}
        config |= {"n_head": c.num_attention_heads, "n_layer": c.num_hidden_layers}
        config |= {"n_positions": c.max_position_embeddings, "activation_function": "gelu_new"}
        config |= {"attn_pdrop": 0.0, "embd_pdrop": 0.0, "resid_pdrop": 0.0}
    generation = {"bos_token_id": end, "eos_token_id": end}
    words = {"tokenizer_class": "PreTrainedTokenizerFast", "bos_token": END, "eos_token": END}
    words |= {"model_max_length": c.max_position_embeddings}
    folder.mkdir(parents=True, exist_ok=True)
    files = {"config": config, "generation_config": generation, "tokenizer_config": words}
    for name, content in files.items():
        (folder / f"{name}.json").write_text(json.dumps(content, indent=2) + "\n", "utf-8")
    tokenizer.save(str(folder / "tokenizer.json"))


if __name__ == "__main__":
    main()
