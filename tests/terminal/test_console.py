"""Tests what the console shows of a run, on terminals and in files, and the tables and paths in it."""

import io
from contextlib import redirect_stdout
from pathlib import Path

import pytest
from cli_jobs import progress

from gpipe_cli.commands.lines import write_answers
from gpipe_cli.terminal.command import run_command, show, to_stderr
from gpipe_cli.terminal.console import Console
from gpipe_cli.terminal.text import relative_paths


def shown(*events: dict[str, object], every: int = 1) -> str:
    output = io.StringIO()
    with redirect_stdout(output), Console(every, "plain") as console:
        for event in events:
            console(event)
    return output.getvalue()


@pytest.mark.parametrize(("is_terminal", "expected"), [(True, b"8.1 ? 7.9\n"), (False, "8.1 → 7.9\n".encode())])
def test_only_what_a_terminal_cannot_show_is_a_question_mark(
    is_terminal: bool, expected: bytes, monkeypatch: pytest.MonkeyPatch
) -> None:
    class Written(io.BytesIO):
        def isatty(self) -> bool:
            return is_terminal

    monkeypatch.setenv("TTY_COMPATIBLE", "0")
    written = Written()
    with redirect_stdout(io.TextIOWrapper(written, encoding="ascii")):
        assert run_command("gpipe-x", ["K=1"], "", lambda words: Console(1, "plain").say("8.1 → 7.9") or 0) == 0
        assert written.getvalue() == expected


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


@pytest.mark.parametrize(("is_terminal", "said"), [(True, HARMLESS), (False, HOSTILE)])
def test_answers_are_harmless_on_a_terminal_and_whole_in_a_file(
    is_terminal: bool, said: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    output = io.StringIO()
    monkeypatch.setattr(output, "isatty", lambda: is_terminal)
    with redirect_stdout(output):
        write_answers({"kind": "answers", "texts": [HOSTILE], "log_probabilities": [0.0]}, one_line=False)
    assert output.getvalue() == f"{said}\n"


def test_work_without_a_count_is_told_when_it_begins() -> None:
    events = [("lines", 0, 3), ("vocabulary, 9 pieces", 0, 0), ("tokens", 9, 9)]
    lines = shown(*({"kind": "preparation", "text": text, "done": done, "total": of} for text, done, of in events))
    assert lines == "lines: 0 of 3\nvocabulary, 9 pieces\ntokens: 9 of 9\n"


def test_plain_progress_tells_the_first_step_the_last_and_not_too_many_between() -> None:
    lines = shown(*(progress(step, 1000) for step in range(1, 1001)), every=10).splitlines()
    assert lines[0].startswith("step 1/1,000") and lines[-1].startswith("step 1,000/1,000")
    assert len(lines) < 5


def test_speed_is_shown_as_a_share_of_the_peak_where_it_is_known() -> None:
    known = {**progress(1, 4), "flops_per_second": 395.6e12, "mfu": 0.4}
    assert "  800 examples/s  MFU 40.0 %  396 TFLOP/s  bubble 20.0 %" in shown(known)
    assert "  800 examples/s  bubble 20.0 %" in shown(progress(1, 4))


def test_paths_are_relative_to_where_the_person_stands(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    assert relative_paths(f"log: {tmp_path}/runs/x and /elsewhere") == "log: runs/x and /elsewhere"
    message: dict[str, object] = {"event": "message", "text": f"step 3 recorded: {tmp_path}/trace/step.json"}
    assert shown(message) == "step 3 recorded: trace/step.json\n"
