"""Numbers of binary interfaces: XLA's C structs by offset, CUDA's launch structs, the plan of the handlers.

Constants alone; each names the field that it is the offset of.
"""

from __future__ import annotations

import hashlib

from .. import params

# ------------------------------------------------------------------------------------------------
# XLA's structs, xla/ffi/api/c_api.h. Each begins {size_t struct_size; Extension_Base* extension_start}.
# tests/test_xla_ffi.py compares each number with the field named beside it in the installed header.
# ------------------------------------------------------------------------------------------------
# struct XLA_FFI_CallFrame { ...; const Api* api; ExecutionContext* ctx; ExecutionStage stage; Args args;
#                            Rets rets; Attrs attrs; Future* future; }
FRAME_EXTENSION = 8  # XLA_FFI_CallFrame.extension_start
FRAME_API = 16  # XLA_FFI_CallFrame.api
FRAME_CONTEXT = 24  # XLA_FFI_CallFrame.ctx
FRAME_STAGE = 32  # XLA_FFI_CallFrame.stage
FRAME_ARGS = 40  # XLA_FFI_CallFrame.args
FRAME_RETS = 80  # XLA_FFI_CallFrame.rets
FRAME_ATTRS = 120  # XLA_FFI_CallFrame.attrs
# struct XLA_FFI_Args { ...; int64_t size; ArgType* types; void** args; }, and Rets alike
BUFFERS_SIZE = 16  # XLA_FFI_Args.size
BUFFERS_POINTERS = 32  # XLA_FFI_Args.args
# struct XLA_FFI_Attrs { ...; int64_t size; AttrType* types; ByteSpan** names; void** attrs; }, sorted by name
ATTRS_SIZE = 16  # XLA_FFI_Attrs.size
ATTRS_TYPES = 24  # XLA_FFI_Attrs.types
ATTRS_POINTERS = 40  # XLA_FFI_Attrs.attrs
# struct XLA_FFI_Buffer { ...; DataType dtype; void* data; int64_t rank; int64_t* dims; }
BUFFER_DATA = 24  # XLA_FFI_Buffer.data
# struct XLA_FFI_ByteSpan { const char* ptr; size_t len; }
SPAN_POINTER = 0  # XLA_FFI_ByteSpan.ptr
SPAN_LENGTH = 8  # XLA_FFI_ByteSpan.len
# struct XLA_FFI_Array { DataType dtype; size_t size; void* data; }
ARRAY_DTYPE = 0  # XLA_FFI_Array.dtype
ARRAY_SIZE = 8  # XLA_FFI_Array.size
ARRAY_DATA = 16  # XLA_FFI_Array.data
# struct XLA_FFI_Api { ...; Api_Version api_version; const InternalApi* internal_api; <one pointer each> }
API_MINOR = 36  # XLA_FFI_Api.api_version + XLA_FFI_Api_Version.minor_version
API_ERROR_CREATE = 48  # XLA_FFI_Api.XLA_FFI_Error_Create
API_ERROR_DESTROY = 64  # XLA_FFI_Api.XLA_FFI_Error_Destroy
API_STREAM_GET = 80  # XLA_FFI_Api.XLA_FFI_Stream_Get
API_POOL_SCHEDULE = 136  # XLA_FFI_Api.XLA_FFI_ThreadPool_Schedule
API_POOL_THREADS = 144  # XLA_FFI_Api.XLA_FFI_ThreadPool_NumThreads
# struct XLA_FFI_Error_Create_Args { ...; const char* message; Error_Code errc; }; struct_size ends after errc
ERROR_CREATE_MESSAGE = 16  # XLA_FFI_Error_Create_Args.message
ERROR_CREATE_CODE = 24  # XLA_FFI_Error_Create_Args.errc
# struct XLA_FFI_Error_Destroy_Args { ...; Error* error; }
ERROR_DESTROY_ERROR = 16  # XLA_FFI_Error_Destroy_Args.error
# struct XLA_FFI_Stream_Get_Args { ...; ExecutionContext* ctx; void* stream; }
STREAM_GET_CONTEXT = 16  # XLA_FFI_Stream_Get_Args.ctx
STREAM_GET_STREAM = 24  # XLA_FFI_Stream_Get_Args.stream
# struct XLA_FFI_ThreadPool_Schedule_Args { ...; ExecutionContext* ctx; Task* task; void* data; }
SCHEDULE_CONTEXT = 16  # XLA_FFI_ThreadPool_Schedule_Args.ctx
SCHEDULE_TASK = 24  # XLA_FFI_ThreadPool_Schedule_Args.task
SCHEDULE_DATA = 32  # XLA_FFI_ThreadPool_Schedule_Args.data
# struct XLA_FFI_ThreadPool_NumThreads_Args { ...; ExecutionContext* ctx; int64_t* num_threads; }
THREADS_CONTEXT = 16  # XLA_FFI_ThreadPool_NumThreads_Args.ctx
THREADS_COUNT = 24  # XLA_FFI_ThreadPool_NumThreads_Args.num_threads
# struct XLA_FFI_Extension_Base { size_t struct_size; Extension_Type type; Extension_Base* next; }
EXTENSION_TYPE = 8  # XLA_FFI_Extension_Base.type
EXTENSION_NEXT = 16  # XLA_FFI_Extension_Base.next
# struct XLA_FFI_Metadata_Extension { Extension_Base extension_base; Metadata* metadata; }
EXTENSION_METADATA = 24  # XLA_FFI_Metadata_Extension.metadata
# struct XLA_FFI_Metadata { size_t struct_size; Api_Version api_version; Handler_Traits traits; ... }
METADATA_MAJOR = 24  # XLA_FFI_Metadata.api_version + XLA_FFI_Api_Version.major_version
METADATA_MINOR = 28  # XLA_FFI_Metadata.api_version + XLA_FFI_Api_Version.minor_version
METADATA_TRAITS = 32  # XLA_FFI_Metadata.traits

