"""Text of a disassembler as instructions: operations, what their control bits say, loops, counts by class.

Read is what `nvdisasm -c -hex` and `cuobjdump -sass` print. The second word of an encoding says how the compiler
scheduled an instruction (Volta and later): cycles until the next one of its warp, the scoreboard that it holds until
its result is written or its operands are read, and the scoreboards that it waits for.
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cached_property

LINE = re.compile(r"^\s*/\*([0-9a-f]{4,})\*/\s+(.*?)\s*;\s*/\* 0x([0-9a-f]{16}) \*/")
WORD = re.compile(r"^\s*/\* 0x([0-9a-f]{16}) \*/\s*$")
LABEL = re.compile(r"^(\.L_x_\d+|\.L_\d+):")
FUNCTION = re.compile(r"^\.text\.(\w+):|^\s*Function : (\w+)")
NONE = 7  # of a scoreboard's number

CLASSES = [  # name, what its operations begin with: the first that fits
    ("matrix", r"[HQI]GMMA|[HIQD]MMA|UTC\w*MMA"), ("MUFU", r"MUFU"), ("FFMA", r"FFMA"), ("FMUL", r"FMUL"),
    ("FADD", r"FADD"), ("FMNMX", r"FMNMX"), ("FSEL", r"FSEL"), ("FSETP", r"FSETP|FSET"), ("half", r"H[A-Z]+2"),
    ("convert", r"F2F|F2FP|I2F|F2I|I2FP|FRND|I2I"), ("ISETP", r"ISETP"), ("SEL", r"SEL"),
    ("logic", r"LOP3|PLOP3|P2R|R2P|VOTE|POPC|FLO|BREV|BMSK"),
    ("integer", r"IADD|IMAD|LEA|SHF|IABS|VIADD|PRMT|SGXT|VIMNMX|IMNMX|IDP|IMUL|SHL|SHR|VABSDIFF"),
    ("move", r"MOV|CS2R|S2R|NOP|DEPC"), ("uniform", r"U(?!TMA)|R2UR|S2UR"), ("LDSM", r"LDSM"), ("LDS", r"LDS"),
    ("STS", r"STS|STAS"), ("LDGSTS", r"LDGSTS"), ("LDG", r"LDG|LD\b|LDC"), ("STG", r"STG|ST\b|RED|ATOM"),
    ("local", r"STL|LDL"), ("TMA", r"UTMA|UBLKCP"), ("SHFL", r"SHFL|REDUX"), ("barrier", r"BAR|SYNCS|NANOSLEEP"),
    ("fence", r"MEMBAR|FENCE|ERRBAR|CCTL"), ("wait", r"WARPGROUP|DEPBAR|LDGDEPBAR|ARRIVES|UTCBAR"),
    ("branch", r"BRA|BSSY|BSYNC|EXIT|BREAK|CALL|RET|BRX|JMP|WARPSYNC|YIELD"),
]  # fmt: skip
COMPILED = [(name, re.compile(rf"(?:{starts})")) for name, starts in CLASSES]


@dataclass(frozen=True)
class Instruction:
    """One instruction: its text without a predicate, the predicate, and its control bits. `write` and `read` are
    scoreboards, 7: none; `wait` is a mask of scoreboards; `stall` in cycles."""

    text: str
    predicate: str = ""
    stall: int = 1
    write: int = NONE
    read: int = NONE
    wait: int = 0
    target: int | None = None  # of a branch: where in the program
    targets: tuple[int, ...] = ()  # of a branch by a register

    @property
    def op(self) -> str:
        return self.text.split(None, 1)[0]

    @property
    def operands(self) -> str:
        return self.text.partition(" ")[2]

    @property
    def never(self) -> bool:
        """Whether its predicate is false by its name, as of the loads that ptxas puts before fences."""
        return self.predicate in ("@!PT", "@!UPT")

    @property
    def waits(self) -> bool:
        """Whether it asks a barrier in shared memory: a branch to it spins, once the barrier did not answer."""
        return self.op.startswith("SYNCS.PHASECHK")

    @cached_property
    def kind(self) -> str:
        """The class of the operation; one in no class is a class of its own."""
        return next((name for name, starts in COMPILED if starts.match(self.op)), self.op.split(".")[0])


@dataclass(frozen=True)
class Loop:
    """A loop from the instruction `start` to before `stop`, which follows its branch back."""

    start: int
    stop: int


@dataclass(frozen=True)
class Sass:
    """The instructions of one kernel."""

    name: str
    instructions: tuple[Instruction, ...]

    @cached_property
    def loops(self) -> tuple[Loop, ...]:
        """Loops that hold no other loop; those that spin on a barrier do not count, neither in nor out."""
        back = [
            Loop(x.target, i + 1)
            for i, x in enumerate(self.instructions)
            if x.target is not None
            and x.target <= i
            and x.op.startswith("BRA")
            and not self._spins(x.target, i)
            and not self._returns(x.target, i)
        ]
        outer = {a for a in back for b in back if a != b and a.start <= b.start and b.stop <= a.stop}
        return tuple(sorted((x for x in back if x not in outer), key=lambda x: x.start))

    def _spins(self, start: int, stop: int) -> bool:
        """Whether a branch goes back to itself, or a few instructions to one that asks a barrier again."""
        if start == stop:
            return True
        inside = self.instructions[start:stop]
        asks = any("TRYWAIT" in x.op or "PHASECHK" in x.op for x in inside)
        return stop - start < 12 and asks and not any(x.kind in ("matrix", "TMA") for x in inside)

    def _returns(self, start: int, stop: int) -> bool:
        """Whether a branch comes from behind the kernel's end, where a wait that failed is asked again."""
        return any(x.op == "EXIT" and not x.predicate for x in self.instructions[start:stop])

    @cached_property
    def products(self) -> tuple[Loop, ...]:
        """The loops with matrix instructions, in the order of the text."""
        return tuple(x for x in self.loops if any(i.kind == "matrix" for i in self.body(x)))

    def body(self, loop: Loop) -> tuple[Instruction, ...]:
        """A loop's instructions on the way on which no forward branch with a predicate is taken."""
        return tuple(self.instructions[i] for i in self.way(loop.start, loop.stop))

    def way(self, start: int, stop: int) -> Iterator[int]:
        """Places from `start` to before `stop` in the order of execution, by forward branches without a predicate."""
        i = start
        while i < stop:
            x = self.instructions[i]
            yield i
            ahead = x.op.startswith("BRA") and not x.predicate and x.target is not None and i < x.target <= stop
            i = x.target if ahead else i + 1  # type: ignore[assignment]


