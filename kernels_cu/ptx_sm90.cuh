// Hopper's (sm_90a) instructions, one to a function: mbarriers, TMA, wgmma, setmaxnreg, named barriers, stmatrix, bulk
// reductions. Inline assembly only: nothing here knows attention. DTYPE (0 float16, 1 bfloat16) picks the 16-bit type.
#pragma once
#include "params.cuh"

struct alignas(64) TMap {  // a CUtensorMap, passed by value as a __grid_constant__ argument
  u64 words[16];
};

#if DTYPE == 1
#define WGMMA_TYPES ".f32.bf16.bf16"
#define PACK_TYPE "bf16x2"
#else
#define WGMMA_TYPES ".f32.f16.f16"
#define PACK_TYPE "f16x2"
#endif

// ---------------------------------------------------------------------------------------------- scalars
// A value that all lanes share, into a uniform register (REDUX writes one; a shuffle is not enough for ptxas).
// Volatile, unlike ptx.cuh's: what is computed from it is not hoisted above it. A template, so that both may stand in one kernel.
template <int = 0> __device__ __forceinline__ int uniform(int x) {
  int y;
  asm volatile("redux.sync.max.s32 %0, %1, 0xffffffff;" : "=r"(y) : "r"(x));
  return y;
}
__device__ __forceinline__ float exp2_approx(float x) {
  float y;
  asm("ex2.approx.ftz.f32 %0, %1;" : "=f"(y) : "f"(x));
  return y;
}
__device__ __forceinline__ float log2_approx(float x) {
  float y;
  asm("lg2.approx.ftz.f32 %0, %1;" : "=f"(y) : "f"(x));
  return y;
}
__device__ __forceinline__ float tanh_approx(float x) {
  float y;
  asm("tanh.approx.f32 %0, %1;" : "=f"(y) : "f"(x));
  return y;
}
// sum += x * y, but nothing where x is 0.
__device__ __forceinline__ void fma_unless_zero(float& sum, float x, float y) {
  asm volatile("{\n.reg .pred P;\nsetp.neu.f32 P, %1, 0f00000000;\n@P fma.rn.f32 %0, %1, %2, %0;\n}" : "+f"(sum) : "f"(x), "f"(y));
}
// Two floats rounded to halves, whatever DTYPE is, and back.
__device__ __forceinline__ u32 pack_f16(float lo, float hi) {
  u32 r;
  asm("cvt.rn.f16x2.f32 %0, %1, %2;" : "=r"(r) : "f"(hi), "f"(lo));
  return r;
}
__device__ __forceinline__ float2 unpack_f16(u32 x) {
  float2 y;
  asm("{\n.reg .f16 l, h;\nmov.b32 {l, h}, %2;\ncvt.f32.f16 %0, l;\ncvt.f32.f16 %1, h;\n}" : "=f"(y.x), "=f"(y.y) : "r"(x));
  return y;
}
// Two floats rounded to the 16-bit type, `lo` in the low half.
__device__ __forceinline__ u32 pack_half2(float lo, float hi) {
  u32 r;
  asm("cvt.rn." PACK_TYPE ".f32 %0, %1, %2;" : "=r"(r) : "f"(hi), "f"(lo));
  return r;
}
// The lesser of each half; of a number and NaN the number.
__device__ __forceinline__ u32 min_half2(u32 x, u32 y) {
  u32 r;
  asm("min." PACK_TYPE " %0, %1, %2;" : "=r"(r) : "r"(x), "r"(y));
  return r;
}
__device__ __forceinline__ float2 unpack_half2(u32 x) {
#if DTYPE == 1
  return make_float2(__uint_as_float(x << 16), __uint_as_float(x & 0xffff0000u));
#else
  return unpack_f16(x);
#endif
}

