"""The kernels of `csrc` on a CPU: g++ compiles their sources, a CUDA thread is a fiber, a seed decides who runs when.

A test calls an op inside `Device.execute(seed, ops)`: what the op launches is queued as on a stream, and then all of it
runs. The same seed gives the same run. `EmulatorError` says what went wrong and what each warp was waiting for.

What is modelled, and fails where it is used wrongly:

- Asynchronous copies (TMA, bulk copies, cp.async) complete at random moments, a few of them very late: where a wait is
  missing, results are wrong. So are those of wgmma, whose registers are NaN until the wait.
- mbarriers with arrivals, bytes and phases; named barriers; collectives of a warp. A deadlock or livelock is reported.
- wgmma needs its fence, commit and wait, and the same operations from all warps of a warpgroup.
- TMA and wgmma may not read ordinary stores to shared memory, or cp.async, before fence.proxy.async.
- A block may not end before its copies have used its shared memory. Shared memory is NaN at first; accesses to it and
  asynchronous copies are checked for bounds and alignment.
- Stores to other devices arrive at random moments until a fence or the end of the kernel waits for them; bulk copies,
  of which some wait to the last, until the same after their thread has waited. The end of a kernel may come long after
  that of its last block.
- Blocks take multiprocessors by threads and shared memory; a kernel launched early runs beside the one before it.
  One launched normally follows that one, and others only if that one has waited for them.

What it cannot see:

- Weak memory: global memory is sequentially consistent, and fences of it (also fence.proxy.async.global) do nothing.
- Ordinary loads and stores of global memory out of bounds, and races between them: no other thread runs in between. A
  loop that waits for memory must use ld.acquire or __nanosleep, or it never ends.
- Speed, bank conflicts, limits of registers; the rounding of tensor cores (sums are float32) and of approximations.

To add a kernel: nothing, if an op launches it; `conftest.py` lists those to be compiled ahead. To add an instruction:
the compiler names the function that `runtime/ptx.h` lacks, or the CUDA one that `runtime/cuda.h` lacks; what it does
belongs into one of the runtime's sources, by subject.
"""
