// Inline assembly for sm_75 to sm_120 outside Hopper's own instructions: one instruction, or one idiom, a function.
// Nothing here knows attention. Below sm_80 the same names are built from what Turing has.
#pragma once
#include "config.cuh"

#define DEVICE __device__ __forceinline__

// ---- shared memory addresses, asynchronous copies -----------------------------------------------------------------

DEVICE u32 smem_address(const void* pointer) { return (u32)__cvta_generic_to_shared(pointer); }

DEVICE void store_shared16(u32 to, uint4 x) {
  asm volatile("st.shared.v4.b32 [%0], {%1, %2, %3, %4};" ::"r"(to), "r"(x.x), "r"(x.y), "r"(x.z), "r"(x.w) : "memory");
}

DEVICE void store_shared4(u32 to, u32 x) { asm volatile("st.shared.b32 [%0], %1;" ::"r"(to), "r"(x) : "memory"); }

DEVICE uint4 load_shared16(u32 from) {
  uint4 x;
  asm volatile("ld.shared.v4.b32 {%0, %1, %2, %3}, [%4];"
               : "=r"(x.x), "=r"(x.y), "=r"(x.z), "=r"(x.w)
               : "r"(from)
               : "memory");
  return x;
}

DEVICE void cp_async16(u32 to, const void* from) {
#if __CUDA_ARCH__ >= 800
  asm volatile("cp.async.cg.shared.global [%0], [%1], 16;" ::"r"(to), "l"(from) : "memory");
#else
  store_shared16(to, *(const uint4*)from);
#endif
}

// The copy if `valid`, zeros without reading otherwise.
DEVICE void cp_async16_or_zero(u32 to, const void* from, bool valid) {
#if __CUDA_ARCH__ >= 800
  asm volatile(
      "{ .reg .pred ignore; setp.eq.s32 ignore, %2, 0; cp.async.cg.shared.global [%0], [%1], 16, ignore; }" ::"r"(to),
      "l"(from), "r"((int)valid)
      : "memory");
#else
  store_shared16(to, valid ? *(const uint4*)from : make_uint4(0, 0, 0, 0));
#endif
}

// Copies the first `bytes` (0 .. 16) and fills the rest with zeros.
DEVICE void cp_async16_partial(u32 to, const void* from, int bytes) {
#if __CUDA_ARCH__ >= 800
  asm volatile("cp.async.cg.shared.global [%0], [%1], 16, %2;" ::"r"(to), "l"(from), "r"(bytes) : "memory");
#else
  u32 word[4] = {0, 0, 0, 0};
#pragma unroll
  for (int i = 0; i < 8; i++) {
    if (2 * i < bytes) word[i / 2] |= (u32)((const u16*)from)[i] << (16 * (i & 1));
  }
  store_shared16(to, make_uint4(word[0], word[1], word[2], word[3]));
#endif
}

DEVICE void cp_async_commit() {
#if __CUDA_ARCH__ >= 800
  asm volatile("cp.async.commit_group;" ::: "memory");
#endif
}

template <int PENDING>
DEVICE void cp_async_wait() {
#if __CUDA_ARCH__ >= 800
  asm volatile("cp.async.wait_group %0;" ::"n"(PENDING) : "memory");
#endif
}

// The same value, but what is computed from it is not hoisted out of the loop: registers are dearer than an XOR.
DEVICE u32 rematerialize(u32 x) {
  asm volatile("" : "+r"(x));
  return x;
}
DEVICE int opaque(int x) {
  asm volatile("" : "+r"(x));
  return x;
}

// The value that all lanes hold, in a uniform register where there are some.
DEVICE int uniform(int x) {
#if __CUDA_ARCH__ >= 800
  asm("redux.sync.max.s32 %0, %1, 0xffffffff;" : "=r"(x) : "r"(x));
#endif
  return x;
}

// ---- matrix fragments ---------------------------------------------------------------------------------------------

// Four 8x8 matrices of 16-bit elements; lane l gives the address of row l % 8 of matrix l / 8.
DEVICE void ldmatrix_x4(u32 (&r)[4], u32 address) {
  asm volatile("ldmatrix.sync.aligned.m8n8.x4.shared.b16 {%0, %1, %2, %3}, [%4];"
               : "=r"(r[0]), "=r"(r[1]), "=r"(r[2]), "=r"(r[3])
               : "r"(address)
               : "memory");
}

