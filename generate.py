"""Text from a language model, one token at a time: the decode loop and the command line.

A language model scores every token of its vocabulary as the next one. Take the highest (or draw
one), append it, ask again: that is all. The first forward pass reads the whole prompt (prefill),
each later one a single token (a step), which finds the keys and values of all earlier tokens in
the cache.

    python generate.py --prompt "Once upon a time"
"""

import argparse
import json
import logging
import math
import os
import re
import signal
import sys
import time
import unicodedata
from contextlib import suppress
from operator import index

import torch
from torch.profiler import record_function

import kvcache
import model as models
from pipeline import MODES, Launcher, overlaps, replayable
from tokenizer import Tokenizer

CACHES = {
    "none": kvcache.NoCache,
    "growing": kvcache.GrowingCache,
    "preallocated": kvcache.PreallocatedCache,
}


def generate(
    model,
    prompts,
    max_new_tokens=100,
    *,
    cache="preallocated",
    compile=False,
    cuda_graph=False,
    pipeline="off",
    stop_ids=(),
    temperature=0.0,
    top_k=0,
    top_p=1.0,
    seed=None,
    runners_up=0,
):
    """Iterator over steps; each yields a list with one entry a row of the batch.

    prompts: list of lists of ids, lengths may differ. An entry is the new id, or None once the
    row has stopped; the stop id itself is yielded. With runners_up=n an entry is
    (id, p, [(id, p), ...]), p being the plain softmax of the logits.
    cache: "none", "growing", "preallocated", or an object of kvcache.py, which is emptied first
    and serves one request at a time: RuntimeError if another one takes it.
    compile: False, True or "max-autotune". cuda_graph: replay captured steps (CUDA, preallocated).
    pipeline: "off", "event", "ping-pong", "unchecked" (see pipeline.py).
    temperature 0 takes the best token; top_k 0 and top_p 1.0 are off; seed None draws anew.
    Raises ValueError, before anything runs, for what cannot work.
    """
    try:  # copies: whoever appends each new id to a prompt would change the request
        prompts, stop_ids = [[*map(index, ids)] for ids in prompts], tuple(map(index, stop_ids))
    except TypeError as error:
        raise ValueError(f"prompts are lists of ids, stop_ids is one list ({error})") from error
    needed = check(
        model.config, model.device, prompts, max_new_tokens, cache, compile, cuda_graph, pipeline,
        temperature, top_k, top_p, seed, runners_up,
    )  # fmt: skip
    if isinstance(cache, str):
        cache = CACHES[cache](model, len(prompts), needed)
    for what, value in kvcache.layout(model).items():
        if value != (made := cache.layout[what]):
            raise ValueError(f"the cache was made for {what} {made}, the model has {value}")
    if compile == "max-autotune":
        compile = "max-autotune-no-cudagraphs"  # graphs are captured here, not by the compiler
    return decode(
        model, prompts, max_new_tokens, cache, compile, cuda_graph, pipeline, stop_ids,
        (temperature, top_k, top_p), seed, runners_up,
    )  # fmt: skip