STAGE_EXECUTE = 3  # XLA_FFI_ExecutionStage_EXECUTE
EXTENSION_IS_METADATA = 1  # XLA_FFI_Extension_Metadata
ATTR_IS_ARRAY = 1  # XLA_FFI_AttrType_ARRAY
ATTR_IS_STRING = 4  # XLA_FFI_AttrType_STRING
DTYPE_S64 = 5  # XLA_FFI_DataType_S64
INVALID_ARGUMENT = 3  # XLA_FFI_Error_Code_INVALID_ARGUMENT
FAILED_PRECONDITION = 9  # XLA_FFI_Error_Code_FAILED_PRECONDITION
INTERNAL = 13  # XLA_FFI_Error_Code_INTERNAL
TESTED_MINOR = 5  # the newest API minor version whose structs were compared with these

# CUDA's driver API, cuda.h (12.4 and newer)
# typedef struct { unsigned gridDimX, Y, Z, blockDimX, Y, Z, sharedMemBytes; CUstream hStream;
#                  CUlaunchAttribute* attrs; unsigned numAttrs; } CUlaunchConfig;
CONFIG_STREAM, CONFIG_ATTRIBUTES, CONFIG_COUNT = 32, 40, 48
# typedef struct { CUlaunchAttributeID id; char pad[4]; CUlaunchAttributeValue value /* 64 bytes */; }
#                CUlaunchAttribute;
ATTRIBUTE_VALUE = 8
ATTRIBUTE_DEPENDENT = 6  # CU_LAUNCH_ATTRIBUTE_PROGRAMMATIC_STREAM_SERIALIZATION
TENSOR_MAP_DTYPES = {  # CUtensorMapDataType
    "uint8": 0, "int32": 3, "int64": 5, "float16": 6, "float32": 7, "float64": 8, "bfloat16": 9,
}  # fmt: skip
TENSOR_MAP_SWIZZLES = {0: 0, 32: 1, 64: 2, 128: 3}  # CUtensorMapSwizzle
TENSOR_MAP_L2_256 = 3  # CU_TENSOR_MAP_L2_PROMOTION_L2_256B
MAP_BYTES, MAX_MAPS, MAX_RANK = 128, 8, 5
MAPS_BYTES = MAP_BYTES * MAX_MAPS

# ------------------------------------------------------------------------------------------------
# The plan: what the handlers interpret. A buffer is an index into arguments, then results.
#   [version, steps, arguments, results] then per step [kind, words, ...]:
#   MEMSET  buffer, bytes
#   HOST    key, tiles, n, n x (word of the parameter block, buffer), block
#   LAUNCH  key, grid x 3, block, shared memory, dependent, n, maps, n x (word, buffer), block, maps x
#           [words, buffer, offset, dtype, rank, swizzle, dims[rank], strides[rank - 1], box[rank]]
# ------------------------------------------------------------------------------------------------
HEADER, STEP_MEMSET, STEP_HOST, STEP_LAUNCH = 4, 1, 2, 3
BLOCK_BYTES = 8 * params.WORDS
VERSION = int.from_bytes(hashlib.sha256(repr(("plan 1", params.FIELDS)).encode()).digest()[:6], "little")
