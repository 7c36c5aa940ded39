"""SmolLM2-135M-Instruct in numpy, with a key/value cache that can be swapped.

`model` holds weights and the forward pass, `tokens` the tokenizer, `plain` the
exact cache, `skerry_session` the same place filled by Skerry, `policies` the
main job and `quality` the protocol that compares policies at equal bytes.
"""
