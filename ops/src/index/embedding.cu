// Row gather: w[V,D], tokens[T] -> y[T,D]: embedding.rs. A block row is a token; eight elements a thread.
#include "element.cuh"

KERNEL(128, 8) embedding(GLOBAL(const In) w, GLOBAL(const int) tokens, GLOBAL(Out) y, long long dim) {
    long long at = (static_cast<long long>(blockIdx.y) * blockDim.x + threadIdx.x) * 8;
    if (at >= dim) return;
    long long from = static_cast<long long>(tokens[blockIdx.x]) * dim + at;
    long long to = static_cast<long long>(blockIdx.x) * dim + at;
    Eight row = load_up_to8<In>(w + from, dim - at, aligned16(w + from), 0.0f);
    store_up_to8<Out>(y + to, dim - at, aligned16(y + to), row);
}
