"""Reads a database that an agent wrote, inside the grader sandbox; run by `python3 -I -S -B -c`
with two paths.

Nothing hidden is here, so a file that takes this process over gains nothing: it can make it write
rows, which the agent could have put into the file in the first place.
"""

import contextlib
import json
import re
import sqlite3
import sys

MOST_BYTES = 900_000
# What SQLite itself keeps: https://www.sqlite.org/fileformat2.html#intschema
INTERNAL = re.compile("sqlite_sequence|sqlite_stat[1-4]")


class TooLarge(Exception):
    """There is more than anybody would compare."""


def main(database: str, out: str) -> None:
    """Write what `dump` returns, or `{"error": why}`, to the file `out`."""
    try:
        with contextlib.closing(
            sqlite3.connect(f"file:{database}?mode=ro&immutable=1", uri=True)
        ) as connection:
            found = dump(connection)
    except TooLarge:
        found = {"error": f"its rows take more than {MOST_BYTES:,} bytes"}
    except (sqlite3.Error, OverflowError, MemoryError) as error:
        found = {"error": f"it is no readable database: {type(error).__name__}"}
    with open(out, "w") as stream:
        json.dump(found, stream)


def dump(connection: sqlite3.Connection) -> dict[str, object]:
    """Rows of every plain table, the names of all that acts on tables or looks like one, and the
    whole schema: `{"tables": {name: [row]}, "others": ["trigger name"], "schema": {..}}`.

    Raises:
        TooLarge: all rows together are.
        sqlite3.Error: it is no database.
    """
    connection.execute("PRAGMA trusted_schema = OFF")
    connection.execute("PRAGMA query_only = ON")
    if hasattr(connection, "setlimit"):  # from Python 3.11 on
        connection.setlimit(sqlite3.SQLITE_LIMIT_LENGTH, MOST_BYTES)
    connection.text_factory = lambda text: text.decode("utf-8", "surrogateescape")
    tables: dict[str, list[dict[str, object]]] = {}
    others, size = [], 0
    schema = connection.execute(
        "SELECT type, name, sql FROM sqlite_master ORDER BY name"
    ).fetchall()
    for kind, name, sql in schema:
        if kind == "index" or (kind == "table" and INTERNAL.fullmatch(name)):
            continue
        if kind != "table" or str(sql).upper().startswith("CREATE VIRTUAL"):
            others.append(f"{kind} {name}")
            continue
        rows = connection.execute('SELECT * FROM "{}"'.format(name.replace('"', '""')))
        columns = [column[0] for column in rows.description]
        tables[name] = []
        for row in rows:
            tables[name].append(dict(zip(columns, map(plain, row), strict=True)))
            size += len(json.dumps(tables[name][-1]))
            if size > MOST_BYTES:
                raise TooLarge
    return {"tables": tables, "others": others, "schema": read_schema(connection)}


def read_schema(connection: sqlite3.Connection) -> dict[str, str]:
    """`KIND NAME` of every table, index, view and trigger -> its definition with single spaces, and
    the two numbers that an application keeps in the header.

    Raises:
        TooLarge: all definitions together are.
        sqlite3.Error: it is no database.
    """
    rows = connection.execute("SELECT type, name, sql FROM sqlite_master").fetchall()
    schema = {
        f"{kind} {name}": " ".join(str(sql or "").split())
        for kind, name, sql in rows
        if not (kind == "table" and INTERNAL.fullmatch(name))
    }
    for pragma in ("user_version", "application_id"):
        (value,) = connection.execute(f"PRAGMA {pragma}").fetchone()
        schema[f"pragma {pragma}"] = str(value)
    if sum(map(len, schema.values())) > MOST_BYTES:
        raise TooLarge
    return schema


def plain(value: object) -> object:
    """A value as JSON that keeps its type: floats and bytes by their hexadecimal form."""
    if isinstance(value, float):
        return {"float": value.hex()}
    return {"bytes": value.hex()} if isinstance(value, bytes) else value


if __name__ == "__main__":
    main(*sys.argv[1:3])
