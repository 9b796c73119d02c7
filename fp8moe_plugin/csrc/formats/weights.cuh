// The format of the kernel's weights, by a macro of its key (WEIGHT_MACROS of fp8moe_plugin/plan/sm90/catalog.py).
#pragma once
#include "formats/weights_fp8.cuh"
