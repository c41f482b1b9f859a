// The gradient of the activations of a matrix product: dy[M,N], w[N,K] -> dx[M,K]: gemm_dx.rs. It is the product of dy and
// the transpose of w: its outputs are the columns of w, of which there are n here, and its sum is over the k rows.
#include "tile.cuh"

TILES(gemm_dx_tile128, 128, 128, 8, 8, 2, true)
TILES(gemm_dx_tile64, 64, 64, 4, 4, 4, true)