DEVICE void ldmatrix_x4_trans(u32 (&r)[4], u32 address) {
  asm volatile("ldmatrix.sync.aligned.m8n8.x4.trans.shared.b16 {%0, %1, %2, %3}, [%4];"
               : "=r"(r[0]), "=r"(r[1]), "=r"(r[2]), "=r"(r[3])
               : "r"(address)
               : "memory");
}

// c (16x8, float32) += a (16x16) b (16x8) of f16 or bf16, by DTYPE. With g = lane / 4 and t = lane % 4:
// a[0..3] are rows g, g + 8, g, g + 8 and columns 2t.. of the first, first, second, second 8; b[i] is rows 8i + 2t..,
// column g; c[0..3] are (g, 2t), (g, 2t + 1), (g + 8, 2t), (g + 8, 2t + 1).
DEVICE void mma_m16n8k16(float (&c)[4], const u32 (&a)[4], u32 b0, u32 b1) {
#if __CUDA_ARCH__ < 800
  asm volatile("mma.sync.aligned.m16n8k8.row.col.f32.f16.f16.f32 {%0, %1, %2, %3}, {%4, %5}, {%6}, {%0, %1, %2, %3};"
               : "+f"(c[0]), "+f"(c[1]), "+f"(c[2]), "+f"(c[3])
               : "r"(a[0]), "r"(a[1]), "r"(b0));
  asm volatile("mma.sync.aligned.m16n8k8.row.col.f32.f16.f16.f32 {%0, %1, %2, %3}, {%4, %5}, {%6}, {%0, %1, %2, %3};"
               : "+f"(c[0]), "+f"(c[1]), "+f"(c[2]), "+f"(c[3])
               : "r"(a[2]), "r"(a[3]), "r"(b1));
#elif DTYPE == F16
  asm volatile(
      "mma.sync.aligned.m16n8k16.row.col.f32.f16.f16.f32 {%0, %1, %2, %3}, {%4, %5, %6, %7}, {%8, %9}, {%0, %1, %2, %3};"
      : "+f"(c[0]), "+f"(c[1]), "+f"(c[2]), "+f"(c[3])
      : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b0), "r"(b1));
#else
  asm volatile(
      "mma.sync.aligned.m16n8k16.row.col.f32.bf16.bf16.f32 {%0, %1, %2, %3}, {%4, %5, %6, %7}, {%8, %9}, {%0, %1, %2, %3};"
      : "+f"(c[0]), "+f"(c[1]), "+f"(c[2]), "+f"(c[3])
      : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b0), "r"(b1));
#endif
}

#if __CUDA_ARCH__ >= 800
// c (16x8, float32) += a (16x8) b (8x8) of tf32. a[0..3]: (g, t), (g + 8, t), (g, t + 4), (g + 8, t + 4);
// b[0..1]: (t, g), (t + 4, g); c as above.
DEVICE void mma_m16n8k8_tf32(float (&c)[4], const u32 (&a)[4], u32 b0, u32 b1) {
  asm volatile(
      "mma.sync.aligned.m16n8k8.row.col.f32.tf32.tf32.f32 {%0, %1, %2, %3}, {%4, %5, %6, %7}, {%8, %9}, {%0, %1, %2, %3};"
      : "+f"(c[0]), "+f"(c[1]), "+f"(c[2]), "+f"(c[3])
      : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b0), "r"(b1));
}

// To nearest, ties away from zero. NOTE: cvt.rna.tf32 is six instructions, four of them for NaN and infinity.
DEVICE u32 to_tf32(float x) { return (__float_as_uint(x) + 0x1000) & 0xffffe000; }

// bf16 pairs regardless of DTYPE, for float32 kernels at bf16 precision.
DEVICE u32 pack_bf16(float lo, float hi) {
  u32 y;
  asm("cvt.rn.bf16x2.f32 %0, %1, %2;" : "=r"(y) : "f"(hi), "f"(lo));
  return y;
}

DEVICE void mma_m16n8k16_bf16(float (&c)[4], const u32 (&a)[4], u32 b0, u32 b1) {
  asm volatile(
      "mma.sync.aligned.m16n8k16.row.col.f32.bf16.bf16.f32 {%0, %1, %2, %3}, {%4, %5, %6, %7}, {%8, %9}, {%0, %1, %2, %3};"
      : "+f"(c[0]), "+f"(c[1]), "+f"(c[2]), "+f"(c[3])
      : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b0), "r"(b1));
}
#endif

// ---- conversions --------------------------------------------------------------------------------------------------

