"""Size of the key-value cache of a model, in closed form; papers tell it, pools of `generate` have it."""

from research.config import ModelConfig


def cache_elements(c: ModelConfig) -> int:
    """Elements that all layers keep of one token (DeepSeek-V2, table 1): a key and a value of each kv head, so that GQA
    and MQA keep less than MHA; for latent attention the latent and the one turned key. A layer with a window drops a
    token again once it is `window` tokens old."""
    return c.layers * (c.kv_latent + c.rotary_dim if c.attention == "mla" else 2 * c.kv_heads * c.head_dim)
