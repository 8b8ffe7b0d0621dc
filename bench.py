"""What each technique of fast decoding is worth on this machine, in one table.

    python bench.py
    python bench.py --model qwen3-0.6b-base --random-weights --device cuda
    python bench.py --experiment kv-caching --new-tokens 200 --runs 2 --plot curve.png

A row is one combination of cache, compilation, CUDA graph and pipeline, measured in a process of
its own: fresh allocator, fresh compiler counters. measure.py says what each figure means.
"""

import argparse
import json
import os
import signal
import sys
import time
from importlib.util import find_spec
from itertools import product
from statistics import median

import torch

import measure
import model as models
from generate import CACHES, check_compiler, notice, one_line, open_streams, write
from measure import in_process
from pipeline import MODES, overlaps

FIELDS = """model device device_name dtype matmul_precision torch threads cache compile cuda_graph
    pipeline batch_size prompt_tokens new_tokens runs status reason notes warmup_s compile_cache
    prefill_s time_to_first_token_s decode_tokens_per_s end_to_end_tokens_per_s total_s step_s
    ms_by_position peak_allocated_bytes peak_reserved_bytes fragmentation_bytes peak_rss_bytes
    compiled_graphs captured_graphs recompiles_while_timed same_tokens_as_first_row
    first_difference bandwidth_fraction published""".split()
SETTINGS = ("cache", "compile", "cuda_graph", "pipeline")
WORKLOAD = ("device", "batch_size", "prompt_tokens", "new_tokens")  # shared by the rows of a table

# First line: model, matmul precision, runs, stop id (-1 never comes), prompt ids. Then the rows:
# cache, compile, CUDA graph, pipeline, batch sizes, new tokens, published figure. Of values with
# commas all combinations are run; "best" is what was fastest in the rows before.
EVERY = "none,growing,preallocated off,on off,on off,event,ping-pong,unchecked"
PRESETS = {
    "default": """
        tiny-qwen3  highest  3  -1
        none,growing,preallocated  off,on  off  off,unchecked                  1  100
        best                       best    off  event,ping-pong                1  100
        preallocated               best    on   off,event,ping-pong,unchecked  1  100""",
    # "Device, compile, KV cache": the device makes the same work faster, compiling makes the
    # operations cheaper, the cache avoids old work. Published without figures.
    "three-steps": """
        qwen3-0.6b-base  highest  2  151643  840,20772,3460,4128,4119,304,264,3175,11652,13
        none          on   off     off  1  100
        growing       off  off     off  1  100""",
    # Why does each token take longer as the sequence grows, and which part of that goes away?
    "kv-caching": """
        gpt2-medium  highest  5  -1  18438,391,509,53,40918,287,6121,364,13
        none          off  off     off  1  1000  more than 107 s
        growing       off  off     off  1  1000  21.7 s: 5 times as fast
        preallocated  off  off     off  1  1000""",
    # "Optimizing Token Generation in PyTorch Decoder Models" (Chaim Rand, 2026), on an L40S. Its
    # ping-pong reads the stop flag without waiting for the copy; ours waits.
    "token-generation": """
        gpt2  high  10  -1  50256
        none          off  off     off  32  100,200,400  4 times the time at twice the length
        growing       off  off     off  32  100,200,400  gain grows with the length
        growing+exp   off  off     off  32  100,200,400  less fragmentation, slightly faster
        preallocated  off  off     off  32  100,200,400  over growing: slower, +9 %, +10 %
        preallocated  on   off     off,event,unchecked  16,32,64,128  100
        preallocated  on   off     ping-pong  16,32,64,128  100  over off: +11.6 % at least batch
        preallocated  on   on      off,event,ping-pong  32  100  all together nearly 5 times""",
    # Published with the prompt processing included: compare the end-to-end rate.
    "device-table": """
        qwen3-0.6b-base  highest  2  -1  840,20772,3460,4128,4119,304,264,3175,11652,13
        none          off  off     off  1  41  M4 CPU 5, M4 GPU 27, H100 51 tok/s (1.55 GiB)
        none          on   off     off  1  41  M4 CPU 6, M4 GPU 43, H100 164 tok/s (1.81 GiB)
        growing       off  off     off  1  41  M4 CPU 28, M4 GPU 41, H100 48 tok/s (1.52 GiB)
        growing       on   off     off  1  41  M4 CPU 68, M4 GPU 71, H100 141 tok/s (1.81 GiB)
        preallocated  on   off,on  off  1  41""",
}


