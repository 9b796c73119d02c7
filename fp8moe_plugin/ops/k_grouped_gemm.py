"""GEMMs of groups that differ in K: the gradients of experts' weights."""

from collections.abc import Sequence

import torch

from fp8moe_plugin.errors import InvalidInputError
from fp8moe_plugin.formats.fp8_block import GROUP
from fp8moe_plugin.jit.launch import Slot
from fp8moe_plugin.jit.launcher import Prepared
from fp8moe_plugin.launches.sm90.k_grouped import KGroupedLayout, k_grouped_launches
from fp8moe_plugin.ops import devices, reference
from fp8moe_plugin.ops.checks import (
    FP8,
    CheckedOnce,
    check_aligned,
    check_apart,
    check_multiple,
    check_shape,
    check_tensor,
    debugs,
    two_parts,
)
from fp8moe_plugin.ops.devices import Device, prepares
from fp8moe_plugin.ops.operands import Quantized, k_major
from fp8moe_plugin.ops.option_checks import check_flag, check_int, check_ints

RECIPE = (1, 1, 128)
K_GROUPED_N_MULTIPLE = 16


def k_grouped_fp8_gemm_nt_contiguous(
    a: Quantized,
    b: Quantized,
    d: torch.Tensor,
    ks_cpu: Sequence[int],
    grouped_layout: torch.Tensor,
    c: torch.Tensor,
    recipe: tuple[int, int, int] = RECIPE,
    compiled_dims: str = "mn",
    use_psum_layout: bool = False,
) -> torch.Tensor:
    """`d[g] = c[g] + a_g @ b_g.T` for G groups of K_g channels each, accumulated in float32 every 128 K.

    The gradient of an expert's weight adds up over its tokens, which are K. The same call gives the same bits. Captures
    in a CUDA graph after a first call. Where `c` is `d`, subnormal sums become zero.

    Args:
        a: e4m3 with M * sum(K) elements, `[M, K_g]` of one group after the other, and float32 scales
            `[M, sum(K) / 128]` of any strides; K-major ones are read in place, others are copied first.
        b: as `a`, with N instead of M; N a multiple of 16.
        d: float32 `[G, M, N]`.
        ks_cpu: K of each group, multiples of 128; a group of 0 gets `d[g] = c[g]`.
        grouped_layout: int32 `[G]` on the device, the same numbers; only read with FP8MOE_DEBUG=1.
        c: addend of the dtype and shape of `d`; may be `d` itself.
        recipe: only (1, 1, 128), DeepGEMM's recipe for Hopper GPUs.
        compiled_dims: ignored; no kernel is compiled for a shape.
        use_psum_layout: only False, as in DeepGEMM.
    Raises:
        InvalidInputError: wrong dtype, shape, stride, device or option.
    """
    _check_options(recipe, use_psum_layout)
    _check_once(*two_parts("a", a), *two_parts("b", b), d, grouped_layout, c)
    ks = _checked_ks(ks_cpu, d.shape[0])
    for name, pair, rows in (("a", a, d.shape[1]), ("b", b, d.shape[2])):
        _check_size(name, pair, rows, sum(ks))
    c_is_d = c.data_ptr() == d.data_ptr()
    check_apart("d", d, a=a[0], b=b[0], c=None if c_is_d else c)
    if debugs(d.is_cuda) and grouped_layout.tolist() != list(ks):
        raise InvalidInputError(
            f"grouped_layout holds {grouped_layout.tolist()}, ks_cpu {list(ks)}. Pass the same numbers in both."
        )
    device = devices.sm90_device_of(d)
    if d.numel() == 0:
        return d
    if device is None:
        reference.k_grouped_gemm(a, b, ks, c, d)
        return d
    if not c_is_d:
        for group in (group for group, k in enumerate(ks) if k == 0):
            d[group].copy_(c[group])
    if any(ks):
        _launch(device, a, b, d, ks, c)
    return d


