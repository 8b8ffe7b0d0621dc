"""Decoding on a CPU against other implementations, alternating in one run.

    python results/cpu_peers.py [--rounds 5] [--only NAME ...] [--json FILE]
    python results/cpu_peers.py --cases [--rounds 5] [--json FILE]
    python results/cpu_peers.py --first [--rounds 5] [--json FILE]

Every implementation runs in a process of its own, with random weights of the Qwen3-0.6B shapes in
bfloat16 (the speed does not depend on their values), batch 1, 32 prompt tokens, 64 new ones. The
processes take turns: each round asks all of them, and the memory's read bandwidth, once. Ratios
are taken within a round and their median is printed, as such machines are noisy. `warm-up` is
the first request of a new process with an empty compiler cache, after loading. (What torch keeps
elsewhere is not emptied: a precompiled C++ header, 4 s once a machine, needed by all compilers.)
`--cases` compares with transformers alone: Qwen3 where nothing is compiled, and GPT-2 compiled
with the best of three settings of transformers in each round. `--first` repeats the warm-up alone,
in new processes: ours with an empty and then with its own compiler cache, and transformers.

Beside this project: transformers; reasoning-from-scratch, if PEER_RFS names a checkout of it;
llama.cpp, if PEER_LLAMA_PYTHON names a Python that has llama-cpp-python and gguf.
"""

