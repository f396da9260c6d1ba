"""The state of SQLite databases: right or wrong row by row, and what is no database."""

from __future__ import annotations

import asyncio
import sqlite3
from contextlib import closing

import pytest
from conftest import require
from state_cases import judge, run

from agentrl.errors import TaskError, VerifierError
from agentrl.sandboxes import open_pool
from agentrl.verifiers.state.stores import sqlite_state

SCHEMA = (
    "CREATE TABLE orders (id INTEGER, name TEXT, price REAL, at, data BLOB); CREATE TABLE empty"
    " (x);"
)


FILL = "INSERT INTO orders VALUES (1, 'a', 2.5, NULL, x'00ff'), (2, 'b\"c', 1e999, 'now', NULL);"


ORDERS = [
    {"id": 2, "name": 'b"c', "price": {"py": "1e999"}, "at": "now", "data": None},
    {"id": 1, "name": "a", "price": 2.5, "at": None, "data": {"py": "b'\\x00\\xff'"}},
]


TABLES = {"orders": ORDERS, "empty": []}


HIDDEN = {"database": "shop.db", "tables": TABLES}


def database(tmp_path, script=""):
    path = tmp_path / "shop.db"
    path.unlink(missing_ok=True)
    with closing(sqlite3.connect(path)) as connection:
        connection.executescript(SCHEMA + FILL + script)
    return path.read_bytes()


def judge_all(backend, contents, hidden=HIDDEN):
    """Scores of databases in one pool."""
    if backend == "bubblewrap":
        require("bubblewrap")

    async def all_of_them():
        pool = open_pool(backend, size=2)
        try:
            jobs = (
                judge(sqlite_state(), hidden, {"shop.db": content}, pool=pool)
                for content in contents
            )
            return await asyncio.gather(*jobs)
        finally:
            await pool.close()

    return asyncio.run(all_of_them())


CHANGES = {
    "a row more": "INSERT INTO empty VALUES (1);",
    "a row less": "DELETE FROM orders WHERE id = 1;",
    "another type": "UPDATE orders SET at = 0 WHERE id = 1;",
    "text for a blob": "UPDATE orders SET data = CAST(data AS TEXT);",
    "a table more": "CREATE TABLE planted (x);",
    "a table less": "DROP TABLE empty;",
    "a trigger": "CREATE TRIGGER planted AFTER INSERT ON empty BEGIN DELETE FROM orders; END;",
    "a trigger by a name of the system's": "CREATE TRIGGER planted AFTER INSERT ON empty BEGIN DELETE FROM orders; "
    "END; PRAGMA writable_schema = ON; UPDATE sqlite_master SET name = 'sqlite_planted', "
    "sql = replace(sql, 'planted', 'sqlite_planted') WHERE type = 'trigger';",
    "a view by a name of the system's": "CREATE VIEW planted AS SELECT 1; PRAGMA writable_schema = ON; "
    "UPDATE sqlite_master SET name = 'sqlite_stat1', sql = replace(sql, 'planted', 'sqlite_stat1') "
    "WHERE name = 'planted';",
    "a table by a name of the system's": "CREATE TABLE planted (x); PRAGMA writable_schema = ON; UPDATE sqlite_master "
    "SET name = 'sqlite_planted', tbl_name = 'sqlite_planted', sql = 'CREATE TABLE sqlite_planted (x)' "
    "WHERE name = 'planted';",
    "a view": "CREATE VIEW planted AS SELECT 1;",
    "a view for a table": "DROP TABLE empty; CREATE VIEW empty AS SELECT 1 AS x WHERE 0;",
    "a virtual table": "CREATE VIRTUAL TABLE planted USING fts5(x);",
    "a column that is huge": "CREATE TABLE planted (x, y AS (zeroblob(900000000))); INSERT INTO planted VALUES (1);",
    "many rows that are huge": "CREATE TABLE planted (x, y AS (zeroblob(800000))); "
    "WITH n(x) AS (SELECT 1 UNION ALL SELECT x + 1 FROM n LIMIT 5000) INSERT INTO planted SELECT x FROM n;",
    "text that is no text": "CREATE TABLE planted AS SELECT CAST(x'ff' AS TEXT) AS x;",
    "a name that is none": 'CREATE TABLE "a""b; DROP TABLE orders" (x);',
    "a lying schema": "PRAGMA writable_schema = ON; UPDATE sqlite_master SET sql = 'CREATE TABLE orders (id)' "
    "WHERE name = 'orders';",
    "a broken schema": "PRAGMA writable_schema = ON; UPDATE sqlite_master SET sql = 'nonsense';",
}  # fmt: skip