// ---------------------------------------------------------------------------------------------- mbarriers
__device__ __forceinline__ u32 shared_address(const void* p) { return (u32)__cvta_generic_to_shared(p); }
__device__ __forceinline__ void mbarrier_init(u32 bar, u32 arrivals) {
  asm volatile("mbarrier.init.shared::cta.b64 [%0], %1;" ::"r"(bar), "r"(arrivals));
}
// Makes initialised barriers visible to TMA; a block barrier must follow.
__device__ __forceinline__ void mbarrier_init_fence() {
  asm volatile("fence.mbarrier_init.release.cluster;\nfence.proxy.async.shared::cta;" ::: "memory");
}
__device__ __forceinline__ void mbarrier_expect(u32 bar, u32 bytes) {
  asm volatile("mbarrier.arrive.expect_tx.shared::cta.b64 _, [%0], %1;" ::"r"(bar), "r"(bytes) : "memory");
}
__device__ __forceinline__ void mbarrier_arrive(u32 bar) {
  asm volatile("mbarrier.arrive.shared::cta.b64 _, [%0];" ::"r"(bar) : "memory");
}
// Arrives where `yes`, without a branch: branches near wgmmas in flight make ptxas move their waits.
__device__ __forceinline__ void mbarrier_arrive_if(u32 bar, bool yes) {
  asm volatile("{\n.reg .pred P;\nsetp.ne.u32 P, %1, 0;\n@P mbarrier.arrive.shared::cta.b64 _, [%0];\n}" ::"r"(bar),
               "r"((u32)yes)
               : "memory");
}
// NOTE: spins without a trap on purpose: a trap makes ptxas serialise the wgmmas around it (C7512).
__device__ __forceinline__ void mbarrier_wait(u32 bar, u32 parity) {
  asm volatile(
      "{\n.reg .pred P;\nL:\nmbarrier.try_wait.parity.shared::cta.b64 P, [%0], %1;\n@P bra E;\nbra L;\nE:\n}" ::"r"(bar),
      "r"(parity)
      : "memory");
}
// The same; nothing that is computed from `a` and `b` moves ahead of it.
__device__ __forceinline__ void mbarrier_wait_before(u32 bar, u32 parity, float& a, float& b) {
  u32 x = __float_as_uint(a), y = __float_as_uint(b);
  asm volatile(
      "{\n.reg .pred P;\n.reg .b32 M;\nL:\nmbarrier.try_wait.parity.shared::cta.b64 P, [%2], %3;\nselp.b32 M, 0xffffffff, 0, P;\n"
      "@P bra E;\nbra L;\nE:\nand.b32 %0, %0, M;\nand.b32 %1, %1, M;\n}"
      : "+r"(x), "+r"(y)
      : "r"(bar), "r"(parity)
      : "memory");
  a = __uint_as_float(x), b = __uint_as_float(y);
}

// ---------------------------------------------------------------------------------------------- barriers, registers
// This thread's lane, read anew: no register holds it in between.
__device__ __forceinline__ int lane_now() {
  int lane;
  asm volatile("mov.u32 %0, %%laneid;" : "=r"(lane));
  return lane;
}
__device__ __forceinline__ void barrier_sync(int id, int threads) {
  asm volatile("bar.sync %0, %1;" ::"r"(id), "r"(threads) : "memory");
}
__device__ __forceinline__ void barrier_arrive(int id, int threads) {
  asm volatile("bar.arrive %0, %1;" ::"r"(id), "r"(threads) : "memory");
}
template <int N> __device__ __forceinline__ void registers_give() {
  asm volatile("setmaxnreg.dec.sync.aligned.u32 %0;" ::"n"(N));
}
template <int N> __device__ __forceinline__ void registers_take() {
  asm volatile("setmaxnreg.inc.sync.aligned.u32 %0;" ::"n"(N));
}
// Programmatic dependent launch: wait for the predecessor's writes; let the successor start.
__device__ __forceinline__ void dependency_wait() { asm volatile("griddepcontrol.wait;" ::: "memory"); }
__device__ __forceinline__ void dependency_launch() { asm volatile("griddepcontrol.launch_dependents;" ::: "memory"); }