import argparse
import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
CASES = {  # model, dtype, batch, prompt tokens, new tokens, with a cache
    "decoding": ("qwen3-0.6b", "bfloat16", 1, 32, 64, True),
    "batch of 8": ("qwen3-0.6b", "bfloat16", 8, 32, 64, True),
    "no cache": ("qwen3-0.6b", "bfloat16", 1, 32, 16, False),
    "prefill of 512": ("qwen3-0.6b", "bfloat16", 1, 512, 1, True),
    "gpt2, float32": ("gpt2", "float32", 1, 32, 64, True),
    "gpt2, bfloat16": ("gpt2", "bfloat16", 1, 32, 64, True),
    "gpt2, float32, batch of 32": ("gpt2", "float32", 32, 32, 64, True),
    "gpt2, bfloat16, batch of 32": ("gpt2", "bfloat16", 32, 32, 64, True),
}
NAME, DTYPE, B, P, N, CACHED = CASES[sys.argv[3] if sys.argv[1:2] == ["worker"] else "decoding"]
BYTES = 596_049_920 * 2 + 28 * (P + N // 2) * 8 * 128 * 2 * 2  # weights, and K/V half-way
PEERS = ["read", "ours", "ours-eager", "transformers-dynamic", "transformers-static",
         "transformers-compiled", "rfs", "rfs-compiled", "llama.cpp"]  # fmt: skip
PROMPT = [(i * 7) % 1000 for i in range(P)]


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--only", nargs="+", choices=PEERS, default=PEERS)
    parser.add_argument("--cases", action="store_true")
    parser.add_argument("--first", action="store_true")
    parser.add_argument("--json", metavar="FILE")
    args = parser.parse_args()
    if args.cases:
        return cases(args)
    if args.first:
        return first_requests(args)
    workers, warm_up, cache = {}, {}, tempfile.mkdtemp()
    for name in args.only:
        if (name.startswith("rfs") and "PEER_RFS" not in os.environ) or (
            name == "llama.cpp" and "PEER_LLAMA_PYTHON" not in os.environ
        ):
            print(f"{name}: skipped, its environment variable is not set")
            continue
        workers[name] = start(name, cache)
        warm_up[name] = ask(workers[name])["seconds"]
        print(f"{name:24} warm-up {warm_up[name]:6.1f} s", flush=True)
    if "ours" in workers:
        again = start("ours", cache)
        warm_up["ours, warm compiler cache"] = ask(again)["seconds"]
        again.kill()
        print(f"ours, warm compiler cache: {warm_up['ours, warm compiler cache']:.1f} s")
    rates = {name: [] for name in workers}
    for _ in range(args.rounds):
        for name, worker in workers.items():
            rates[name].append(ask(worker)["rate"])
        print({name: round(values[-1], 1) for name, values in rates.items()}, flush=True)
    for worker in workers.values():
        worker.kill()
    print(f"\n{'':24} tokens/s   ours / it   of read bandwidth")
    for name, values in rates.items():
        if name == "read":
            print(f"read bandwidth           {statistics.median(values):.1f} GB/s")
            continue
        ratio = statistics.median(a / b for a, b in zip(rates["ours"], values))
        share = statistics.median(v * BYTES / 1e9 / r for v, r in zip(values, rates["read"]))
        print(f"{name:24} {statistics.median(values):8.1f}   {ratio:9.2f}   {share:.0%}")
    if args.json:
        Path(args.json).write_text(json.dumps({"warm_up_s": warm_up, "rates": rates}, indent=1))


def cases(args):
    """Steps per second in each case, and how many times as fast the best of the others is."""
    results, cache = {}, tempfile.mkdtemp()
    for case in CASES:
        names = ["ours", "transformers-dynamic", "transformers-static", "transformers-compiled"]
        if not case.startswith("gpt2"):
            names = ["ours-eager", "transformers-dynamic"]
        workers = [start(name, cache, case) for name in names]
        rounds = [[ask(worker)["rate"] for worker in workers] for _ in range(args.rounds + 1)][1:]
        for worker in workers:
            worker.kill()
        ratio = statistics.median(ours / max(others) for ours, *others in rounds)
        results[case] = {"rates": dict(zip(names, zip(*rounds))), "ours / best": ratio}
        rates = ", ".join(f"{n} {statistics.median(c):.2f}" for n, c in zip(names, zip(*rounds)))
        print(f"{case}: steps/s {rates}; ours / best of the others {ratio:.2f}", flush=True)
    if args.json:
        Path(args.json).write_text(json.dumps(results, indent=1))


def first_requests(args):
    """Seconds of the first request, and ratios within a round: medians and extremes."""
    rounds = []
    for _ in range(args.rounds):
        cache, seconds = tempfile.mkdtemp(), []
        for name in ("ours", "ours", "transformers-compiled"):
            worker = start(name, cache)
            seconds.append(ask(worker)["seconds"])
            worker.kill()
        rounds.append(seconds)
        print("cold {:.1f} s, warm {:.1f} s, transformers {:.1f} s".format(*seconds), flush=True)
    for what, ratios in (
        ("cold, of that of transformers", [cold / peer for cold, _, peer in rounds]),
        ("warm, of cold", [warm / cold for cold, warm, _ in rounds]),
    ):
        low, mid, high = min(ratios), statistics.median(ratios), max(ratios)
        print(f"{what}: {mid:.1%} ({low:.1%} to {high:.1%})")
    if args.json:
        names = ("ours", "ours, warm compiler cache", "transformers-compiled")
        seconds = dict(zip(names, zip(*rounds)))
        Path(args.json).write_text(json.dumps({"first_request_s": seconds}, indent=1))


def start(name, cache, case="decoding"):
    python = os.environ["PEER_LLAMA_PYTHON"] if name == "llama.cpp" else sys.executable
    folder = cache if name.startswith("ours") else f"{cache}/{name}"  # ours: once cold, once warm
    env = dict(os.environ, TORCHINDUCTOR_CACHE_DIR=folder)
    # glibc keeps freed memory once a block of some size was freed, as loading may or may not do;
    # a prefill is 8 % faster then. The same for all.
    env |= {"MALLOC_MMAP_THRESHOLD_": str(2**25), "MALLOC_TRIM_THRESHOLD_": str(2**27)}
    pipes = dict(stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL)
    command = [python, __file__, "worker", name, case]
    return subprocess.Popen(command, env=env, text=True, **pipes)


def ask(worker):
    """Lets one worker run one request, while all others wait."""
    worker.stdin.write("\n")
    worker.stdin.flush()
    while not (line := worker.stdout.readline()).startswith("{"):
        if not line:
            raise RuntimeError(f"{worker.args[-2]} stopped")
    return json.loads(line)


def work(name):
    """A worker: one request per line of input; a request returns its rate."""
    request = REQUESTS[name.split("-")[0].split(".")[0]](name)
    for _ in sys.stdin:
        start = time.perf_counter()
        rate = request()
        print(json.dumps({"rate": rate, "seconds": time.perf_counter() - start}), flush=True)


def decode_rate(start, times):
    """Steps per second, without the prefill unless that is all there is."""
    times = [start, *times] if len(times) == 1 else times
    return (len(times) - 1) / (times[-1] - times[0])


def read(name):
    import torch

    x = torch.randn(2**28)
    seconds = []

    def request():
        for _ in range(3):
            start = time.perf_counter()
            x.sum()
            seconds.append(time.perf_counter() - start)
        return 4 * x.numel() / statistics.median(seconds[-3:]) / 1e9

    return request


def ours(name):
    sys.path.insert(0, str(ROOT))
    from generate import generate
    from model import load

    model = load(NAME, "cpu", DTYPE, random_weights=True)
    options = dict(compile=name == "ours", cache="preallocated" if CACHED else "none")

    def request():
        steps = generate(model, [PROMPT] * B, N, **options)
        return decode_rate(time.perf_counter(), [time.perf_counter() for _ in steps])

    return request


def transformers(name):
    sys.path.insert(0, str(ROOT))
    import torch
    from transformers.generation.streamers import BaseStreamer

    from measure import transformers_model
    from model import load

    peer = transformers_model(load(NAME, "cpu", DTYPE, random_weights=True))
    options = dict(max_new_tokens=N, min_new_tokens=N, do_sample=False, pad_token_id=0)
    options["use_cache"] = CACHED
    if name != "transformers-dynamic":
        options["cache_implementation"] = "static"
    if name == "transformers-static":
        options["disable_compile"] = True
    if name == "transformers-compiled":
        from transformers import CompileConfig

        config = CompileConfig(fullgraph=True, mode="default")
        config._compile_all_devices = True  # otherwise compiled on accelerators only
        options["compile_config"] = config

    class Clock(BaseStreamer):
        def put(self, ids):
            self.times.append(time.perf_counter())

        def end(self):
            pass

    ids = torch.tensor([PROMPT] * B)

    def request():
        clock = Clock()
        clock.times = []
        with torch.inference_mode():
            peer.generate(ids, attention_mask=torch.ones_like(ids), streamer=clock, **options)
        return decode_rate(*clock.times[:1], clock.times[1:])  # the first put is the prompt

    return request


def rfs(name):
    sys.path.insert(0, os.environ["PEER_RFS"])
    import torch
    from reasoning_from_scratch.qwen3 import QWEN_CONFIG_06_B, KVCache, Qwen3Model

    model = Qwen3Model(QWEN_CONFIG_06_B).eval()
    run = model
    if name == "rfs-compiled":
        torch._dynamo.config.allow_unspec_int_on_nn_module = True  # as its own script does
        run = torch.compile(model)

    @torch.inference_mode()
    def request():
        cache, times = KVCache(n_layers=28), []
        model.reset_kv_cache()
        ids = torch.tensor([PROMPT])
        for _ in range(N):
            ids = run(ids, cache=cache)[:, -1].argmax(dim=-1, keepdim=True)
            ids.item()
            times.append(time.perf_counter())
        return decode_rate(None, times)

    return request


def llama(name):
    import llama_cpp

    path = Path(tempfile.gettempdir()) / "qwen3-0.6b-random-bf16.gguf"
    if not path.exists():
        write_gguf(path)
    model = llama_cpp.Llama(str(path), n_ctx=512, n_threads=2, n_threads_batch=2, verbose=False)

    def request():
        model.reset()
        times, ids = [], PROMPT
        for _ in range(N):
            model.eval(ids)
            logits = llama_cpp.llama_get_logits_ith(model._ctx.ctx, -1)
            ids = [max_index(logits, 151_936)]
            times.append(time.perf_counter())
        return decode_rate(None, times)

    return request


def max_index(logits, size):
    import numpy

    return int(numpy.ctypeslib.as_array(logits, (size,)).argmax())


def write_gguf(path):
    """Random bf16 weights in llama.cpp's own format."""
    import gguf
    import numpy

    D, I, H, KV, hd, V = 1024, 3072, 16, 8, 128, 151_936  # noqa: E741
    writer = gguf.GGUFWriter(path, "qwen3")
    writer.add_block_count(28)
    writer.add_context_length(40960)
    writer.add_embedding_length(D)
    writer.add_feed_forward_length(I)
    writer.add_head_count(H)
    writer.add_head_count_kv(KV)
    writer.add_key_length(hd)
    writer.add_value_length(hd)
    writer.add_rope_freq_base(1e6)
    writer.add_layer_norm_rms_eps(1e-6)
    writer.add_file_type(gguf.LlamaFileType.MOSTLY_BF16)
    writer.add_tokenizer_model("gpt2")
    writer.add_tokenizer_pre("qwen2")
    writer.add_token_list([f"t{i}" for i in range(V)])
    writer.add_token_types([1] * V)
    writer.add_token_merges(["t 1"])
    random = numpy.random.default_rng(0)

    def weight(name, *shape):
        values = random.standard_normal(shape, dtype=numpy.float32) * 0.02
        half = (values.view(numpy.uint32) >> 16).astype(numpy.uint16)  # bf16 by truncation
        kind = gguf.GGMLQuantizationType.BF16
        writer.add_tensor(name, half.view(numpy.uint8), raw_dtype=kind)

    def norm(name, size):
        writer.add_tensor(name, numpy.ones(size, dtype=numpy.float32))

    weight("token_embd.weight", V, D)
    norm("output_norm.weight", D)
    for i in range(28):
        for name, *shape in (
            ("attn_q", H * hd, D), ("attn_k", KV * hd, D), ("attn_v", KV * hd, D),
            ("attn_output", D, H * hd), ("ffn_gate", I, D), ("ffn_up", I, D), ("ffn_down", D, I),
        ):  # fmt: skip
            weight(f"blk.{i}.{name}.weight", *shape)
        for name, size in (
            ("attn_norm", D), ("ffn_norm", D), ("attn_q_norm", hd), ("attn_k_norm", hd),
        ):  # fmt: skip
            norm(f"blk.{i}.{name}.weight", size)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


REQUESTS = dict(read=read, ours=ours, transformers=transformers, rfs=rfs, llama=llama)

if __name__ == "__main__":
    work(sys.argv[2]) if sys.argv[1:2] == ["worker"] else main()
