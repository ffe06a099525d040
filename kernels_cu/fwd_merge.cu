// Out and LSE from attention over disjoint parts of the keys, each already divided by its own sum (fwd_sm90.cu, SPLIT). A warp
// a row. Parts are added in their order, so runs agree to the bit. No keys and values here.
//
// Defines: DTYPE, SINKS. Params: scratch = float32 (part, batch, head, row, column) and, behind them, LSE (part, batch, head,
// row); aux4 parts; out, lse, sinks.
#include "ptx_sm90.cuh"

#define WARPS 4
#define AT_ONCE 8  // parts' loads in flight a lane
#define NEG_INF __int_as_float(0xff800000)
#define LOG2E 1.4426950408889634f
#define LN2 0.6931471805599453f

__device__ __forceinline__ float weight_of(float lse, float top) { return exp2_approx((lse - top) * LOG2E); }

extern "C" __global__ void __launch_bounds__(32 * WARPS) fwd_merge(const __grid_constant__ Params p) {
  const int lane = threadIdx.x % 32, parts = (int)p.aux4, columns = (int)p.head_dim_v;
  const i64 rows = p.batch * p.heads_q * p.seqlen_q, row = (i64)blockIdx.x * WARPS + threadIdx.x / 32;
  if (row >= rows) return;
  const float *outs = (const float*)p.scratch + row * columns, *lses = (const float*)p.scratch + parts * rows * columns + row;
  const i64 head_of_all = row / p.seqlen_q, i = row - head_of_all * p.seqlen_q;
  const i64 batch = head_of_all / p.heads_q, head = head_of_all - batch * p.heads_q;
  dependency_wait();

  float top = NEG_INF, sum = 0.f;
  for (int part = lane; part < parts; part += 32) top = fmaxf(top, lses[part * rows]);
#pragma unroll
  for (int x = 16; x > 0; x /= 2) top = fmaxf(top, __shfl_xor_sync(~0u, top, x));
  const bool empty = top == NEG_INF;
#if SINKS
  const float sink = ((const float*)p.sinks)[head];
  top = fmaxf(top, sink);
#endif
  for (int part = lane; part < parts; part += 32) sum += empty ? 0.f : weight_of(lses[part * rows], top);
#pragma unroll
  for (int x = 16; x > 0; x /= 2) sum += __shfl_xor_sync(~0u, sum, x);
#if SINKS
  sum += weight_of(sink, top);
#endif

  const float inverse = empty ? 0.f : 1.f / sum;
  u16* out = (u16*)p.out + batch * p.out_stride_b + head * p.out_stride_h + i * p.out_stride_s;
  for (int column = 4 * lane; column < columns; column += 128) {
    float4 total = make_float4(0.f, 0.f, 0.f, 0.f);
    for (int first = 0; first < parts; first += AT_ONCE) {
#pragma unroll
      for (int x = 0; x < AT_ONCE; x++) {
        const int part = first + x;
        if (part >= parts || empty) continue;
        const float w = weight_of(lses[part * rows], top) * inverse;
        const float4 share = *(const float4*)(outs + part * rows * columns + column);
        total.x += w * share.x, total.y += w * share.y, total.z += w * share.z, total.w += w * share.w;
      }
    }
    *(uint2*)(out + column) = make_uint2(pack_half2(total.x, total.y), pack_half2(total.z, total.w));
  }
  if (lane == 0) {
    float* lse = (float*)p.lse + batch * p.lse_stride_b + head * p.lse_stride_h;
    lse[i] = empty ? NEG_INF : top + log2_approx(sum) * LN2;
  }
}
