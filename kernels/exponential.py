"""Exponentials for a softmax in plain JAX.

XLA's own is accurate for every argument; a softmax needs no large ones, and for
the others a polynomial takes a processor half as long.
"""

from __future__ import annotations

import math
from collections.abc import Callable

import jax.numpy as jnp
import numpy as np
from jax import Array, lax

LOG2_E = math.log2(math.e)
#: Adding 1.5 · 2²³ rounds to an integer, which is then in the sum's low bits.
ROUNDER = 1.5 * 2**23
_ROUNDER_BITS = np.int32(0x4B400000)
#: Coefficients of least relative error for 2^f over |f| ≤ 1/2, highest power first.
EXP2_POWERS = tuple(
    np.float32(c)
    for c in (1.3276471e-3, 9.6755410e-3, 5.5507131e-2, 2.4022120e-1, 6.9314694e-1, 1.0000001)
)


def polynomial_exp(x: Array) -> Array:
    """exp(x) of float32 x ≤ 88, exactly 0 below -88.

    The relative error is at most 3e-7 + 1.2e-7 · |x|, about that of an x that was
    rounded to float32 itself; of x ≤ 0 it is at most 3e-7 of the result for 0.

    2^n is put together from its bits and 2^f, |f| ≤ 1/2, is a polynomial, as
    in Cody & Waite, Software Manual for the Elementary Functions (1980).
    """
    y = jnp.maximum(x * np.float32(LOG2_E), -127.0)
    # Through the bits, since XLA takes (y + c) - c for y.
    whole = lax.bitcast_convert_type(y + np.float32(ROUNDER), jnp.int32) - _ROUNDER_BITS
    fraction = y - whole.astype(jnp.float32)
    # The exponent field of 2^-127 is 0, and so is the number.
    power = lax.bitcast_convert_type((whole + 127) << 23, jnp.float32)
    value = jnp.full_like(x, EXP2_POWERS[0])
    for coefficient in EXP2_POWERS[1:]:
        value = value * fraction + coefficient
    return value * power


#: By the name that a config gives.
EXPONENTIALS: dict[str, Callable[[Array], Array]] = {
    "native": jnp.exp,
    "polynomial": polynomial_exp,
}
