#pragma once

// Reads router files (docs/router-files.md).

#include "io/source.hpp"
#include "model/router.hpp"

namespace skerry {

inline constexpr int32_t router_file_version = 1;

// Fills weights that hold nothing yet. Throws std::bad_alloc.
Status router_read(const ByteSource &source, Allocator &allocator, RouterWeights *out, skerry_error *error);

} // namespace skerry
