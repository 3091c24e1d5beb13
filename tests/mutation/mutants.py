"""Where djjobs can be broken: one condition of a statement, one lock, one `if`, one call at a time.

Places are found by their text and by the syntax tree, so that they are found again when code has moved.
"""

from __future__ import annotations

import ast
import fnmatch
import hashlib
import io
import itertools
import re
import tokenize
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

#: Where SQL is, and where the code is that uses it.
SQL = ("djjobs/sql/*.py",)
PYTHON = (
    *(f"djjobs/queue/{name}.py" for name in ("claim", "finish", "judge", "leases", "cleanup", "enqueue", "cancel")),
    "djjobs/run/hooks.py",
    "djjobs/recurring/rows.py",
)
#: The guards that the project asked about by name: part of the mutant's name, and what it does.
NAMED = (
    ("begin_scheduling", "drop: (last_scheduled"),
    ("delete_orphans", "drop: timestamp <= %(seen)s"),
    ("is_still_silent", "return True"),
    ("_claim_once", "drop: queue.change("),
)

#: What most tests notice.
_DULL = ("which", "look", "alternative", "case", "if", "operand")

_OPAQUE = re.compile(r"\{+[^{}]*\}+|%\(\w+\)s|'[^']*'")
_TOKEN = re.compile(
    r"(?P<open>\()|(?P<close>\))|\b(?P<and>AND)\b|\b(?P<or>OR)\b|\b(?P<between>BETWEEN)\b"
    r"|\b(?P<clause>WHERE|WHEN)\b"
    r"|\b(?P<end>ORDER BY|GROUP BY|LIMIT|FOR UPDATE|OFFSET|SET|FROM|JOIN|ON|THEN|ELSE|END|SELECT|UPDATE|DELETE"
    r"|INSERT|VALUES|CASE|EXCEPT|UNION|AS)\b"
)
_LOCK = re.compile(r"\bFOR UPDATE( SKIP LOCKED)?|(?<!FOR UPDATE) SKIP LOCKED")
_TRAILING = re.compile(r"(?<=[\w)\]}'])(?<!\bIN)\s+\{+[\w\[\]]+\}+$")
_WHICH = re.compile(r"(\w+\.)?(table_name|key_hash|run_id|name|scope|role) (=|IN) %\(\w+\)s")
_OPPOSITE = {"<=": ">", ">=": "<", "<": ">=", ">": "<="}
_TIME = re.compile(r"(?<![<>])(<=|>=|<|>)(?!>)")


@dataclass(frozen=True)
class Mutant:
    """One change of one file.

    Parameters
    ----------
    kind : str
        In SQL "guard" (a condition of a change, or of a part that statements share), "look" (one of a plain SELECT),
        "which" (which row or table is meant), "alternative", "time", "lock" and "case"; in Python "call", "raise",
        "return", "if" and "operand".
    where : str
        The statement or the function.
    pieces : tuple of str
        The texts around the placeholders of the statement, which every SQL made from it contains in this order.
    """

    file: str
    kind: str
    where: str
    what: str
    start: int
    end: int
    replacement: str
    pieces: tuple[str, ...] = ()

    @property
    def name(self) -> str:
        return f"{Path(self.file).stem}:{self.where} {self.what}"

    @property
    def is_named(self) -> bool:
        return any(where in self.where and what in self.what for where, what in NAMED)

    def apply(self, source: str) -> str:
        return source[: self.start] + self.replacement + source[self.end :]


def find(root: Path) -> list[Mutant]:
    """All mutants of the tree, in a fixed order, each with a name of its own."""
    found = [mutant for pattern in SQL for path in _files(root, pattern) for mutant in _in_sql(root, path)]
    found += [mutant for pattern in PYTHON for path in _files(root, pattern) for mutant in _in_python(root, path)]
    names: dict[str, int] = {}
    unique = []
    for mutant in found:
        number = names[mutant.name] = names.get(mutant.name, 0) + 1
        again = f" (no. {number})" if number > 1 else ""
        unique.append(Mutant(**{**mutant.__dict__, "what": mutant.what + again}))
    return unique


def choose(mutants: list[Mutant], only: str = "", sample: int = 0, seed: int = 0) -> list[Mutant]:
    """Those whose name has the pattern in it; of these a sample, mostly guards, that a seed fixes.

    What the project asked about by name is always among the sample. Of the kinds that most tests notice only the
    sixteenth part comes before the guards are used up.
    """
    if only:
        mutants = [mutant for mutant in mutants if fnmatch.fnmatch(mutant.name, f"*{only}*")]
    if not sample or sample >= len(mutants):
        return mutants

    def rank(mutant: Mutant) -> tuple[bool, bool, str]:
        chance = hashlib.sha256(f"{seed} {mutant.name}".encode()).hexdigest()
        dull = mutant.kind in _DULL and chance >= "1"
        return not mutant.is_named, dull, chance

    chosen = set(sorted(mutants, key=rank)[:sample])
    return [mutant for mutant in mutants if mutant in chosen]


