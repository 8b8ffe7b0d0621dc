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
`pos` (T,) is the slot of each token fed, the same for all rows and always a tensor on the device:
a Python int would cost a recompile per token, and reading it back would stall the device. The
host keeps its own count in `length`.
"""

import torch

BLOCK = 64  # slots; a preallocated cache is read in whole blocks, so that shapes rarely change


class NoCache:
    """Remembers the ids instead of K and V, and feeds all of them again at every step."""

    def __init__(self, model, batch_size=1, capacity=None):
        self.batch_size, self.capacity = batch_size, capacity
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
        self.batch_size, self.capacity, self.model = batch_size, capacity, model

    @torch.inference_mode()
    def start(self, ids, pad):
        """Empties the cache. ids (B,T), pad [int] left padding a row -> ids and pos to feed."""
        c = self.model.config
        shape = (self.batch_size, c.num_key_value_heads, 0, c.head_dim)
        nothing = torch.empty(shape, dtype=self.model.dtype, device=ids.device)
        self.layers = [[nothing, nothing] for _ in range(c.num_hidden_layers)]
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
    `slots` slots, the used length rounded up to a block. Nothing moves, so a captured CUDA graph
    may keep the addresses; such graphs are stored here, in `graphs`.
    """

    @torch.inference_mode()
    def __init__(self, model, batch_size=1, capacity=1024):
        c = model.config
        self.batch_size, self.capacity = batch_size, capacity
        self.size = -(-capacity // BLOCK) * BLOCK
        # One slot more than is ever read: a view of everything would be contiguous, which the
        # compiler would take for a special case worth a graph of its own. Zeros, not garbage:
        # what is masked still gets multiplied, and 0 * NaN is NaN.
        shape = (batch_size, c.num_key_value_heads, self.size + 1, c.head_dim)
        self.storage = [
            [torch.zeros(shape, dtype=model.dtype, device=model.device) for _ in "kv"]
            for _ in range(c.num_hidden_layers)
        ]
        self.pos = torch.zeros(1, dtype=torch.int64, device=model.device)
        self.pad = torch.zeros(batch_size, 1, dtype=torch.int64, device=model.device)
        self.layers, self.graphs = [], {}

    @torch.inference_mode()
    def start(self, ids, pad):
        """Empties the cache. ids (B,T), pad [int] left padding a row -> ids and pos to feed."""
        for t in (t for kv in self.layers for t in kv):
            t.zero_()  # all that the last request wrote: one NaN would outlive it
        own_pad = self.pad
        pos = begin(self, ids, pad)
        self.pad = own_pad.copy_(self.pad)  # captured graphs hold its address
        self.pos.fill_(self.length - 1)
        self.read(self.length)
        return ids, pos

    def reserve(self, doubling=False):
        """Host side of a step: counts one more slot and chooses how many are read.

        doubling: 256, 512, 1024, ... slots instead of whole blocks, so that a long text needs
        few captured graphs.
        """
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
        kv[0].index_copy_(2, pos, k)
        kv[1].index_copy_(2, pos, v)
        return kv

    @torch.inference_mode()
    def crop(self, length):
        """Forgets everything from slot `length` on; later tokens will write over it."""
        self.length = length
        self.pos.fill_(length - 1)


def begin(cache, ids, pad):
    """What all three do with a prompt: check it, take in the padding -> pos (T,)."""
    B, T = ids.shape
    if B != cache.batch_size:
        raise ValueError(f"the cache was made for {cache.batch_size} rows, the prompt has {B}")
    if cache.capacity is not None and T > cache.capacity:
        raise ValueError(f"the cache has room for {cache.capacity} tokens, the prompt has {T}")
    cache.pad = torch.tensor(pad, device=ids.device)[:, None]  # (B,1)
    cache.padded = any(pad)
    cache.length = cache.slots = T
    return torch.arange(T, device=ids.device)