def decode(
    model, prompts, max_new_tokens, cache, compile, cuda_graph, pipeline, stop_ids,
    sampling, seed, runners_up,
):  # fmt: skip
    """The one decode loop. A generator runs nothing until asked, hence `generate`, which checks."""
    if max_new_tokens == 0:  # the prefill alone would give a token
        return
    settings = (model, compile, sampling, stop_ids, runners_up > 0)
    # Captured graphs hold the addresses of the buffers: both live on the cache, for next time, as
    # {settings: (Buffers, {slots: graph})} with one entry at most.
    kept = cache.graphs if cuda_graph else {}
    if settings not in kept:
        kept.clear()  # what was captured for other settings would hold its memory for ever
        kept[settings] = Buffers(model, len(prompts), stop_ids, sampling[0], runners_up > 0), {}
    buffers, graphs = kept[settings]
    rng = torch.Generator(model.device)
    rng.manual_seed(seed) if seed is not None else rng.seed()

    def prefill():
        buffers.result.zero_()
        ids, pad = left_pad(prompts, model.device)
        logits = model(*cache.start(ids, pad), cache)  # never compiled: it runs once
        choose(logits, buffers, sampling)
        cache.request = launcher

    def step():
        with record_function("forward"):
            logits = model(*cache.feed(buffers.ids), cache, compile)
        with record_function("sample"):
            choose(logits, buffers, sampling)

    @torch.inference_mode()
    def run(i):
        # Noise is drawn outside the step, which stays the same whether compiled or captured. From
        # 2**-24 on, as CUDA's: mps draws zeros, and 0 / 0 is NaN, which argmax would choose.
        if buffers.noise is not None:
            buffers.noise.exponential_(generator=rng).clamp_(min=2**-24)
        if i == 0:
            return prefill()
        if cache.request is not launcher:
            raise RuntimeError("another request has taken the cache: give each one of its own")
        cache.reserve(doubling=cuda_graph)
        if cuda_graph:  # how many slots are read is part of what was captured
            replayable(step, graphs, cache.slots)()
        else:
            step()

    if earlier := getattr(cache, "request", None):  # its steps may still be in flight
        earlier.finish()
    launcher = Launcher(buffers.result, pipeline, max_new_tokens)
    launched, stopped, seen = 0, [0] * len(prompts), 0
    try:
        for i in range(max_new_tokens):
            # A step that runs ahead has no slot in the cache beyond the last one.
            while launched < min(i + 1 + launcher.ahead, max_new_tokens):
                with record_function("step"):
                    launcher.launch(launched, lambda: run(launched))
                launched += 1
            with record_function("stop check"):
                before, (ids, stopped) = stopped, launcher.wait(i)
            seen = i + 1
            if runners_up:
                ids = with_runners_up(ids, buffers.logits, runners_up)
            yield [None if was else id for id, was in zip(ids, before)]
            if all(stopped):
                break
    finally:  # also when the consumer closes the generator, or a step raised
        launcher.finish()
        if seen and cache.request is launcher:
            cache.crop(max(map(len, prompts)) + seen - 1)  # as many were fed; forget what ran ahead


class Buffers:
    """What a step reads and writes besides the cache, at addresses that stay the same."""

    @torch.inference_mode()
    def __init__(self, model, batch_size, stop_ids, temperature, keep_logits):
        device, V = model.device, model.config.vocab_size
        self.result = torch.zeros(2, batch_size, dtype=torch.int64, device=device)
        self.ids = self.result[0, :, None]  # (B,1) the new ids, fed to the next step
        self.stopped = self.result[1]  # (B,) 1 from the stop id on
        self.stop_ids = torch.tensor(stop_ids, dtype=torch.int64, device=device)
        # (B,V) fp32, each only where it is needed
        self.noise = torch.empty(batch_size, V, device=device) if temperature > 0 else None
        self.logits = torch.empty(batch_size, V, device=device) if keep_logits else None


def choose(logits, buffers, sampling):
    """Picks the next token of every row: logits (B,V) -> buffers.ids, buffers.stopped."""
    if buffers.noise is None:
        ids = logits.argmax(dim=-1, keepdim=True)  # (B,1)
    else:
        # The first of several exponential clocks with rates p rings with probability p: a draw
        # without a host synchronisation (as in gpt-fast), and never a token of probability 0.
        ids = (probabilities(logits, *sampling) / buffers.noise).argmax(dim=-1, keepdim=True)
    buffers.ids.copy_(ids)
    # Only what is new: a prompt or its padding may hold a stop id.
    buffers.stopped.logical_or_((ids == buffers.stop_ids).any(dim=-1))
    if buffers.logits is not None:
        buffers.logits.copy_(logits)