def main(argv=None):
    """Runs the command line -> exit status: 0, 2 for a user's error, 130 for Ctrl-C."""
    document, report, status = {"devices": {}, "rows": []}, [], 0
    open_streams()
    try:
        args = parse_arguments(argv)
        dtypes = check_request(args)
        try:
            run(args, dtypes, document, report)
        except KeyboardInterrupt:
            notice("interrupted: these rows were measured")
            status = 130
        write_results(args, document, report)
        rows = [row for row in document["rows"] if row["status"] == "ok"]
        if args.plot and rows:
            plot(rows, args.plot)
        if args.trace and rows and not status:
            trace(args, rows)
    except KeyboardInterrupt:  # while checking or writing
        return 130
    except BrokenPipeError:  # the reader of the table has gone; the files hold what it saw
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
    except (ValueError, OSError) as error:
        notice(f"error: {one_line(error)}")
        return 2
    return status


def parse_arguments(argv):
    """The command line, completed by the preset; `rows` are dicts of lists to combine."""

    def usage_error(message):
        hint = "use --cuda-graph on" if "'reduce-overhead'" in message else "see --help"
        raise ValueError(f"{message} ({hint})")

    def positive(text):
        if not text.isdecimal() or int(text) < 1:
            raise argparse.ArgumentTypeError(f"{text!r} is not a whole number above 0")
        return int(text)

    parser = argparse.ArgumentParser(
        description="What each technique of fast decoding is worth on this machine.",
        epilog="Without --cache, --compile, --cuda-graph and --pipeline: caches x compile, then "
        "the rest on what was fastest. With any of them: all combinations, of everything where "
        "one is not given. Options that take several values may also be repeated.",
    )
    parser.error, add = usage_error, parser.add_argument
    parser.print_help = lambda: write(parser.format_help())
    several = {"nargs": "+", "action": "extend"}
    add("--device", **several, help="default: every device of the machine")
    add("--model", help="as in generate.py (default: tiny-qwen3, in the clone)")
    add("--random-weights", action="store_true", help="shapes of a known name, no download")
    add("--dtype", default="auto", choices=["auto", *models.DTYPES])
    add("--matmul-precision", choices=["highest", "high"], help="high allows TF32 on CUDA")
    add("--cache", **several, choices=[*CACHES])
    add("--compile", **several, choices=["off", "on", "max-autotune"])
    add("--cuda-graph", **several, choices=["off", "on"])
    add("--pipeline", **several, choices=[*MODES], help="unchecked: no look before the end")
    add("--batch-size", **several, type=positive, metavar="N", help="default: 1")
    add("--prompt-tokens", **several, type=positive, metavar="N", help="default: 32")
    add("--new-tokens", **several, type=positive, metavar="N", help="default: 100")
    add("--runs", type=positive, metavar="N", help="timed requests of a row (default: 3)")
    add("--warmup", type=positive, metavar="N", default=1, help="requests before (default: 1)")
    add("--experiment", choices=[*PRESETS], default="default", help="a published workload")
    add("--expandable-segments", action="store_true", help="a setting of the CUDA allocator")
    add("--peers", action="store_true", help="also run transformers, where it is installed")
    add("--json", metavar="FILE", help="write everything measured")
    add("--markdown", metavar="FILE", help="write the table")
    add("--plot", metavar="FILE.png", help="draw rates, and the time of a token by position")
    add("--trace", metavar="FILE.json", help="profile the fastest row, for Chrome or Perfetto")
    args = parser.parse_args(argv)

    preset = PRESETS[args.experiment].strip().splitlines()
    scalars, *lines = (line.split(None, 6) for line in preset)
    args.model = args.model or scalars[0]
    args.matmul_precision = args.matmul_precision or scalars[1]
    args.runs, args.stop_ids = args.runs or int(scalars[2]), [int(scalars[3])]
    args.prompt_ids = [int(id) for id in "".join(scalars[4:]).split(",") if id]
    if any(getattr(args, key) for key in SETTINGS):
        lines = [EVERY.split() + lines[0][4:6]]
    args.rows = []
    for line in lines:
        row = {key: getattr(args, key) or cell.split(",") for key, cell in zip(SETTINGS, line)}
        row["batch_size"] = args.batch_size or [*map(int, line[4].split(","))]
        row["prompt_tokens"] = args.prompt_tokens or [len(args.prompt_ids) or 32]
        row["new_tokens"] = args.new_tokens or [*map(int, line[5].split(","))]
        args.rows.append(row | {"published": "".join(line[6:])})
    for cache, compile in (("dynamic", ["off"]), ("static", ["off", "on"])) * args.peers:
        peer = {"cache": [f"transformers {cache}"], "compile": compile, "published": ""}
        args.rows.append(args.rows[0] | peer | {"cuda_graph": ["off"], "pipeline": ["off"]})
    return args


