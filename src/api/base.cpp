#include <skerry/base.h>

#include "base/status.hpp"

#define SKERRY_STRING_(x) #x
#define SKERRY_STRING(x) SKERRY_STRING_(x)

const char *skerry_status_name(skerry_status status) { return skerry::status_name(status); }

const char *skerry_status_text(skerry_status status) { return skerry::status_text(status); }

int32_t skerry_version(void) { return SKERRY_API_VERSION; }

const char *skerry_build_text(void) {
    return "skerry " SKERRY_STRING(SKERRY_API_MAJOR) "." SKERRY_STRING(SKERRY_API_MINOR) "." SKERRY_STRING(
        SKERRY_API_PATCH) ", "
#if defined(__VERSION__)
                          "compiler " __VERSION__ ", "
#endif
                          "backends: cpu";
}