def probabilities(logits, temperature, top_k, top_p):
    """softmax(logits / temperature) (B,V) over the top_k best, or as many as hold top_p.

    The token that crosses top_p is kept, the best always is, and what is kept sums to 1.
    """
    p = (logits / max(temperature, 1e-30)).softmax(dim=-1)  # 1e-40 would give inf, then NaN
    if top_k or top_p < 1:
        k = min(top_k or p.shape[-1], p.shape[-1])
        best, ids = p.topk(k, dim=-1)  # descending
        if top_p < 1:
            mass_before = best.cumsum(dim=-1) - best
            best[:, 1:] *= mass_before[:, 1:] < top_p * best.sum(dim=-1, keepdim=True)
        p = torch.zeros_like(p).scatter_(-1, ids, best)
        p /= p.sum(dim=-1, keepdim=True)
    return p


def with_runners_up(ids, logits, n):
    """ids [int], logits (B,V) -> [(id, p, [(id, p) of the n best others])]."""
    p = logits.softmax(dim=-1)
    best, best_ids = p.topk(min(n + 1, p.shape[-1]), dim=-1)
    entries = []
    for row, (id, qs, others) in enumerate(zip(ids, best.tolist(), best_ids.tolist())):
        others = [(other, q) for other, q in zip(others, qs) if other != id][:n]
        entries.append((id, p[row, id].item(), others))
    return entries


def left_pad(prompts, device):
    """[[int]] of unequal lengths -> ids (B,T), padded on the left, and the padding [int]."""
    T = max(map(len, prompts))
    pad = [T - len(prompt) for prompt in prompts]
    ids = [[0] * n + list(prompt) for n, prompt in zip(pad, prompts)]
    return torch.tensor(ids, device=device), pad  # waits: on mps a source may be freed too early


def check(
    config, device, prompts, max_new_tokens, cache, compile, cuda_graph, pipeline,
    temperature, top_k, top_p, seed, runners_up,
):  # fmt: skip
    """How many positions a request needs; ValueError with the numbers and the way out."""
    if not prompts or not all(prompts):
        raise ValueError("no prompt, or an empty one: each needs at least one id")
    for id in (id for prompt in prompts for id in prompt):
        if not 0 <= id < config.vocab_size:
            raise ValueError(f"id {id} is outside the vocabulary of {config.vocab_size}")
    if max_new_tokens < 0:
        raise ValueError(f"max_new_tokens must be 0 or more, not {max_new_tokens}")
    # The last new token is never fed back.
    P = max(map(len, prompts))
    needed = P + max(max_new_tokens, 1) - 1
    limits = [("the model", config.max_position_embeddings)]
    if isinstance(cache, str):
        if cache not in CACHES:
            raise ValueError(f"cache {cache!r} is not one of {', '.join(CACHES)}")
    elif not isinstance(cache, tuple(CACHES.values())):
        raise ValueError(f"cache must be a name or an object of kvcache.py, not {cache!r}")
    else:
        limits.append(("the cache", needed if cache.capacity is None else cache.capacity))
        if cache.batch_size != len(prompts):
            raise ValueError(f"the cache holds {cache.batch_size} rows, not {len(prompts)}")
    for what, limit in limits:
        if needed > limit:
            raise ValueError(
                f"{P} prompt tokens and {max_new_tokens} new ones need {needed} positions, "
                f"{what} has {limit}: shorten the prompt or lower max_new_tokens"
            )
    if compile == "reduce-overhead":
        raise ValueError("compile 'reduce-overhead' is not supported: use --cuda-graph instead")
    if compile not in (False, True, "max-autotune"):
        raise ValueError(f"compile mode {compile!r} is not 'max-autotune'")
    if device.type == "meta":
        raise ValueError("device 'meta' holds shapes only: nothing can run there")
    if cuda_graph and device.type != "cuda":
        raise ValueError(f"CUDA graphs need a CUDA device, not {device.type}: drop --cuda-graph")
    if cuda_graph and cache != "preallocated" and not isinstance(cache, CACHES["preallocated"]):
        raise ValueError("CUDA graphs need fixed addresses: use --cache preallocated")
    if pipeline not in MODES:
        raise ValueError(f"pipeline {pipeline!r} is not one of {', '.join(MODES)}")
    if not (math.isfinite(temperature) and temperature >= 0):
        raise ValueError(f"temperature must be 0 (greedy) or more, not {temperature}")
    if top_k < 0:
        raise ValueError(f"top_k must be 0 (off) or more, not {top_k}")
    if not 0 <= top_p <= 1:
        raise ValueError(f"top_p must lie between 0 and 1.0 (off), not {top_p}")
    if seed is not None and not -(2**63) <= seed < 2**64:
        raise ValueError(f"seed {seed} does not fit in 64 bits")
    if runners_up < 0:
        raise ValueError(f"runners_up must be 0 or more, not {runners_up}")
    if runners_up and pipeline != "off":
        raise ValueError("showing tokens needs the logits of every step: use --pipeline off")
    return needed


