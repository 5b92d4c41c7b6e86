"""Configs that a caller gives in part."""

import pytest

from shapetune.cache.errors import ConfigError
from shapetune.kernels import current_device, default, get_op

from ..samples import problem


def test_a_part_of_a_config_is_completed_so_that_it_fits():
    about = problem(seq=2048, dim=32, heads=8, causal=True)
    op = get_op("attention")
    space = op.implementation("blockwise").space(about, current_device())
    plain = default.forced(op, about, "blockwise", None).config
    given = {"block_q": 1024, "block_k": 1024}
    # So many keys at a time leave room for fewer heads than the default has.
    assert space.refusal({**plain, **given}) is not None
    found = default.forced(op, about, "blockwise", given).config
    assert found["tile_heads"] < plain["tile_heads"]
    assert found == {**plain, **given, "tile_heads": found["tile_heads"]}
    for wrong in ({"block_k": 17}, {**given, "tile_heads": 8}, {"nonsense": 1}):
        with pytest.raises(ConfigError):
            default.forced(op, about, "blockwise", wrong)
