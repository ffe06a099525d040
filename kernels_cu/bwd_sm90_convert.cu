// After bwd_sm90.cu: dQ of the last section. One CTA for each query slot.
#include "bwd_sm90_rows.cuh"

extern "C" __global__ void __launch_bounds__(256) attention_backward_sm90_convert(const __grid_constant__ Params p) {
  __shared__ alignas(128) unsigned char stages[2 * PIECE_BYTES];
  __shared__ u64 bars[2];
  dependency_wait();
  proxy_fence_global();
  convert_slots<2, 1>(p, last_section(p), blockIdx.x, blockIdx.x + 1, shared_address(stages), shared_address(bars));
}