# ---------------------------------------------------------------------------------------------
# The command line


def main(argv=None):
    """Runs the command line -> exit status: 0, 2 for a user's error, 130 for Ctrl-C."""
    open_streams()
    try:
        if hasattr(sys.stdout, "reconfigure"):  # some terminals cannot show every character
            sys.stdout.reconfigure(errors="replace")
        run_command(parse_arguments(argv))
    except BrokenPipeError:  # the reader of stdout has gone: nothing to say
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
    except (ValueError, OSError, RuntimeError, MemoryError) as error:
        # A compiler's complaint and want of memory are the user's; other RuntimeErrors are ours.
        known = by_compiler(error) or re.search("(out of|allocate|enough) memory", str(error))
        if isinstance(error, RuntimeError) and not known:
            raise
        notice(f"error: {one_line(error) or 'out of memory'}")
        return 2
    except KeyboardInterrupt:
        notice("")
        return 130
    return 0


def open_streams():
    """Opens what the shell has closed (`>&-`): print(file=None) writes to stdout instead."""
    for name in ("stdout", "stderr"):
        if getattr(sys, name) is None:
            setattr(sys, name, open(os.devnull, "w"))
            os.set_inheritable(getattr(sys, name).fileno(), True)  # for the benchmark's processes


def by_compiler(error):
    """Whether torch.compile raised it."""
    return type(error).__module__.startswith(("torch._dynamo", "torch._inductor"))


def one_line(error):
    """The text of an error without line breaks; of a compiler's, which is pages, the complaint."""
    text = str(error)
    if by_compiler(error):
        said = text.partition("Set TORCHDYNAMO")[0].rpartition("Output:")[2].strip()
        said = next((line for line in said.splitlines() if "error" in line), said)
        compiler = torch._inductor.config.cpp.cxx[-1]  # g++, clang++, or what CXX says
        hint = f"check the compiler, {compiler}, or " * ("Output:" in text)  # not Triton's
        text = f"--compile failed ({said[:300]}): {hint}drop --compile"
    return " ".join(text.split())


