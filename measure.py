"""How one row of the benchmark is measured, in a process of its own.

What is timed is `generate`, the loop that users call, by whoever consumes its iterator. The clock
is read when the device is done.

    warm-up     whole requests in the very shapes that are timed later: compiling, capturing
    prefill     a request for one token
    TTFT        time to the first token of a whole request; `unchecked` and transformers, which
                hand over everything together, have none before the end
    decode      batch x (new - 1) tokens over the time that follows the first token
    end-to-end  batch x new tokens over the whole request; prompt tokens count in neither rate
    roofline    bytes that a step must read over its duration, as a fraction of what the device
                reads in a plain sum; only for a gigabyte or more, as less may sit in a cache

The stop check stays on, with a stop id that no model emits: its cost is part of the question.
A job is a dict: the settings of a row and what `plan` in bench.py adds to them.
"""

import math
import os
import platform
import random
import signal
import sys
import time
from collections import Counter
from itertools import chain, zip_longest
from multiprocessing import get_context, parent_process
from statistics import mean, median, stdev
from threading import Thread

import torch

import model as models
from generate import CACHES, check_compiler, generate, one_line, peak_memory
from pipeline import overlaps
from tokenizer import Tokenizer


def in_process(task, job):
    """task(job) in a process of its own; an error, or a process that dies, is a failed row."""
    context = get_context("spawn")
    receiver, sender = context.Pipe(duplex=False)
    process = context.Process(target=answer, args=(sender, task, job))
    kept = dict(os.environ)
    if job.get("expandable_segments"):
        os.environ["PYTORCH_CUDA_ALLOC_CONF"] = "expandable_segments:True"
    kept_handler = signal.signal(signal.SIGINT, signal.SIG_IGN)  # in the process, while it imports
    process.start()
    os.environ.clear()
    os.environ.update(kept)
    sender.close()  # so that the end of the process is the end of the pipe
    try:
        signal.signal(signal.SIGINT, kept_handler)
        return receiver.recv()
    except EOFError:
        process.join()
        killed = " (killed: out of memory?)" if process.exitcode == -9 else ""
        reason = f"its process ended with status {process.exitcode}{killed}"
        return {"status": "failed", "reason": reason}
    except KeyboardInterrupt:
        process.kill()
        raise
    finally:
        process.join()


