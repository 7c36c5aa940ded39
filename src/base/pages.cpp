#include "base/pages.hpp"

#include <cstdint>

#if defined(__linux__)
#include <sys/mman.h>
#endif

namespace skerry {

void advise_huge_pages([[maybe_unused]] void *memory, [[maybe_unused]] size_t bytes) noexcept {
#if defined(__linux__) && defined(MADV_HUGEPAGE)
    // Whole huge pages only: what shares a page with other allocations is not ours to advise on.
    const uintptr_t begin = (reinterpret_cast<uintptr_t>(memory) + huge_page_bytes - 1) / huge_page_bytes * huge_page_bytes;
    const uintptr_t end = (reinterpret_cast<uintptr_t>(memory) + bytes) / huge_page_bytes * huge_page_bytes;
    if (begin < end) static_cast<void>(madvise(reinterpret_cast<void *>(begin), end - begin, MADV_HUGEPAGE));
#endif
}

} // namespace skerry
