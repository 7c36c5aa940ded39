#pragma once

#include <cstddef>

namespace skerry {

inline constexpr size_t huge_page_bytes = size_t{2} << 20;

// Asks for huge pages under memory that is about to be touched for the first time, where the system grants them on
// request. A hint: it cannot fail and changes no byte.
void advise_huge_pages(void *memory, size_t bytes) noexcept;

} // namespace skerry
