"""Compiles mask.lark to the LALR tables in mask.json: `python -m frisket.grammar.build`."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

HERE = Path(__file__).parent


def tables() -> dict[str, Any]:
    """The LALR tables of mask.lark, in the form JSON holds them.

    `states[s][symbol]` is n >= 0 for "go to state n" and n < 0 for "reduce by rule -n - 1". A rule is
    [symbol it makes, number of things it takes, name of the action or null to pass the one thing on].
    A symbol is a rule, the name of a pattern, or a word or sign as it is written.
    """
    from lark import Lark

    grammar = Lark((HERE / "mask.lark").read_text(encoding="utf-8"), parser="lalr")
    parser: Any = grammar.parser
    table = parser.parser.parser.parse_table
    spelled = {t.name: t.pattern.value for t in grammar.terminals if t.pattern.type == "str"}
    clash = {r.origin.name for r in grammar.rules} & set(spelled.values())
    assert not clash, f"rules and words share a name: {clash}"
    rules = sorted(grammar.rules, key=lambda r: (r.origin.name, r.order))
    numbers = {rule: -i - 1 for i, rule in enumerate(rules)}
    rows = {
        state: {spelled.get(symbol, symbol): action for symbol, action in sorted(row.items())}
        for state, row in table.states.items()
    }
    order = _reachable(table.start_states["start"], rows)
    return {
        "start": 0,
        "end": order[table.end_states["start"]],
        "patterns": {t.name: t.pattern.value for t in grammar.terminals if t.name not in spelled},
        "signs": sorted(spelled.values(), key=lambda s: (-len(s), s)),
        "ignore": sorted(grammar.ignore_tokens),
        "rules": [[r.origin.name, len(r.expansion), r.alias] for r in rules],
        "states": [
            {s: order[t] if a.name == "Shift" else numbers[t] for s, (a, t) in rows[state].items()} for state in order
        ],
    }


def _reachable(start: int, rows: dict[int, dict[str, Any]]) -> dict[int, int]:
    """Number the reachable states of lark's automaton in a fixed order: lark's own numbers change from run to run."""
    order = {start: 0}
    for state in (queue := [start]):
        for action, target in rows[state].values():
            if action.name == "Shift" and target not in order:
                order[target] = len(order)
                queue.append(target)
    return order


def text() -> str:
    data = tables()
    rows = ",\n".join(json.dumps(s, separators=(",", ":")) for s in data.pop("states"))
    head = json.dumps(data, separators=(",", ":"))
    return f'{head[:-1]},"states":[\n{rows}\n]}}\n'


if __name__ == "__main__":
    (HERE / "mask.json").write_text(text(), encoding="utf-8")
