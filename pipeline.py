"""Keeping the GPU busy while the host looks for the stop.

A GPU works through a queue (a stream) on its own; the host only fills it. But whether to go on
after step i depends on its token, which the host must read first. In the plain loop the queue
runs empty meanwhile, about 110 microseconds a step in the article cited below:

    off         host  launch 0 ....... look 0  launch 1 ....... look 1  launch 2 .......
                GPU            [step 0]                [step 1]                [step 2]

The way out is to be one step ahead: launch step i + 1, and only then look at step i. Its token
and stop flags were copied to pinned host memory behind it, with an event behind the copy; the
host waits for that event and for nothing else. A step launched after the stop is thrown away.

    event       host  launch 0  launch 1  look 0  launch 2  look 1  launch 3  look 2
                GPU            [step 0][step 1]........[step 2][step 3]

    ping-pong   host  launch 0  launch 1  look 0  launch 2  look 1  launch 3  look 2
                GPU A          [step 0]                [step 2]
                GPU B                  [step 1]                [step 3]

    unchecked   host  launch 0  launch 1  launch 2  launch 3  look 0 1 2 3
                GPU            [step 0][step 1][step 2][step 3]

Ping-pong is the published form (Chaim Rand, "Optimizing Token Generation in PyTorch Decoder
Models", 2026): steps take turns on two streams, each waiting for the other's work. That costs a
second pool of the allocator, which keeps memory per stream; `event` hides the same wait with one
stream. The published listing reads the pinned flag with nothing that makes the host wait for
the copy, so it can read a stale one; here the host always waits for the event. `unchecked` never
looks until the end: the floor that the others are compared with.
"""

import torch

# mode: streams, and how many steps the host is ahead of the one it looks at (None: all of them)
MODES = {"off": (1, 0), "event": (1, 1), "ping-pong": (2, 1), "unchecked": (1, None)}


def overlaps(device):
    """Whether a device has streams to queue on; without, a step is done when it is launched."""
    return device.type in ("cuda", "xpu")


class Launcher:
    """Launches step i, and waits for what step i left in `result`.

    result: int64 tensor (2,B) on the device, written anew by every step: new ids, stop flags.
    steps: how many there are at most. `ahead` says how far the loop may run ahead of `wait`.
    Wait for step i before step i + ahead + 1 is launched: they share a slot in host memory.
    """

    def __init__(self, result, mode, steps):
        streams, ahead = MODES[mode]
        self.result = result  # kept: its memory must not be handed out while a stream uses it
        self.ahead = steps - 1 if ahead is None else ahead
        self.copies = [None] * (self.ahead + 1)  # of `result`, of the latest steps
        self.streams = []
        if overlaps(result.device):
            device = result.device
            self.last = torch.accelerator.current_stream(device)
            self.streams = [self.last]
            if streams == 2:
                self.streams = [torch.Stream(device=device), torch.Stream(device=device)]
            shape, dtype = result.shape, result.dtype
            self.copies = [torch.empty(shape, dtype=dtype, pin_memory=True) for _ in self.copies]
            self.events = [torch.Event(device=device) for _ in self.copies]

    def launch(self, i, step):
        """Queues step() and the copy of its result; does not wait for either."""
        slot = i % len(self.copies)
        if not self.streams:  # cpu, mps: the same logic with an ordinary copy
            step()
            self.copies[slot] = self.result.clone()
            return
        stream = self.streams[i % len(self.streams)]
        with stream:
            if stream is not self.last:  # it holds step i - 1 and its copy (i = 0: the weights)
                stream.wait_stream(self.last)
            step()
            self.copies[slot].copy_(self.result, non_blocking=True)
            self.events[slot].record(stream)
        self.last = stream

    def wait(self, i):
        """Waits for step i and its copy -> (ids [int], stop flags [int])."""
        slot = i % len(self.copies)
        if self.streams:
            self.events[slot].synchronize()
        return self.copies[slot].tolist()

    def finish(self):
        """Leaves nothing in flight: later work may reuse every buffer and slot."""
        for stream in self.streams:
            stream.synchronize()


def replayable(step, graphs, key):
    """step, or the replay of a CUDA graph captured from it: one launch for all its kernels.

    step must read and write tensors at fixed addresses only. The first call for a key runs it
    as it is, which compiles and loads whatever it needs; the second captures. `graphs` {key:
    graph, or None: ran once} must not outlive the tensors at those addresses. The graphs share
    one memory pool, which is safe because only one runs at a time and none leaves a result in it.
    """
    if key not in graphs:
        graphs[key] = None
        return step
    if graphs[key] is None:
        graph = torch.cuda.CUDAGraph()
        pool = next((other.pool() for other in graphs.values() if other is not None), None)
        stream = torch.cuda.Stream()  # on the current device; the default one stays on the first
        with torch.cuda.graph(graph, pool=pool, stream=stream, capture_error_mode="thread_local"):
            step()
        graphs[key] = graph
    return graphs[key].replay
