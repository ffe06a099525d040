// Packed arrays may be longer than their sequences. Fills the rows ahead of the first and behind the last one: out and
// gradients with 0, LSE with -infinity. Other kernels fill the rest.
//
// Params: cu_seqlens, batch, heads_q and strides; out, lse, dq, dk and dv, null where there is nothing to fill; aux0 and
// aux1 count the rows of q and of k.
#include "ptx.cuh"

constexpr int THREADS = 256;

// Elements [first, last) of an array that starts on 16 bytes become 0.
DEVICE void zero(Element* x, i64 first, i64 last) {
  constexpr int N = 16 / sizeof(Element);
  const i64 thread = (i64)blockIdx.x * THREADS + threadIdx.x, step = (i64)gridDim.x * THREADS;
  const i64 begin = min((first + N - 1) / N * N, last), end = max(last / N * N, begin);
  for (i64 i = first + thread; i < begin; i += step) x[i] = 0;
  for (i64 i = begin / N + thread; i < end / N; i += step) ((uint4*)x)[i] = make_uint4(0, 0, 0, 0);
  for (i64 i = end + thread; i < last; i += step) x[i] = 0;
}

// Rows that belong to sequences: [first, last) of `total`.
struct Rows {
  i64 first, last, total;

  DEVICE Rows(const int* cu_seqlens, i64 batch, i64 total_) {
    total = total_;
    first = min(max((i64)cu_seqlens[0], 0ll), total);
    last = min(max((i64)cu_seqlens[batch], first), total);
  }
  DEVICE void zero_others(void* array, i64 stride) const {
    if (!array) return;
    zero((Element*)array, 0, first * stride);
    zero((Element*)array, last * stride, total * stride);
  }
};

extern "C" __global__ void __launch_bounds__(THREADS) tail(const __grid_constant__ Params p) {
  const Rows q(p.cu_seqlens_q, p.batch, p.aux0), k(p.cu_seqlens_k, p.batch, p.aux1);
  q.zero_others(p.out, p.out_stride_s);
  q.zero_others(p.dq, p.dq_stride_s);
  k.zero_others(p.dk, p.dk_stride_s);
  k.zero_others(p.dv, p.dv_stride_s);
  if (!p.lse) return;
  const i64 others = q.total - (q.last - q.first);
  for (i64 i = (i64)blockIdx.x * THREADS + threadIdx.x; i < others * p.heads_q; i += (i64)gridDim.x * THREADS) {
    const i64 row = i % others < q.first ? i % others : i % others + q.last - q.first;
    ((Accum*)p.lse)[i / others * p.lse_stride_h + row] = (Accum)-infinity();
  }
}
