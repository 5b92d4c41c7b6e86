import pytest

from shapetune.autotune.targets import target, targets
from shapetune.cache.errors import TargetError

MINE = """
[mine]
name = "My Card"
capability = "8.6"
cores = 10
fp32_per_core = 128
threads_per_core = 1536
shared_per_core = 102400
shared_per_block = 101376
memory = 8000000000
l2 = 2000000
bandwidth = 200000000000
clock_ghz = 1.5
"""


def test_the_shipped_targets_have_fingerprints():
    found = targets()
    assert set(found) >= {"rtx3090", "a100", "h100", "h200"}
    device = found["a100"].device
    assert (device.platform, device.capability, device.cores) == ("cuda", "8.0", 108)
    assert device.shared_memory == 166912
    assert "ACCELERATED_FEATURES" in found["h100"].config_text
    assert "ACCELERATED_FEATURES" not in found["a100"].config_text


def test_a_file_adds_a_target(tmp_path):
    path = tmp_path / "mine.toml"
    path.write_text(MINE)
    assert target("mine", path).device.name == "My Card"
    assert target("a100", path).cores == 108


@pytest.mark.parametrize(
    ("change", "words"),
    [
        (("cores = 10", "cores = -1"), ["cores", "-1"]),
        (("cores = 10", "cores = 'many'"), ["cores", "many"]),
        (("cores = 10", ""), ["cores", "exactly"]),
        (("cores = 10", "cores = 5000000000"), ["cores", "5000000000"]),
        (("clock_ghz = 1.5", "clock_ghz = nan"), ["clock_ghz", "nan"]),
        (('"8.6"', '"7.0"'), ["capability", "7.0", "9.0"]),
        (('"My Card"', "'A\" evil'"), ["name"]),
        (("[mine]", "[mine"), ["mine.toml", "cannot be read"]),
    ],
)
def test_a_target_that_is_not_right_is_named(tmp_path, change, words):
    path = tmp_path / "mine.toml"
    path.write_text(MINE.replace(*change))
    with pytest.raises(TargetError) as caught:
        targets(path)
    for word in words:
        assert word in str(caught.value)


def test_a_file_that_is_no_text_is_named(tmp_path):
    path = tmp_path / "mine.toml"
    path.write_bytes(b"\xff\xfe\x00")
    with pytest.raises(TargetError, match=r"mine.toml' cannot be read"):
        targets(path)


def test_an_unknown_target_says_which_there_are(tmp_path):
    with pytest.raises(TargetError, match=r"b200.*rtx3090"):
        target("b200")
    with pytest.raises(TargetError, match="cannot be read"):
        targets(tmp_path / "none.toml")
