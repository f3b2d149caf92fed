"""Tiles for devices that are not here."""

import math
from dataclasses import replace

import pytest
import torch

from apex.ops._device import DeviceFacts
from apex.ops.attention import config

LARGE = DeviceFacts("large", "cuda", 132, 32, 227 << 10)
SMALL = replace(LARGE, shared_memory=99 << 10)
AMD = DeviceFacts("amd", "hip", 304, 64, 64 << 10)

RULES = [config.forward_tile, config.queries_tile, config.keys_tile, config.stored_tile]


@pytest.mark.parametrize("rule", RULES)
@pytest.mark.parametrize("device", [LARGE, SMALL, AMD], ids=lambda device: device.name)
def test_tiles_fit_the_matrix_units(rule, device: DeviceFacts) -> None:
    for head in (1, 16, 24, 32, 64, 100, 128, 256):
        for element_size in (2, 4):
            for length in (1, 17, 64, 5000):
                tile = rule(head, element_size, length, length, "", device)
                for side in (tile.queries, tile.keys):
                    assert side >= 16
                    assert side & (side - 1) == 0
                    assert side <= max(16, 2 * length)
                assert tile.num_warps in (1, 2, 4, 8)
                assert tile.num_stages >= 1


def test_little_shared_memory_means_small_tiles() -> None:
    tile = config.forward_tile(128, 2, 512, 512, "", SMALL)
    assert (tile.queries, tile.keys, tile.num_stages) == (64, 64, 1)
    assert config.largest_head(4, SMALL) == 128
    assert config.largest_head(2, SMALL) == config.largest_head(4, LARGE) == config.largest_head(4, AMD) == 256