def check_request(args):
    """{device: dtype} to run on; ValueError or OSError, before any heavy work, for bad requests."""
    for flag, package in ((args.plot, "matplotlib"), (args.peers, "transformers")):
        if flag and not find_spec(package):
            raise ValueError(f"{package} is not installed: pip install {package}")
    if args.plot and not args.plot.endswith((".png", ".pdf", ".svg")):
        raise ValueError(f"--plot {args.plot}: the name must end in .png, .pdf or .svg")
    if args.experiment != "default" and args.model in models.HUB and not args.random_weights:
        from huggingface_hub import try_to_load_from_cache as cached

        if not isinstance(cached(models.HUB[args.model], "model.safetensors"), str):
            notice(f"{args.model} has not been downloaded: random weights, which are as fast")
            args.random_weights = True
    config = models.known_config(args.model) if args.random_weights else None
    config = config or models.read_config(args.model)
    found = None if args.random_weights else models.find_weights(args.model, config)
    for row in args.rows:
        prompt, new = max(row["prompt_tokens"]), max(row["new_tokens"])
        needed, limit = prompt + new - 1, config.max_position_embeddings  # the last is never fed
        if needed > limit:
            raise ValueError(f"{prompt} + {new} tokens need {needed} positions, there are {limit}")
    dtypes = {}
    for name in args.device or models.present_devices():
        device = models.choose_device(name)
        if device.type == "meta":
            raise ValueError("device 'meta' holds shapes only: nothing can run there")
        dtype = models.choose_dtype(args.dtype, config, found, device)
        dtypes[str(device)] = str(dtype).removeprefix("torch.")
    for path in filter(None, (args.json, args.markdown, args.plot, args.trace)):
        try:  # not after the long run; what a file holds stays until there is a row
            with open(path, "a") as file:
                file.write("\n" * (not os.path.getsize(path)))
        except OSError as error:
            raise ValueError(f"cannot write {path}: {error.strerror}") from error
    return dtypes


def run(args, dtypes, document, report):
    """Runs the plan; rows go to the document, and lines to the report, as they are finished."""
    devices, rows, tokens, ran = document["devices"], document["rows"], {}, 0
    for device in dtypes:
        notice(f"measuring how fast {device} reads memory")
        devices[device] = in_process(measure.describe, {"device": device})
    total, begun = sum(not job["reason"] for job in plan(args, dtypes, [])), time.perf_counter()
    for job in plan(args, dtypes, rows):
        job = devices[job["device"]] | {"status": "skipped"} | job
        if not job["reason"]:
            left = (time.perf_counter() - begun) / max(ran, 1) * (total - ran)
            ran += 1
            what = ", ".join(f"{key.replace('_', ' ')} {job[key]}" for key in WORKLOAD + SETTINGS)
            notice(f"[{ran}/{total}] {what}" + f"; about {left:.0f} s left" * (ran > 1))
            # Random weights are the same on devices of one kind only.
            kind = job["device"].split(":")[0] if args.random_weights else ""
            same = job["dtype"], kind, *(job[key] for key in WORKLOAD[1:])
            job |= in_process(measure.measure_row, job | {"reference": tokens.get(same)})
            if job["status"] == "ok":
                tokens.setdefault(same, job["new_ids"])
        rows.append({key: job.get(key) for key in FIELDS})
        lines = row_lines(rows, job)
        report += lines
        try:
            write_results(args, document, report)
        except OSError as error:  # the next row, or the end, tries again
            notice(one_line(error))
        write("\n".join(lines) + "\n")