def answer(sender, task, job):
    """The other end of `in_process`."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C is the parent's to handle
    parent = parent_process()  # if it is killed, so is this
    Thread(target=lambda: (parent.join(), os._exit(1)), daemon=True).start()
    try:
        result = {"status": "ok", "reason": None} | task(job)
    except Exception as error:  # whatever it is: the row keeps it, and the others go on
        text = f"{type(error).__name__}: {one_line(error)}"
        result = {"status": "failed", "reason": text[:300]}
    sender.send(result)


def describe(job):
    """Name, threads and read bandwidth (bytes/s: the median of plain sums) of a device."""
    device, name, info = torch.device(job["device"]), platform.processor(), "/proc/cpuinfo"
    if device.type in ("cuda", "xpu"):
        name = getattr(torch, device.type).get_device_name(device)
    elif os.path.exists(info):
        with open(info) as lines:
            name = next((s.split(": ")[1].strip() for s in lines if "model name" in s), name)
    sizes = [2**28, 2**25] if device.type == "cpu" else [2**30, 2**27]  # floats
    try:
        x = torch.ones(sizes[0], device=device)
    except RuntimeError:  # short of memory
        x = torch.ones(sizes[1], device=device)
    seconds = [timed(lambda new: [x.sum()], 1, device)[0] for _ in range(7)]
    return {
        "device_name": name or platform.machine(),
        "threads": torch.get_num_threads(),
        "bandwidth": 4 * x.numel() / median(seconds),
    }


def measure_row(job):
    """The measured fields of a row, and its tokens as "new_ids"."""
    model, prompts, produce, cache, notes = prepare(job)
    result = measure(produce, job, model.device, cache)
    read, rate = bytes_per_step(model, job), result["decode_tokens_per_s"]
    if read >= 1e9 and rate and job.get("bandwidth"):
        result["bandwidth_fraction"] = read * rate / job["batch_size"] / job["bandwidth"]
        if result["bandwidth_fraction"] > 1:
            notes.append("faster than memory can be read: do not trust this")
    if job["reference"]:
        where = first_difference(model, prompts, job["reference"], result["new_ids"])
        result |= {"first_difference": where, "same_tokens_as_first_row": where is None}
    if job["stop_ids"] != [-1] and not job["random_weights"]:  # the text is part of the result
        text = Tokenizer(job["model"]).decode(result["new_ids"][0])
        notes.append("text: " + " ".join(text.split()))
    return result | {"notes": notes + result["notes"]}


def prepare(job):
    """Model, prompts, produce, cache, notes. produce(new) is an iterable of generation steps."""
    torch.set_float32_matmul_precision(job["matmul_precision"])
    notes, draw, ids = [], random.Random(0), job["prompt_ids"]
    if job["expandable_segments"]:
        notes.append("expandable segments")
    model = models.load(job["model"], job["device"], job["dtype"], job["random_weights"])
    if job["pipeline"] in ("event", "ping-pong") and not overlaps(model.device):
        notes.append(f"{model.device.type} has no streams: nothing overlaps")
    if job["compile"] != "off":
        check_compiler(model.device)
    prompts = [
        [draw.randrange(model.config.vocab_size) for _ in range(job["prompt_tokens"])]
        for _ in range(job["batch_size"])
    ]
    if len(ids) == job["prompt_tokens"] and max(ids) < model.config.vocab_size:
        prompts = [ids] * job["batch_size"]
    elif ids:
        notes.append("random prompt ids instead of the published ones")
    if job["cache"].startswith("transformers"):
        return model, prompts, peer(job, model, prompts), None, notes
    # One cache serves all requests: captured graphs live on it.
    capacity = job["prompt_tokens"] + job["new_tokens"] - 1
    cache = CACHES[job["cache"]](model, len(prompts), capacity)
    settings = {
        "compile": {"off": False, "on": True}.get(job["compile"], job["compile"]),
        "cuda_graph": job["cuda_graph"] == "on",
        "pipeline": job["pipeline"],
        "cache": cache,
        "stop_ids": job["stop_ids"],
    }
    return model, prompts, lambda new: generate(model, prompts, new, **settings), cache, notes


def peer(job, model, prompts):
    """`produce` of transformers: its model with our weights, its loop, all steps at the end."""
    import transformers

    theirs, ids = transformers_model(model), torch.tensor(prompts, device=model.device)
    options = {"eos_token_id": job["stop_ids"], "pad_token_id": 0, "do_sample": False}
    if job["cache"].endswith("static"):
        options |= {"cache_implementation": "static", "disable_compile": job["compile"] == "off"}
    if job["compile"] != "off":
        options["compile_config"] = transformers.CompileConfig()
        options["compile_config"]._compile_all_devices = True  # a CPU would silently not compile

    def produce(new):
        mask = torch.ones_like(ids)
        out = theirs.generate(ids, attention_mask=mask, max_new_tokens=new, **options)
        return out[:, ids.shape[1] :].T.tolist()

    return produce


def transformers_model(model):
    """The model of transformers with the weights of ours. (Its names are those of Config.)"""
    import transformers

    transformers.logging.set_verbosity_error()
    c = model.config
    fields = vars(c) | {"rms_norm_eps": c.eps, "layer_norm_epsilon": c.eps}
    if c.rope_theta:
        fields["rope_parameters"] = {"rope_type": "default", "rope_theta": c.rope_theta}
    config = transformers.AutoConfig.for_model(**fields, n_inner=c.intermediate_size)
    # A dtype here, as `.to(dtype)` would round the frequencies of the rotary embedding as well.
    theirs = transformers.AutoModelForCausalLM.from_config(config, dtype=model.dtype).eval()
    theirs.load_state_dict(models.checkpoint(model) | {"lm_head.weight": model.lm_head})
    return theirs.to(model.device)


def measure(produce, job, device, cache=None):
    """Warm-up, then `runs` requests for one token and for all, each timed -> fields of the row."""
    new, batch, begun = job["new_tokens"], job["batch_size"], time.perf_counter()
    # A CUDA graph is captured the second time that its length is met: one request more.
    for _ in range(job["warmup"] + (job["cuda_graph"] == "on")):
        timed(produce, new, device)
        timed(produce, 1, device)
    warmup_s, warm = time.perf_counter() - begun, counts(cache)
    if device.type == "cuda":
        torch.cuda.reset_peak_memory_stats(device)
    runs = [
        (timed(produce, 1, device)[0], *timed(produce, new, device)) for _ in range(job["runs"])
    ]
    prefill_s, total_s, times, steps = zip(*runs)
    peaks, after = memory(device), counts(cache)

    # Where all tokens come at once, at the end, decoding is what is left after a prefill.
    late = job["pipeline"] == "unchecked" or job["cache"].startswith("transformers")
    first_s = prefill_s if late else [t[0] for t in times]
    decode_s = median(total - first for total, first in zip(total_s, first_s))
    by_position = [] if late else [[b - a for a, b in zip(t, t[1:])] for t in times]
    step_s = sorted(chain(*by_position))
    new_ids = [[[id for id in row if id is not None] for row in zip(*run)] for run in steps]
    tokens = sum(map(len, new_ids[0]))
    more = after["unique_graphs"] - warm["unique_graphs"]
    cold = warm["fxgraph_cache_miss"] + warm["fxgraph_cache_bypass"]
    notes = {
        f"stopped after {len(times[0])} of {new} tokens": len(times[0]) < new,
        "its runs gave different tokens": any(ids != new_ids[0] for ids in new_ids),
        f"compiled {more} more graphs while timed": more,
        "captured CUDA graphs while timed": after["captured"] > warm["captured"],
        "the compiler gave up: partly uncompiled": after["gave_up"],
        f"{after['breaks']} graph breaks": after["breaks"],
        "the compiler skipped CUDA graphs": device.type == "cuda" and after["cudagraph_skips"],
    }
    return {
        "new_ids": new_ids[0],
        "notes": [text for text, happened in notes.items() if happened],
        "warmup_s": warmup_s,
        "compile_cache": ("cold" if cold else "warm") if warm["unique_graphs"] else None,
        "prefill_s": median(prefill_s),
        "time_to_first_token_s": median(t[0] for t in times),
        "decode_tokens_per_s": per_second(tokens - batch, decode_s),
        "end_to_end_tokens_per_s": per_second(tokens, median(total_s)),
        "total_s": spread(total_s),
        "step_s": percentiles(step_s),
        "ms_by_position": [round(1000 * median(s), 4) for s in zip(*by_position)],
        "compiled_graphs": after["unique_graphs"],
        "captured_graphs": after["captured"],
        "recompiles_while_timed": more,
        **peaks,
    }


def per_second(tokens, seconds):
    """A rate, or None: one token a row decodes nothing, and noise may exceed a short decoding."""
    return tokens / seconds if tokens > 0 and seconds > 0 else None


def spread(values):
    """Mean, the sample's standard deviation, extremes and median."""
    std = stdev(values) if len(values) > 1 else None
    low, high = min(values), max(values)
    return {"mean": mean(values), "std": std, "min": low, "max": high, "median": median(values)}


