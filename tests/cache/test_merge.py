"""Merging is set union, whatever the order, the grouping and the duplicates."""

import dataclasses
import random

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from shapetune.cache import Candidate, Device, RecordSet, load, merge, publish
from shapetune.cache.errors import CacheError
from shapetune.cache.pin import Pin, latest
from shapetune.cache.segment import write_segments
from shapetune.kernels import current_device, get_op
from shapetune.kernels.decision import Settings, decide

from ..samples import problem, record
from .light import DEVICE
from .light import record as light

SEQS = (512, 700, 1024)
OTHER = dataclasses.replace(current_device(), cores=current_device().cores + 1)


def _pin(seq, count, active=True, made=1.0):
    about = problem(seq=seq)
    chosen = Candidate("blockwise", _config(about))
    return Pin(about, current_device(), chosen, active, count, made)


def _config(about, **more):
    one = get_op("attention").implementation("blockwise")
    return {**one.default_config(about, current_device()), **more}


def _pool():
    xla = Candidate("xla", {})
    out = []
    for seq in SEQS:
        about = problem(seq=seq)
        out += [
            record(about, ratio=1.2),
            record(about, ratio=1.9, chosen=xla),
            record(about, ratio=3.0, jax_version="0.1.0"),
            record(about, ratio=3.0, version=77),
            record(about, ratio=2.5, chosen=Candidate("blockwise", {"block_q": 3})),
            record(about, ratio=1.9, device=OTHER),
        ]
    out += [_pin(512, 1), _pin(512, 2, active=False), _pin(700, 1), _pin(700, 1, made=2.0)]
    return [one.to_bytes() for one in out]


POOL = _pool()
subsets = st.lists(st.sampled_from(POOL), max_size=14)


def _decisions(records):
    op = get_op("attention")
    asked = [problem(seq=seq) for seq in (512, 600, 700, 1024, 1500)]
    made = [decide(op, one, current_device(), records, Settings()) for one in asked]
    return [(one.candidate.key, one.tier, one.record_ids) for one in made]


@given(subsets, subsets, subsets)
def test_union_is_commutative_associative_and_idempotent(a, b, c):
    x, y, z = RecordSet(a), RecordSet(b), RecordSet(c)
    assert (x | y).ids == (y | x).ids
    assert ((x | y) | z).ids == (x | (y | z)).ids
    assert (x | x).ids == x.ids
    assert (x | y).digest == (y | x).digest
    assert (x.digest == y.digest) == (x.ids == y.ids)


