"""Instructions written by hand, as a disassembler prints them."""


def listing(text, name="kernel"):
    """The text of `nvdisasm -c -hex`: a line an instruction, with its control bits before it, `stall=4,wait=1 FADD R1`.
    Bits that are not written are those of an instruction that waits for nothing and holds nothing."""
    lines, place = [f".text.{name}:"], 0
    for line in filter(None, map(str.strip, text.splitlines())):
        if line.endswith(":"):
            lines.append(line)
            continue
        bits = {"stall": 1, "write": 7, "read": 7, "wait": 0}
        if "=" in line.split()[0]:
            known, line = line.split(None, 1)
            bits |= {n: int(x) for n, x in (pair.split("=") for pair in known.split(","))}
        word = (bits["stall"] | bits["write"] << 5 | bits["read"] << 8 | bits["wait"] << 11) << 41
        lines.append(f"        /*{place:04x}*/                   {line} ;   /* 0x{0:016x} */")
        lines.append(f"                                                   /* 0x{word:016x} */")
        place += 16
    return "\n".join(lines) + "\n"