def plan(args, dtypes, done):
    """Jobs, table by table: the known fields of a row, and what its process needs besides.

    What a device cannot do comes once, with the reason. "best" is found among the rows in `done`:
    this is a generator, so that those are measured by then.
    """
    axes, said = (*SETTINGS, *WORKLOAD[1:]), set()
    for device, dtype in dtypes.items():
        jobs = [
            vars(args) | row | dict(zip(axes, values), device=device, dtype=dtype, notes=[])
            for row in args.rows
            for values in product(*(row[key] for key in axes))
        ]
        for job in sorted(jobs, key=lambda job: [job[key] for key in WORKLOAD]):
            best = fastest(done, job) or {"cache": "preallocated", "compile": "on"}
            job |= {key: best[key] for key in SETTINGS if job[key] == "best"}
            job["cache"], _, expandable = job["cache"].partition("+")
            job["expandable_segments"] |= bool(expandable)
            job |= {"torch": torch.__version__, "reason": cannot(job, args.pipeline)}
            if not job["reason"] or (device, job["reason"]) not in said:
                said.add((device, job["reason"]))
                yield job


def fastest(rows, workload):
    """Of our rows on a workload that look at every token: the one with the highest rate."""
    ok = (row for row in rows if row["status"] == "ok" and row["cache"] in CACHES)
    here = (row for row in ok if all(row[key] == workload.get(key, row[key]) for key in WORKLOAD))
    checked = (row for row in here if row["pipeline"] != "unchecked")
    return max(checked, key=lambda row: row["end_to_end_tokens_per_s"] or 0, default=None)


def cannot(job, asked_pipeline):
    """Why the job's device cannot run it, or None."""
    device = torch.device(job["device"])
    if job["expandable_segments"] and device.type != "cuda":
        return "expandable segments belong to the CUDA allocator"
    if job["cuda_graph"] == "on" and device.type != "cuda":
        return f"CUDA graphs need CUDA, not {device.type}"
    if job["cuda_graph"] == "on" and job["cache"] != "preallocated":
        return "CUDA graphs need the preallocated cache, which never moves"
    if job["pipeline"] in ("event", "ping-pong") and not (overlaps(device) or asked_pipeline):
        return f"event and ping-pong: {device.type} has no streams, nothing would overlap"
    try:
        return check_compiler(device) if job["compile"] != "off" else None
    except ValueError as error:
        return str(error)


# ---------------------------------------------------------------------------------------------
# What is shown

COLUMNS = (
    "cache       |compile|graph|pipeline |prefill ms|TTFT ms|decode tok/s|end-to-end tok/s"
    "|total s (std)  |speed-up|peak MiB   |roofline|same tokens    |warm-up s|notes"
).split("|")


def row_lines(rows, job):
    """The last row as a line of a Markdown table, under a heading if it is the first."""
    row = rows[-1]
    table = [other for other in rows if all(other[key] == row[key] for key in WORKLOAD)]
    first = next((other for other in table if other["status"] == "ok"), None)
    texts = [f"{row['status']}: {row['reason']}"] if row["reason"] else [*row["notes"]]
    texts += [f"published: {row['published']}"] * bool(row["published"])
    lines = [table_line([row[key] or "" for key in SETTINGS] + figures(row, first), texts)]
    if len(table) == 1:
        read = f"reads {job['bandwidth'] / 1e9:.1f} GB/s" if job.get("bandwidth") else "read rate ?"
        weights = " (random weights)" * job["random_weights"]
        lines[:0] = [
            f"\n{row['model']}{weights} on {row['device']} ({row['device_name']}, {read}, "
            f"{row['threads']} threads), torch {row['torch']}, {row['dtype']}, matmul precision "
            f"{row['matmul_precision']}, batch {row['batch_size']}, {row['prompt_tokens']} prompt "
            f"+ {row['new_tokens']} new tokens, {row['runs']} runs after a warm-up\n",
            table_line(COLUMNS),
            table_line("-" * len(name) for name in COLUMNS),
        ]
    return lines


def figures(row, first):
    """The measured cells of a row, as text; `first` is the one that speed-ups refer to."""
    if row["status"] != "ok":
        return [""] * 10
    total, where = row["total_s"], row["first_difference"]
    kinds = ["allocated", "reserved"] if row["peak_allocated_bytes"] else ["rss"]
    peaks = [f"{(row[f'peak_{kind}_bytes'] or 0) / 2**20:.0f}" for kind in kinds]
    rates = row["decode_tokens_per_s"], row["end_to_end_tokens_per_s"]
    same = {None: "", True: "yes"}.get(row["same_tokens_as_first_row"])
    return [
        f"{1000 * row['prefill_s']:.1f}",
        f"{1000 * row['time_to_first_token_s']:.1f}",
        *(f"{rate:.1f}" if rate else "" for rate in rates),
        f"{total['mean']:.3f}" + (f" ± {total['std']:.3f}" if total["std"] is not None else ""),
        f"{first['total_s']['median'] / total['median']:.2f}",
        " / ".join(peaks),
        f"{row['bandwidth_fraction']:.0%}" if row["bandwidth_fraction"] else "",
        f"to {where['position']}, gap {where['top2_gap']:.2g}" if where else same,
        f"{row['warmup_s']:.1f}",
    ]


