"""The policies that the main job and the quality protocol compare.

A policy is a name and the settings it changes; everything else is the library's
default. Setting names are those of skerry_policy_desc (include/skerry/cache.h),
values are the lower-case names of its constants.
"""

POLICIES = {
    "full": {"kind": "full"},
    "streaming": {"kind": "streaming"},
    # Scores of eviction methods differ in which queries they count; at this model's size
    # the age-normalised one holds up best.
    "evict": {"kind": "evict", "score": "age"},
    "evict-last": {"kind": "evict", "score": "last"},
    "evict-cumulative": {"kind": "evict", "score": "cumulative"},
    "quantise": {"kind": "quantise"},
    "qevict": {"kind": "qevict"},
    "sekv": {"kind": "sekv"},
    # Spans between surprising tokens in place of windows.
    "sekv-spans": {"kind": "sekv", "sekv": {"segmentation": "surprisal"}},
    # The router of examples/data, in place of the one that needs no training.
    "sekv-trained": {"kind": "sekv", "router": "smollm2-router.safetensors"},
    "qevict-paper": {"kind": "qevict", "fidelity": "paper"},
}

# What the main job shows, in this order; "full" is always there. Those in FIRST_SHARE it shows at the first of its sizes only.
MAIN = ("evict", "quantise", "qevict", "sekv", "sekv-spans", "qevict-paper")
FIRST_SHARE = ("sekv-spans",)


def wants_surprisal(settings):
    """Whether a cache with these settings has to be told how surprising each token was."""
    if settings["kind"] != "sekv":
        return False
    return settings.get("fidelity") == "paper" or settings.get("sekv", {}).get("segmentation") == "surprisal"


def budget_bytes(config, share, length):
    """Bytes of `share` of a full 16-bit cache of `length` tokens."""
    return int(share * config.cache_bytes(length))
