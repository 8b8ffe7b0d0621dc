"""Three ways to remember what a decoder has computed: not at all, growing, preallocated.

Token t attends to the keys and values of tokens 0..t. Without a cache all of them are computed
again for every new token, so a token gets dearer as the text gets longer; with one, a step
computes a single row and reads the others. All three classes have the same few methods, and the
difference between them is the lesson:

    NoCache             keeps the ids; every step feeds the whole sequence
    GrowingCache        keeps K and V in tensors of just the right length: every step allocates
                        new ones, one slot longer, and copies the old ones into them
    PreallocatedCache   allocates once and writes each new slot in place; addresses never change

Sizes: B batch, T tokens fed, S slots attended to, KV key/value heads, hd head_dim.
`pos` (T,) is the slot of each token fed, padding counted, the same for all rows and always a
tensor on the device: a Python int would cost a recompile per token, and reading it back would
stall the device. The host keeps its own count in `length`.

A request: `start` with the prompt, then for each token `reserve` on the host and `feed` on the
device, the part that is captured. Every block calls `update`, a plain function, so that compiled
code does not depend on the cache object. The model reads `layers` (one kv each), `slots` (S),
`pad` (B,1: left padding) and `padded` (whether there is any).
"""

import torch

BLOCK = 64  # slots; a preallocated cache is read in whole blocks, so that shapes rarely change


class NoCache:
    """Remembers the ids instead of K and V, and feeds all of them again at every step."""

    def __init__(self, model, batch_size=1, capacity=None):
        self.layout, self.batch_size, self.capacity = layout(model), batch_size, capacity
        self.layers = [None] * model.config.num_hidden_layers

    def start(self, ids, pad):
        """Empties the cache. ids (B,T), pad [int] left padding a row -> ids and pos to feed."""
        self.ids = ids
        return ids, begin(self, ids, pad)

    def reserve(self, doubling=False):
        """Host side of a step: counts one more slot."""
        self.length = self.slots = self.length + 1

    def feed(self, ids):
        """Device side of a step: ids (B,1) new tokens -> ids (B,T) and pos (T,) to feed."""
        self.ids = torch.cat((self.ids, ids), dim=1)
        return self.ids, torch.arange(self.ids.shape[1], device=ids.device)

    @staticmethod
    def update(kv, k, v, pos):
        """Takes in one layer's new k, v (B,KV,T,hd) -> the K, V (B,KV,S,hd) to attend to."""
        return k, v

    def crop(self, length):
        """Forgets everything from slot `length` on."""
        self.ids = self.ids[:, :length]
        self.length = self.slots = length


class GrowingCache:
    """Appends: `torch.cat` allocates and copies the whole of K and V for every token."""

    def __init__(self, model, batch_size=1, capacity=None):
        self.layout, self.batch_size, self.capacity = layout(model), batch_size, capacity

    @torch.inference_mode()  # whoever calls: what is made in this mode changes only in it
    def start(self, ids, pad):
        """Empties the cache. ids (B,T), pad [int] left padding a row -> ids and pos to feed."""
        layers, KV, hd, dtype, device = self.layout.values()
        nothing = torch.empty((self.batch_size, KV, 0, hd), dtype=dtype, device=device)
        self.layers = [[nothing, nothing] for _ in range(layers)]
        pos = begin(self, ids, pad)
        self.pos = pos[-1:].clone()
        return ids, pos

    def reserve(self, doubling=False):
        """Host side of a step: counts one more slot."""
        self.length = self.slots = self.length + 1

    @torch.inference_mode()
    def feed(self, ids):
        """Device side of a step: ids (B,1) new tokens -> the same and their pos (1,)."""
        self.pos += 1
        return ids, self.pos

    @staticmethod
    def update(kv, k, v, pos):
        """Appends one layer's new k, v (B,KV,T,hd) -> the K, V (B,KV,S,hd) to attend to."""
        # Into new tensors: resize_ keeps the flat order, and slots would move to other heads.
        kv[0] = torch.cat((kv[0], k), dim=2)
        kv[1] = torch.cat((kv[1], v), dim=2)
        return kv

    @torch.inference_mode()
    def crop(self, length):
        """Forgets everything from slot `length` on."""
        self.layers = [[t[:, :, :length] for t in kv] for kv in self.layers]
        self.length = self.slots = length
        self.pos.fill_(length - 1)


