// The last step of a bias's gradient that was summed in aux0 parts: their sum, in their order. Part i lies at scratch + i * aux4.
#include "ptx.cuh"

extern "C" __global__ void __launch_bounds__(128) bwd_dbias_sum(const __grid_constant__ Params p) {
  const i64 element = (i64)blockIdx.x * 128 + threadIdx.x;
  if (element >= p.aux4) return;
  Accum sum = 0;
  for (i64 part = 0; part < p.aux0; part++) sum += ((const Accum*)p.scratch)[part * p.aux4 + element];
  ((BiasElement*)p.dbias)[element] = from_accum<BiasElement>(sum);
}
