/* SPDX-License-Identifier: MIT */
#ifndef SKERRY_TENSOR_H
#define SKERRY_TENSOR_H

#include <skerry/base.h>

#ifdef __cplusplus
extern "C" {
#endif

/* Type of the numbers behind a tensor. Declared by the caller at each call, converted by the library, never guessed. */
typedef int32_t skerry_dtype;
enum {
    SKERRY_DTYPE_NONE = 0,
    SKERRY_DTYPE_F32  = 1,
    SKERRY_DTYPE_F16  = 2, /* IEEE binary16 */
    SKERRY_DTYPE_BF16 = 3
};

typedef int32_t skerry_device_type;
enum {
    SKERRY_DEVICE_CPU    = 0,
    SKERRY_DEVICE_CUDA   = 1, /* reserved; refused by this version */
    SKERRY_DEVICE_VULKAN = 2  /* reserved; refused by this version */
};

/* plain. Numbers in the caller's memory, any strides (a stride of a dimension of size 1 is ignored; a stride may be zero or
 * negative for inputs). Element (i, j, k, l) lies at data + byte_offset + size(dtype) * (i * stride[0] + j * stride[1] + ...). */
typedef struct skerry_tensor {
    void              *data;
    uint64_t           byte_offset;
    skerry_dtype       dtype;
    int32_t            rank;         /* 1 to 4: leading entries of shape and stride in use */
    int64_t            shape[4];
    int64_t            stride[4];
    skerry_device_type device_type;
    int32_t            device_index;
} skerry_tensor;

/* plain. The host's own queue on a device; NULL handle: the device's default. The CPU has none: pass NULL. */
typedef struct skerry_stream {
    void              *handle;
    skerry_device_type device_type;
    int32_t            device_index;
} skerry_stream;

#ifdef __cplusplus
}
#endif

#endif
