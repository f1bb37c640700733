"""Write the tables of docs/from-others.md: how Quire reads the command lines of other servers."""

from __future__ import annotations

from pathlib import Path

from quire.cli.foreign import SERVERS, foreign_flags

PAGE = Path(__file__).resolve().parents[1] / "docs" / "from-others.md"


def page(text: str) -> str:
    """Return the page with the tables of today."""
    for server in SERVERS:
        begin, end = f"<!-- {server}: begin (written by tools/foreign_docs.py) -->", f"<!-- {server}: end -->"
        before, _, rest = text.partition(begin)
        _, _, after = rest.partition(end)
        text = f"{before}{begin}\n{table(server)}\n{end}{after}"
    return text


def table(server: str) -> str:
    """Return one line per flag of ``server``: what it is here."""
    lines = [f"| {SERVERS[server]} | here |", "|---|---|"]
    lines += [f"| `{flag}` | {_meaning(flag, rule)} |" for flag, rule in foreign_flags()[server].items()]
    return "\n".join(lines)


def _meaning(flag: str, rule: dict[str, object]) -> str:
    parts = []
    if rule.get("to") == "MODEL":
        parts.append("the argument MODEL")
    elif flag == "--speculative-config":
        parts.append("`--speculate`, `--draft-model` and `--spec-tokens`")
    elif "to" in rule:
        parts.append(f"`{rule['to']}`")
    values = rule.get("values", {})
    assert isinstance(values, dict)
    if named := ", ".join(f"`{theirs}` → `{ours}`" for theirs, ours in values.items() if theirs != "*"):
        parts.append(f"with {named}")
    if "effect" in rule:
        neutral = rule.get("neutral")
        assert neutral is None or isinstance(neutral, list)
        of = "" if neutral is None else ", ".join(f"`{value}`" for value in neutral) + ": "
        parts.append(f"{of}no effect: {rule['effect']}")
    if "instead" in rule:
        parts.append(f"{'else ' if parts else ''}refused: {rule['instead']}")
    return "; ".join(parts)


if __name__ == "__main__":
    PAGE.write_text(page(PAGE.read_text()))
