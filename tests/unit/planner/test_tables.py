"""Tables are read as they are meant, or refused with what is wrong where."""

import pytest

from kdist.planner.tables.read import count, maybe, number, read_own_table, read_table, text

COLUMNS = {"machine": text, "gpus": count, "rate": number, "note": maybe(text)}


@pytest.fixture
def table(tmp_path):
    def write(content):
        path = tmp_path / "mine.csv"
        path.write_bytes(content if isinstance(content, bytes) else content.encode())
        return path

    return write


def test_rows_have_the_requested_columns(table):
    path = table('rate,machine,gpus,note,unknown\n2.5," a, b ",4,,x\n1e3,c,1,yes,\n')
    assert read_table(path, COLUMNS) == [
        {"machine": "a, b", "gpus": 4, "rate": 2.5, "note": None},
        {"machine": "c", "gpus": 1, "rate": 1000.0, "note": "yes"},
    ]


def test_a_byte_order_mark_is_ignored(table):
    assert read_table(table("\ufeffmachine\nx\n"), {"machine": text}) == [{"machine": "x"}]


def test_missing_and_present_columns_are_named(table):
    with pytest.raises(ValueError, match="mine.csv lacks the columns gpus, note; it has machine"):
        read_table(table("machine,rate\nx,1\n"), COLUMNS)


@pytest.mark.parametrize(
    ("cells", "says"),
    [
        ("x,2,nan,", "line 3: rate is nan, but must be a number above 0"),
        ("x,2,inf,", "rate is inf"),
        ("x,2,-1,", "rate is -1"),
        ("x,2,fast,", "rate is 'fast', but must be a number"),
        ("x,2,,", "rate is empty"),
        ("x,2.5,1,", "gpus is '2.5', but must be an integer"),
        ("x,0,1,", "gpus is 0, but must be an integer of at least 1"),
        (",2,1,", "machine is empty"),
        ("x,2", "rate is empty"),
    ],
)
def test_a_wrong_cell_is_named(table, cells, says):
    path = table(f"machine,gpus,rate,note\nright,1,1,\n{cells}\n")
    with pytest.raises(ValueError, match="mine.csv has invalid cells") as raised:
        read_table(path, COLUMNS)
    assert says in str(raised.value)


def test_the_list_of_invalid_cells_is_truncated(table):
    path = table("machine,gpus,rate,note\n" + "x,1,nan,\n" * 25)
    with pytest.raises(ValueError, match="and 15 more"):
        read_table(path, COLUMNS)


@pytest.mark.parametrize(
    ("content", "says"),
    [
        ("", "it has none"),
        ("machine,gpus,rate,note\n", "no rows"),
        (b"\xff\xfe\x00machine", "UTF-8"),
    ],
)
def test_files_that_are_no_tables_are_refused(table, content, says):
    with pytest.raises(ValueError, match=says):
        read_table(table(content), COLUMNS)


def test_a_missing_file(tmp_path):
    with pytest.raises(FileNotFoundError, match="nowhere.csv"):
        read_table(tmp_path / "nowhere.csv", COLUMNS)


def test_own_tables_name_their_sources():
    rows = read_own_table("gpus.csv", {"gpu": text, "memory_gb": maybe(number)})
    assert len(rows) > 10
    assert {"H100 80GB SXM", "T4"} <= {row["gpu"] for row in rows}
