/* SPDX-License-Identifier: MIT */
#ifndef SKERRY_H
#define SKERRY_H

/* The stable interface, in reading order. */

#include <skerry/version.h>
#include <skerry/base.h>
#include <skerry/hooks.h>
#include <skerry/tensor.h>
#include <skerry/device.h>
#include <skerry/router.h>
#include <skerry/cache.h>
#include <skerry/sequence.h>
#include <skerry/step.h>
#include <skerry/stats.h>

#endif
