import csv
import gzip
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from prfaas.core.workload.lengths import WorkloadError
from prfaas.core.workload.requests import read_requests
from prfaas.core.workload.trace_columns import TraceColumns

# Made up in the form of release 1.1 of github.com/HPMLL/BurstGPT: the second and the last request failed.
BURSTGPT_1 = """\
Timestamp,Model,Request tokens,Response tokens,Total tokens,Log Type
7,ChatGPT,310,25,335,Conversation log
9,GPT-4,0,0,0,Conversation log
12,GPT-4,1200,300,1500,API log
12,ChatGPT,80,0,80,API log
"""
# The same in the form of release 2.
BURSTGPT_2 = """\
Timestamp,Session ID,Elapsed time,Model,Request tokens,Response tokens,Total tokens,Log Type
7.25,a-1,3.2,ChatGPT,310,25,335,Conversation log
9.0,,0.1,GPT-4,0,0,0,API log
12.75,b-2,8,GPT-4,1200,300,1500,Conversation log
12.75,,0,ChatGPT,80,0,80,API log
"""
OWN = TraceColumns("when", "prompt", "answer")


def written(path: Path, text: str) -> Path:
    data = text.encode()
    path.write_bytes(gzip.compress(data) if path.suffix == ".gz" else data)
    return path


@pytest.mark.parametrize(("text", "later_s"), [(BURSTGPT_1, 5.0), (BURSTGPT_2, 5.5)])
@pytest.mark.parametrize("name", ["b.csv", "b.csv.gz"])
def test_burstgpt_of_both_releases(tmp_path: Path, text: str, later_s: float, name: str) -> None:
    path = written(tmp_path / name, text)
    assert read_requests(path).lengths.lengths.tolist() == [310, 1200]
    requests = read_requests(path, "burstgpt")
    assert [(each.arrival_s, each.input_tokens, each.output_tokens) for each in requests.requests] == [
        (0.0, 310, 25),
        (later_s, 1200, 300),
    ]
    assert [each.block_ids for each in requests.requests] == [(0,), (1, 2, 3)]
    assert requests.units.startswith("BurstGPT's: Timestamp as date and time, or in s; ")
    assert requests.units.endswith("; 2 requests that failed are left out")


def test_an_own_file_with_columns_in_any_order(tmp_path: Path) -> None:
    text = 'team,answer,"when","prompt"\n"chat, web",10,2.5,600\n\n"two\nlines",20.0,1.25,512\n'
    requests = read_requests(written(tmp_path / "o.csv", text), columns=OWN)
    assert [(each.arrival_s, each.input_tokens, each.output_tokens) for each in requests.requests] == [
        (0.0, 512, 20),
        (1.25, 600, 10),
    ]
    assert "when as date and time, or in s; no two prompts begin alike" in requests.units
    # A file's own name and header don't count where the columns are named.
    azure = "TIMESTAMP,ContextTokens,GeneratedTokens,when,prompt,answer\n1,2,3,4,5,6\n7,8,9,10,11,12\n"
    path = written(tmp_path / "o.txt", azure)
    assert read_requests(path, columns=OWN).lengths.mean() == 8
    assert [each.arrival_s for each in read_requests(path, columns=OWN).requests] == [0, 6]


@pytest.mark.parametrize(
    ("columns", "times", "later_s"),
    [
        (OWN, ("1700000000.5", "1700000001.75"), 1.25),
        (OWN, ("1e3", "-250"), -1250.0),
        (TraceColumns.parse("arrival_ms=when,input=prompt,output=answer"), ("1500", "2750"), 1.25),
        (OWN, ("2026-03-29 00:59:59.5", "2026-03-29 01:00:00.75"), 1.25),
        # Summer time begins: the clock goes forward by an hour.
        (OWN, ("2026-03-29T01:59:59.500000000+01:00", "2026-03-29T03:00:00.75+0200"), 1.25),
        (OWN, ("2026-03-29 00:59:59.5Z", "2026-03-29 03:00:00.75+02:00"), 1.25),
    ],
)
def test_times(tmp_path: Path, columns: TraceColumns, times: tuple[str, str], later_s: float) -> None:
    text = "when,prompt,answer\n" + "".join(f"{time},1,1\n" for time in times)
    requests = read_requests(written(tmp_path / "t.csv", text), columns=columns)
    assert requests.arrival_s.tolist() == [0, pytest.approx(abs(later_s), abs=1e-6)]


