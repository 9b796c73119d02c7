"""wgmma reads an operand in registers while it runs: nothing may write them before the wait.

ptxas may give the registers to other values as soon as the instruction is issued, for example where the source decodes
the next operand before the wait. The emulator does not see that, so the machine code is checked.
"""

import re
from pathlib import Path

import pytest

from fp8moe_plugin.jit.cache import CHECKSUM_BYTES
from fp8moe_plugin.jit.compiler import entry_name, nvrtc_version
from fp8moe_plugin.jit.dump import disassembled, find_disassembler
from fp8moe_plugin.launches.kernel_sets import all_kernels
from fp8moe_plugin.plan.keys import KernelKey
from tests.shared import every_kernel

PACKED = [key for key in all_kernels() if ("MXFP4", 1) in key.defines]
PREDICATE = re.compile(r"^@!?U?P\w+\s+")
MULTIPLY = re.compile(r"QGMMA\.\S+\s+R\d+, R(\d+), gdesc")
WRITE = re.compile(r"([A-Z0-9]+)(\S*)\s+(?:U?P\w+, )?R(\d+)\b")
WAIT = "WARPGROUP.DEPBAR.LE gsb0, 0x0"
READERS = ("ST", "RED", "LDGSTS", "BAR", "SYNCS", "QGMMA", "UBLKCP", "UTMALDG", "R2UR")  # their first register is read
REGISTERS = {"CS2R": 2, ".64": 2, ".WIDE": 2, ".M88.2": 2, ".128": 4, ".M88.4": 4}  # else 1


class MachineCode:
    """Instructions, and where labels point, in the output of nvdisasm."""

    def __init__(self, text: str) -> None:
        self.instructions: list[str] = []
        self.labels: dict[str, int] = {}
        for line in text.splitlines():
            if label := re.match(r"\s*(\.L\S+):", line):
                self.labels[label[1]] = len(self.instructions)
            elif found := re.match(r"\s*/\*[0-9a-f]{4,}\*/\s+(.+?)\s*;", line):
                self.instructions.append(found[1])

    def following(self, at: int) -> list[int]:
        """Returns the instructions that may run after this one."""
        bare = PREDICATE.sub("", self.instructions[at])
        after = [at + 1] if at + 1 < len(self.instructions) else []
        always = bare == self.instructions[at]
        if bare.startswith(("EXIT", "RET")) and always:
            return []
        if bare.startswith("BRA") and (target := re.search(r"`\((\.L\S+)\)", bare)):
            conditional = not always or re.match(r"BRA(\.\S+)?\s+!?U?P|BRA\.", bare)
            return [self.labels[target[1]], *(after if conditional else [])]
        return after

    def overwritten(self) -> list[tuple[str, str]]:
        """Returns each wgmma of whose operand a register is written before the wait, and the instruction that does."""
        found = []
        for start, instruction in enumerate(self.instructions):
            if not (multiply := MULTIPLY.match(PREDICATE.sub("", instruction))):
                continue
            operand = set(range(int(multiply[1]), int(multiply[1]) + 4))
            seen: set[int] = set()
            left = self.following(start)
            while left:
                at = left.pop()
                if at in seen or PREDICATE.sub("", self.instructions[at]).startswith(WAIT):
                    continue
                seen.add(at)
                if operand & written(PREDICATE.sub("", self.instructions[at])):
                    found.append((instruction, self.instructions[at]))
                    break
                left += self.following(at)
        return found


def written(instruction: str) -> set[int]:
    """Returns the registers that an instruction writes."""
    write = WRITE.match(instruction)
    if not write or write[1].startswith(READERS):
        return set()
    count = max((size for name, size in REGISTERS.items() if name in write[1] + write[2]), default=1)
    return set(range(int(write[3]), int(write[3]) + count))


@pytest.fixture(scope="module")
def cache(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return every_kernel(tmp_path_factory) / "cache"


@pytest.mark.parametrize("key", PACKED, ids=str)
def test_no_operand_is_overwritten_while_it_is_read(cache: Path, key: KernelKey) -> None:
    disassembler = find_disassembler()
    assert disassembler, "the package triton has one"
    cubin = (cache / entry_name(key, nvrtc_version())).read_bytes()[CHECKSUM_BYTES:]
    code = MachineCode(disassembled(disassembler, cubin).decode())
    in_registers = ("DECODED", 1) not in key.defines
    assert any(MULTIPLY.match(PREDICATE.sub("", line)) for line in code.instructions) == in_registers
    assert not code.overwritten()


LOOP = """
.L_x_1:
 /*0000*/ LDS.128 R{}, [R2] ;
 /*0010*/ @P0 BRA `(.L_x_2) ;
 /*0020*/ QGMMA.64x8x32.F32.E4M3.E4M3 R24, R28, gdesc[UR12], RZ, !UPT ;
 /*0030*/ BRA `(.L_x_1) ;
.L_x_2:
 /*0040*/ WARPGROUP.DEPBAR.LE gsb0, 0x0 ;
 /*0050*/ MOV R28, R1 ;
"""


@pytest.mark.parametrize(("register", "seen"), [(28, 1), (31, 1), (25, 1), (24, 0), (32, 0)])
def test_a_write_in_the_next_round_of_a_loop_is_seen(register: int, seen: int) -> None:
    assert len(MachineCode(LOOP.format(register)).overwritten()) == seen
