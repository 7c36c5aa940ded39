"""SmolLM2's tokenizer, rebuilt from the vocabulary and merges inside the GGUF file."""

from .model import find_weights

SYSTEM = "You are a helpful AI assistant named SmolLM, trained by Hugging Face"
CONTROL = 3  # token type of GGUF for tokens that text never produces by itself


class Tokens:
    def __init__(self, path=None):
        import gguf
        from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers

        fields = gguf.GGUFReader(str(find_weights(path))).fields
        get = lambda key: fields["tokenizer.ggml." + key].contents()
        if get("model") != "gpt2" or get("pre") != "smollm":
            raise ValueError("the GGUF file does not carry SmolLM's tokenizer")
        words = get("tokens")
        merges = [tuple(m.split(" ")) for m in get("merges")]
        inner = Tokenizer(models.BPE({w: i for i, w in enumerate(words)}, merges))
        # SmolLM splits digits one by one, then applies GPT-2's byte-level pattern.
        inner.pre_tokenizer = pre_tokenizers.Sequence([
            pre_tokenizers.Digits(individual_digits=True),
            pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=True)])
        inner.decoder = decoders.ByteLevel()
        kinds = get("token_type")
        inner.add_special_tokens([AddedToken(w, special=True, normalized=False)
                                  for w, kind in zip(words, kinds) if kind == CONTROL])
        self._inner = inner
        self.end = int(get("eos_token_id"))

    def encode(self, text):
        return self._inner.encode(text, add_special_tokens=False).ids

    def decode(self, ids):
        return self._inner.decode(list(ids), skip_special_tokens=False)

    def chat_start(self, text, system=SYSTEM):
        """ChatML of the system's turn and of a user's turn that stays open after `text`."""
        return "<|im_start|>system\n%s<|im_end|>\n<|im_start|>user\n%s" % (system, text)

    def chat_ask(self, question):
        """Closes the open turn, asks `question` in one of its own and opens the answer."""
        return "<|im_end|>\n<|im_start|>user\n%s<|im_end|>\n<|im_start|>assistant\n" % question
