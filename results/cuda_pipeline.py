"""What the stop check costs on a CUDA device, and what hides it: under four minutes.

    python results/cuda_pipeline.py [--json FILE] [--trace FOLDER]

Qwen3-0.6B shapes, random bfloat16 weights, batch 1, 32 prompt tokens, 200 new ones. For each mode
of pipeline.py, eager, compiled and captured: milliseconds per step (median of five runs), the
fraction of the floor (bytes of the weights over the measured memory bandwidth), the cost of the
stop check against `unchecked`, and the GPU's idle time per step from a profile of 20 steps. Then
1,000 short runs with random delays on the device, whose tokens must equal those of the plain loop.
"""

import argparse
import json
import random
import statistics
import sys
import time
from itertools import pairwise
from pathlib import Path

import torch
from torch.profiler import ProfilerActivity, profile

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from generate import generate
from kvcache import PreallocatedCache
from model import checkpoint, load

P, N = 32, 200
KINDS = {
    "eager": {},
    "compiled": dict(compile=True),
    "eager, captured": dict(cuda_graph=True),
    "compiled, captured": dict(compile=True, cuda_graph=True),
}


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("--json", metavar="FILE")
    parser.add_argument("--trace", metavar="FOLDER")
    args = parser.parse_args()
    model = load("qwen3-0.6b", "cuda", "bfloat16", random_weights=True)
    weights = sum(tensor.nbytes for tensor in checkpoint(model).values())
    floor_ms = 1e3 * weights / read_bandwidth()
    print(
        f"{torch.cuda.get_device_name()}, torch {torch.__version__}, floor {floor_ms:.3f} ms a step"
    )
    prompt, rows = [[(i * 7) % 1000 for i in range(P)]], []
    for kind, settings in KINDS.items():
        cache = PreallocatedCache(model, 1, P + N)
        reference = base = None
        for mode in ("unchecked", "off", "event", "ping-pong"):

            def request(new=N, mode=mode, cache=cache, settings=settings):
                options = dict(cache=cache, pipeline=mode, stop_ids=[-1], **settings)
                return list(generate(model, prompt, new, **options))

            for _ in range(3):  # compile, capture, replay once
                tokens = request()
            reference = reference or tokens
            decode_s = statistics.median(timed(request) - timed(request, 1) for _ in range(5))
            ms = 1e3 * decode_s / (N - 1)
            base = base or ms  # `unchecked` comes first
            idle, same = idle_us(request, kind, mode, args), tokens == reference
            rows.append({
                "kind": kind, "pipeline": mode, "ms_per_step": ms, "of_floor": floor_ms / ms,
                "stop_check": ms / base - 1, "idle_us_per_step": idle, "same_tokens": same,
            })  # fmt: skip
            print(f"{kind:20} {mode:10} {ms:7.3f} ms, {floor_ms / ms:4.0%} of floor, stop check "
                  f"{ms / base - 1:+.1%}, idle {idle:6.1f} us, same tokens: {same}")  # fmt: skip
    wrong = delayed_runs(model)
    print(f"{wrong} of 1,000 runs with random delays differ from the plain loop")
    if args.json:
        result = {"device": torch.cuda.get_device_name(), "torch": torch.__version__}
        result |= {"floor_ms": floor_ms, "rows": rows, "delayed_runs_that_differ": wrong}
        Path(args.json).write_text(json.dumps(result, indent=1))


def read_bandwidth():
    """Bytes per second of a plain sum over 4 GiB."""
    x = torch.ones(2**30, device="cuda")
    return 4 * x.numel() / statistics.median(timed(x.sum) for _ in range(10))


def timed(function, *arguments):
    torch.cuda.synchronize()
    start = time.perf_counter()
    function(*arguments)
    torch.cuda.synchronize()
    return time.perf_counter() - start


def idle_us(request, kind, mode, args):
    """Microseconds per step in which no kernel or copy runs, over 20 steps in a profile."""
    with profile(activities=[ProfilerActivity.CPU, ProfilerActivity.CUDA]) as profiler:
        request(41)
    if args.trace:
        name = f"{kind}-{mode}.json".replace(", ", "-")
        profiler.export_chrome_trace(str(Path(args.trace) / name))
    spans = sorted(
        (event.time_range.start, event.time_range.end)
        for event in profiler.events()
        if event.device_type == torch.autograd.DeviceType.CUDA
    )
    spans = spans[len(spans) // 2 :]  # the second half: about 20 steps
    idle, end = 0.0, spans[0][1]
    for (_, _), (start, stop) in pairwise(spans):
        idle, end = idle + max(0.0, start - end), max(end, stop)
    return idle / 20


def delayed_runs(model, runs=1000):
    """How many short runs with random sleeps on the device differ from the plain loop."""
    draw, wrong, forward = random.Random(0), 0, type(model).__call__
    prompt = [[1, 2, 3]]
    expected = list(generate(model, prompt, 4))

    def slow(self, *arguments):
        torch.cuda._sleep(draw.randrange(200_000))
        logits = forward(self, *arguments)
        torch.cuda._sleep(draw.randrange(200_000))
        return logits

    type(model).__call__ = slow
    try:
        cache = PreallocatedCache(model, 1, 8)
        for i in range(runs):
            mode = ("event", "ping-pong")[i % 2]
            wrong += list(generate(model, prompt, 4, cache=cache, pipeline=mode)) != expected
    finally:
        type(model).__call__ = forward
    return wrong


if __name__ == "__main__":
    main()
