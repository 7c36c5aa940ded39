#include <cmath>
#include <cstring>

#include "base/half.hpp"
#include "step/cache.hpp"

namespace skerry {

namespace {

float read_value(const uint8_t *at, skerry_dtype dtype) {
    if (dtype == SKERRY_DTYPE_F32) {
        float value = 0;
        std::memcpy(&value, at, sizeof value);
        return value;
    }
    uint16_t bits = 0;
    std::memcpy(&bits, at, sizeof bits);
    return dtype == SKERRY_DTYPE_F16 ? f16_to_f32(bits) : bf16_to_f32(bits);
}

int64_t size_of(skerry_dtype dtype) { return dtype == SKERRY_DTYPE_F32 ? 4 : 2; }

// Above it, rounding to the store dtype would give infinity.
float largest_storable(skerry_dtype store) {
    return store == SKERRY_DTYPE_F16 ? 65519.996f : store == SKERRY_DTYPE_BF16 ? 3.3961776e38f : 3.4028235e38f;
}

} // namespace

TensorRows tensor_rows(const skerry_tensor &tensor) {
    TensorRows rows{&tensor, 0, 0, 0};
    const auto stride = [&](int32_t i) { return tensor.shape[i] == 1 ? 0 : tensor.stride[i]; };
    rows.row_stride = stride(0);
    if (tensor.rank == 3) {
        rows.head_stride = stride(1);
        rows.element_stride = stride(2);
    } else {
        rows.element_stride = stride(1);
    }
    return rows;
}

void read_row(const TensorRows &rows, int64_t row, int64_t head, int32_t dim, float *out) {
    const skerry_dtype dtype = rows.tensor->dtype;
    const int64_t size = size_of(dtype);
    const uint8_t *at = rows.base() + size * (row * rows.row_stride + head * rows.head_stride);
    if (dtype == SKERRY_DTYPE_F32 && (rows.element_stride == 1 || dim == 1)) {
        std::memcpy(out, at, static_cast<size_t>(dim) * sizeof(float));
        return;
    }
    for (int32_t c = 0; c < dim; ++c)
        out[c] = read_value(at + size * c * rows.element_stride, dtype);
}

void write_row(const TensorRows &rows, int64_t row, int64_t head, int32_t dim, const float *values) {
    const skerry_dtype dtype = rows.tensor->dtype;
    const int64_t size = size_of(dtype);
    uint8_t *at = const_cast<uint8_t *>(rows.base()) + size * (row * rows.row_stride + head * rows.head_stride);
    for (int32_t c = 0; c < dim; ++c) {
        uint8_t *place = at + size * c * rows.element_stride;
        if (dtype == SKERRY_DTYPE_F32) {
            std::memcpy(place, &values[c], sizeof(float));
        } else {
            const uint16_t bits = dtype == SKERRY_DTYPE_F16 ? f32_to_f16(values[c]) : f32_to_bf16(values[c]);
            std::memcpy(place, &bits, sizeof bits);
        }
    }
}

int64_t count_unstorable(const TensorRows &rows, int64_t row, int64_t head, int32_t dim, skerry_dtype store) {
    const skerry_dtype dtype = rows.tensor->dtype;
    const int64_t size = size_of(dtype);
    const uint8_t *at = rows.base() + size * (row * rows.row_stride + head * rows.head_stride);
    const float largest = largest_storable(store);
    int64_t count = 0;
    if (dtype == SKERRY_DTYPE_F32 && (rows.element_stride == 1 || dim == 1)) {
        for (int32_t c = 0; c < dim; ++c) {
            float value = 0;
            std::memcpy(&value, at + static_cast<size_t>(c) * sizeof value, sizeof value);
            count += std::fabs(value) <= largest ? 0 : 1;
        }
        return count;
    }
    for (int32_t c = 0; c < dim; ++c)
        count += std::fabs(read_value(at + size * c * rows.element_stride, dtype)) <= largest ? 0 : 1;
    return count;
}

void zero_unstorable(float *row, int32_t dim, skerry_dtype store) {
    const float largest = largest_storable(store);
    for (int32_t c = 0; c < dim; ++c) {
        if (!(std::fabs(row[c]) <= largest)) row[c] = 0;
    }
}

Status check_output(const skerry_tensor &tensor, int32_t rank, const int64_t *shape, bool at_least, int32_t argument, const char *what,
                    skerry_error *error) {
    if (const Status status = check_tensor(tensor, rank, shape, at_least, argument, what, error); status < 0) return status;
    for (int32_t i = 0; i < rank; ++i) {
        if (tensor.shape[i] > 1 && tensor.stride[i] == 0) {
            return fail(error, SKERRY_ERROR_ARGUMENT, SKERRY_SUBJECT_TENSOR, i, 0, 1,
                        "%s.stride[%d] is 0: rows of an output would lie on each other", what, i);
        }
    }
    return SKERRY_OK;
}

Status check_tensor(const skerry_tensor &tensor, int32_t rank, const int64_t *shape, bool at_least, int32_t argument, const char *what,
                    skerry_error *error) {
    if (tensor.data == nullptr) {
        return fail(error, SKERRY_ERROR_ARGUMENT, SKERRY_SUBJECT_TENSOR, argument, 0, 0, "%s.data is NULL", what);
    }
    if (tensor.dtype < SKERRY_DTYPE_F32 || tensor.dtype > SKERRY_DTYPE_BF16) {
        return fail(error, SKERRY_ERROR_ARGUMENT, SKERRY_SUBJECT_DTYPE, argument, tensor.dtype, SKERRY_DTYPE_BF16,
                    "%s.dtype is %d, which is none of f32, f16, bf16", what, tensor.dtype);
    }
    if (tensor.device_type != SKERRY_DEVICE_CPU || tensor.device_index != 0) {
        return fail(error, SKERRY_ERROR_UNSUPPORTED, SKERRY_SUBJECT_TENSOR, argument, tensor.device_type, SKERRY_DEVICE_CPU,
                    "%s lies on device %d:%d; this build reads host memory", what, tensor.device_type, tensor.device_index);
    }
    if (tensor.rank != rank) {
        return fail(error, SKERRY_ERROR_ARGUMENT, SKERRY_SUBJECT_TENSOR, argument, tensor.rank, rank, "%s.rank is %d, expected %d", what,
                    tensor.rank, rank);
    }
    for (int32_t i = 0; i < rank; ++i) {
        const bool fits = at_least && i == 0 ? tensor.shape[i] >= shape[i] : tensor.shape[i] == shape[i];
        if (!fits) {
            return fail(error, SKERRY_ERROR_ARGUMENT, SKERRY_SUBJECT_TENSOR, i, tensor.shape[i], shape[i],
                        "%s.shape[%d] is %lld, expected %lld", what, i, static_cast<long long>(tensor.shape[i]),
                        static_cast<long long>(shape[i]));
        }
        // Element offsets stay within 62 bits, so that their sums and byte sizes fit.
        constexpr int64_t most = int64_t{1} << 40;
        if (tensor.shape[i] > 1 && (tensor.stride[i] > most || tensor.stride[i] < -most)) {
            return fail(error, SKERRY_ERROR_ARGUMENT, SKERRY_SUBJECT_TENSOR, i, tensor.stride[i], most, "%s.stride[%d] is out of range",
                        what, i);
        }
    }
    return SKERRY_OK;
}

} // namespace skerry
