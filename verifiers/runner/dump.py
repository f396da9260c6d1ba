"""Reads a database that an agent wrote, inside the grader sandbox; run by `python3 -I -S -B -c` with two paths.

Nothing hidden is here, so a file that takes this process over gains nothing: it can make it write rows, which the agent
could have put into the file in the first place.
"""

import contextlib
import json
import sqlite3
import sys

MOST_BYTES = 900_000


def main(database: str, out: str) -> None:
    """Write `{"tables": {name: [row]}, "others": ["trigger name"]}`, or `{"error": why}`, to the file `out`."""
    try:
        with contextlib.closing(sqlite3.connect(f"file:{database}?mode=ro&immutable=1", uri=True)) as connection:
            text = json.dumps(dump(connection))
    except (sqlite3.Error, OverflowError, MemoryError) as error:
        text = json.dumps({"error": f"it is no readable database: {type(error).__name__}"})
    if len(text) > MOST_BYTES:
        text = json.dumps({"error": f"its rows take more than {MOST_BYTES:,} bytes"})
    with open(out, "w") as stream:
        stream.write(text)


def dump(connection: sqlite3.Connection) -> dict[str, object]:
    """Rows of every plain table, and the names of all that acts on tables or looks like one."""
    connection.execute("PRAGMA trusted_schema = OFF")
    connection.execute("PRAGMA query_only = ON")
    connection.text_factory = lambda text: text.decode("utf-8", "surrogateescape")
    tables: dict[str, list[dict[str, object]]] = {}
    others = []
    schema = connection.execute("SELECT type, name, sql FROM sqlite_master ORDER BY name").fetchall()
    for kind, name, sql in schema:
        if kind == "index" or name.startswith("sqlite_"):
            continue
        if kind != "table" or str(sql).upper().startswith("CREATE VIRTUAL"):
            others.append(f"{kind} {name}")
            continue
        rows = connection.execute('SELECT * FROM "{}"'.format(name.replace('"', '""')))
        columns = [column[0] for column in rows.description]
        tables[name] = [dict(zip(columns, map(plain, row), strict=True)) for row in rows]
    return {"tables": tables, "others": others}


def plain(value: object) -> object:
    """A value as JSON that keeps its type: a float by its exact hexadecimal form, bytes by theirs."""
    if isinstance(value, float):
        return {"float": value.hex()}
    return {"bytes": value.hex()} if isinstance(value, bytes) else value


if __name__ == "__main__":
    main(*sys.argv[1:3])