def parse_arguments(argv):
    """The flags; an error is one line and exit status 2."""
    parser = argparse.ArgumentParser(
        description="Generate text with Qwen3 or GPT-2: text on stdout, statistics on stderr.",
        epilog="A base model continues the prompt. --chat is for models trained to answer.",
    )
    parser.error = lambda text: parser.exit(2, f"error: {' '.join(text.split())} (see --help)\n")
    parser.print_help = lambda: write(parser.format_help())
    add = parser.add_argument
    # fmt: off
    add("--model", default="tiny-qwen3", metavar="NAME",
        help=f"{', '.join([*models.TINY, *models.HUB])}; a hub id org/name; or a folder with "
        "config.json, tokenizer.json and safetensors (default: %(default)s, in the clone)")
    add("--prompt", action="append", required=True, metavar="TEXT",
        help="repeat it for a batch; - reads standard input; empty starts a new text")
    add("--max-new-tokens", type=int, default=100, metavar="N", help="default: %(default)s")
    add("--device", default="auto", help="auto (cuda, then mps, xpu, cpu) or a torch device")
    add("--dtype", default="auto", choices=["auto", *models.DTYPES],
        help="auto: the checkpoint's own, where the device computes with it")
    add("--matmul-precision", default="highest", choices=["highest", "high"],
        help="high allows TF32 for float32 products on CUDA")
    add("--cache", default="preallocated", choices=CACHES, help="default: %(default)s")
    add("--compile", nargs="?", const=True, default=False, metavar="max-autotune",
        help="compile the step: the first tokens take long, the others are faster")
    add("--cuda-graph", action="store_true", help="capture the step once, then replay it")
    add("--pipeline", default="off", choices=[mode for mode in MODES if mode != "unchecked"],
        help="read a token while the next step runs (default: %(default)s)")
    add("--temperature", type=float, default=0.0, help="0 is greedy (default)")
    add("--top-k", type=int, default=0, metavar="K", help="draw from the K best; 0 is off")
    add("--top-p", type=float, default=1.0, metavar="P",
        help="draw from the best that together hold probability P; 1.0 is off")
    add("--seed", type=int, help="same seed, same text")
    add("--chat", action="store_true", help="wrap the prompt in the model's chat template")
    add("--system", metavar="TEXT", help="system message, with --chat")
    add("--no-think", action="store_true", help="answer without thinking first, with --chat")
    add("--ignore-eos", action="store_true", help="run to the length limit")
    add("--show-tokens", action="store_true",
        help="show ids, pieces, probabilities and runners-up instead of text")
    add("--json", action="store_true", help="print one JSON object instead of text")
    # fmt: on
    args = parser.parse_args(argv)
    if not args.chat and (args.system is not None or args.no_think):
        parser.error("--system and --no-think need --chat")
    if args.json and args.show_tokens:
        parser.error("--json and --show-tokens exclude each other")
    return args


def run_command(args):
    """Checks everything that can be checked before the weights are read, then generates."""
    device = models.choose_device(args.device)
    config = models.read_config(args.model)
    tokenizer = Tokenizer(args.model)
    texts = [read_stdin() if prompt == "-" else prompt for prompt in args.prompt]
    prompts = [encode_prompt(tokenizer, text, args) for text in texts]
    names = "cache compile cuda_graph pipeline temperature top_k top_p seed".split()
    options = {name: getattr(args, name) for name in names}
    options["runners_up"] = 4 if args.show_tokens else 0
    check(config, device, prompts, args.max_new_tokens, **options)
    if args.show_tokens:
        print_prompt_tokens(prompts, tokenizer)
        if args.max_new_tokens == 0:
            return
    if args.compile:
        check_compiler(device)
    if args.pipeline != "off" and not overlaps(device):
        notice(f"--pipeline {args.pipeline}: {device.type} has no streams, nothing overlaps")
    if args.temperature == 0 and (args.top_k or args.top_p < 1):
        notice("--top-k and --top-p change nothing at temperature 0: add --temperature 1")
    torch.set_float32_matmul_precision(args.matmul_precision)
    started = time.perf_counter()
    model = models.load(args.model, device, args.dtype)
    load_s = time.perf_counter() - started

    stop_ids = () if args.ignore_eos else tokenizer.stop_ids
    if args.chat and not args.ignore_eos and tokenizer.end_of_turn is not None:
        stop_ids = (*stop_ids, tokenizer.end_of_turn)
    begin = time.perf_counter()
    steps = generate(model, prompts, args.max_new_tokens, stop_ids=stop_ids, **options)
    new_ids, new_texts, times = consume(steps, tokenizer, stop_ids, args)
    stats = statistics(prompts, new_ids, load_s, begin, times, device)
    if not args.json:
        return print_statistics(stats, model, args)
    finish = ["stop" if ids and ids[-1] in stop_ids else "length" for ids in new_ids]
    write(json.dumps({
        "model": args.model, "device": str(model.device), "dtype": dtype_name(model),
        "cache": args.cache, "compile": args.compile, "cuda_graph": args.cuda_graph,
        "pipeline": args.pipeline, "prompts": texts, "prompt_ids": prompts,
        "new_ids": new_ids, "texts": new_texts, "finish": finish, "stats": stats,
    }) + "\n")  # fmt: skip


