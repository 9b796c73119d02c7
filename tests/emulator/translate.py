"""Turn a preprocessed CUDA source into C++: shared variables ask the runtime, `asm` calls what runtime/ptx.h has."""

import itertools
import re
from collections.abc import Iterator

OPENING, CLOSING = "([{", ")]}"
REGISTERS = {"pred": "bool"}

EXTERN_SHARED = re.compile(r"extern\s+__shared__\s+(\w+)\s+(\w+)\[\];")
STATIC_SHARED = re.compile(r"__shared__\s+(\w+)\s+(\w+)\[(\w+)\];")
ASM = re.compile(r"\basm(?:\s+volatile)?\s*(?=\()")
STRING = re.compile(r'"((?:[^"\\]|\\.)*)"')
OPERAND = re.compile(r'"[^"]+"\s*(\(.*\))', re.DOTALL)
LABEL = re.compile(r"(\w+):\s+")
GUARD = re.compile(r"@(!?)(\w+)\s+")

STATIC_VARIABLE = (
    "static char {1}_name; "
    "auto& {1} = *reinterpret_cast<{0}(*)[{2}]>(emu::static_shared(&{1}_name, sizeof({0}) * {2}));"
)


def translate(source: str) -> str:
    source = EXTERN_SHARED.sub(r"static constexpr emu::DynamicShared<\1> \2;", source)
    source = STATIC_SHARED.sub(lambda match: STATIC_VARIABLE.format(*match.groups()), source)
    translated, at = [], 0
    for number, match in enumerate(ASM.finditer(source)):
        end = _end_of_parentheses(source, match.end())
        statement = _statement(source[match.end() + 1 : end - 1], number)
        translated += [source[at : match.start()], statement]
        at = end
    return "".join(translated) + source[at:]


def _end_of_parentheses(text: str, begin: int) -> int:
    depth = 0
    for at, character in _outside_of_strings(text, begin):
        depth += (character in OPENING) - (character in CLOSING)
        if depth == 0:
            return at + 1
    raise ValueError(f"no end of: {text[begin : begin + 200]}")


def _split(text: str, separator: str) -> list[str]:
    """Returns the parts of `text` between separators that are in no string and no brackets."""
    cuts, depth = [-1], 0
    for at, character in _outside_of_strings(text, 0):
        depth += (character in OPENING) - (character in CLOSING)
        if character == separator and depth == 0:
            cuts.append(at)
    return [text[a + 1 : b].strip() for a, b in itertools.pairwise([*cuts, len(text)])]


def _outside_of_strings(text: str, begin: int) -> Iterator[tuple[int, str]]:
    quoted = False
    for at in range(begin, len(text)):
        if text[at] == '"':
            quoted = not quoted
        elif not quoted:
            yield at, text[at]


def _statement(asm: str, number: int) -> str:
    """Returns the C++ of what stands in the parentheses of an `asm`; `number` tells its labels from others."""
    asm = re.sub(r"^#.*$", "", asm, flags=re.MULTILINE)  # the preprocessor's line numbers
    template, *lists = _split(asm, ":")
    ptx = "".join(STRING.findall(template)).replace(r"\n", " ").strip()
    operands = []
    for operand in itertools.chain(*(_split(part, ",") for part in lists[:2])):
        if match := OPERAND.fullmatch(operand):
            operands.append(match[1])
    if ptx.startswith("{"):
        ptx = ptx[1:-1]
    lines = [_instruction(line.strip(), operands, number) for line in ptx.split(";") if line.strip()]
    return "{ " + " ".join(lines) + " }"


def _instruction(line: str, operands: list[str], number: int) -> str:
    label, condition = "", ""
    if match := LABEL.match(line):
        label, line = f"{match[1]}_{number}: ", line[match.end() :]
    if match := GUARD.match(line):
        condition, line = f"if ({match[1]}{match[2]}) ", line[match.end() :]
    name, _, arguments = line.partition(" ")
    if name == ".reg":
        kind, variable = arguments.split()
        return f"{REGISTERS[kind.removeprefix('.')]} {variable};"
    if name == "bra":
        return f"{label}{condition}goto {arguments}_{number};"
    function = re.sub(r"\W+", "_", name)
    return f"{label}{condition}ptx::{function}({', '.join(_arguments(arguments, operands))});"


def _arguments(text: str, operands: list[str]) -> Iterator[str]:
    """Yields the operands of an instruction one by one, without brackets; `_` is one that nobody wants."""
    for argument in re.findall(r"[%\w]+", text):
        if argument != "_":
            yield operands[int(argument[1:])] if argument.startswith("%") else argument