// ---------------------------------------------------------------------------------------------- TMA
__device__ __forceinline__ void tma_prefetch(const TMap* map) {
  asm volatile("prefetch.tensormap [%0];" ::"l"(map) : "memory");
}
// One box of a 4-D tensor (column, row, head, batch) into shared memory; out-of-bounds elements arrive as zeros.
__device__ __forceinline__ void tma_load(u32 dst, const TMap* map, int c0, int c1, int c2, int c3, u32 bar) {
  asm volatile(
      "cp.async.bulk.tensor.4d.shared::cluster.global.mbarrier::complete_tx::bytes [%0], [%1, {%2, %3, %4, %5}], [%6];" ::"r"(
          dst),
      "l"(map), "r"(c0), "r"(c1), "r"(c2), "r"(c3), "r"(bar)
      : "memory");
}
// The box back; what lies out of bounds is not written.
__device__ __forceinline__ void tma_store(const TMap* map, int c0, int c1, int c2, int c3, u32 src) {
  asm volatile("cp.async.bulk.tensor.4d.global.shared::cta.bulk_group [%0, {%1, %2, %3, %4}], [%5];" ::"l"(map), "r"(c0), "r"(c1),
               "r"(c2), "r"(c3), "r"(src)
               : "memory");
}
// Contiguous bytes (16-byte multiples, 16-byte aligned) into shared memory.
__device__ __forceinline__ void bulk_load(u32 dst, const void* src, u32 bytes, u32 bar) {
  asm volatile("cp.async.bulk.shared::cluster.global.mbarrier::complete_tx::bytes [%0], [%1], %2, [%3];" ::"r"(dst), "l"(src),
               "r"(bytes), "r"(bar)
               : "memory");
}
// Contiguous floats from shared memory added to global memory.
__device__ __forceinline__ void bulk_reduce_add_f32(float* dst, u32 src, u32 bytes) {
  asm volatile("cp.reduce.async.bulk.global.shared::cta.bulk_group.add.f32 [%0], [%1], %2;" ::"l"(dst), "r"(src), "r"(bytes)
               : "memory");
}
// Contiguous bytes from shared memory to global memory.
__device__ __forceinline__ void bulk_store(void* dst, u32 src, u32 bytes) {
  asm volatile("cp.async.bulk.global.shared::cta.bulk_group [%0], [%1], %2;" ::"l"(dst), "r"(src), "r"(bytes) : "memory");
}
__device__ __forceinline__ void bulk_commit() { asm volatile("cp.async.bulk.commit_group;" ::: "memory"); }
// Until all but N of this thread's bulk groups have read their shared memory (bulk_wait: have been written).
template <int N> __device__ __forceinline__ void bulk_wait_read() {
  asm volatile("cp.async.bulk.wait_group.read %0;" ::"n"(N) : "memory");
}
template <int N> __device__ __forceinline__ void bulk_wait() {
  asm volatile("cp.async.bulk.wait_group %0;" ::"n"(N) : "memory");
}
// Counters with which CTAs follow each other in writing to the same place, also by bulk copies: spin until `*turn` has come to
// `mine`; count up when one's own writes are done.
__device__ __forceinline__ int look_at_turn(const int* turn) {
  int now;
  asm volatile("ld.acquire.gpu.global.s32 %0, [%1];" : "=r"(now) : "l"(turn) : "memory");
  return now;
}
// Orders ordinary and bulk accesses to global memory.
__device__ __forceinline__ void proxy_fence_global() { asm volatile("fence.proxy.async.global;" ::: "memory"); }
__device__ __forceinline__ void wait_for_turn(const int* turn, int mine) {
  while (look_at_turn(turn) < mine) {
  }
  proxy_fence_global();
}
__device__ __forceinline__ void pass_turn(int* turn, int by) {
  asm volatile("fence.proxy.async.global;\nred.release.gpu.global.add.s32 [%0], %1;" ::"l"(turn), "r"(by) : "memory");
}
// Makes a 0 a 1, and returns what stood there. NOTE: not an addition, which ptxas shares among lanes and so waits for at once.
__device__ __forceinline__ int claim_turn(int* turn) {
  int before;
  asm volatile("atom.relaxed.gpu.global.cas.b32 %0, [%1], 0, 1;" : "=r"(before) : "l"(turn) : "memory");
  return before;
}
// Four floats added to global memory, 16-byte aligned.
__device__ __forceinline__ void reduce_add_f4(float* to, float a, float b, float c, float d) {
  asm volatile("red.relaxed.gpu.global.add.v4.f32 [%0], {%1, %2, %3, %4};" ::"l"(to), "f"(a), "f"(b), "f"(c), "f"(d) : "memory");
}
// Orders ordinary shared-memory writes before what TMA and wgmma read.
__device__ __forceinline__ void proxy_fence() { asm volatile("fence.proxy.async.shared::cta;" ::: "memory"); }
__device__ __forceinline__ void stmatrix_x4(u32 dst, u32 a, u32 b, u32 c, u32 d) {
  asm volatile("stmatrix.sync.aligned.m8n8.x4.shared.b16 [%0], {%1, %2, %3, %4};" ::"r"(dst), "r"(a), "r"(b), "r"(c), "r"(d)
               : "memory");
}
__device__ __forceinline__ void stmatrix_x4_trans(u32 dst, u32 a, u32 b, u32 c, u32 d) {
  asm volatile("stmatrix.sync.aligned.m8n8.x4.trans.shared.b16 [%0], {%1, %2, %3, %4};" ::"r"(dst), "r"(a), "r"(b), "r"(c),
               "r"(d)
               : "memory");
}
__device__ __forceinline__ void ldmatrix_x4(u32 src, u32& a, u32& b, u32& c, u32& d) {
  asm volatile("ldmatrix.sync.aligned.m8n8.x4.shared.b16 {%0, %1, %2, %3}, [%4];"
               : "=r"(a), "=r"(b), "=r"(c), "=r"(d)
               : "r"(src)
               : "memory");
}
// To global memory where `yes`, without a branch.
__device__ __forceinline__ void store_if(float* dst, float x, bool yes) {
  asm volatile("{\n.reg .pred P;\nsetp.ne.u32 P, %2, 0;\n@P st.global.f32 [%0], %1;\n}" ::"l"(dst), "f"(x), "r"((u32)yes) : "memory");
}
__device__ __forceinline__ void shared_store(u32 dst, u32 x) {
  asm volatile("st.shared.b32 [%0], %1;" ::"r"(dst), "r"(x) : "memory");
}
__device__ __forceinline__ u32 shared_load(u32 src) {
  u32 x;
  asm volatile("ld.shared.b32 %0, [%1];" : "=r"(x) : "r"(src) : "memory");
  return x;
}
__device__ __forceinline__ void shared_store_v4(u32 dst, u32 a, u32 b, u32 c, u32 d) {
  asm volatile("st.shared.v4.b32 [%0], {%1, %2, %3, %4};" ::"r"(dst), "r"(a), "r"(b), "r"(c), "r"(d) : "memory");
}
__device__ __forceinline__ void shared_load_v4(u32 src, u32& a, u32& b, u32& c, u32& d) {
  asm volatile("ld.shared.v4.b32 {%0, %1, %2, %3}, [%4];" : "=r"(a), "=r"(b), "=r"(c), "=r"(d) : "r"(src) : "memory");
}
__device__ __forceinline__ float2 shared_load_f2(u32 src) {
  float2 x;
  asm volatile("ld.shared.v2.f32 {%0, %1}, [%2];" : "=f"(x.x), "=f"(x.y) : "r"(src) : "memory");
  return x;
}