def counted(body: tuple[Instruction, ...]) -> Counter[str]:
    """Instructions by class; those that never run are left out."""
    return Counter(x.kind for x in body if not x.never)


def parse(text: str) -> tuple[Sass, ...]:
    """The kernels of a disassembler's text.

    ValueError where no instruction has its encoding: `nvdisasm` prints it with -hex.
    """
    kernels: list[tuple[str, list[tuple[int, str, int]], dict[str, int]]] = []
    lines = iter(text.splitlines())
    for line in lines:
        if named := FUNCTION.match(line):
            kernels.append((named[1] or named[2], [], {}))
        elif not kernels:
            continue
        elif label := LABEL.match(line):
            kernels[-1][2][label[1]] = len(kernels[-1][1])
        elif one := LINE.match(line):
            second = WORD.match(next(lines, ""))
            if second is None:
                raise ValueError(f"half an encoding: {line.strip()}")
            kernels[-1][1].append((int(one[1], 16), one[2], int(second[1], 16)))
    if not any(found for _, found, _ in kernels):
        raise ValueError("no instruction with its encoding: disassemble with `nvdisasm -c -hex` or `cuobjdump -sass`")
    return tuple(_kernel(*x) for x in kernels if x[1])


def _kernel(name: str, lines: list[tuple[int, str, int]], labels: dict[str, int]) -> Sass:
    places = {address: i for i, (address, _, _) in enumerate(lines)}
    return Sass(name, tuple(instruction(text, word, labels, places) for _, text, word in lines))


def instruction(text: str, word: int, labels: dict[str, int], places: dict[int, int]) -> Instruction:
    """One instruction of its text and the second word of its encoding."""
    bits = word >> 41
    predicate, _, rest = text.partition(" ") if text.startswith("@") else ("", "", text)
    rest, target = rest.strip(), None
    if rest.startswith("BRA"):
        if label := re.search(r"\((\.L\w+)\)", rest):
            target = labels.get(label[1])
        elif address := re.search(r"0x([0-9a-f]+)$", rest):
            target = places.get(int(address[1], 16))
    several = re.search(r'BRANCH_TARGETS ([^"]+)"', rest)
    targets = tuple(labels[x] for x in several[1].split(",") if x in labels) if several else ()
    return Instruction(
        rest, predicate, bits & 15, bits >> 5 & 7, bits >> 8 & 7, bits >> 11 & 63, target=target, targets=targets
    )
