/* SPDX-License-Identifier: MIT */
#ifndef SKERRY_BASE_H
#define SKERRY_BASE_H

/* Rules that hold for every header of this library
 *
 * Structs      Three kinds, named in the first line of their text.
 *              desc   in, grows at its end. Start with SKERRY_DESC(type): zero in every other field is a valid choice.
 *              info   out, grows at its end. The caller sets struct_size (SKERRY_DESC), the library writes no further.
 *              plain  frozen for the life of the major version.
 *              A desc, and every string and array it points to, is read during the call only.
 * Failure      A negative status. Outputs are untouched (handles become NULL), the state is as before the call. Only
 *              SKERRY_ERROR_DEVICE_LOST and SKERRY_ERROR_INTERNAL poison the object they name.
 * Handles      create / retain / release are shared ownership; release takes NULL and cannot fail.
 * Ids          One-field structs with a generation inside: an id whose object is gone is SKERRY_ERROR_STALE_ID.
 * Callbacks    `void *user` first. They may not call back into the library unless their text says so.
 * Threads      Three words: "any", "one at a time per cache", "before first use".
 * Never        The library does not abort, exit, throw across this border, print, read the environment, install signal
 *              handlers, or start a thread that was not asked for.
 * Units        bytes are uint64_t and end in _bytes, tokens end in _tokens, shares are parts per million and end in _ppm,
 *              positions are int64_t and count tokens of a sequence from 0, strides are in elements.
 */

#include <stddef.h>
#include <stdint.h>

#include <skerry/version.h>

#if defined(_WIN32)
#if defined(SKERRY_BUILDING)
#define SKERRY_EXPORT __declspec(dllexport)
#else
#define SKERRY_EXPORT __declspec(dllimport)
#endif
#elif defined(__GNUC__)
#define SKERRY_EXPORT __attribute__((visibility("default")))
#else
#define SKERRY_EXPORT
#endif

#if defined(__GNUC__) && !defined(SKERRY_NO_CHECK)
#define SKERRY_CHECKED __attribute__((warn_unused_result))
#else
#define SKERRY_CHECKED
#endif

/* A function whose status must be looked at, and one that returns something else. */
#define SKERRY_API SKERRY_EXPORT SKERRY_CHECKED
#define SKERRY_API_VOID SKERRY_EXPORT

/* Zeroes everything but the size, in C99 and C++11 alike. (Compilers that warn of fields without an initialiser keep quiet about the
 * designated form; C++ has it from 2020 on.) */
#if defined(__cplusplus) && __cplusplus < 202002L
#define SKERRY_DESC(type) { (uint32_t) sizeof(type) }
#else
#define SKERRY_DESC(type) { .struct_size = (uint32_t) sizeof(type) }
#endif