// ---------------------------------------------------------------------------------------------- wgmma
__device__ __forceinline__ void wgmma_fence() { asm volatile("wgmma.fence.sync.aligned;" ::: "memory"); }
__device__ __forceinline__ void wgmma_commit() { asm volatile("wgmma.commit_group.sync.aligned;" ::: "memory"); }
template <int N> __device__ __forceinline__ void wgmma_wait() {
  asm volatile("wgmma.wait_group.sync.aligned %0;" ::"n"(N) : "memory");
}
// wgmma writes its accumulators asynchronously: tell the compiler that they change here.
template <int N> __device__ __forceinline__ void touch(float (&r)[N]) {
#pragma unroll
  for (int i = 0; i < N; i++) asm volatile("" : "+f"(r[i])::"memory");
}

// Descriptor of a tile kept as 128-byte wide slabs with the 128-byte swizzle (slabs 1024-byte aligned).
// K-major: leading offset unused (16), stride 1024; +2 per 16 columns, + slab bytes / 16 per 64 columns.
// MN-major: leading offset = bytes of a slab, stride 1024; +128 per 16 rows.
__device__ __forceinline__ u64 wgmma_descriptor(u32 address, u32 leading_bytes, u32 stride_bytes) {
  return (u64)((address & 0x3FFFF) >> 4) | ((u64)(leading_bytes >> 4) << 16) | ((u64)(stride_bytes >> 4) << 32) | (1ull << 62);
}