class PreallocatedCache:
    """Writes in place into K and V of full size, and reads only the blocks in use.

    The cost of a token follows what is in the cache, not its capacity: attention sees views of
    `slots` slots, the used length rounded up (see `reserve`). Nothing moves, so a captured CUDA
    graph may keep the addresses; such graphs are stored here, in `graphs`.
    """

    @torch.inference_mode()
    def __init__(self, model, batch_size=1, capacity=1024):
        self.layout, self.batch_size, self.capacity = layout(model), batch_size, capacity
        layers, KV, hd, dtype, device = self.layout.values()
        self.size = -(-capacity // BLOCK) * BLOCK
        # One slot more than is ever read: a view of everything would be contiguous, which the
        # compiler would take for a special case worth a graph of its own. Zeros, not garbage:
        # what is masked still gets multiplied, and 0 * NaN is NaN.
        shape = (batch_size, KV, self.size + 1, hd)
        self.storage = [
            [torch.zeros(shape, dtype=dtype, device=device) for _ in "kv"] for _ in range(layers)
        ]
        self.pos = torch.zeros(1, dtype=torch.int64, device=device)
        self.pad = torch.zeros(batch_size, 1, dtype=torch.int64, device=device)
        self.layers, self.graphs = [], {}  # the latter filled by `generate`

    @torch.inference_mode()
    def start(self, ids, pad):
        """Empties the cache. ids (B,T), pad [int] left padding a row -> ids and pos to feed."""
        for t in (t for kv in self.layers for t in kv):
            t.zero_()  # all that the last request wrote: one NaN would outlive it
        own_pad = self.pad
        pos = begin(self, ids, pad)
        self.pad = own_pad.copy_(self.pad)  # captured graphs hold its address
        self.pos.fill_(self.length - 1)
        self.read(self.length)  # S == T: a prompt without padding needs no mask
        return ids, pos

    def reserve(self, doubling=False):
        """Host side of a step: counts one more slot and chooses how many are read.

        doubling: 256, 512, 1024, ... slots instead of whole blocks, so that a long text needs
        few captured graphs.
        """
        if self.length == self.capacity:
            raise ValueError(f"the cache is full: it has room for {self.capacity} tokens")
        self.length += 1
        slots = -(-self.length // BLOCK) * BLOCK
        if doubling:
            slots = min(max(256, 1 << (self.length - 1).bit_length()), self.size)
        if slots != self.slots:
            self.read(slots)

    @torch.inference_mode()
    def read(self, slots):
        """Lets attention see the first `slots` slots."""
        self.slots = slots
        self.layers = [[t[:, :, :slots] for t in kv] for kv in self.storage]

    @torch.inference_mode()
    def feed(self, ids):
        """Device side of a step: ids (B,1) new tokens -> the same and their pos (1,)."""
        self.pos += 1
        return ids, self.pos

    @staticmethod
    def update(kv, k, v, pos):
        """Writes one layer's new k, v (B,KV,T,hd) -> the K, V (B,KV,S,hd) to attend to."""
        # No slice: it takes a host's number, and past the end it writes nothing in silence.
        kv[0].index_copy_(2, pos, k)
        kv[1].index_copy_(2, pos, v)
        return kv

    @torch.inference_mode()
    def crop(self, length):
        """Forgets everything from slot `length` on; later tokens will write over it."""
        self.length = length
        self.pos.fill_(length - 1)


def layout(model):
    """What K and V of a model look like, by name: a cache serves all models of the same."""
    c = model.config
    return {
        "layers": c.num_hidden_layers,
        "num_key_value_heads": c.num_key_value_heads,
        "head_dim": c.head_dim,
        "dtype": model.dtype,
        "device": model.device,
    }


def begin(cache, ids, pad):
    """What all three do with a prompt: check it, take in the padding -> pos (T,)."""
    B, T = ids.shape
    if B != cache.batch_size:
        raise ValueError(f"the cache was made for {cache.batch_size} rows, the prompt has {B}")
    if cache.capacity is not None and T > cache.capacity:
        raise ValueError(f"the cache has room for {cache.capacity} tokens, the prompt has {T}")
    cache.pad = torch.tensor(pad, device=ids.device)[:, None]  # (B,1)
    cache.padded = any(pad)  # for the host, which must not ask the device
    cache.request = None  # `generate` puts its launcher here, to notice another request
    cache.length = cache.slots = T
    return torch.arange(T, device=ids.device)