def _files(root: Path, pattern: str) -> list[Path]:
    return sorted(root.glob(pattern))


# -- SQL ----------------------------------------------------------------------------------------------------------


def _in_sql(root: Path, path: Path) -> Iterator[Mutant]:
    source = path.read_text()
    file = str(path.relative_to(root))
    names, offsets = _names_by_line(source), _line_offsets(source)
    for token in tokenize.generate_tokens(io.StringIO(source).readline):
        if token.type != tokenize.STRING or not names.get(token.start[0]):
            continue
        prefix = re.match(r"\w*(\"\"\"|'''|\"|')", token.string)
        assert prefix
        inner = token.string[prefix.end() : -len(prefix.group(1))]
        at = offsets[token.start[0] - 1] + token.start[1] + prefix.end()
        pieces = _pieces(inner)
        for kind, what, start, end, replacement in _changes(inner):
            yield Mutant(file, kind, names[token.start[0]], what, at + start, at + end, replacement, pieces)


def _names_by_line(source: str) -> dict[int, str]:
    """The statement or function that each line belongs to; none for docstrings."""
    names: dict[int, str] = {}

    def visit(node: ast.AST, name: str) -> None:
        for child in ast.iter_child_nodes(node):
            inner = name
            if isinstance(child, ast.FunctionDef):
                inner = child.name
            elif isinstance(child, ast.Assign) and isinstance(child.targets[0], ast.Name):
                inner = name or child.targets[0].id
            elif isinstance(child, ast.AnnAssign) and isinstance(child.target, ast.Name):
                inner = name or child.target.id
            is_docstring = isinstance(child, ast.Expr) and isinstance(child.value, ast.Constant)
            if inner and not is_docstring and isinstance(child, ast.stmt):
                for line in range(child.lineno, (child.end_lineno or child.lineno) + 1):
                    names[line] = inner
            elif is_docstring:
                for line in range(child.lineno, (child.end_lineno or child.lineno) + 1):  # type: ignore[attr-defined]
                    names.pop(line, None)
            visit(child, inner)

    visit(ast.parse(source), "")
    return names


def _line_offsets(source: str) -> list[int]:
    offsets = [0]
    for line in source.splitlines(keepends=True):
        offsets.append(offsets[-1] + len(line))
    return offsets


def _pieces(text: str) -> tuple[str, ...]:
    pieces = (" ".join(piece.split()) for piece in re.split(r"\{+[^{}]*\}+", text))
    return tuple(piece for piece in pieces if len(piece) > 1)


def _changes(text: str) -> Iterator[tuple[str, str, int, int, str]]:
    masked = _OPAQUE.sub(lambda match: re.sub(r"[^{}]", "x", match.group()), text)
    is_look = text.lstrip().startswith("SELECT") and "FOR UPDATE" not in text
    seen = set()
    for joined_by, start, end in _parts(masked, text, 0, len(masked), True):
        part = " ".join(text[start:end].split())
        if (start, end) in seen or part in ("TRUE", ""):
            continue
        seen.add((start, end))
        if joined_by == "or":
            yield "alternative", f"never: {part}", start, end, "FALSE"
            continue
        if joined_by == "case":
            yield "case", f"never: {part}", start, end, "FALSE"
            continue
        kind = "which" if _WHICH.fullmatch(part) else "look" if is_look else "guard"
        yield kind, f"drop: {part}", start, end, "TRUE"
        if len(_TIME.findall(part)) == 1 and ("now}" in part or "%(seen)s" in part):
            (match,) = _TIME.finditer(text, start, end)
            yield "time", f"turn round: {part}", *match.span(), _OPPOSITE[match.group()]
    for match in _LOCK.finditer(text):
        if match.group(1):
            yield "lock", "drop: SKIP LOCKED", *match.span(1), ""
        if match.group().startswith("FOR UPDATE"):
            yield "lock", f"drop: {match.group()}", *match.span(), ""
        else:
            yield "lock", "drop: SKIP LOCKED", *match.span(), ""


def _parts(masked: str, text: str, start: int, end: int, outermost: bool = False) -> Iterator[tuple[str, int, int]]:
    """The conditions between two places: how each is joined to its neighbours, where it begins and where it ends."""
    # A piece of text may begin in the middle of a condition.
    clause, begin = "", start
    separators: list[tuple[str, int, int]] = []
    opened: list[int] = []
    inner: list[tuple[int, int]] = []
    between = 0
    regions: list[tuple[str, int, int, list[tuple[str, int, int]]]] = []
    for match in _TOKEN.finditer(masked, start, end):
        kind = match.lastgroup or ""
        if kind == "open":
            opened.append(match.end())
        elif kind == "close":
            if opened:
                first = opened.pop()
                if not opened:
                    inner.append((first, match.start()))
        elif opened:
            continue
        elif kind == "between":
            between += 1
        elif kind == "and" and between:
            between -= 1
        elif kind in ("and", "or"):
            separators.append((kind, match.start(), match.end()))
        else:
            regions.append((clause, begin, match.start(), separators))
            clause, begin, separators = match.group().lower(), match.end(), []
    regions.append((clause, begin, end, separators))
    for clause, begin, stop, separators in regions:
        yield from _parts_of_region(text, clause, begin, stop, separators)
    for first, last in inner:
        yield from _parts(masked, text, first, last)