@pytest.mark.parametrize("element_size", [2, 4])
@pytest.mark.parametrize("rule", RULES)
def test_few_heads_are_shared_by_all_multiprocessors(rule, element_size: int) -> None:
    split = "keys" if rule is config.keys_tile else "queries"
    for head in (8, 32, 64):
        smallest = 16 if split == "keys" and head <= 32 else 32
        for heads in (1, 6, 24, 130, 5000):
            for length in (16, 40, 172, 536, 762, 5000):
                chosen = rule(head, element_size, length, length, "bias", LARGE)
                tile = config.spread(chosen, split, length, length, heads, head, element_size, LARGE)
                programs = heads * -(-length // getattr(tile, split))
                enough = LARGE.multiprocessors // (2 if split == "keys" and element_size == 4 else 1)
                assert getattr(tile, split) <= getattr(chosen, split)
                assert programs >= min(enough, heads * -(-length // smallest))
                if heads * -(-length // getattr(chosen, split)) >= enough:
                    assert tile == chosen


@pytest.mark.parametrize("rule", RULES)
def test_small_tiles_of_float32_do_not_spill(rule) -> None:
    """With 32 by 32, 64 by 32 or two warps threads keep 320 to 1480 bytes outside of registers."""
    split = "keys" if rule is config.keys_tile else "queries"
    for head in (8, 32, 64):
        for length in (40, 72, 381, 488, 762):
            for heads in (1, 6, 168):
                chosen = rule(head, 4, length, length, "bias", LARGE)
                tile = config.spread(chosen, split, length, length, heads, head, 4, LARGE)
                assert tile.num_warps >= 4 or tile.queries * tile.keys < 1024
                assert split == "queries" or head == 64 or tile[:2] in ((32, 64), (64, 16))


def test_warps_share_narrow_tiles_of_keys() -> None:
    """A warp has 16 keys, or as many and a part of the head: four need 64 keys, or heads that are wide enough."""
    for head in (8, 16, 24, 32, 64):
        for element_size, dtype in ((2, torch.bfloat16), (4, torch.float32)):
            for length in (16, 40, 128, 240, 371, 488, 603, 762):
                for heads in (1, 2, 8, 18, 36, 168):
                    chosen = config.keys_tile(head, element_size, length, length, "mask bias", LARGE)
                    tile = config.spread(chosen, "keys", length, length, heads, head, element_size, LARGE)
                    block = config.tile_constants(tile, length, length, head, False, dtype, LARGE)["BD"]
                    # Half-precision heads of up to 16 have 32 keys where that makes programs enough.
                    assert tile.keys in ((16, 32, chosen.keys) if head <= 16 else (16, chosen.keys)) or head == 64
                    narrow = tile.keys == 16 < length
                    assert block == max(32 if narrow else 16, config.head_block(head))
                    assert not narrow or tile.queries >= min(64, config.head_block(length))


def test_float32_gradients_of_long_queries_take_large_tiles_of_stored_logits() -> None:
    """Of heads of 33 to 64 elements, whose tiles take 252 of 255 registers on sm_90; larger ones would spill."""
    for head in (8, 32, 33, 48, 64, 65, 128):
        for length in (16, 64, 100, 128, 302, 546, 5000):
            tile = config.stored_tile(head, 4, length, length, "bias", LARGE)
            most = 128 if 32 < head <= 64 else 64
            assert tile.queries == min(most, config.head_block(length))
            assert tile.queries * config.head_block(head) <= 128 * 64


def test_kernels_know_what_divides_the_lengths() -> None:
    for rows in (1, 72, 103, 248, 356, 576):
        for columns in (8, 15, 36, 381, 512):
            tile = config.keys_tile(32, 2, rows, columns, "", LARGE)
            constants = config.tile_constants(tile, rows, columns, 32, False, torch.bfloat16, LARGE)
            assert (constants["ALIGN_M"], constants["ALIGN_N"]) == (math.gcd(rows, 16), math.gcd(columns, 16))
            assert config.tile_constants(tile, rows, columns, 24, False, torch.bfloat16, LARGE)["ALIGN_D"] == 8
        assert rows <= config.pitch(rows) < rows + 16
        assert config.pitch(rows) % 16 == 0
        # The last tile of queries reaches as far: what lies beyond them is written, too.
        assert config.pitch(rows) <= -(-rows // tile.queries) * tile.queries


def test_sums_of_batches_have_enough_programs() -> None:
    for plane in (256, 1024, 4 * 384 * 384):
        for group in (1, 7, 500):
            batches, elements = config.sum_block(plane, group, LARGE)
            assert batches < 2 * group
            assert batches * elements <= config.SUMMED_ELEMENTS
            assert elements == 64 or plane >= elements * LARGE.multiprocessors


def test_biases_are_copied_where_odd_rows_of_many_batches_are_read() -> None:
    assert config.padded_bias(18, 4, 503, 503, 18, 2) == 504
    assert not config.padded_bias(18, 4, 503, 503, 18, 4)
    assert not config.padded_bias(18, 4, 502, 502, 18, 2)
    assert not config.padded_bias(18, 4, 503, 503, 1, 2)
    assert not config.padded_bias(4, 1, 63, 63, 4, 2)


def test_tiles_of_keys_with_a_bias_do_not_spill() -> None:
    """128 keys of heads of 64 keep 296 bytes per thread outside of registers."""
    for length in (112, 248, 576):
        assert config.keys_tile(64, 2, length, length, "mask bias", LARGE).keys <= 64


def test_windows_of_long_sequences_have_their_own_tiles_on_hopper_alone() -> None:
    hopper = replace(LARGE, capability=(9, 0))
    window = "packed window"
    assert config.forward_tile(128, 2, 8192, 8192, window, hopper) == (128, 128, 8, 3)
    assert config.queries_tile(128, 2, 8192, 8192, window, hopper) == (128, 64, 8, 3)
    assert config.keys_tile(128, 2, 8192, 8192, window, hopper) == (64, 128, 8, 3)
    for rule in (config.forward_tile, config.queries_tile, config.keys_tile):
        for device in (replace(LARGE, capability=(10, 0)), SMALL, AMD):
            assert rule(128, 2, 8192, 8192, window, device) == rule(128, 2, 8192, 8192, "packed", device)
        for size, element_size, length in ((64, 2, 8192), (128, 4, 8192), (128, 2, 100)):
            sizes = (size, element_size, length, length)
            assert rule(*sizes, window, hopper) == rule(*sizes, "packed", hopper)


def test_gradients_of_packed_sequences_have_their_own_tiles() -> None:
    hopper = replace(LARGE, capability=(9, 0))
    wide, narrow = (128, 2, 512, 512), (64, 2, 512, 512)
    for rule, of_wide, of_narrow in (
        (config.queries_tile, (128, 64, 8, 3), (64, 64, 4, 3)),
        (config.keys_tile, (64, 128, 8, 3), (64, 64, 4, 3)),
    ):
        assert rule(*wide, "packed", hopper) == of_wide
        assert rule(*narrow, "packed", hopper) == of_narrow
        assert rule(*wide, "mask bias", hopper) == rule(*wide, "mask bias", LARGE) != of_wide
        assert rule(*narrow, "mask bias", hopper) == rule(*narrow, "mask bias", LARGE) != of_narrow


def test_few_heads_of_a_long_window_leave_four_warps() -> None:
    """Eight warps have nothing to share of a tile of 32 queries or keys."""
    hopper = replace(LARGE, capability=(9, 0))
    rules = ((config.forward_tile, "queries"), (config.queries_tile, "queries"), (config.keys_tile, "keys"))
    for rule, split in rules:
        tile = rule(128, 2, 256, 256, "packed window", hopper)
        assert config.spread(tile, split, 256, 256, 1, 128, 2, hopper).num_warps <= 4
        assert config.spread(tile, split, 256, 256, 5000, 128, 2, hopper) == tile