def percentiles(ordered):
    if not ordered:
        return None
    low, high = ordered[len(ordered) // 10], ordered[len(ordered) * 9 // 10]
    return {"median": median(ordered), "p10": low, "p90": high}


def timed(produce, new, device):
    """One request -> (seconds in all, seconds until each step was handed over, the steps)."""
    times, steps = [], []
    synchronize(device)
    begun = time.perf_counter()
    for step in produce(new):
        times.append(time.perf_counter() - begun)
        steps.append(step)
    synchronize(device)
    return time.perf_counter() - begun, times, steps


def synchronize(device):
    """Waits until the device has done what was queued. A CPU queues nothing."""
    if device.type == "mps":
        torch.mps.synchronize()
    elif device.type != "cpu":
        getattr(torch, device.type).synchronize(device)


def counts(cache):
    """What torch.compile has counted in this process, and the CUDA graphs captured on a cache."""
    groups = getattr(sys.modules.get("torch._dynamo.utils"), "counters", {})
    count = sum((groups[name] for name in ("stats", "inductor") if name in groups), Counter())
    count["breaks"] = sum(groups.get("graph_break", {}).values())
    count["gave_up"] = sum("recompile limit" in text for text in groups.get("unimplemented", ()))
    kept = chain(*(graphs.values() for _, graphs in getattr(cache, "graphs", {}).values()))
    count["captured"] = sum(graph is not None for graph in kept)
    return count


def memory(device):
    """Peaks in bytes: the resident size, and since the warm-up those of the CUDA allocator."""
    peaks = {"peak_rss_bytes": peak_memory(torch.device("cpu"))}
    if device.type == "cuda":
        peaks["peak_allocated_bytes"] = used = torch.cuda.max_memory_allocated(device)
        peaks["peak_reserved_bytes"] = held = torch.cuda.max_memory_reserved(device)
        peaks["fragmentation_bytes"] = held - used
    return peaks


def bytes_per_step(model, job):
    """Bytes that a step must read: weights, embedding rows, K and V at half of the new tokens.

    A tied head is the embedding and read whole, once. Without a cache there are no K and V.
    """
    c = model.config
    weights = [*model.norm, model.lm_head, *chain(*model.layers)]
    slots = 0 if job["cache"] == "none" else job["prompt_tokens"] + job["new_tokens"] // 2
    kv = 2 * c.num_hidden_layers * c.num_key_value_heads * c.head_dim * slots
    rows = c.hidden_size * (1 if model.embed_positions is None else 2)
    numbers = sum(w.numel() for w in weights) + job["batch_size"] * (rows + kv)
    return model.dtype.itemsize * numbers


def first_difference(model, prompts, expected, ids):
    """Where tokens part from the expected ones, and how close the two best scores were there.

    Rounding may decide between close ones; a wide gap is a fault. None if they are the same.
    """
    for row, (a, b) in enumerate(zip(expected, ids)):
        for position, (x, y) in enumerate(zip_longest(a, b)):
            if x != y:
                context = [prompts[row] + a[:position]]
                [[(_, p, [(_, q)])]] = generate(model, context, 1, cache="none", runners_up=1)
                gap = math.log(p / q) if q else math.inf
                return {"row": row, "position": position, "top2_gap": gap}


def trace(job):
    """Profiles steps 30 to 50 of 100, or the same share of fewer, for Chrome or Perfetto.

    On CUDA once more with NVTX ranges, for `nsys profile --capture-range=cudaProfilerApi`.
    """
    job = job | {"new_tokens": max(2, job["new_tokens"])}  # the first is no step
    model, _, produce, *_ = prepare(job)
    timed(produce, job["new_tokens"], model.device)  # warm-up
    first, last = job["new_tokens"] * 3 // 10, max(1, job["new_tokens"] // 2)

    def profile(start, stop):
        for i, _ in enumerate(produce(last + 1)):
            if i in (first, last):
                (start if i == first else stop)()

    profiler = torch.profiler.profile()
    profile(profiler.start, profiler.stop)
    profiler.export_chrome_trace(job["trace"])
    if model.device.type == "cuda":
        with torch.autograd.profiler.emit_nvtx():
            profile(torch.cuda.profiler.start, torch.cuda.profiler.stop)
    return {"steps": [first, last]}
