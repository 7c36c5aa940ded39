#include "store/arena.hpp"

#include <algorithm>
#include <new>

namespace skerry {

void Arena::reserve(uint64_t units, uint64_t records) {
    if (units >= none) throw std::bad_alloc(); // beyond what places can name: 256 GiB
    if (units == 0) return;
    free_.reserve(records + 1);
    references_.resize(units);
    memory_.resize(units * unit_bytes);
    free_.push_back(Extent{0, static_cast<uint32_t>(units)});
}

uint32_t Arena::take(uint32_t units) noexcept {
    for (Extent &extent : free_) {
        if (extent.units < units) continue;
        const uint32_t place = extent.begin;
        extent.begin += units;
        extent.units -= units;
        if (extent.units == 0) {
            const size_t index = static_cast<size_t>(&extent - free_.data());
            std::copy(free_.begin() + index + 1, free_.end(), free_.begin() + index);
            free_.resize(free_.size() - 1);
        }
        references_[place] = 1;
        used_ += units;
        return place;
    }
    return none;
}

bool Arena::release(uint32_t place, uint32_t units) noexcept {
    if (--references_[place] != 0) return false;
    used_ -= units;
    Extent *const end = free_.data() + free_.size();
    Extent *const next = std::lower_bound(free_.data(), end, place, [](const Extent &a, uint32_t b) { return a.begin < b; });
    const bool joins_before = next != free_.data() && next[-1].begin + next[-1].units == place;
    const bool joins_after = next != end && place + units == next->begin;
    if (joins_before && joins_after) {
        next[-1].units += units + next->units;
        std::copy(next + 1, end, next);
        free_.resize(free_.size() - 1);
    } else if (joins_before) {
        next[-1].units += units;
    } else if (joins_after) {
        next->begin = place;
        next->units += units;
    } else {
        // Between two free extents lies a record, so there is room for one more extent than there are records.
        free_.push_back(Extent{});
        std::copy_backward(next, end, end + 1);
        *next = Extent{place, units};
    }
    return true;
}

bool Arena::consistent() const noexcept {
    uint64_t free_units = 0;
    uint64_t last = 0;
    for (const Extent &extent : free_) {
        if (extent.units == 0 || (free_units > 0 && extent.begin <= last)) return false;
        last = uint64_t{extent.begin} + extent.units;
        free_units += extent.units;
    }
    return free_units + used_ == references_.size() && last <= references_.size();
}

} // namespace skerry
