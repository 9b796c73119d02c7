// The format of the kernel's weights, by a macro of its key (WEIGHT_MACROS of fp8moe_plugin/plan/sm90/catalog.py).
#pragma once
#if defined(FP8_CHANNEL)
#include "formats/weights_fp8_channel.cuh"
#elif defined(DECODED)
#include "formats/weights_mxfp4_decoded.cuh"
#elif defined(MXFP4)
#include "formats/weights_mxfp4.cuh"
#else
#include "formats/weights_fp8.cuh"
#endif
