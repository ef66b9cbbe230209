"""Tests what the console shows of a run, on terminals and in files, and the tables and paths in it."""

from __future__ import annotations

import io
from contextlib import redirect_stdout
from pathlib import Path
from types import SimpleNamespace

import pytest
from cli_jobs import progress

from gpipe_cli.commands.lines import Writer
from gpipe_cli.terminal.command import show, to_stderr
from gpipe_cli.terminal.console import Console
from gpipe_cli.terminal.text import relative_paths, text_table


def shown(*events: dict[str, object], every: int = 1, brief: bool = False) -> str:
    output = io.StringIO()
    with redirect_stdout(output), Console(every, "plain", brief=brief) as console:
        for event in events:
            console(event)
    return output.getvalue()


def test_what_a_terminal_cannot_show_is_a_question_mark() -> None:
    written = io.BytesIO()
    with redirect_stdout(io.TextIOWrapper(written, encoding="ascii")), Console(1, "plain") as console:
        console.say("8.1 → 7.9")
        console.say("on")
    assert written.getvalue() == b"8.1 ? 7.9\non\n"


HOSTILE = "\x1b]0;title\x07\x9b2J\rok"
HARMLESS = r"\x1b]0;title\x07\x9b2J\x0dok"


@pytest.mark.parametrize("terminal", ["0", "1"])
def test_control_characters_of_files_do_not_reach_the_terminal(
    terminal: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("TTY_COMPATIBLE", terminal)  # of rich: whether it prints to a terminal
    said = shown({"kind": "samples", "rows": [{"source": HOSTILE}]}, {"kind": "message", "text": f"\t{HOSTILE}"})
    assert said.expandtabs() == f"    source  {HARMLESS}\n        {HARMLESS}\n"
    show(HOSTILE)
    to_stderr(HOSTILE)
    Console(1, "plain").error(HOSTILE, logged=False)
    assert capsys.readouterr() == (f"{HARMLESS}\n", f"{HARMLESS}\n{HARMLESS}\n")


def test_answers_are_harmless_on_a_terminal_and_whole_in_a_file(monkeypatch: pytest.MonkeyPatch) -> None:
    written = {}
    for terminal in (True, False):
        output = io.StringIO()
        monkeypatch.setattr(output, "isatty", lambda terminal=terminal: terminal)
        Writer(output, scores=False, pipe=None, keep=False)._write(1, [HOSTILE], [0.0])
        written[terminal] = output.getvalue()
    assert written == {True: f"{HARMLESS}\n", False: f"{HOSTILE}\n"}


def test_an_output_that_is_closed_ends_no_run() -> None:
    output = io.StringIO()
    with redirect_stdout(output), Console(1, "plain") as console:
        output.close()
        console.say("still here")


def test_plain_progress_tells_the_first_step_the_last_and_not_too_many_between() -> None:
    lines = shown(*(progress(step, 1000) for step in range(1, 1001)), every=10).splitlines()
    assert lines[0].startswith("step 1/1,000") and lines[-1].startswith("step 1,000/1,000")
    assert len(lines) < 5


def test_a_run_of_a_sweep_is_a_few_lines() -> None:
    row = {"cell": 0, "worker": 0, "layers": 3, "first": "a", "last": "b", "parameters": 12345, "cost": 1, "share": 0.5}
    events: list[dict[str, object]] = [
        {"kind": "message", "text": "4 cells on 2 workers"},
        {"kind": "cells", "rows": [row]},
        *(progress(step, 100) for step in range(1, 101)),
        {"kind": "evaluation", "step": 100, "numbers": {"nll": 2.5}},
        {"kind": "samples", "rows": [{"source": "a", "output": "b"}]},
        {"kind": "end", "text": "loss 5 -> 0.05"},
    ]
    lines = shown(*events, brief=True).splitlines()
    assert [line.partition("  ")[0] for line in lines] == [
        "step 1/100",
        "evaluation after step 100: nll 2.5",
        "loss 5 -> 0.05",
    ]


def test_paths_are_relative_to_where_the_person_stands(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    assert relative_paths(f"log: {tmp_path}/runs/x and /elsewhere") == "log: runs/x and /elsewhere"
    message: dict[str, object] = {"event": "message", "text": f"step 3 recorded: {tmp_path}/trace/step.json"}
    assert shown(message) == "step 3 recorded: trace/step.json\n"


def test_the_time_left_follows_from_the_share_done_whatever_limits_the_run(monkeypatch: pytest.MonkeyPatch) -> None:
    ticks = iter(range(0, 1000, 30))  # the clock is read twice at the first step, and twice at each that follows
    monkeypatch.setattr("gpipe_cli.terminal.console.time", SimpleNamespace(monotonic=ticks.__next__))
    events = [{**progress(step, None), "done": done} for step, done in ((1, 0.25), (2, 0.5), (3, 1.0))]
    first, second, last = shown(*events).splitlines()
    assert "left" not in first and "left" not in last
    assert second.endswith("2:00 left")  # a quarter took a minute


def test_events_of_the_launcher_are_told_in_words() -> None:
    text = shown(
        {"event": "stopping", "signal": "SIGINT", "grace_seconds": 8.0}, {"event": "warning", "message": "slow disk"}
    )
    assert text.startswith("SIGINT: the run stops after this step and saves, within 8 s")
    assert "warning: slow disk" in text


def test_a_table_puts_numbers_to_the_right() -> None:
    assert text_table(["name", "n"], [["a", 5], ["long", 1234]]) == "name      n\n----  -----\na         5\nlong  1,234"