@settings(max_examples=60, deadline=None)
@given(st.lists(st.sampled_from(POOL), min_size=1, max_size=18), st.integers(0, 2**32), st.data())
def test_decisions_do_not_depend_on_order_grouping_or_duplicates(
    tmp_path_factory, some, seed, data
):
    want = _decisions(RecordSet(some))
    shuffled = some + some[: len(some) // 2]
    random.Random(seed).shuffle(shuffled)
    assert _decisions(RecordSet(shuffled)) == want
    folder = tmp_path_factory.mktemp("grouped")
    cut = data.draw(st.integers(0, len(shuffled)))
    for group in (shuffled[:cut], shuffled[cut:], shuffled[:1]):
        write_segments(folder / current_device().folder, group)
    assert _decisions(load([folder])) == want
    merge.compact(folder)
    assert _decisions(load([folder])) == want


@given(subsets)
def test_a_pin_wins_over_every_record_until_it_is_taken_back(some):
    pinned = _pin(1024, 5)
    records = RecordSet([*some, pinned.to_bytes()])
    op = get_op("attention")
    one = decide(op, problem(), current_device(), records, Settings())
    assert (one.tier, one.candidate) == ("pinned", pinned.candidate)
    unpinned = records | RecordSet([_pin(1024, 6, active=False).to_bytes()])
    again = decide(op, problem(), current_device(), unpinned, Settings())
    assert again.tier != "pinned"


@given(st.permutations([_pin(512, 1), _pin(512, 2, active=False), _pin(512, 3, made=0.5)]))
def test_the_last_pin_counts_in_any_order_and_whatever_the_clocks_say(pins):
    assert latest(pins).count == 3
    assert latest(pins[:0]) is None


@given(st.floats(1.0, 1.5), st.floats(1.6, 9.0))
def test_a_fresh_record_beats_a_stale_one_whatever_their_ratios(low, high):
    fresh = record(problem(), ratio=low)
    records = RecordSet(
        [fresh.to_bytes(), record(problem(), ratio=high, jax_version="0.1").to_bytes()]
    )
    one = decide(get_op("attention"), problem(), current_device(), records, Settings())
    assert one.record_ids == (fresh.id,)


def test_merge_adds_what_is_missing_and_nothing_twice(tmp_path):
    a, b, into = tmp_path / "a", tmp_path / "b", tmp_path / "into"
    publish(a, [light(n) for n in range(1, 6)])
    publish(b, [light(n) for n in range(4, 9)])
    publish(b, [light(3, device=OTHER)])
    change = merge.merge(into, [a, b])
    assert (change.added, change.present) == (9, 0)
    assert load([into]).ids == load([a, b]).ids
    again = merge.merge(into, [b, a])
    assert (again.added, again.present, again.written) == (0, 9, 0)


def test_merge_names_a_source_that_is_not_there(tmp_path):
    with pytest.raises(CacheError, match=r"no cache at.*nowhere"):
        merge.merge(tmp_path / "into", [tmp_path / "nowhere"])


def test_an_exported_file_is_a_cache_that_merges_back(tmp_path):
    publish(tmp_path / "a", [light(n) for n in range(1, 9)])
    publish(tmp_path / "a", [light(2, device=OTHER)])
    assert merge.export([tmp_path / "a"], tmp_path / "all.msgpack") == 9
    merge.merge(tmp_path / "b", [tmp_path / "all.msgpack"])
    assert load([tmp_path / "b"]).ids == load([tmp_path / "a"]).ids
    assert len(load([tmp_path / "b"], OTHER)) == 1
    with pytest.raises(CacheError, match=r"NAME\.msgpack"):
        merge.export([tmp_path / "a"], tmp_path / "all.zip")


def test_compact_folds_all_segments_and_keeps_all_records(tmp_path):
    for n in range(1, 20):
        publish(tmp_path, [light(n)])
    before = load([tmp_path]).ids
    change = merge.compact(tmp_path)
    assert (change.written, change.removed, change.present) == (1, 19, 19)
    assert load([tmp_path]).ids == before
    assert merge.compact(tmp_path).removed == 0


def test_many_records_fill_several_segments_of_bounded_size(tmp_path, monkeypatch):
    from shapetune.cache import segment

    monkeypatch.setattr(segment, "FULL_SEGMENT_BYTES", 8000)
    paths = write_segments(tmp_path, [light(n).to_bytes() for n in range(1, 40)])
    assert len(paths) > 3
    assert max(path.stat().st_size for path in paths) < 12000


def test_compact_leaves_damaged_segments_and_repair_moves_them_aside(tmp_path):
    paths = [publish(tmp_path, [light(n), light(n + 100)]) for n in range(1, 4)]
    data = bytearray(paths[0].read_bytes())
    data[-5] ^= 1
    paths[0].write_bytes(data)
    kept = load([tmp_path]).ids
    assert len(kept) == 5
    merge.compact(tmp_path)
    assert paths[0].exists()
    assert load([tmp_path]).ids == kept
    (moved,) = merge.repair(tmp_path)
    assert moved.parent.name == "damaged"
    found = load([tmp_path])
    assert (found.ids, found.damage) == (kept, [])


def test_repair_leaves_out_records_whose_body_is_damaged(tmp_path):
    from shapetune.cache.envelope import read_head

    bad = dataclasses.replace(read_head(light(1).to_bytes()), body=b"\x01").seal()
    write_segments(tmp_path / DEVICE.folder, [bad, light(2).to_bytes()])
    assert len(merge.verify([tmp_path]).damage) == 1
    (moved,) = merge.repair(tmp_path)
    found = merge.verify([tmp_path])
    assert (found.ids, found.damage) == ({light(2).id}, [])
    assert moved.exists()


def test_records_of_a_later_version_survive_merge_and_compact(tmp_path):
    from shapetune.cache.envelope import read_head

    head = read_head(light(1).to_bytes())
    later = dataclasses.replace(head, schema=99).seal()
    strange = dataclasses.replace(head, kind="weather").seal()
    write_segments(tmp_path / "a" / DEVICE.folder, [later])
    write_segments(tmp_path / "a" / DEVICE.folder, [strange, light(2).to_bytes()])
    merge.compact(tmp_path / "a")
    merge.merge(tmp_path / "b", [tmp_path / "a"])
    assert {later, strange} <= set(load([tmp_path / "b"]).payloads)


def test_a_device_is_told_by_its_key():
    for device in (DEVICE, OTHER, Device("cpu", "A|B", "", 3)):
        assert Device.from_key(device.key).folder == device.folder
    assert Device.from_key("nonsense") is None