words = st.text(st.characters(exclude_categories=["C", "Z"]), min_size=1, max_size=12)
rows = st.lists(
    st.tuples(st.floats(0, 1e6), st.integers(1, 10**6), st.integers(0, 10**6)), min_size=1, max_size=9
)


@given(st.lists(words, min_size=4, max_size=4, unique=True), rows, st.permutations(range(4)))
def test_any_names_in_any_order(
    tmp_path_factory: pytest.TempPathFactory,
    names: list[str],
    requests: list[tuple[float, int, int]],
    order: list[int],
) -> None:
    path = tmp_path_factory.mktemp("any") / "any.csv"
    with path.open("w", newline="", encoding="utf-8") as file:
        table = csv.writer(file)
        for row in ([*names], *([*map(str, each), "other"] for each in requests)):
            table.writerow([row[at] for at in order])
    read = read_requests(path, columns=TraceColumns(names[0], names[1], names[2]))
    first_s = min(requests)[0]
    assert [(each.arrival_s, each.input_tokens, each.output_tokens) for each in read] == [
        (pytest.approx(arrival_s - first_s), prompt, answer)
        for arrival_s, prompt, answer in sorted(requests, key=lambda row: row[0])
    ]


@pytest.mark.parametrize(
    ("text", "columns"),
    [
        (
            "arrival=Timestamp,input=Request tokens,output=Response tokens",
            "Timestamp|Request tokens|Response tokens",
        ),
        (" output = c , arrival = a, b ,input=x=y ", "a, b|x=y|c"),
        ("input=in,output=out,arrival=at, input", "at, input|in|out"),
    ],
)
def test_columns_by_option(text: str, columns: str) -> None:
    assert TraceColumns.parse(text) == TraceColumns(*columns.split("|"))


@pytest.mark.parametrize(
    "text",
    [
        "",
        "when,prompt,answer",
        "arrival=a,input=b",
        "arrival=a,arrival_ms=b,input=c,output=d",
        "arrival=a,input=b,output=",
        "arrival=a,input=b,output=c,output=d",
        "time=a,input=b,output=c",
    ],
)
def test_columns_that_say_too_little_or_too_much(text: str) -> None:
    with pytest.raises(WorkloadError, match="are named as arrival=COLUMN,input=COLUMN,output=COLUMN"):
        TraceColumns.parse(text)


HEADER = "when,prompt,answer\n"


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("", "is empty; the first line must name the columns"),
        (HEADER, "has no request with a prompt"),
        ("when,answer\n", ":1: the header has no prompt; it has when, answer"),
        (
            "when;prompt;answer\n",
            ":1: the header has no when, prompt, answer; it has when;prompt;answer; cells must be separated by commas",
        ),
        ("when,prompt,answer,when\n", ":1: the header has when twice"),
        (HEADER + "1,2,3\n1,2\n", ":3: has 2 values for 3 columns"),
        (
            HEADER + "1,2,3\n\n2026-03-02 09:00:00,2,3\n",
            ":4: when must be a time, not '2026-03-02 09:00:00'; all must be",
        ),
        (HEADER + "2026-03-02 09:00:00,2,3\n5,2,3\n", ":3: when must be a time, not '5'"),
        (HEADER + "2026-13-02 09:00:00,2,3\n", ":2: when must be a time, not '2026-13-02 09:00:00'"),
        (HEADER + "nan,2,3\n", ":2: when must be a time, not 'nan'"),
        (HEADER + "1,-2,3\n", ":2: prompt must be a whole number of tokens, not '-2'"),
        (HEADER + "1,2,\n", ":2: answer must be a whole number of tokens, not ''"),
        (HEADER + f'1,2,3\n1,"{"x" * 200_000}",3\n', ":3: is no line of a CSV file (field larger than"),
    ],
)
def test_malformed_lines_are_named(tmp_path: Path, text: str, words: str) -> None:
    path = written(tmp_path / "t.csv", text)
    with pytest.raises(WorkloadError) as error:
        read_requests(path, columns=OWN)
    assert str(error.value).startswith(str(path)) and words in str(error.value)


def test_a_format_and_columns_exclude_each_other(tmp_path: Path) -> None:
    path = written(tmp_path / "t.csv", HEADER + "1,2,3\n")
    with pytest.raises(WorkloadError, match="leave out the format azure"):
        read_requests(path, "azure", OWN)
