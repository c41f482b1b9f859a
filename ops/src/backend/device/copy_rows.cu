// Rows from place to place, bit for bit: device/copy_rows.rs. A block row is a row; 16 bytes a thread.
#include "element.cuh"

// Where the rows of one side stand: row i is row `rows[i]`, or i / every, of a buffer whose rows are `stride` apart and
// begin `offset` behind.
DEVICE long long place_of(GLOBAL(const int) rows, int has_rows, long long every, long long stride, long long offset) {
    long long row = blockIdx.x;
    if (has_rows) row = rows[row]; else row = row / every;
    return row * stride + offset;
}

KERNEL(128, 8) copy_rows(GLOBAL(const In) from, GLOBAL(const int) from_rows, int from_has_rows, long long from_every,
                         long long from_stride, long long from_offset, GLOBAL(In) to, GLOBAL(const int) to_rows,
                         int to_has_rows, long long to_every, long long to_stride, long long to_offset, long long width) {
    const int PACK = Pack<In>::COUNT;
    long long at = (static_cast<long long>(blockIdx.y) * blockDim.x + threadIdx.x) * PACK;
    if (at >= width) return;
    from = from + place_of(from_rows, from_has_rows, from_every, from_stride, from_offset) + at;
    to = to + place_of(to_rows, to_has_rows, to_every, to_stride, to_offset) + at;
    if (width - at >= PACK && aligned16(from) && aligned16(to)) {
        store16(to, load16(from));
        return;
    }
    for (int i = 0; i < PACK && at + i < width; i++) to[i] = static_cast<In>(from[i]);
}