#ifdef __cplusplus
extern "C" {
#endif

/* Result of every call that can fail: 0 success, > 0 success with a remark, < 0 failure. Numbers are never reused. */
typedef int32_t skerry_status;
enum {
    SKERRY_OK                  =   0,
    SKERRY_PENDING             =   1, /* queued on a stream; wait on it */
    SKERRY_INCOMPLETE          =   2, /* array too small; the needed count was written */
    SKERRY_MISS                =   3, /* nothing stored for that key */

    SKERRY_ERROR_ARGUMENT      = -10, /* a value is outside what the text allows */
    SKERRY_ERROR_STRUCT_SIZE   = -11, /* struct_size fits no known version */
    SKERRY_ERROR_NEWER_FIELD   = -12, /* a field that this build does not know is set */
    SKERRY_ERROR_STALE_ID      = -13, /* the id's object is gone */
    SKERRY_ERROR_STATE         = -14, /* legal call, wrong moment */
    SKERRY_ERROR_NONFINITE     = -15, /* NaN or infinity in K, V, Q or a score, and the policy is to refuse */

    SKERRY_ERROR_OUT_OF_MEMORY = -20,
    SKERRY_ERROR_OVER_BUDGET   = -21, /* the caller's own limit, not the machine's */
    SKERRY_ERROR_TIER_FULL     = -22,

    SKERRY_ERROR_UNSUPPORTED   = -30, /* this device or build cannot */
    SKERRY_ERROR_BACKEND       = -31, /* backend missing, too old or too new */
    SKERRY_ERROR_DEVICE_LOST   = -32,

    SKERRY_ERROR_IO            = -40,
    SKERRY_ERROR_FORMAT        = -41, /* stored bytes made under other settings */
    SKERRY_ERROR_CORRUPT       = -42, /* stored bytes fail their check */

    SKERRY_ERROR_INTERNAL      = -90  /* a broken invariant; please report */
};

/* What an error is about. Values are never reused. */
enum {
    SKERRY_SUBJECT_NONE          = 0,
    SKERRY_SUBJECT_ARGUMENT      = 1,  /* a pointer or number; index counts the arguments from 0 */
    SKERRY_SUBJECT_STRUCT        = 2,
    SKERRY_SUBJECT_FLAGS         = 3,
    SKERRY_SUBJECT_LAYER         = 10, /* index is the layer */
    SKERRY_SUBJECT_HEADS         = 11,
    SKERRY_SUBJECT_KEY_DIM       = 12,
    SKERRY_SUBJECT_VALUE_DIM     = 13,
    SKERRY_SUBJECT_WINDOW        = 14,
    SKERRY_SUBJECT_SINKS         = 15,
    SKERRY_SUBJECT_RECENT        = 16,
    SKERRY_SUBJECT_PERIOD        = 17,
    SKERRY_SUBJECT_FORMAT        = 18,
    SKERRY_SUBJECT_ROTARY        = 19,
    SKERRY_SUBJECT_BUDGET        = 20, /* found and allowed are bytes */
    SKERRY_SUBJECT_POLICY        = 21,
    SKERRY_SUBJECT_SCORE         = 22,
    SKERRY_SUBJECT_SEQUENCE      = 30, /* index is the place in the step, or -1 */
    SKERRY_SUBJECT_POSITION      = 31,
    SKERRY_SUBJECT_TOKENS        = 32,
    SKERRY_SUBJECT_STEP          = 33,
    SKERRY_SUBJECT_TENSOR        = 40, /* index is the dimension, or -1 */
    SKERRY_SUBJECT_DTYPE         = 41,
    SKERRY_SUBJECT_VALUES        = 42, /* the numbers themselves; index is the token */
    SKERRY_SUBJECT_HOST_MEMORY   = 50,
    SKERRY_SUBJECT_PARALLEL_FOR  = 51,
    SKERRY_SUBJECT_BACKEND       = 60
};

/* info. Why a call failed. Owned by the caller; pass NULL when only the status matters. A call that succeeds leaves it alone. */
typedef struct skerry_error {
    uint32_t      struct_size;
    skerry_status status;
    uint32_t      subject;      /* SKERRY_SUBJECT_* */
    int32_t       index;        /* layer, head, dimension or array position, or -1 */
    int64_t       found;
    int64_t       allowed;
    char          message[232]; /* UTF-8, one line, zero-terminated */
} skerry_error;

/* Name of the enumerator ("SKERRY_ERROR_STATE"), or "SKERRY_UNKNOWN". Never NULL. Threads: any */
SKERRY_API_VOID const char *skerry_status_name(skerry_status status);

/* One English sentence about the status, without a full stop. Never NULL. Threads: any */
SKERRY_API_VOID const char *skerry_status_text(skerry_status status);

/* Version of the loaded library as SKERRY_VERSION_NUMBER. Threads: any */
SKERRY_API_VOID int32_t skerry_version(void);

/* Build description of the loaded library: version, compiler, backends. Never NULL. Threads: any */
SKERRY_API_VOID const char *skerry_build_text(void);

/* Non-zero when the loaded library can serve a program compiled against these headers. */
#define SKERRY_VERSION_CHECK() \
    (skerry_version() / 1000000 == SKERRY_API_MAJOR && \
     (SKERRY_API_MAJOR > 0 ? skerry_version() >= SKERRY_VERSION_NUMBER(SKERRY_API_MAJOR, SKERRY_API_MINOR, 0) \
                           : skerry_version() / 1000 == SKERRY_API_VERSION / 1000))

#ifdef __cplusplus
}
#endif

#endif
