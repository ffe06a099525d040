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

// Copies the first `bytes` (0 .. 16) of 16 from global to shared memory and fills the rest with zeros.
DEVICE void cp_async16(u32 to, const void* from, int bytes) {
#if __CUDA_ARCH__ >= 800
  asm volatile("cp.async.cg.shared.global [%0], [%1], 16, %2;" ::"r"(to), "l"(from), "r"(bytes) : "memory");
#else
  uint4 x = make_uint4(0, 0, 0, 0);
  if (bytes == 16) {
    x = *(const uint4*)from;
  } else {
    u32 half[8];
#pragma unroll
    for (int i = 0; i < 8; i++) half[i] = 2 * i < bytes ? ((const u16*)from)[i] : 0;
    x = make_uint4(half[0] | half[1] << 16, half[2] | half[3] << 16, half[4] | half[5] << 16, half[6] | half[7] << 16);
  }
  store_shared16(to, x);
#endif
}

DEVICE void cp_async16(u32 to, const void* from) {
#if __CUDA_ARCH__ >= 800
  asm volatile("cp.async.cg.shared.global [%0], [%1], 16;" ::"r"(to), "l"(from) : "memory");
#else
  store_shared16(to, *(const uint4*)from);
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

DEVICE u32 to_tf32(float x) {
  u32 y;
  asm("cvt.rna.tf32.f32 %0, %1;" : "=r"(y) : "f"(x));
  return y;
}

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

DEVICE void red_add(float* to, float x) { asm volatile("red.global.add.f32 [%0], %1;" ::"l"(to), "f"(x) : "memory"); }
