"""What all keys of a head share, and why a gradient may leave it out.

The gradients ds of a query's scores sum to 0, as a shift of all of them changes no weight. So
the query's gradient Σ_j ds_j k_j is Σ_j ds_j (k_j - c) for any c. In 16 bits they do not sum
to 0 exactly: they are computed from ``out``, which is rounded. Where keys are alike, the
sum's error times what they share would outweigh all else; with c near them it does not.
"""

from __future__ import annotations

from typing import Any

import jax.numpy as jnp
from jax import Array, lax


def is_centred(dtype: Any) -> bool:
    """Whether gradients of queries of ``dtype`` leave out what all keys share."""
    return jnp.dtype(dtype).itemsize < 4


def key_centre(key: Array) -> Array:
    """The mean key of each head, float32 [B, 1, K, H]; 0 where it is not finite.

    Keys that a length hides count too: any centre is right.
    """
    mean = key.astype(jnp.float32).mean(1, keepdims=True)
    return lax.stop_gradient(jnp.where(jnp.isfinite(mean), mean, 0.0))