def _parts_of_region(
    text: str, clause: str, start: int, end: int, separators: list[tuple[str, int, int]]
) -> Iterator[tuple[str, int, int]]:
    if clause not in ("", "where", "when") or (not separators and clause == ""):
        return
    borders = [(start, start), *((first, last) for _, first, last in separators), (end, end)]
    joins = [kind for kind, _, _ in separators]
    for number, ((_, first), (last, _)) in enumerate(itertools.pairwise(borders)):
        around = set(joins[max(number - 1, 0) : number + 1])
        joined_by = "or" if around == {"or"} else "case" if clause == "when" and not around else "and"
        yield from _trimmed(text, joined_by, first, last)


def _trimmed(text: str, joined_by: str, start: int, end: int) -> Iterator[tuple[str, int, int]]:
    """Without the space around, and without what is filled in after a condition."""
    part = text[start:end]
    while (shorter := _TRAILING.sub("", part.rstrip())) != part:
        part = shorter
    stripped = part.lstrip()
    start += len(part) - len(stripped)
    is_whole = stripped.count("(") == stripped.count(")") and stripped.count("/*") == stripped.count("*/")
    is_condition = re.search(r"[=<>]|\b(IS|IN|EXISTS|BETWEEN|NOT)\b", stripped) or re.fullmatch(r"\{+_\w+\}+", stripped)
    if is_whole and is_condition:
        yield joined_by, start, start + len(stripped)


# -- Python ---------------------------------------------------------------------------------------------------------


def _in_python(root: Path, path: Path) -> Iterator[Mutant]:
    source = path.read_text()
    file, offsets = str(path.relative_to(root)), _line_offsets(source)
    lines = source.splitlines(keepends=True)

    def offset(line: int, column: int) -> int:
        return offsets[line - 1] + len(lines[line - 1].encode()[:column].decode())

    def span(node: ast.AST) -> tuple[int, int]:
        place = node.lineno, node.col_offset, node.end_lineno, node.end_col_offset  # type: ignore[attr-defined]
        return offset(*place[:2]), offset(*place[2:])

    for where, function in _functions(ast.parse(source), ""):
        for kind, what, node, replacement in _changes_of(function, lambda node: source[slice(*span(node))]):
            yield Mutant(file, kind, where, " ".join(what.split()), *span(node), replacement)


def _functions(node: ast.AST, prefix: str) -> Iterator[tuple[str, ast.FunctionDef]]:
    for child in ast.iter_child_nodes(node):
        name = prefix
        if isinstance(child, (ast.FunctionDef, ast.ClassDef)):
            name = f"{prefix}.{child.name}" if prefix else child.name
        if isinstance(child, ast.FunctionDef):
            yield name, child
        yield from _functions(child, name)


def _own_nodes(function: ast.AST) -> Iterator[ast.AST]:
    """The nodes of a function that are not of a function inside it."""
    for child in ast.iter_child_nodes(function):
        if isinstance(child, (ast.FunctionDef, ast.Lambda)):
            continue
        yield child
        yield from _own_nodes(child)


def _changes_of(function: ast.FunctionDef, text: object) -> Iterator[tuple[str, str, ast.AST, str]]:
    says: dict[int, str] = {}

    def words(node: ast.AST) -> str:
        if id(node) not in says:
            says[id(node)] = text(node)  # type: ignore[operator]
        return says[id(node)]

    is_predicate = isinstance(function.returns, ast.Name) and function.returns.id == "bool"
    for node in _own_nodes(function):
        if isinstance(node, ast.If):
            yield "if", f"negate: if {words(node.test)}", node.test, f"not ({words(node.test)})"
        elif isinstance(node, ast.BoolOp):
            yield from _operands(node, words)
        elif isinstance(node, ast.Expr) and isinstance(node.value, ast.Call) and not words(node).startswith("logger."):
            yield "call", f"drop: {words(node)}", node, "pass"
        elif isinstance(node, ast.Raise):
            yield "raise", f"drop: {words(node)}", node, "pass"
        elif isinstance(node, ast.Return) and is_predicate:
            for value in ("True", "False"):
                if words(node) != f"return {value}":
                    yield "return", f"return {value}, not {words(node)[7:]}", node, f"return {value}"


def _operands(node: ast.BoolOp, words: object) -> Iterator[tuple[str, str, ast.AST, str]]:
    nothing = "True" if isinstance(node.op, ast.And) else "False"
    for value in node.values:
        said = words(value)  # type: ignore[operator]
        yield "operand", f"{nothing}, not {said}", value, nothing


def contains(sql: str, pieces: tuple[str, ...]) -> bool:
    """Whether a statement was made from a template with these texts around its placeholders."""
    place = 0
    for piece in pieces:
        place = sql.find(piece, place)
        if place < 0:
            return False
        place += len(piece)
    return True
