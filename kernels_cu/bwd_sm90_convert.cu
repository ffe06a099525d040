// After bwd_sm90.cu: dQ of the last section, or of all where the main kernel makes none. One CTA for each query slot, the last first:
// its sums may still lie in the L2.
#include "bwd_sm90_rows.cuh"

extern "C" __global__ void __launch_bounds__(256) attention_backward_sm90_convert(const __grid_constant__ Params p) {
  __shared__ alignas(128) unsigned char stages[2 * PIECE_BYTES];
  __shared__ u64 bars[2];
  dependency_wait();
  proxy_fence_global();
  const int section = p.aux4 > 0 ? last_section(p) : 0, slot = gridDim.x - 1 - blockIdx.x;
  convert_slots<2, 1>(p, section, slot, slot + 1, shared_address(stages), shared_address(bars));
}