def consume(steps, tokenizer, stop_ids, args):
    """Shows the steps as they come, unless --json -> (new ids, texts, time of each step)."""
    rows = len(args.prompt)
    streaming = rows == 1 and not args.json and not args.show_tokens
    new_ids, pieces, times = [[] for _ in range(rows)], [[] for _ in range(rows)], []
    streams = [tokenizer.stream() for _ in range(rows)]
    stopped = None
    try:
        for entries in steps:
            times.append(time.perf_counter())
            if args.show_tokens:
                print_new_tokens(len(times), entries, tokenizer)
                entries = [entry and entry[0] for entry in entries]
            for row, id in enumerate(entries):
                if id is None:
                    continue
                new_ids[row].append(id)
                if id not in stop_ids:
                    pieces[row].append(streams[row].put(id))
                    if streaming:
                        write(pieces[row][-1])
    except BaseException as error:  # Ctrl-C, a compiler that fails: first show what there is
        if not times:
            raise
        stopped = error
    for row, stream in enumerate(streams):
        pieces[row].append(stream.end())
    texts = ["".join(parts) for parts in pieces]
    if streaming:
        write(pieces[0][-1] + "\n")
    elif not args.json and not args.show_tokens:
        for number, text in enumerate(texts, 1):
            write(f"[{number}]\n{text}\n")
    if stopped:
        raise stopped
    return new_ids, texts, times


def encode_prompt(tokenizer, text, args):
    """Ids of one prompt: raw, or wrapped in the chat template; empty text is begin-of-text."""
    if not args.chat:  # never unasked: base models come with a template, too
        return tokenizer.encode(text) or [tokenizer.bos_id]
    messages = [{"role": "system", "content": args.system}] if args.system is not None else []
    messages.append({"role": "user", "content": text})
    return tokenizer.chat(messages, think=not args.no_think)


def read_stdin():
    """All of standard input as strict UTF-8, without one newline at its end."""
    if sys.stdin is None:
        raise ValueError("--prompt - reads standard input, which is closed")
    try:
        text = sys.stdin.buffer.read().decode("utf-8")
    except UnicodeDecodeError as error:
        raise ValueError(f"standard input is not UTF-8: {error}") from error
    return text.removesuffix("\n").removesuffix("\r") if text.endswith("\n") else text


def check_compiler(device):
    """A CPU needs a C++ compiler for --compile; ValueError if there is none."""
    # This logger warns of a missing GPU wherever there is a CUDA toolkit without one. We know.
    logging.getLogger("torch.utils.cpp_extension").setLevel(logging.ERROR)
    if device.type == "cpu":
        from torch._inductor import cpp_builder

        try:
            cpp_builder.get_cpp_compiler()
        except RuntimeError as error:  # exc.InvalidCxxCompiler, in older versions a plain one
            raise ValueError(
                "--compile needs a C++ compiler (g++ or clang++): none found"
            ) from error


def statistics(prompts, new_ids, load_s, begin, times, device):
    """The "stats" of --json; rates are None where nothing was decoded."""
    tokens = sum(map(len, new_ids))
    decoded = tokens - len(new_ids)  # the first token of each row belongs to the prefill
    prefill_s = times[0] - begin if times else None
    decode_s = times[-1] - times[0] if len(times) > 1 else None
    return {
        "prompt_tokens": sum(map(len, prompts)),
        "new_tokens": tokens,
        "load_s": load_s,
        "prefill_s": prefill_s,
        "decode_s": decode_s,
        "time_to_first_token_s": prefill_s,
        "decode_tokens_per_s": decoded / decode_s if decode_s else None,
        "end_to_end_tokens_per_s": tokens / (times[-1] - begin) if times else None,
        "peak_memory_bytes": peak_memory(device),
    }