#if DTYPE == F16 || DTYPE == BF16
// Two float32 rounded to nearest; `lo` in the low half.
DEVICE u32 pack(float lo, float hi) {
  u32 y;
#if DTYPE == BF16
  asm("cvt.rn.bf16x2.f32 %0, %1, %2;" : "=r"(y) : "f"(hi), "f"(lo));
#elif __CUDA_ARCH__ >= 800
  asm("cvt.rn.f16x2.f32 %0, %1, %2;" : "=r"(y) : "f"(hi), "f"(lo));
#else
  asm("{ .reg .b16 l, h; cvt.rn.f16.f32 l, %2; cvt.rn.f16.f32 h, %1; mov.b32 %0, {l, h}; }" : "=r"(y) : "f"(hi), "f"(lo));
#endif
  return y;
}
#endif

DEVICE Accum to_accum(double x) { return (Accum)x; }
DEVICE Accum to_accum(float x) { return (Accum)x; }
DEVICE Accum to_accum(u16 bits) {
#if DTYPE == F16
  float x;
  asm("cvt.f32.f16 %0, %1;" : "=f"(x) : "h"(bits));
  return x;
#else
  return (Accum)__uint_as_float((u32)bits << 16);
#endif
}

template <typename T>
DEVICE T from_accum(Accum x);
template <>
DEVICE float from_accum<float>(Accum x) { return (float)x; }
template <>
DEVICE double from_accum<double>(Accum x) { return (double)x; }
#if DTYPE == F16 || DTYPE == BF16
template <>
DEVICE u16 from_accum<u16>(Accum x) { return (u16)pack(x, 0.f); }
#endif

// ---- arithmetic ---------------------------------------------------------------------------------------------------

#define LOG2E 1.4426950408889634
#define LN2 0.6931471805599453

DEVICE float infinity() { return __int_as_float(0x7f800000); }

DEVICE float exp2_fast(float x) {
  float y;
  asm("ex2.approx.ftz.f32 %0, %1;" : "=f"(y) : "f"(x));
  return y;
}
DEVICE double exp2_fast(double x) { return exp2(x); }

DEVICE float reciprocal_fast(float x) {
  float y;
  asm("rcp.approx.ftz.f32 %0, %1;" : "=f"(y) : "f"(x));
  return y;
}

// Ends what ptxas schedules together: a branch that is never taken, as no arithmetic makes such a NaN.
DEVICE void end_schedule(float x) {
  asm volatile("{ .reg .pred q; setp.eq.u32 q, %0, 0x7f812345; @q trap; }" ::"r"(__float_as_uint(x)) : "memory");
}

DEVICE void red_add(float* to, float x) { asm volatile("red.global.add.f32 [%0], %1;" ::"l"(to), "f"(x) : "memory"); }

// Four sums; `to` is a multiple of 16 bytes.
DEVICE void red_add4(float* to, float a, float b, float c, float d) {
#if __CUDA_ARCH__ >= 900
  asm volatile("red.global.add.v4.f32 [%0], {%1, %2, %3, %4};" ::"l"(to), "f"(a), "f"(b), "f"(c), "f"(d) : "memory");
#else
  red_add(to, a), red_add(to + 1, b), red_add(to + 2, c), red_add(to + 3, d);
#endif
}

// ---- shared memory, continued -------------------------------------------------------------------------------------

// Copies 4 bytes, or writes zeros.
DEVICE void cp_async4(u32 to, const void* from, bool inside) {
#if __CUDA_ARCH__ >= 800
  asm volatile("cp.async.ca.shared.global [%0], [%1], 4, %2;" ::"r"(to), "l"(from), "r"(inside ? 4 : 0) : "memory");
#else
  store_shared4(to, inside ? *(const u32*)from : 0);
#endif
}

// The A operand of a 16 x 16 patch to its tile: lane l gives the address of row l % 16 of chunk l / 16.
DEVICE void stmatrix_x4(u32 address, const u32 (&r)[4]) {
#if __CUDA_ARCH__ >= 900
  asm volatile("stmatrix.sync.aligned.m8n8.x4.shared.b16 [%0], {%1, %2, %3, %4};" ::"r"(address), "r"(r[0]), "r"(r[1]),
               "r"(r[2]), "r"(r[3])
               : "memory");
#else
  const int lane = threadIdx.x & 31;
#pragma unroll
  for (int i = 0; i < 4; i++) {
    const u32 row = __shfl_sync(~0u, address, (lane >> 2) + 8 * i);
    store_shared4(row + (lane & 3) * 4, r[i]);
  }
#endif
}