def table_line(cells, texts=None):
    cells = [*cells] if texts is None else [*cells, "; ".join(texts).replace("|", "/")]
    return "| " + " | ".join(c.ljust(len(name)) for c, name in zip(cells, COLUMNS)) + " |"


def write_results(args, document, report):
    """Writes what there is so far."""
    if args.json:
        document |= {"experiment": args.experiment, "random_weights": args.random_weights}
        # JSON has no NaN and no infinity.
        clean = json.loads(json.dumps(document), parse_constant=lambda name: None)
        save(args.json, json.dumps(clean, indent=1, allow_nan=False))
    if args.markdown:
        save(args.markdown, "\n".join(report).strip() + "\n")


def save(path, text):
    """Replaces a file in one go: neither a full disk nor Ctrl-C may cost what it held."""
    real = os.path.realpath(path)
    whole = os.path.isfile(real) and os.access(os.path.dirname(real), os.W_OK)
    part = f"{real}.part" if whole else path  # a device, as /dev/stdout, is just written to
    try:
        with open(part, "w", encoding="utf-8") as file:
            file.write(text)
        if whole:
            os.replace(part, real)
    except OSError as error:
        raise OSError(f"cannot write {path}: {error.strerror}") from error
    finally:  # also after Ctrl-C
        if whole and os.path.exists(part):
            os.unlink(part)


def trace(args, rows):
    """Profiles the fastest row once more, in a process of its own."""
    best = fastest(rows, {})
    if best is None:
        raise ValueError("--trace: no row that could be profiled was measured")
    what = ", ".join(best[key] for key in SETTINGS)
    if reason := in_process(measure.trace, vars(args) | best)["reason"]:
        raise ValueError(f"no profile of {what}: {reason}")
    notice(f"profile of {what}: {args.trace}")


def plot(rows, path):
    """Two panels: the decode rate of every row, and the time of a token by its position."""
    from matplotlib.figure import Figure

    varying = [key for key in WORKLOAD if len({row[key] for row in rows}) > 1]
    figure = Figure(figsize=(13, max(4.5, 1.5 + 0.3 * len(rows))), layout="constrained")
    left, right = figure.subplots(1, 2)
    colors = dict(zip(CACHES, ("tab:red", "tab:orange", "tab:blue")))
    for y, row in enumerate(rows):
        name = f"{row['cache']} cache" if row["cache"] in CACHES else row["cache"]
        name = "no cache" if row["cache"] == "none" else name
        name += ", compiled" * (row["compile"] != "off") + ", graph" * (row["cuda_graph"] == "on")
        name += "".join(f", {key.split('_')[0]} {row[key]}" for key in varying)
        color = colors.get(row["cache"], "tab:gray")
        pipelined = "" if row["pipeline"] == "off" else f", {row['pipeline']}"
        rate = row["decode_tokens_per_s"] or 0
        bar = left.barh(y, rate, color=color, alpha=1 if row["compile"] != "off" else 0.5)
        left.bar_label(bar, [f" {rate:,.0f}  {name}{pipelined}"])
        if row["pipeline"] == "off" and (ms := row["ms_by_position"]):
            smooth = [median(ms[max(0, i - 4) : i + 5]) for i in range(len(ms))]
            style = {"color": color, "linestyle": "-" if row["compile"] != "off" else "--"}
            right.plot(range(2, 2 + len(ms)), smooth, label=name, **style)
    left.set(title="Decoding, tokens per second", xlim=(0, left.get_xlim()[1] * 1.7))
    left.invert_yaxis()
    left.axis("off")
    right.set(title="Time of a token", ylabel="milliseconds", ylim=(0, None))
    right.set_xlabel("position among the new tokens")
    if right.lines:
        right.legend(loc="upper left")
    right.spines[["top", "right"]].set_visible(False)
    row = rows[0]
    figure.suptitle(
        f"{row['model']}, {row['dtype']}, {row['device_name']}, batch "
        f"{row['batch_size']}, {row['prompt_tokens']} prompt tokens"
    )
    figure.savefig(path, dpi=150)


if __name__ == "__main__":
    status = main()
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # what is left to do is to end
    sys.exit(status)