@pytest.mark.parametrize("backend", ["bubblewrap", "process"])
def test_a_database_is_right_or_wrong_row_by_row(tmp_path, backend):
    good = database(tmp_path)
    wrong = [database(tmp_path, change) for change in CHANGES.values()]
    broken = [b"", b"x" * 5000, good[:5000], good[:100] + b"\xff" * (len(good) - 100)]
    right, indexed, *others = judge_all(
        backend,
        [good, database(tmp_path, "CREATE INDEX i ON orders (id); ANALYZE;"), *wrong, *broken],
    )
    assert (right.value, right.parts, right.why) == (
        1.0,
        {"tables": 1.0},
        "the rows are as expected",
    )
    assert indexed.value == 1.0
    names = [*CHANGES, "empty file", "no database", "cut short", "overwritten"]
    assert {name: score.value for name, score in zip(names, others, strict=True)} == dict.fromkeys(
        names, 0.0
    )
    whys = {name: score.why.encode().decode() for name, score in zip(names, others, strict=True)}
    assert whys["a trigger"] == "trigger planted is not expected"
    assert whys["a trigger by a name of the system's"] == "trigger sqlite_planted is not expected"
    assert whys["many rows that are huge"].endswith("its rows take more than 900,000 bytes")


def test_what_may_be_written_is_free_in_a_database(tmp_path):
    changed = database(
        tmp_path,
        "UPDATE orders SET at = id; INSERT INTO empty VALUES (9); CREATE VIEW v AS SELECT 1;",
    )
    hidden = {**HIDDEN, "may_write": ["orders.at", "empty", "v"]}
    assert [score.value for score in judge_all("process", [changed], hidden)] == [1.0]
    assert [
        score.value for score in judge_all("process", [changed], {**HIDDEN, "may_write": ["v"]})
    ] == [0.0]
    ordered = {**HIDDEN, "ordered": ["orders"]}
    assert [score.value for score in judge_all("process", [database(tmp_path)], ordered)] == [0.0]


def test_a_missing_database_is_wrong_and_a_missing_pool_is_broken(tmp_path):
    with pytest.raises(VerifierError, match="pool"):
        run(sqlite_state(), HIDDEN, {"shop.db": database(tmp_path)})

    async def missing():
        pool = open_pool("process", size=1)
        try:
            return await judge(sqlite_state(), HIDDEN, {}, declared=["shop.db"], pool=pool)
        finally:
            await pool.close()

    assert asyncio.run(missing()).value == 0.0


def test_a_grader_without_sqlite_is_broken_and_gives_no_number(tmp_path):
    async def broken():
        pool = open_pool("process", size=1)
        try:
            verifier = sqlite_state(python="/bin/false")
            await judge(verifier, HIDDEN, {"shop.db": database(tmp_path)}, pool=pool)
        finally:
            await pool.close()

    with pytest.raises(VerifierError, match="no database at all"):
        asyncio.run(broken())


WHOLE = SCHEMA + "CREATE INDEX by_name ON orders (name); PRAGMA user_version = 3;"
RECREATED = "ALTER TABLE empty RENAME TO old; CREATE TABLE empty ({}); DROP TABLE old;"
SCHEMA_CHANGES = {
    "an index more": "CREATE INDEX planted ON orders (id);",
    "an index less": "DROP INDEX by_name;",
    "an index of other columns": "DROP INDEX by_name; CREATE INDEX by_name ON orders (price);",
    "a unique index": "DROP INDEX by_name; CREATE UNIQUE INDEX by_name ON orders (name);",
    "a typed column": RECREATED.format("x TEXT"),
    "a check": RECREATED.format("x CHECK (x > 0)"),
    "a default": RECREATED.format("x DEFAULT 7"),
    "a hidden column": RECREATED.format("x, y AS (x) VIRTUAL"),
    "a trigger": "CREATE TRIGGER planted AFTER INSERT ON empty BEGIN DELETE FROM orders; END;",
    "a view": "CREATE VIEW planted AS SELECT 1;",
    "a version": "PRAGMA user_version = 4;",
    "an application": "PRAGMA application_id = 1;",
}


def test_the_whole_schema_is_compared_where_the_task_names_it(tmp_path):
    add = WHOLE.removeprefix(SCHEMA)
    contents = [database(tmp_path, add + change) for change in SCHEMA_CHANGES.values()]
    right, bare, *wrong = judge_all(
        "bubblewrap",
        [database(tmp_path, add), database(tmp_path), *contents],
        HIDDEN | {"schema": WHOLE.replace("; ", ";\n  ")},
    )
    assert (right.value, right.why) == (1.0, "the rows are as expected")
    assert bare.value == 0.0 and "by_name is missing" in bare.why
    assert {name: score.value for name, score in zip(SCHEMA_CHANGES, wrong, strict=True)} == (
        dict.fromkeys(SCHEMA_CHANGES, 0.0)
    )


def test_what_may_be_written_may_have_another_schema(tmp_path):
    hidden = HIDDEN | {"schema": SCHEMA, "may_write": ["empty"]}
    (score,) = judge_all("bubblewrap", [database(tmp_path, RECREATED.format("x TEXT"))], hidden)
    assert score.value == 1.0


@pytest.mark.parametrize("schema", [7, "CREATE nonsense"])
def test_a_schema_that_is_no_sql_is_the_tasks_fault(schema):
    with pytest.raises(TaskError):
        run(sqlite_state(), HIDDEN | {"schema": schema}, {"shop.db": b""})