// d (64 x N, float32; row = 16 warp + lane / 4 + 8 (i / 2 & 1), column = 8 (i / 4) + 2 (lane & 3) + (i & 1)) =
// or += A (64 x 16) B (16 x N). ss: both by descriptor; rs: A in registers. TA, TB: 1 where the operand is MN-major.
template <int N> struct Wgmma;
#define WG_S0 "%0, %1, %2, %3, %4, %5, %6, %7"
#define WG_S1 "%8, %9, %10, %11, %12, %13, %14, %15"
#define WG_S2 "%16, %17, %18, %19, %20, %21, %22, %23"
#define WG_S3 "%24, %25, %26, %27, %28, %29, %30, %31"
#define WG_S4 "%32, %33, %34, %35, %36, %37, %38, %39"
#define WG_S5 "%40, %41, %42, %43, %44, %45, %46, %47"
#define WG_S6 "%48, %49, %50, %51, %52, %53, %54, %55"
#define WG_S7 "%56, %57, %58, %59, %60, %61, %62, %63"
#define WG_S8 "%64, %65, %66, %67, %68, %69, %70, %71"
#define WG_S9 "%72, %73, %74, %75, %76, %77, %78, %79"
#define WG_S10 "%80, %81, %82, %83, %84, %85, %86, %87"
#define WG_S11 "%88, %89, %90, %91, %92, %93, %94, %95"
#define WG_S12 "%96, %97, %98, %99, %100, %101, %102, %103"
#define WG_S13 "%104, %105, %106, %107, %108, %109, %110, %111"
#define WG_S14 "%112, %113, %114, %115, %116, %117, %118, %119"
#define WG_S15 "%120, %121, %122, %123, %124, %125, %126, %127"
#define WG_D8(i) "+f"(d[i]), "+f"(d[i + 1]), "+f"(d[i + 2]), "+f"(d[i + 3]), "+f"(d[i + 4]), "+f"(d[i + 5]), "+f"(d[i + 6]), "+f"(d[i + 7])
// N, its registers' names, the registers, and the numbers of the operands that follow them
#define DEFINE_WGMMA(N, NAMES, REGISTERS, O0, O1, O2, O3, O4, O5, O6)                                                            \
  template <> struct Wgmma<N> {                                                                                                  \
    template <int TA = 0, int TB = 0>                                                                                            \
    static __device__ __forceinline__ void ss(float (&d)[N / 2], u64 a, u64 b, int accumulate) {                                 \
      asm volatile("{\n.reg .pred p;\nsetp.ne.b32 p, " O2 ", 0;\nwgmma.mma_async.sync.aligned.m64n" #N "k16" WGMMA_TYPES         \
                   " {" NAMES "}, " O0 ", " O1 ", p, 1, 1, " O3 ", " O4 ";\n}"                                                   \
                   : REGISTERS                                                                                                   \
                   : "l"(a), "l"(b), "r"(accumulate), "n"(TA), "n"(TB));                                                         \
    }                                                                                                                            \
    template <int TB = 0>                                                                                                        \
    static __device__ __forceinline__ void rs(float (&d)[N / 2], u32 a0, u32 a1, u32 a2, u32 a3, u64 b, int accumulate) {        \
      asm volatile("{\n.reg .pred p;\nsetp.ne.b32 p, " O5 ", 0;\nwgmma.mma_async.sync.aligned.m64n" #N "k16" WGMMA_TYPES         \
                   " {" NAMES "}, {" O0 ", " O1 ", " O2 ", " O3 "}, " O4 ", p, 1, 1, " O6 ";\n}"                                 \
                   : REGISTERS                                                                                                   \
                   : "r"(a0), "r"(a1), "r"(a2), "r"(a3), "l"(b), "r"(accumulate), "n"(TB));                                      \
    }                                                                                                                            \
  };
