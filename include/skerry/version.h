/* SPDX-License-Identifier: MIT */
#ifndef SKERRY_VERSION_H
#define SKERRY_VERSION_H

/* Version of the interface in these headers. A minor adds symbols, struct tails and enum members; a major changes anything
 * else. Before 1.0 every minor has its own SONAME. The build reads these three numbers. */
#define SKERRY_API_MAJOR 0
#define SKERRY_API_MINOR 1
#define SKERRY_API_PATCH 0

#define SKERRY_VERSION_NUMBER(major, minor, patch) ((major) * 1000000 + (minor) * 1000 + (patch))
#define SKERRY_API_VERSION SKERRY_VERSION_NUMBER(SKERRY_API_MAJOR, SKERRY_API_MINOR, SKERRY_API_PATCH)

#endif
