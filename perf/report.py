"""Writes what is measured into five pages of docs/ and README.md, from the records in perf/results and nothing else.

    python perf/report.py            # tables and pictures
    python perf/report.py --check    # exit status 1 if the pages are not what the records give

Between `<!-- begin NAME ... -->` and `<!-- end NAME -->` lines of those pages stands what is generated; the rest is
written by hand and left alone. Of each benchmark and kind of hardware the latest record is shown, whatever it says.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import records
import report_link
import report_summary
import report_tables
import report_wires
from records import BenchError
from render import Lines, Record

DOCS = records.CHECKOUT / "docs"
PAGE, TABLES_PAGE, WIRES_PAGE = DOCS / "performance.md", DOCS / "measurements.md", DOCS / "wires.md"
README = records.CHECKOUT / "README.md"
# Benchmarks of a table, by the block of the page that it is in.
BLOCKS = tuple(name.replace("_", "-") for name in report_tables.TABLES)
MISSED, SUMMARY, HEADLINE = "missed", "summary", "headline"
# Blocks that are of one benchmark's latest record on CPU: of which, and what makes one.
OF_ONE: Mapping[str, tuple[str, Callable[[Record], Lines]]] = {
    "fsdp-link": ("link-fsdp", lambda record: [*_origin(record), *report_link.shards(record)]),
    "wire-choice": ("link", lambda record: [*_origin(record), *report_link.choices(record)]),
    HEADLINE: ("link", report_link.headline),
    **report_wires.BLOCKS,
}
# By page the blocks that it must have a place for.
NEEDED: Mapping[Path, Sequence[str]] = {
    PAGE: [MISSED, SUMMARY],
    TABLES_PAGE: BLOCKS,
    WIRES_PAGE: list(report_wires.BLOCKS),
    DOCS / "frameworks" / "fsdp.md": ["fsdp-link"],
    DOCS / "wire_choice.md": ["wire-choice"],
    README: [HEADLINE],
}
# Pictures of these pages: of which benchmark, and what saves one of its latest; None where there is nothing to draw.
Save = Callable[[Path], None]
PICTURES: Mapping[str, tuple[str, Callable[[Record], Save | None]]] = {
    "link.png": ("link", report_link.picture),
    "wires_by_link.png": ("link", report_wires.steps_picture),
    "performance_errors_cpu.png": ("errors", report_wires.picture),
}
ONLY_CPU = ("link", "errors")
_BEGIN = re.compile(r"<!-- begin (?P<name>[a-z-]+)\b[^>]*-->\n")
NO_GPU = "No result on a GPU yet."
NOTHING = "Not measured yet."


def latest_records(folder: Path) -> list[dict[str, Any]]:
    """Of each benchmark and hardware the latest; all of the folder are read.

    Raises:
        BenchError: one cannot be read (see records.read), or there is no table for it.
    """
    found: dict[tuple[str, str], dict[str, Any]] = {}
    for path in sorted(folder.glob("*.json")):
        record = records.read(path)
        if report_tables.family(record["what"]) is None:
            known = ", ".join(report_tables.TABLES)
            raise BenchError(f"{path.name}: there is no table for {record['what']!r}; there are: {known}")
        key = record["what"], record["device"]
        if key not in found or found[key]["created"] < record["created"]:
            found[key] = record
    # A GPU first, and the default settings before others.
    return sorted(found.values(), key=lambda one: (one["device"] == "cpu", one["device"], one["what"]))


def blocks(found: Sequence[Record]) -> dict[str, str]:
    """Every generated block, by name."""
    made = {}
    for name in BLOCKS:
        mine = [one for one in found if report_tables.family(one["what"]) == name.replace("-", "_")]
        lines: Lines = [] if mine else [NOTHING, ""]
        if name not in ONLY_CPU and all(one["device"] == "cpu" for one in mine):
            lines += [NO_GPU, ""]
        for record in mine:
            lines += _section(record)
        made[name] = "\n".join(lines).strip()
    made[MISSED] = _missed(found)
    made[SUMMARY] = _summary(found)
    on_cpu = {record["what"]: record for record in found if record["device"] == "cpu"}
    for name, (what, lines_of) in OF_ONE.items():
        lines = lines_of(on_cpu[what]) if what in on_cpu else []
        made[name] = "\n".join(lines).strip() or NOTHING
    return made


def _summary(found: Sequence[Record]) -> str:
    """What a reader decides by: over a network, on a GPU, on CPU; a paragraph and some bullets per machine of each."""
    if not found:
        return f"{NOTHING}\n\n{NO_GPU}"
    over_network = [one for one in found if report_tables.family(one["what"]) == "link"]
    within = [one for one in found if one not in over_network]
    paragraphs = _of_machines("Over a network", over_network)
    paragraphs += _of_machines("On a GPU", [one for one in within if one["device"] != "cpu"]) or [NO_GPU]
    paragraphs += _of_machines("On CPU, within one machine", [one for one in within if one["device"] == "cpu"])
    return "\n\n".join(paragraphs)


def _of_machines(where: str, found: Sequence[Record]) -> Lines:
    """A paragraph and some bullets per machine, of those that have something for the summary."""
    by_machine: dict[str, list[tuple[Record, Lines]]] = {}
    for record in found:
        if lines := report_summary.summary(record):
            by_machine.setdefault(record["hardware"], []).append((record, lines))
    paragraphs = []
    for hardware, mine in by_machine.items():
        torchs = " and ".join(sorted({str(record["versions"]["torch"]) for record, _ in mine}))
        bullets = [f"- {line}" for _, lines in mine for line in lines]
        paragraphs.append("\n".join([f"{where} ({hardware}, torch {torchs}):", "", *bullets]))
    return paragraphs


def _section(record: Record) -> Lines:
    title = f"### {record['what']}, {record['device']}"
    return [title, "", *_origin(record), *report_tables.lines_of(record), ""]


def _origin(record: Record) -> Lines:
    """On what, with what, when and how a record came about."""
    versions = ", ".join(f"{name} {version}" for name, version in record["versions"].items())
    return [
        f"On {record['hardware']}; {versions}; commit {record['commit']}, {record['created'][:10]}; other work kept "
        f"{record['others_cores']:.2f} cores busy.",
        "",
        f"    {record['command']}",
        "",
    ]


def _missed(found: Sequence[Record]) -> str:
    """Bullets of all records, each with where it comes from."""
    lines: Lines = []
    for record in found:
        if bullets := report_tables.missed(record):
            where = f"**{record['what']}** on {record['hardware']}, torch {record['versions']['torch']}"
            command = f"`{record['command']}`, commit {record['commit']}, {record['created'][:10]}"
            lines += [f"{where} ({command}):", "", *(f"- {bullet}" for bullet in bullets), ""]
    return "\n".join(lines).strip() or "Nothing that was measured missed what it was to reach."


def filled(text: str, made: Mapping[str, str], *, needed: Sequence[str] = ()) -> str:
    """A page with every block that it has a place for.

    Raises:
        BenchError: a place that does not end, for no block, or missing.
    """
    done, rest, seen = "", text, []
    while (begin := _BEGIN.search(rest)) is not None:
        name = begin["name"]
        before, marker, after = rest.partition(f"<!-- end {name} -->")
        if name not in made:
            raise BenchError(f"there is no block {name!r}; there are: {', '.join(made)}")
        if not marker or len(before) < begin.end():
            raise BenchError(f"block {name!r} has no end: a line '<!-- end {name} -->'")
        done += f"{rest[: begin.end()]}\n{made[name]}\n\n{marker}"
        rest = after
        seen.append(name)
    if missing := [name for name in needed if name not in seen]:
        raise BenchError(
            f"the page has no place for {', '.join(missing)}: lines '<!-- begin NAME -->', '<!-- end NAME -->'"
        )
    return done + rest


def pages(found: Sequence[Record]) -> dict[Path, tuple[str, str]]:
    """What the pages hold, and what they are to hold."""
    made = blocks(found)
    texts = {path: path.read_text() for path in NEEDED}
    return {path: (text, filled(text, made, needed=NEEDED[path])) for path, text in texts.items()}


def pictures(record: Record) -> dict[str, Save]:
    """What saves each picture of a record, by file name. matplotlib is imported when one is drawn: pages need none."""
    made = {name: of(record) for name, (what, of) in PICTURES.items() if record["what"] == what}
    return {name: save for name, save in made.items() if save is not None}


def draw(save: Save, path: Path) -> None:
    """Draws one of `pictures`.

    Raises:
        BenchError: matplotlib is missing.
    """
    try:
        import matplotlib
    except ImportError as error:
        raise BenchError("the pictures take matplotlib: pip install '.[demo]', or --text-only") from error
    matplotlib.use("Agg")
    save(path)


def differences(found: Sequence[Record]) -> list[str]:
    """What is not as the records give it; of a picture only whether there is one."""
    wrong = []
    for path, (is_, should) in pages(found).items():
        if is_ != should:
            lines = zip(is_.splitlines() + [""], should.splitlines() + [""], strict=False)
            at = next((number for number, (one, other) in enumerate(lines, 1) if one != other), 1)
            wrong.append(f"{path.relative_to(records.CHECKOUT)} is not what the records give, from line {at} on")
    drawn = {name for record in found for name in pictures(record)}
    there = {name for name in PICTURES if (DOCS / name).exists()}
    wrong += [f"docs/{name} is missing" for name in sorted(drawn - there)]
    return wrong + [f"docs/{name} is of no record" for name in sorted(there - drawn)]


def main() -> int:
    """Writes or checks."""
    parser = records.Parser(description=__doc__)
    parser.add_argument("--check", action="store_true", help="write nothing; exit status 1 if something is out of date")
    parser.add_argument("--text-only", action="store_true", help="leave the pictures as they are")
    arguments = parser.parse_args()
    found = latest_records(records.RESULTS)
    if arguments.check:
        wrong = differences(found)
        if wrong:
            raise BenchError(f"{'; '.join(wrong)}: run perf/report.py")
        names = ", ".join(str(path.relative_to(records.CHECKOUT)) for path in NEEDED)
        print(f"{names} are what {len(found)} records give")
        return 0
    for path, (is_, should) in pages(found).items():
        if is_ != should:
            path.write_text(should)
            print(f"{path.relative_to(records.CHECKOUT)} written")
    if arguments.text_only:
        return 0
    drawn = {name: save for record in found for name, save in pictures(record).items()}
    for name, save in drawn.items():
        draw(save, DOCS / name)
        print(f"docs/{name} drawn")
    for name in PICTURES.keys() - drawn.keys():
        (DOCS / name).unlink(missing_ok=True)
    return 0


if __name__ == "__main__":
    records.entry(main)
