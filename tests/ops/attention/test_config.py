"""Tiles for devices that are not here."""

from dataclasses import replace

import pytest

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


@pytest.mark.parametrize("rule", RULES)
def test_few_heads_are_shared_by_all_multiprocessors(rule) -> None:
    split = "keys" if rule is config.keys_tile else "queries"
    for heads in (1, 6, 24, 130, 5000):
        for length in (40, 172, 536, 762, 5000):
            chosen = rule(64, 2, length, length, "", LARGE)
            tile = config.spread(chosen, split, length, heads, 2, LARGE)
            block = getattr(tile, split)
            assert heads * -(-length // block) >= min(LARGE.multiprocessors, heads * -(-length // 32))
            assert block in (32, getattr(chosen, split)) or heads * -(-length // (2 * block)) < LARGE.multiprocessors
