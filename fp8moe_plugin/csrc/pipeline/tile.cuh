// An output tile, and how a producer passes it to the math warpgroups: with the tile's first stage.
#pragma once
#include "device/ptx.cuh"
#include "pipeline/tile_table.cuh"

struct Tile {
    int expert;
    int row_tile;  // index in the table
    int row;       // first row in A and D
    int rows;      // valid rows; 0: there are no more tiles
    int column;    // index along N, in tiles
    int last;      // 1: one of the last tiles, about two per block
};

DEVICE int4 published(const Tile& tile) {
    static_assert(RowTiles::kLongest < 1 << 9, "9 bits for rows, 1 for last, 22 for the column");
    return make_int4(tile.expert, tile.row_tile, tile.row, tile.rows | tile.last << 9 | tile.column << 10);
}
DEVICE void publish_tile(u32 address, const Tile& tile) {
    const int4 words = published(tile);
    asm volatile("st.shared.v4.s32 [%0], {%1, %2, %3, %4};" ::"r"(address), "r"(words.x), "r"(words.y), "r"(words.z),
                 "r"(words.w)
                 : "memory");
}
DEVICE Tile published_tile(u32 address) {
    Tile tile;
    u32 rest;
    asm volatile("ld.shared.v4.s32 {%0, %1, %2, %3}, [%4];"
                 : "=r"(tile.expert), "=r"(tile.row_tile), "=r"(tile.row), "=r"(rest)
                 : "r"(address)
                 : "memory");
    tile.rows = rest & 0x1ff, tile.last = rest >> 9 & 1, tile.column = rest >> 10;
    return tile;
}
