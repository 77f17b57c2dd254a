"""Names of subjects: an id that is no token is refused, since it would reach somebody else (BUS-1)."""

from __future__ import annotations

import inspect
import typing

import pytest

from subjects import names
from subjects.ids import IngressId, RequestId

BY_ID = [
    (made.__name__, parameter)
    for _, made in inspect.getmembers(names, inspect.isfunction)
    if made.__module__ == names.__name__ and not made.__name__.startswith("_")
    for parameter, kind in typing.get_type_hints(made).items()
    if getattr(kind, "__name__", "") in ("IngressId", "ReplicaId", "WorkerId")
]


def test_names_by_id_are_found() -> None:
    """So that the next test cannot pass for want of names."""
    assert {"claim", "run", "out", "unheard", "all_unheard", "commands"} <= {name for name, _ in BY_ID}


@pytest.mark.parametrize(("name", "parameter"), BY_ID)
@pytest.mark.parametrize("wrong", ["", "a.b", "*", ">", "a b", "a\n"])
def test_an_id_that_is_no_token_makes_no_name(name: str, parameter: str, wrong: str) -> None:
    """Wildcards and dots would hear or speak to others."""
    made = getattr(names, name)
    more = {"request": RequestId("g-1"), "attempt": 1} if name == "unheard" else {}
    with pytest.raises(ValueError, match="is not a subject token"):
        made(**{parameter: wrong}, **more)


def test_a_reply_subject_is_heard_by_its_gateway() -> None:
    """What the gateway subscribes to matches, whatever the length of its name."""
    ingress = IngressId("g" * 48 + "-0123456789")
    name = names.unheard(ingress, RequestId(f"{ingress}-123456"), 2)
    assert name == names.all_unheard(ingress).replace(".*.*", f".{ingress}-123456.2")