#define WG_N1 WG_S0
#define WG_R1 WG_D8(0)
#define WG_N2 WG_N1 ", " WG_S1
#define WG_R2 WG_R1, WG_D8(8)
#define WG_N3 WG_N2 ", " WG_S2
#define WG_R3 WG_R2, WG_D8(16)
#define WG_N4 WG_N3 ", " WG_S3
#define WG_R4 WG_R3, WG_D8(24)
#define WG_N5 WG_N4 ", " WG_S4
#define WG_R5 WG_R4, WG_D8(32)
#define WG_N6 WG_N5 ", " WG_S5
#define WG_R6 WG_R5, WG_D8(40)
#define WG_N7 WG_N6 ", " WG_S6
#define WG_R7 WG_R6, WG_D8(48)
#define WG_N8 WG_N7 ", " WG_S7
#define WG_R8 WG_R7, WG_D8(56)
#define WG_N9 WG_N8 ", " WG_S8
#define WG_R9 WG_R8, WG_D8(64)
#define WG_N10 WG_N9 ", " WG_S9
#define WG_R10 WG_R9, WG_D8(72)
#define WG_N11 WG_N10 ", " WG_S10
#define WG_R11 WG_R10, WG_D8(80)
#define WG_N12 WG_N11 ", " WG_S11
#define WG_R12 WG_R11, WG_D8(88)
#define WG_N13 WG_N12 ", " WG_S12
#define WG_R13 WG_R12, WG_D8(96)
#define WG_N14 WG_N13 ", " WG_S13
#define WG_R14 WG_R13, WG_D8(104)
#define WG_N15 WG_N14 ", " WG_S14
#define WG_R15 WG_R14, WG_D8(112)
#define WG_N16 WG_N15 ", " WG_S15
#define WG_R16 WG_R15, WG_D8(120)
DEFINE_WGMMA(16, WG_N1, WG_R1, "%8", "%9", "%10", "%11", "%12", "%13", "%14")
DEFINE_WGMMA(32, WG_N2, WG_R2, "%16", "%17", "%18", "%19", "%20", "%21", "%22")
DEFINE_WGMMA(48, WG_N3, WG_R3, "%24", "%25", "%26", "%27", "%28", "%29", "%30")
DEFINE_WGMMA(64, WG_N4, WG_R4, "%32", "%33", "%34", "%35", "%36", "%37", "%38")
DEFINE_WGMMA(80, WG_N5, WG_R5, "%40", "%41", "%42", "%43", "%44", "%45", "%46")
DEFINE_WGMMA(96, WG_N6, WG_R6, "%48", "%49", "%50", "%51", "%52", "%53", "%54")
DEFINE_WGMMA(112, WG_N7, WG_R7, "%56", "%57", "%58", "%59", "%60", "%61", "%62")
DEFINE_WGMMA(128, WG_N8, WG_R8, "%64", "%65", "%66", "%67", "%68", "%69", "%70")
DEFINE_WGMMA(144, WG_N9, WG_R9, "%72", "%73", "%74", "%75", "%76", "%77", "%78")
DEFINE_WGMMA(160, WG_N10, WG_R10, "%80", "%81", "%82", "%83", "%84", "%85", "%86")
DEFINE_WGMMA(176, WG_N11, WG_R11, "%88", "%89", "%90", "%91", "%92", "%93", "%94")
DEFINE_WGMMA(192, WG_N12, WG_R12, "%96", "%97", "%98", "%99", "%100", "%101", "%102")
DEFINE_WGMMA(208, WG_N13, WG_R13, "%104", "%105", "%106", "%107", "%108", "%109", "%110")
DEFINE_WGMMA(224, WG_N14, WG_R14, "%112", "%113", "%114", "%115", "%116", "%117", "%118")
DEFINE_WGMMA(240, WG_N15, WG_R15, "%120", "%121", "%122", "%123", "%124", "%125", "%126")
DEFINE_WGMMA(256, WG_N16, WG_R16, "%128", "%129", "%130", "%131", "%132", "%133", "%134")
