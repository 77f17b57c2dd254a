"""All numbers of the decisions are in one file, few enough to be known, each with unit, range and reason."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator
from pathlib import Path

import pytest

from broker.core import plan
from broker.core.plan import tunables

PLAN = Path(plan.__file__).parent
FILE = PLAN / "tunables.py"
MOST = 180


def _entries() -> dict[str, ast.Call]:
    found = {}
    for node in ast.parse(FILE.read_text()).body:
        if isinstance(node, ast.Assign) and isinstance(node.value, ast.Call):
            (target,) = node.targets
            assert isinstance(target, ast.Name) and isinstance(node.value.func, ast.Name)
            if node.value.func.id == "tunable":
                found[target.id] = node.value
    return found


def _number(node: ast.expr | None) -> bool:
    """Whether an expression is a number, or a tuple or arithmetic of nothing but numbers."""
    match node:
        case ast.Constant(value=bool()):
            return False
        case ast.Constant(value=int() | float()):
            return True
        case ast.UnaryOp(operand=operand):
            return _number(operand)
        case ast.BinOp(left=left, right=right):
            return _number(left) and _number(right)
        case ast.Tuple(elts=parts) | ast.List(elts=parts):
            return bool(parts) and all(_number(part) for part in parts)
        case ast.Dict(values=parts):
            return bool(parts) and all(_number(part) for part in parts)
        case _:
            return False


def _hidden(source: str) -> Iterator[str]:
    """Numbers under names of their own: constants of the module, and defaults of settings and prices."""
    for node in ast.parse(source).body:
        match node:
            case ast.Assign(targets=[ast.Name(id=name)], value=value) | ast.AnnAssign(target=ast.Name(id=name), value=value):
                if name.strip("_").isupper() and _number(value):
                    yield name
            case ast.ClassDef(name=owner, body=body) if re.search("Settings|Prices", owner):
                for field in body:
                    if isinstance(field, ast.AnnAssign) and _number(field.value):
                        yield f"{owner}.{ast.unparse(field.target)}"


def test_there_are_few_and_each_is_used() -> None:
    """What nobody reads is no tunable."""
    names = _entries()
    assert 0 < len(names) <= MOST
    read = "".join(path.read_text() for path in PLAN.glob("*.py") if path != FILE)
    assert [name for name in names if not re.search(rf"\b{name}\b", read)] == []


def test_each_has_unit_range_and_reason() -> None:
    """And is refused outside its range."""
    for name, call in _entries().items():
        _, unit, least, most, why = [ast.literal_eval(part) if n else None for n, part in enumerate(call.args)]
        assert unit and len(str(why)) > 5 and float(str(least)) < float(str(most)), name
    with pytest.raises(ValueError, match="must be from 1 to 5 s"):
        tunables.tunable(7.0, "s", 1, 5, "a reason")
    with pytest.raises(ValueError, match="with a reason"):
        tunables.tunable(3.0, "s", 1, 5, "")


@pytest.mark.parametrize("path", sorted(path for path in PLAN.glob("*.py") if path != FILE), ids=lambda path: path.stem)
def test_no_number_has_a_name_elsewhere(path: Path) -> None:
    """Constants and defaults of settings refer to the one file."""
    assert list(_hidden(path.read_text())) == []


def test_a_hidden_number_is_found() -> None:
    """The check itself."""
    source = "A_S = 3.0\n_B = (1, -2)\nC = A_S * 2\nclass XSettings:\n    gap_s: float = 1.5\n    on: bool = True\n"
    assert list(_hidden(source)) == ["A_S", "_B", "XSettings.gap_s"]