def _launch(device: Device, a: Quantized, b: Quantized, d: torch.Tensor, ks: tuple[int, ...], c: torch.Tensor) -> None:
    m, n = d.shape[1:]
    (a_scales, _, a_stride), (b_scales, _, b_stride) = k_major(a[0].view(m, -1), a[1]), k_major(b[0].view(n, -1), b[1])
    addresses = tuple(tensor.data_ptr() for tensor in (a[0], a_scales, b[0], b_scales, c, d))
    for run in prepared_k_grouped(device, KGroupedLayout(m, n, ks, a_stride, b_stride)):
        run(addresses)


@prepares("k_grouped_fp8_gemm_nt_contiguous")
def prepared_k_grouped(device: Device, layout: KGroupedLayout) -> list[Prepared]:
    """Returns a callable for each launch of a call, given the addresses of A, its scales, B, its scales, C and D."""
    launches = k_grouped_launches(layout, tuple(map(Slot, range(6))), device.multiprocessors)
    return [device.prepare([launch]) for launch in launches]


# ---- checks ----------------------------------------------------------------------------------------------------------


def _check_options(recipe: tuple[int, int, int], use_psum_layout: bool) -> None:
    if check_ints("recipe", recipe, (3,), "Leave it out.") != RECIPE:
        raise InvalidInputError(f"recipe is {recipe}, needs {RECIPE}: Hopper GPUs have no other. Leave it out.")
    check_flag("use_psum_layout", use_psum_layout)
    if use_psum_layout:
        raise InvalidInputError(
            "use_psum_layout is set, which DeepGEMM does not take here for FP8 either. Pass K of each group."
        )


def _check(
    a: torch.Tensor,
    a_scales: torch.Tensor,
    b: torch.Tensor,
    b_scales: torch.Tensor,
    d: torch.Tensor,
    grouped_layout: torch.Tensor,
    c: torch.Tensor,
) -> None:
    """Raise `InvalidInputError` unless these are valid tensors for some K."""
    check_tensor("d", d, dtype=torch.float32, shape=(None, None, None))
    groups, m, n = d.shape
    check_multiple("d's N", n, K_GROUPED_N_MULTIPLE)
    for name, values, scales, rows in (("a", a, a_scales, m), ("b", b, b_scales, n)):
        check_tensor(name, values, dtype=FP8, device=d.device)
        shape = (rows, None)
        check_tensor(f"{name}'s scales", scales, dtype=torch.float32, shape=shape, device=d.device, contiguous=False)
    check_tensor("grouped_layout", grouped_layout, dtype=torch.int32, shape=(groups,), device=d.device)
    check_tensor("c", c, dtype=torch.float32, shape=(groups, m, n), device=d.device)
    for name, tensor in (("c", c), ("d", d)):
        check_aligned(name, tensor)


_check_once = CheckedOnce(_check)


def _checked_ks(ks: Sequence[int], groups: int) -> tuple[int, ...]:
    if not isinstance(ks, list | tuple):
        raise InvalidInputError(f"ks_cpu is a {type(ks).__name__}, not a list. Pass K of each group as ints.")
    if len(ks) != groups:
        raise InvalidInputError(f"ks_cpu has {len(ks)} groups, d {groups}. Pass K of each group, 0 for an empty one.")
    for group, k in enumerate(ks):
        check_int(f"ks_cpu[{group}]", k)
        if k != 0:
            check_multiple(f"ks_cpu[{group}]", k, GROUP)
    return tuple(ks)


def _check_size(name: str, pair: Quantized, rows: int, k: int) -> None:
    """Raise `InvalidInputError` unless an operand has `rows` rows, and the K of its groups add up to `k`."""
    values, scales = pair
    if values.numel() != rows * k:
        raise InvalidInputError(
            f"{name} has {values.numel()} elements, needs {rows} x {k}, rows by the sum of ks_cpu. "
            "Check the layout of the call."
        )
    check_shape(f"{name}'s scales", scales, (rows, k // GROUP))