// ---- order between thread blocks ----------------------------------------------------------------------------------

DEVICE int load_acquire(const int* from) {
  int x;
  asm volatile("ld.acquire.gpu.global.b32 %0, [%1];" : "=r"(x) : "l"(from) : "memory");
  return x;
}

DEVICE void store_release(int* to, int x) {
  __threadfence();
  asm volatile("st.release.gpu.global.b32 [%0], %1;" ::"l"(to), "r"(x) : "memory");
}

// ---- float32 and float64 ------------------------------------------------------------------------------------------

#if DTYPE == F32 || DTYPE == F64
DEVICE float fused(float a, float b, float c) { return fmaf(a, b, c); }
DEVICE double fused(double a, double b, double c) { return fma(a, b, c); }

// Copies one element from global to shared memory, or fills its place with zero.
DEVICE void cp_async_element(u32 to, const Element* from, bool inside) {
#if __CUDA_ARCH__ >= 800
  asm volatile("cp.async.ca.shared.global [%0], [%1], %2, %3;" ::"r"(to), "l"(from), "n"(sizeof(Element)),
               "r"(inside ? (int)sizeof(Element) : 0)
               : "memory");
#elif DTYPE == F32
  store_shared4(to, inside ? __float_as_uint(*from) : 0);
#else
  const u64 bits = inside ? (u64)__double_as_longlong(*from) : 0;
  asm volatile("st.shared.b64 [%0], %1;" ::"r"(to), "l"(bits) : "memory");
#endif
}

DEVICE void red_add(double* to, double x) {
  asm volatile("red.global.add.f64 [%0], %1;" ::"l"(to), "d"(x) : "memory");
}
#endif

#if DTYPE == F64 && __CUDA_ARCH__ >= 900
// c (16x8) += a (16x8) b (8x8) of float64, in the places of mma_m16n8k8_tf32.
DEVICE void mma_m16n8k8_f64(double (&c)[4], const double (&a)[4], double b0, double b1) {
  asm volatile(
      "mma.sync.aligned.m16n8k8.row.col.f64.f64.f64.f64 {%0, %1, %2, %3}, {%4, %5, %6, %7}, {%8, %9}, {%0, %1, %2, %3};"
      : "+d"(c[0]), "+d"(c[1]), "+d"(c[2]), "+d"(c[3])
      : "d"(a[0]), "d"(a[1]), "d"(a[2]), "d"(a[3]), "d"(b0), "d"(b1));
}
#elif DTYPE == F64 && __CUDA_ARCH__ >= 800
DEVICE void mma_m8n8k4_f64(double& c0, double& c1, double a, double b) {
  asm volatile("mma.sync.aligned.m8n8k4.row.col.f64.f64.f64.f64 {%0, %1}, {%2}, {%3}, {%0, %1};"
               : "+d"(c0), "+d"(c1)
               : "d"(a), "d"(b));
}
DEVICE void mma_m16n8k8_f64(double (&c)[4], const double (&a)[4], double b0, double b1) {
  mma_m8n8k4_f64(c[0], c[1], a[0], b0);
  mma_m8n8k4_f64(c[2], c[3], a[1], b0);
  mma_m8n8k4_f64(c[0], c[1], a[2], b1);
  mma_m8n8k4_f64(c[2], c[3], a[3], b1);
}
#endif

#if DTYPE == F32 && __CUDA_ARCH__ >= 800
// Pairs of f16; `lo` in the low half.
DEVICE u32 pack_half(float lo, float hi) {
  u32 y;
  asm("cvt.rn.f16x2.f32 %0, %1, %2;" : "=r"(y) : "f"(hi), "f"(lo));
  return y;
}

DEVICE void unpack_half(u32 x, float& lo, float& hi) {
  asm("{ .reg .b16 l, h; mov.b32 {l, h}, %2; cvt.f32.f16 %0, l; cvt.f32.f16 %1, h; }" : "=f"(lo), "=f"(hi) : "r"(x));
}

DEVICE void mma_m16n8k16_half(float (&c)[4], const u32 (&a)[4], const u32 (&b)[2]) {
  asm volatile(
      "mma.sync.aligned.m16n8k16.row.col.f32.f16.f16.f32 {%0, %1, %2, %3}, {%4, %5, %6, %7}, {%8, %9}, {%0, %1, %2, %3};"
      : "+f"(c[0]), "+f"(c[1]), "+f"(c[2]), "+f"(c[3])
      : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b[0]), "r"(b[1]));
}
#endif
