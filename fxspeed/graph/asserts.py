"""What Python code demands of a tensor's value: `assert` and `if ...: raise`.

A branch on a value that is known only when the model runs cannot be captured, unless one side of it does nothing but
raise: then the graph follows the other side, behind a check that raises the same.
"""

from __future__ import annotations

import builtins
import dataclasses
import dis
import linecache
import types
from collections.abc import Callable

#: Instructions of a branch that only raises; more are no mere message.
_LONGEST = 40


@dataclasses.dataclass(frozen=True)
class Demand:
    """`wanted` is the truth value that goes on; the other raises the built-in exception `error(message)`."""

    wanted: bool
    error: str
    message: str


def demand_at(frame: types.FrameType, outermost: types.CodeType, ours: Callable[[str], bool]) -> Demand | None:
    """What `frame`, which is about to branch on a truth value, demands of it; None if both sides go on.

    The model's own `except` clauses keep a demand from counting: those in frames inside that of `outermost`, but for
    the files for which `ours(file)` is true.
    """
    code = list(dis.get_instructions(frame.f_code))
    place = {i.offset: n for n, i in enumerate(code)}
    at = place.get(frame.f_lasti)
    if at is None:
        return None
    if code[at].opname == "TO_BOOL":
        at += 1
    jump = code[at]
    if not jump.opname.startswith("POP_JUMP") or not jump.opname.endswith(("_IF_TRUE", "_IF_FALSE")):
        return None
    taken = jump.opname.endswith("_IF_TRUE")
    for start, wanted in ((at + 1, taken), (place.get(jump.argval), not taken)):
        if start is not None and (found := _raised(code[start:], frame)) is not None:
            return None if _caught(frame, code[start].offset, outermost, ours) else Demand(wanted, *found)
    return None


def _raised(code: list[dis.Instruction], frame: types.FrameType) -> tuple[str, str] | None:
    """The built-in exception and its text that the straight code `code` begins with raising."""
    names, texts, made = [], [], False
    for step in code[:_LONGEST]:
        if step.opname in ("LOAD_ASSERTION_ERROR", "LOAD_COMMON_CONSTANT"):
            names.append("AssertionError")
        elif step.opname == "LOAD_GLOBAL" and not names:
            names.append(str(step.argval))
        elif step.opname == "LOAD_CONST":
            texts.append(step.argval)
        elif step.opname == "RAISE_VARARGS":
            kind = vars(builtins).get(names[0]) if names and names[0] not in frame.f_globals else None
            if not (isinstance(kind, type) and issubclass(kind, Exception)):
                return None
            plain = len(texts) == 1 and isinstance(texts[0], str) and not made
            file, line = frame.f_code.co_filename, frame.f_lineno
            where = f"{file}:{line}: {linecache.getline(file, line).strip()}"
            return names[0], texts[0] if plain else where if texts or made else ""
        elif "JUMP" in step.opname or step.opname.startswith(("RETURN", "STORE", "YIELD", "FOR_")):
            return None
        elif step.opname not in ("PRECALL", "CALL", "PUSH_NULL", "CACHE", "NOP"):
            made = True  # a text computed from values
    return None


def _caught(frame: types.FrameType, offset: int, outermost: types.CodeType, ours: Callable[[str], bool]) -> bool:
    """Whether the model itself handles what is raised at `offset` of `frame`."""
    each: types.FrameType | None = frame
    while each is not None and each.f_code is not outermost:
        if not ours(each.f_code.co_filename):
            steps = list(dis.get_instructions(each.f_code))
            for entry in dis.Bytecode(each.f_code).exception_entries:  # type: ignore[attr-defined]
                handler = [i.opname for i in steps if i.offset >= entry.target][:2]
                if entry.start <= offset < entry.end and handler[0] == "PUSH_EXC_INFO":
                    if handler[1] != "WITH_EXCEPT_START":
                        return True
        each = each.f_back
        offset = each.f_lasti if each is not None else 0
    return False