def peak_memory(device):
    """Bytes: the allocator's peak on CUDA, else the process's peak resident size, or None."""
    if device.type == "cuda":
        return torch.cuda.max_memory_allocated(device)
    if os.path.exists("/proc/self/status"):  # Linux starts the other figure at the parent's peak
        with open("/proc/self/status") as lines:
            peak = next((line for line in lines if line.startswith("VmHWM")), None)
        return int(peak.split()[1]) * 1024 if peak else None
    try:
        import resource
    except ImportError:  # Windows
        return None
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return peak if sys.platform == "darwin" else peak * 1024


def print_statistics(stats, model, args):
    """One line on stderr: what ran where, and how fast."""
    parts = [f"{stats['prompt_tokens']} prompt + {stats['new_tokens']} new tokens"]
    if stats["prefill_s"] is not None:
        parts.append(f"first token after {stats['prefill_s']:.3f} s")
    if stats["decode_tokens_per_s"]:
        once = " with compiling" * bool(args.compile) + " with capturing" * args.cuda_graph
        parts.append(f"then {stats['decode_tokens_per_s']:.1f} tokens/s{once}")
    if stats["peak_memory_bytes"]:
        parts.append(f"peak memory {stats['peak_memory_bytes'] / 2**20:,.0f} MiB")
    techniques = [f"{args.cache} cache" if args.cache != "none" else "no cache"]
    techniques += ["compiled"] * bool(args.compile) + ["CUDA graph"] * args.cuda_graph
    techniques += [args.pipeline] * (args.pipeline != "off")
    where = f"{args.model}, {model.device}, {dtype_name(model)}, {', '.join(techniques)}"
    notice(f"[{where}] {', '.join(parts)}; loaded in {stats['load_s']:.2f} s")


def print_prompt_tokens(prompts, tokenizer):
    for number, ids in enumerate(prompts, 1):
        write("prompt\n" if len(prompts) == 1 else f"prompt [{number}]\n")
        for id in ids:
            write(f"{id:>8}  {fit(quoted(tokenizer, id), 90).rstrip()}\n")


def print_new_tokens(step, entries, tokenizer):
    """One line a row: the step, the chosen id and piece with its probability, four others."""
    if step == 1:
        write(f"\n    step      id  {fit('chosen', 14)}     p   runners-up\n")
    for row, entry in enumerate(entries, 1):
        if entry is None:
            continue
        id, p, others = entry
        label = str(step) if len(entries) == 1 else f"[{row}]{step}"
        best = "  ".join(f"{fit(quoted(tokenizer, i), 9)}{q:4.0%}" for i, q in others)
        write(f"{label:>8}{id:>8}  {fit(quoted(tokenizer, id), 14)}{p:6.1%}   {best}\n")


def quoted(tokenizer, id):
    """A piece as a string literal, so that spaces and newlines show."""
    return json.dumps(tokenizer.piece(id), ensure_ascii=False)


def fit(text, width):
    """`text` cut or filled to `width` columns of a terminal, where some characters take two."""

    def columns(text):
        wide = sum(unicodedata.east_asian_width(char) in "WF" for char in text)
        return len(text) + wide - sum(map(bool, map(unicodedata.combining, text)))

    if columns(text) >= width:
        while columns(text) > width - 2:
            text = text[:-1]
        text += "…"
    return text + " " * (width - columns(text))


def dtype_name(model):
    return str(model.dtype).removeprefix("torch.")


def write(text):
    try:
        sys.stdout.write(text)
        sys.stdout.flush()  # each piece at once, whether or not it ends a word or a line
    except OSError as error:
        error.filename = "standard output"  # for the message
        raise


def notice(text):
    with suppress(OSError):  # nobody reads it, or a full disk: the text matters more
        print(text, file=sys.stderr, flush=True)


if __name__ == "__main__":
    status = main()
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # torch takes a second to end: no traceback then
    sys.exit(status)
